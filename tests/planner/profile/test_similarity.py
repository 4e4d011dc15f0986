"""How well one layer's choice serves another, against a plain computation over the full attention matrix."""

from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.profile.profile_data import TokenChoice
from sparsekv.planner.profile.similarity import ReuseScores
from sparsekv.plans.patterns import Budget, fraction, tokens
from sparsekv.runtime.hf.observe import AttentionCall

LENGTH, HEADS, GROUPS, SIZE, WIDTH = 40, 4, 2, 8, 16
ROWS = (33, 35, 39)
BUDGETS = (tokens(3), fraction(0.2))
CHOICE = TokenChoice(sink=2, recent=5, budgets=BUDGETS)


class DecodeLayer(NamedTuple):
    call: AttentionCall
    projection_WZ: torch.Tensor


def random_layer(seed: int) -> DecodeLayer:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    q, k, v = draw(1, HEADS, LENGTH, SIZE), draw(1, GROUPS, LENGTH, SIZE), draw(1, GROUPS, LENGTH, SIZE)
    call = AttentionCall(seed, q, k, v, Chunk.uniform(1, 0, LENGTH), scale=0.6, window=None)
    return DecodeLayer(call, draw(WIDTH, HEADS * SIZE))


def attention(layer: DecodeLayer) -> torch.Tensor:
    """[H, S, S]"""
    k_HSD = layer.call.k_BGKD[0].repeat_interleave(HEADS // GROUPS, 0)
    scores = layer.call.q_BHSD[0] @ k_HSD.transpose(1, 2) * layer.call.scale
    hidden = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    return scores.masked_fill(hidden, -torch.inf).softmax(-1)


def expected(chooser: DecodeLayer, user: DecodeLayer, budget: Budget, choice: TokenChoice = CHOICE) -> float:
    worst = 1.0
    v_HSD = user.call.v_BGKD[0].repeat_interleave(HEADS // GROUPS, 0)
    parts = user.projection_WZ.reshape(WIDTH, HEADS, SIZE)
    for row in ROWS:
        scores = attention(chooser).amax(0)[row]
        among = range(choice.sink, row + 1 - choice.recent)
        best = sorted(among, key=lambda token: -float(scores[token]))[: budget.resolve(row + 1)]
        held = sorted({*range(choice.sink), *best, *range(row + 1 - choice.recent, row + 1)})
        attended = attention(user)[:, row]
        sizes = torch.stack([parts[:, h] @ (attended[h] @ v_HSD[h]) for h in range(HEADS)]).norm(dim=1)
        kept = (attended[:, held].sum(1) * sizes / sizes.sum()).sum()
        worst = min(worst, float(kept))
    return worst


@pytest.fixture(scope="module")
def scores() -> tuple[ReuseScores, list[DecodeLayer]]:
    layers = [random_layer(seed) for seed in range(3)]
    reuse = ReuseScores(ROWS, CHOICE)
    for place, layer in enumerate(layers):
        reuse.choose(place, reuse.attended(*layer))
    return reuse, layers


@pytest.mark.parametrize("budget", range(2))
def test_the_share_kept_is_that_of_the_full_matrix(scores, budget: int) -> None:
    reuse, layers = scores
    kept = reuse.kept(reuse.attended(*layers[2]), range(3))
    for filter_ in range(3):
        wanted = expected(layers[filter_], layers[2], BUDGETS[budget])
        assert kept[budget, filter_] == pytest.approx(wanted, abs=1e-5)


@pytest.mark.parametrize(("sink", "recent", "budget"), [(40, 1, 1), (0, 40, 1), (60, 60, 1), (2, 5, 33), (2, 5, 40)])
def test_what_covers_the_context_keeps_everything(sink: int, recent: int, budget: int) -> None:
    choice = TokenChoice(sink=sink, recent=recent, budgets=(tokens(budget),))
    reuse = ReuseScores((LENGTH - 1,), choice)
    for number in range(2):
        reuse.choose(number, reuse.attended(*random_layer(number)))
    np.testing.assert_allclose(reuse.kept(reuse.attended(*random_layer(1)), range(2)), 1.0, atol=1e-5)


class Largest(TorchDispatchMode):
    """The largest tensor that any call makes, in bytes."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        found = func(*args, **(kwargs or {}))
        if isinstance(found, torch.Tensor):
            self.bytes = max(self.bytes, found.untyped_storage().nbytes())
        return found


def test_scoring_many_filter_layers_takes_no_more_memory_than_scoring_one(scores) -> None:
    reuse, layers = scores
    layer, sizes = reuse.attended(*layers[2]), []
    for filters in (range(1), range(3)):
        with Largest() as largest:
            reuse.kept(layer, filters)
        sizes.append(largest.bytes)
    assert sizes[0] == sizes[1] > 0


def test_the_movement_of_the_residual_is_that_of_the_projected_output(scores) -> None:
    reuse, layers = scores
    layer = layers[0]
    v_HSD = layer.call.v_BGKD[0].repeat_interleave(HEADS // GROUPS, 0)
    out_SZ = (attention(layer) @ v_HSD).transpose(0, 1).flatten(1)
    moved = (out_SZ[list(ROWS)] @ layer.projection_WZ.T).norm()
    assert float(reuse.attended(*layer).moved) == pytest.approx(float(moved), rel=1e-5)


def test_kv_heads_that_do_not_fit_a_block_together_give_what_they_give_in_one() -> None:
    draws, length, heads = torch.Generator().manual_seed(0), 512, 2 * 33  # a KV head has 33 * 512 * 512 weights
    q, k, v = (torch.randn(1, count, length, 4, generator=draws) for count in (heads, 2, 2))
    call = AttentionCall(0, q, k, v, Chunk.uniform(1, 0, length), scale=0.6, window=None)
    layer = DecodeLayer(call, torch.randn(8, heads * 4, generator=draws))
    choice = TokenChoice(sink=2, recent=5, budgets=BUDGETS)
    rows = tuple(range(length))
    whole, *halves = (ReuseScores(some, choice).attended(*layer) for some in (rows, rows[::2], rows[1::2]))
    for first, half in enumerate(halves):
        keys = half.best_RS.shape[1]
        torch.testing.assert_close(whole.best_RS[first::2, :keys], half.best_RS)
        torch.testing.assert_close(whole.mass_RS[first::2, :keys], half.mass_RS)
    assert float(whole.moved) ** 2 == pytest.approx(sum(float(half.moved) ** 2 for half in halves), rel=1e-5)
