"""Sparse prefill computes the plan's patterns, and nothing of a sliding layer's past its window."""

import math

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import every_head, plan_for

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.prefill.means import tiles_with_means
from sparsekv.kernels.reference import reference_with_means
from sparsekv.plans.patterns import Adaptive, AShape, BlockSparse, Dense, TileShape, VerticalSlash, tokens
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention

SINK, WINDOW, TILE = 10, 30, 64
A_SHAPE = AShape(sink=tokens(SINK), window=tokens(WINDOW))


def a_shape_by_brute_force(call: AttentionCall) -> torch.Tensor:
    """Heads 0, 2, .. follow the a_shape, the others are dense: tiles touched by j < sink or i - j < window."""
    past, length = call.chunk.past[0], call.chunk.longest
    rows, columns = torch.arange(past, length)[:, None], torch.arange(length)
    first_of_tile = past + (rows - past) // TILE * TILE
    columns_tile = columns // TILE
    touched = columns_tile == 0
    touched = touched | (columns // TILE >= (first_of_tile - WINDOW + 1).clamp(min=0) // TILE)
    touched = touched | (columns_tile >= first_of_tile // TILE - 1)
    mask = torch.stack([touched, torch.ones_like(touched)] * 2) & (columns <= rows)
    if call.window is not None:
        mask = mask & (rows - columns < call.window)
    k, v = (x.repeat_interleave(call.q_BHSD.shape[1] // x.shape[1], 1) for x in (call.k_BGKD, call.v_BGKD))
    scores = torch.einsum("bhsd,bhkd->bhsk", call.q_BHSD, k) * call.scale
    return scores.masked_fill(~mask, -math.inf).softmax(-1) @ v


def logits(model, tokens_BS, *cuts):
    cache, seen = None, []
    with torch.no_grad():
        for piece in tokens_BS.tensor_split(cuts, 1):
            out = model(piece, past_key_values=cache)
            cache = out.past_key_values
            seen.append(out.logits)
    return torch.cat(seen, 1)


@pytest.mark.parametrize("window", [None, 50, 100])
@pytest.mark.parametrize("cuts", [(), (192,)], ids=["one piece", "chunked"])
def test_prefill_computes_the_tiles_of_the_plan(cuts: tuple[int, ...], window: int | None):
    model = tiny_model("mistral", sliding_window=window)
    prompt = random_tokens(2, 330)
    with capture_attention(model, a_shape_by_brute_force):
        expected = logits(model, prompt, *cuts)
    with apply(model, plan_for(model, every_head(model, A_SHAPE, Dense(), tile=TILE))) as handle:
        torch.testing.assert_close(logits(model, prompt, *cuts), expected, atol=2e-4, rtol=2e-4)
    assert handle.stats().prefill_density < 1.0


LINES = {"vertical": tokens(9), "slash": tokens(3), "max_tiles": tokens(192)}


def test_prefill_takes_what_a_compensated_head_skips_as_means():
    model, prompt = tiny_model(), random_tokens(2, 650)
    plain, means = (VerticalSlash(pattern=name, **LINES) for name in ("vertical_slash", "vertical_slash_means"))
    patterns, seen = (plain, means) * 2, []

    def by_definition(call: AttentionCall) -> torch.Tensor:
        tensors, options = (call.q_BHSD, call.k_BGKD), {"scale": call.scale}
        index = build_index(patterns, *tensors, call.chunk, TileShape(query=64, key=64), **options)
        seen.append(float(tiles_with_means(index, call.chunk, (1, 3)).sum()))
        found = reference_with_means(*tensors, call.v_BGKD, index, call.chunk, (1, 3), **options)
        return found.out_BHSD

    with capture_attention(model, by_definition):
        expected = logits(model, prompt)
    with apply(model, plan_for(model, every_head(model, plain, means))) as handle:
        torch.testing.assert_close(logits(model, prompt), expected, atol=2e-4, rtol=2e-4)
    assert handle.stats().prefill_tiles_computed == pytest.approx(sum(seen))
    with apply(model, plan_for(model, every_head(model, plain))):
        assert not torch.allclose(logits(model, prompt), expected, atol=1e-2)


def test_density_counts_every_head_and_layer():
    model = tiny_model(layers=2)
    with apply(model, plan_for(model, every_head(model, A_SHAPE, Dense()))) as handle:
        model(random_tokens(1, 640))
    stats = handle.stats()
    assert stats.prefill_tiles_causal == 2 * 4 * 55
    # an a_shape row computes the first tile, its own and the one before
    assert stats.prefill_tiles_computed == 2 * 2 * 55 + 2 * 2 * (1 + 2 + 8 * 3)
    assert stats.prefill_density == stats.prefill_tiles_computed / stats.prefill_tiles_causal


def test_reset_starts_counting_anew():
    model = tiny_model(layers=2)
    with apply(model, plan_for(model, every_head(model, A_SHAPE))) as handle:
        assert handle.stats().prefill_density is None
        model.generate(random_tokens(1, 200), max_new_tokens=2)
        before = handle.stats()
        handle.reset_stats()
        after = handle.stats()
    assert before.prefill_density is not None
    assert after.prefill_density is None
    assert after.decode_share is None
    assert after.kv_bytes_device == before.kv_bytes_device > 0


@pytest.mark.parametrize(
    "pattern",
    [
        VerticalSlash(vertical=tokens(20), slash=tokens(64), max_tiles=tokens(256)),
        BlockSparse(keep=tokens(192)),
        Adaptive(mass=0.5, max_tiles=tokens(384)),
        Adaptive(score="pooled", mass=0.5, max_tiles=tokens(384)),
        A_SHAPE,
    ],
    ids=lambda pattern: pattern.pattern,
)
@pytest.mark.parametrize("backend", ["cpu", "reference"])
def test_every_pattern_runs_and_saves(pattern, backend: str):
    model = tiny_model(layers=2)
    prompt = random_tokens(1, 640)
    with apply(model, plan_for(model, every_head(model, pattern)), backend=backend) as handle:
        assert handle.backend.name == backend
        assert torch.isfinite(logits(model, prompt)).all()
        assert handle.stats().prefill_density < 0.8


@pytest.mark.parametrize("cuts", [(), (192,), (150, 400)], ids=["one piece", "on a tile", "off a tile"])
def test_adaptive_heads_beside_others_compute_what_the_reference_does(cuts: tuple[int, ...]):
    model = tiny_model(layers=2)
    prompt = random_tokens(2, 600)
    patterns = [
        Adaptive(mass=0.3, max_tiles=tokens(384)),
        BlockSparse(keep=tokens(256)),
        Adaptive(score="pooled", mass=0.6, max_tiles=tokens(512)),
        Dense(),
    ]
    found = {}
    for backend in ("cpu", "reference"):
        with apply(model, plan_for(model, every_head(model, *patterns)), backend=backend) as handle:
            found[backend] = logits(model, prompt, *cuts)
            assert handle.stats().prefill_density < 0.95
    torch.testing.assert_close(found["cpu"], found["reference"], atol=2e-4, rtol=2e-4)
    assert not torch.allclose(found["cpu"], logits(model, prompt), atol=1e-3)
