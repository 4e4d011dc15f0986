"""The damage of a candidate: by brute force, on a sample of rows, and of a whole plan as it is written and run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from masks import brute_computed_tiles, brute_heads, brute_mask
from planner_models import TILE, bare_job, loaded_tiny, made_up_prices, quick_options
from torch import nn
from torch_state import poisoned_memory

from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.options import settle
from sparsekv.planner.plan import compile_once
from sparsekv.planner.profile.head_errors import CandidateScore, Layer, SampledRows, score_candidates
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.profile.search_space import CommonPrefix, in_steps
from sparsekv.planner.profile.sensitivity import Sensitivity, walk_layers
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.files import dump_plan, parse_plan
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, Pattern, VerticalSlash, tokens
from sparsekv.runtime.hf.load import LoadedModel

LENGTH = 512
FAMILIES = ("vertical_slash", "a_shape")
HEADS, GROUPS, SIZE, SCALE = 4, 2, 16, 0.5
PATTERNS = (
    AShape(sink=tokens(64), window=tokens(64)),
    VerticalSlash(vertical=tokens(9), slash=tokens(3), max_tiles=tokens(192)),
    BlockSparse(keep=tokens(192)),
    Dense(),
)


def layer_of(length: int, stride: int, device: str = "cpu", step: int | None = None) -> Layer:
    generator = torch.Generator().manual_seed(length)
    q, g = (torch.randn(1, HEADS, length, SIZE, generator=generator).to(device) for _ in range(2))
    k, v = (torch.randn(1, GROUPS, length, SIZE, generator=generator).to(device) for _ in range(2))
    prefix = CommonPrefix(q, k, in_steps(length, step, TILE), TILE, SCALE)
    rows = SampledRows.of(prefix.chunk, length - 20, TILE, stride)
    dense = dense_attention(q, k, v, Chunk.uniform(1, 0, length), scale=SCALE).out_BHSD
    return Layer(prefix, v, dense, g, rows, "cpu" if device == "cpu" else "triton")


def by_step(prefix: CommonPrefix) -> Iterator[tuple[torch.Tensor, np.ndarray]]:
    """The mask of each step's rows, [H, M, S], and the tiles that heads compute there, [H]."""
    steps, length = prefix.chunk, prefix.chunk.longest
    patterns = PATTERNS if len(steps.past) == 1 else tuple(pattern.of_context(length) for pattern in PATTERNS)
    for past, end in zip(steps.past, steps.lengths, strict=True):
        chunk = Chunk.uniform(1, past, end)
        found = brute_heads(
            patterns, prefix.q_BHSD[:, :, past:end], prefix.k_BGSD[:, :, :end], chunk, TILE, scale=SCALE
        )
        mask_HMK = brute_mask(found, chunk, TILE, end - past)[0]
        yield (
            nn.functional.pad(mask_HMK, (0, length - mask_HMK.shape[-1])),
            np.array(brute_computed_tiles(found, TILE)[0]),
        )


def by_hand(layer: Layer) -> np.ndarray:
    """[H, S]: what each row of each head contributes to the damage of PATTERNS, from their definitions, in float64."""
    prefix, group = layer.prefix, HEADS // GROUPS
    q, g = (one[0].double() for one in (prefix.q_BHSD, layer.gradient_BHSD))
    k, v = (one[0].double().repeat_interleave(group, 0) for one in (prefix.k_BGSD, layer.v_BGSD))
    kept = torch.cat([mask for mask, _ in by_step(prefix)], 1)
    products = q @ k.transpose(1, 2) * SCALE
    dense = products.masked_fill(~torch.ones_like(products, dtype=torch.bool).tril(), -torch.inf).softmax(-1) @ v
    off = products.masked_fill(~kept, -torch.inf).softmax(-1) @ v - dense
    along, anywhere = (off * g).sum(-1) ** 2, (off**2).sum(-1) * (g**2).sum(-1) / SIZE
    return (0.5 * (0.5 * along + 0.5 * anywhere)).numpy()


@pytest.mark.parametrize(("length", "step"), [(320, None), (250, None), (320, 128), (250, 200)])
def test_damage_is_half_the_mean_of_the_known_and_of_any_direction(length: int, step: int | None) -> None:
    layer = layer_of(length, 1, step=step)
    (score,) = score_candidates(layer, [PATTERNS])
    np.testing.assert_allclose(score.damage_H, by_hand(layer).sum(1), rtol=1e-4, atol=1e-9)
    assert (score.damage_H[:3] > 0.01).all()
    assert score.damage_H[3] < 1e-9
    computed = sum(tiles for _, tiles in by_step(layer.prefix))
    np.testing.assert_allclose((score.tiles_H + score.columns_H) * layer.prefix.causal_tiles, computed)


@pytest.mark.parametrize("stride", [2, 3, 4])
def test_a_sampled_row_counts_by_the_rows_that_it_stands_for_and_padding_not_at_all(stride: int) -> None:
    layer = layer_of(410, stride)
    with poisoned_memory():  # NaN wherever a backend leaves rows beyond the prompt as they were
        (score,) = score_candidates(layer, [PATTERNS])
    rows_HS = by_hand(layer)
    spread = range(stride - 1, 7, stride)
    expected = rows_HS[:, 390:].sum(1)
    for tile in spread:
        expected = expected + 7 / len(spread) * rows_HS[:, tile * 64 : min(tile * 64 + 64, 390)].sum(1)
    np.testing.assert_allclose(score.damage_H, expected, rtol=1e-4, atol=1e-9)


@pytest.mark.gpu
@pytest.mark.parametrize("stride", [1, 3])
def test_a_gpu_finds_the_damage_of_a_cpu_and_the_same_bits_again(stride: int) -> None:
    layer = layer_of(410, stride, "cuda")
    with poisoned_memory():
        found, again = score_candidates(layer, [PATTERNS, PATTERNS])
    (expected,) = score_candidates(layer_of(410, stride), [PATTERNS])
    np.testing.assert_allclose(found.damage_H, expected.damage_H, rtol=1e-3, atol=1e-9)
    np.testing.assert_array_equal(again.damage_H, found.damage_H)


def test_heads_that_do_not_fit_a_block_together_have_the_damage_of_heads_that_do() -> None:
    draws, heads = torch.Generator().manual_seed(0), 288  # a block holds 256 of this size
    q, dense, g = (torch.randn(1, heads, 64, 1024, generator=draws) for _ in range(3))
    k, v = (torch.randn(1, 2, 64, 1024, generator=draws) for _ in range(2))
    patterns = (AShape(sink=tokens(64), window=tokens(64)),) * heads

    def damage(part: slice, groups: slice) -> np.ndarray:
        prefix = CommonPrefix(q[:, part], k[:, groups], Chunk.uniform(1, 0, 64), TILE, 1 / 32)
        rows = SampledRows.of(prefix.chunk, 64, TILE, 1)
        layer = Layer(prefix, v[:, groups], dense[:, part], g[:, part], rows, "cpu")
        return score_candidates(layer, [patterns[part]])[0].damage_H

    halves = damage(slice(0, 144), slice(0, 1)), damage(slice(144, heads), slice(1, 2))
    np.testing.assert_allclose(damage(slice(0, heads), slice(0, 2)), np.concatenate(halves), rtol=1e-5)


def test_an_overflow_is_an_error_that_names_the_head() -> None:
    layer = layer_of(320, 1)
    gradient = layer.gradient_BHSD.clone()
    gradient[:, 2] = torch.inf
    with pytest.raises(UnsupportedError, match=r"heads 2 of a layer; .*--dtype"):
        score_candidates(replace(layer, gradient_BHSD=gradient), [PATTERNS])


def test_what_was_scored_is_what_the_plan_says_and_runs(loaded: LoadedModel) -> None:
    """The patterns of a plan as it is read back, scored once more on the same prompts: the numbers of its profile."""
    short = {"lengths": (LENGTH,), "target_density": (0.8,), "levels": (0.85, 1.0)}
    options = settle(quick_options(**short, calibration_samples=2, phases=("prefill",), families=FAMILIES), 4096, "cpu")
    measured = profile(bare_job(loaded, options))
    plan = parse_plan(dump_plan(compile_once(loaded.info, options, measured, made_up_prices())))
    again: dict[int, list[CandidateScore]] = {0: [], 1: [], 2: []}

    def planned(layer: int) -> tuple[Pattern, ...]:
        return tuple(one.in_tokens(LENGTH) for one in plan.prefill.bucket(LENGTH).patterns(layer, 4))

    for sample, prompt in enumerate(bare_job(loaded, options).prompts[LENGTH]):

        def score(found: Sensitivity, end: int = prompt.answer_start, tail: int = prompt.tail_start) -> None:
            call = found.call
            q, k, v = (one[:, :, :end] for one in (call.q_BHSD, call.k_BGKD, call.v_BGKD))
            out, g = (one[:, :, :end] for one in (found.out_BHSD, found.gradient_BHSD))
            prefix = CommonPrefix(q, k, Chunk.uniform(1, 0, end), TILE, call.scale)
            layer = Layer(prefix, v, out, g, SampledRows.of(prefix.chunk, tail, TILE, options.row_stride), "cpu")
            again[call.layer] += score_candidates(layer, [planned(call.layer)])

        rows = prompt.answer_rows
        ids = torch.tensor(prompt.ids.astype(np.int64))[None]
        walk_layers(loaded.model, ids, rows, options.seed + sample, lambda call, hidden: None, score)
    sparse, weight_S1 = 0, np.array(measured.lengths[0].prompt_weights)[:, None]
    for scores in measured.lengths[0].layers:
        damage_SH = np.array([one.damage_H for one in again[scores.layer]]) * weight_S1
        density_SH = np.array([one.tiles_H + one.columns_H for one in again[scores.layer]])
        for head, pattern in enumerate(planned(scores.layer)):
            if isinstance(pattern, Dense):
                continue
            number = measured.lengths[0].patterns.index(pattern)
            slot = [row[head] for row in scores.patterns].index(number)
            assert scores.damage[slot][head] == pytest.approx(damage_SH[:, head].mean(), rel=1e-4)
            assert scores.worst[slot][head] == pytest.approx(damage_SH[:, head].max(), rel=1e-4)
            measured_density = scores.tiles[slot][head] + scores.columns[slot][head]
            assert measured_density == pytest.approx(density_SH[:, head].mean(), rel=1e-4)
            sparse += 1
    assert sparse > 4


class PackedLinear(nn.Linear):
    """A linear layer that stores its weight as bytes and a scale, as quantised ones do."""

    @classmethod
    def of(cls, plain: nn.Linear) -> PackedLinear:
        packed = cls(plain.in_features, plain.out_features, bias=False)
        scale = plain.weight.detach().abs().amax() / 127
        whole = (plain.weight.detach() / scale).round().to(torch.int8)
        packed.weight = nn.Parameter(whole.T.contiguous(), requires_grad=False)  # not even in the usual order
        packed.scale = scale
        return packed

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return nn.functional.linear(hidden, self.floats().to(hidden.dtype))

    def floats(self) -> torch.Tensor:
        """The weight that it stands for."""
        return self.weight.T.float() * self.scale


class ScaledLinear(PackedLinear):
    """The same in float8 and in the usual order: its weight reads as a weight, but for the scale."""

    @classmethod
    def of(cls, plain: nn.Linear) -> ScaledLinear:
        scaled = cls(plain.in_features, plain.out_features, bias=False)
        scaled.scale = plain.weight.detach().abs().amax() / 448
        scaled.weight = nn.Parameter(
            (plain.weight.detach() / scaled.scale).to(torch.float8_e4m3fn), requires_grad=False
        )
        return scaled

    def floats(self) -> torch.Tensor:
        return self.weight.float() * self.scale


class OpaqueLinear(nn.Module):
    """No parameters, and a `weight` that is a method, as in torch's own quantised layers."""

    @classmethod
    def of(cls, plain: nn.Linear) -> OpaqueLinear:
        opaque = cls()
        opaque.inside = (PackedLinear.of(plain),)
        return opaque

    def weight(self) -> torch.Tensor:
        return self.inside[0].weight

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.inside[0](hidden)

    def floats(self) -> torch.Tensor:
        return self.inside[0].floats()


@pytest.mark.parametrize("kind", [PackedLinear, ScaledLinear, OpaqueLinear])
def test_a_quantised_projection_gives_the_decode_statistics_of_its_floats(kind: Any) -> None:
    options = quick_options(phases=("decode",), target_density=(), levels=(), tile=None, row_stride=None)
    options = settle(options, 4096, "cpu")
    found = {}
    for name in ("floats", "packed"):
        loaded = loaded_tiny()
        model: Any = loaded.model
        for layer in model.model.layers:
            packed = kind.of(layer.self_attn.o_proj)
            if name == "floats":
                layer.self_attn.o_proj.weight.data = packed.floats()
            else:
                layer.self_attn.o_proj = packed
        found[name] = profile(bare_job(loaded, options)).lengths[0].reuse
    floats, packed = found["floats"], found["packed"]
    np.testing.assert_allclose(packed.importance, floats.importance, rtol=1e-5)
    for one, other in zip(packed.kept, floats.kept, strict=True):
        for row, wanted in zip(one, other, strict=True):
            np.testing.assert_allclose(row, wanted, rtol=1e-5)
