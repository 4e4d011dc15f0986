"""A program cut to the heads of tensor-parallel ranks computes, put together, what the whole computes."""

import pytest
import torch
from plans_samples import model_info
from tiny_host import Ranks
from tiny_plans import decode_plan, segment

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.keys import full_view
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import AttentionGroup
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import Program, Rank, decode
from sparsekv.runtime.core.roles import Filter
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.stores.store import Resident

LAYERS, HEADS, SIZE, SCALE = 4, 8, 16, 0.25
PATTERNS = (
    AShape(sink=tokens(1), window=tokens(70)),
    VerticalSlash(vertical=fraction(0.05), slash=tokens(20), max_tiles=fraction(0.5)),
    BlockSparse(keep=fraction(0.3)),
    Dense(),
)


def prefill_plan() -> PrefillPlan:
    groups = [
        HeadGroup(layer=layer, heads=(head,), pattern=PATTERNS[(layer + head) % 4])
        for layer in range(LAYERS)
        for head in range(HEADS)
    ]
    return PrefillPlan(tile=TileShape(query=64, key=64), lengths=(PrefillBucket(up_to=None, heads=tuple(groups)),))


def tensors(kv_heads, queries, keys, seed=0, batch=2):
    source = torch.Generator().manual_seed(seed)
    q = torch.randn(LAYERS, batch, HEADS, queries, SIZE, generator=source)
    k, v = torch.randn(2, LAYERS, batch, kv_heads, keys, SIZE, generator=source)
    return q, k, v


def rank_of(model, rank, count):
    return Rank(rank, count).heads(model.attention[0])


def test_equal_parts_of_a_layer_have_the_very_same_patterns_which_caches_of_indices_are_keyed_by():
    layer = Program.of(prefill_plan(), None, model_info(LAYERS, HEADS, 4)).layers[0]
    first, again, other = (layer.for_heads(slice(at, at + 4), slice(0, 2)).patterns for at in (0, 0, 2))
    assert first[0] is again[0]
    assert first[0] != other[0]


@pytest.mark.parametrize(("kv_heads", "ranks"), [(8, 2), (4, 2), (4, 4), (2, 4), (1, 2)])
def test_prefill_of_all_ranks_is_that_of_the_whole(kv_heads, ranks):
    model = model_info(LAYERS, HEADS, kv_heads)
    q, k, v = tensors(kv_heads, 100, 300)
    chunk = Chunk.uniform(2, 200, 300)

    def run(program, layer, queries, kv):
        keys = full_view(k[layer][:, kv], v[layer][:, kv])
        return prefill(program.layers[layer], q[layer][:, queries], keys, chunk, scale=SCALE, fallback=Fallback("cpu"))

    whole = Program.of(prefill_plan(), None, model)
    for layer in range(LAYERS):
        parts = []
        for rank in range(ranks):
            program = Program.of(prefill_plan(), None, model, Rank(rank, ranks))
            parts.append(run(program, layer, *rank_of(model, rank, ranks)))
        together, expected = torch.cat(parts, 1), run(whole, layer, slice(0, HEADS), slice(0, kv_heads))
        torch.testing.assert_close(together, expected, atol=1e-5, rtol=1e-5)


def step(program, q, k, v, state):
    """The attention outputs of all layers in one decode step: [layers, B, H, 1, D]."""
    state.begin((k.shape[3],) * k.shape[1], q.device)
    outputs = []
    for layer, q_BH1D, k_BGSD, v_BGSD in zip(program.layers, q, k, v, strict=True):
        source = Resident(full_view(k_BGSD, v_BGSD))
        outputs.append(decode(layer, q_BH1D, source, state, scale=SCALE, backend="cpu"))
    return torch.stack(outputs)


SEGMENTS = {
    "max": segment(0, (1, 2, 3), 12),
    "max over a window": segment(0, (1, 2, 3), 12, selector="uniform", window=3),
    "per KV head": segment(0, (1, 2, 3), 12, heads="per_kv_head"),
    "head map within ranks": segment(1, (2, 3), 12, heads={2: (1, 0, 3, 2), 3: (0, 0, 3, 3)}),
}


SPLITS = {name: [(4, 2), (4, 4), (2, 4), (8, 2)] for name in SEGMENTS}
SPLITS["per KV head"].remove((2, 4))  # refused, see below
SPLITS["head map within ranks"] = [(4, 2)]


@pytest.mark.parametrize(
    ("name", "kv_heads", "ranks"), [(name, *split) for name, splits in SPLITS.items() for split in splits]
)
def test_decode_of_all_ranks_is_that_of_the_whole(name, kv_heads, ranks):
    model, plan = model_info(LAYERS, HEADS, kv_heads), decode_plan(SEGMENTS[name])
    past, now = tensors(kv_heads, 2, 100), tensors(kv_heads, 1, 100)
    together = Ranks(ranks)

    def run(program, queries, kv, gather=None):
        state = DecodeState(program.segments, gather)
        for layer in program.layers:  # the end of the prompt, which a window looks back to
            if isinstance(layer.role, Filter):
                state.remember(layer.role.segment, past[0][layer.layer][:, queries])
        return step(program, now[0][:, :, queries], now[1][:, :, kv], now[2][:, :, kv], state)

    def of_rank(rank):
        program = Program.of(None, plan, model, Rank(rank, ranks))
        return run(program, *rank_of(model, rank, ranks), together.gather)

    expected = run(Program.of(None, plan, model), slice(0, HEADS), slice(0, kv_heads))
    torch.testing.assert_close(torch.cat(together.run(of_rank, ranks), 2), expected, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(("kv_heads", "ranks"), [(4, 2), (4, 4), (2, 4)])
def test_with_a_local_scope_each_rank_chooses_as_a_model_of_its_own_heads_would(kv_heads, ranks):
    model, plan = model_info(LAYERS, HEADS, kv_heads), decode_plan(segment(0, (1, 2, 3), 12, scope="local"))
    q, k, v = tensors(kv_heads, 1, 100)
    outputs = []
    for rank in range(ranks):
        queries, kv = rank_of(model, rank, ranks)
        own = model_info(LAYERS, HEADS // ranks, max(1, kv_heads // ranks))
        given = (q[:, :, queries], k[:, :, kv], v[:, :, kv])
        lowered, alone = Program.of(None, plan, model, Rank(rank, ranks)), Program.of(None, plan, own)
        outputs.append(step(lowered, *given, DecodeState(lowered.segments)))
        assert torch.equal(outputs[-1], step(alone, *given, DecodeState(alone.segments)))
    whole = Program.of(None, plan, model)
    assert not torch.allclose(torch.cat(outputs, 2), step(whole, q, k, v, DecodeState(whole.segments)), atol=1e-3)


def test_a_head_map_counts_in_the_kv_heads_of_the_filter_layer():
    shapes = [
        AttentionGroup(layers=layers, kind="full", heads=HEADS, kv_heads=kv_heads, head_dim=64)
        for layers, kv_heads in (((0,), 4), ((1, 2, 3), 2))
    ]
    model = model_info(LAYERS, attention=tuple(shapes))
    within = decode_plan(segment(0, (1,), 12, heads={1: (1, 3)}))
    maps = [Program.of(None, within, model, Rank(rank, 2)).layers[1].role.kv_map for rank in range(2)]
    assert maps == [(1,), (1,)]


def test_ranks_that_choose_together_need_their_all_gather():
    program = Program.of(None, decode_plan(SEGMENTS["max"]), model_info(LAYERS, HEADS, 4), Rank(0, 2))
    with pytest.raises(UsageError, match="gather"):
        DecodeState(program.segments)
