"""Indices and attention of a captured call, of the shapes of a larger chunk, beside those of the chunk itself."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_cases import TILES, budgets, make_layer
from torch_state import poisoned_memory
from triton_index import SMALL

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index, groups_of
from sparsekv.kernels.index.layout import IndexLayout
from sparsekv.kernels.index.triton import vertical_slash
from sparsekv.kernels.tiles import AnyChunk, Chunk, computed_tiles
from sparsekv.plans.errors import BackendError
from sparsekv.plans.patterns import Dense, VerticalSlash, tokens
from sparsekv.runtime.paged.captured_prefill import Budgets

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")
ROWS, KEYS = 256, 640 - 1

lines = st.builds(
    VerticalSlash,
    vertical=st.one_of(st.integers(0, 60).map(tokens), budgets),
    slash=st.one_of(st.integers(0, 30).map(tokens), budgets),
    max_tiles=st.one_of(st.integers(1, 400).map(tokens), budgets),
    last_q=st.sampled_from([5, 64, 100]),
)


def padded(x: torch.Tensor, rows: int) -> torch.Tensor:
    whole = torch.full((*x.shape[:2], rows, x.shape[3]), torch.nan, dtype=x.dtype)
    whole[:, :, : x.shape[2]] = x
    return whole


def captured(layer, length: int) -> tuple[AnyChunk, torch.Tensor, torch.Tensor]:
    """The chunk, queries and keys of a captured call for this layer."""
    (past,), groups, cpu = layer.chunk.past, groups_of(layer.patterns), torch.device("cpu")
    slashes = tuple(group for group in groups if group.kind is VerticalSlash)
    known = Budgets.of(slashes)
    _, heads, rows, size = layer.q_BHSD.shape
    kv_heads, dtype = layer.k_BGKD.shape[1], layer.q_BHSD.dtype
    layout = IndexLayout(layer.chunk, layer.tile, None, 1, heads, kv_heads, rows, size, dtype, cpu)
    numbers_4h = known.in_chunk(layout)
    numbers = torch.tensor([past], dtype=torch.int32), torch.tensor([length], dtype=torch.int32)
    chunk = AnyChunk(
        (KEYS - ROWS,), (KEYS,), numbers, {group.named: numbers_4h[:, known.at[group.named]] for group in slashes}
    )
    q_BHSD, k_BGKD = padded(layer.q_BHSD, ROWS), padded(layer.k_BGKD, KEYS)
    q_BHSD[:, :, rows:], k_BGKD[:, :, length:] = 1.0, 0.0  # as an earlier chunk left them
    return chunk, q_BHSD, k_BGKD


@pytest.fixture(autouse=True)
def small(monkeypatch) -> None:
    monkeypatch.setattr(vertical_slash, "sizes_for", lambda device: SMALL)


@settings(max_examples=12, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    patterns=st.lists(st.one_of(lines, st.just(Dense())), min_size=1, max_size=3).filter(
        lambda patterns: any(isinstance(pattern, VerticalSlash) for pattern in patterns)
    ),
    past=st.integers(0, 300),
    rows=st.integers(1, ROWS),
    tile=st.sampled_from(TILES),
    seed=st.integers(0, 99),
)
def test_a_captured_call_has_the_index_and_the_output_of_its_chunk(patterns, past, rows, tile, seed) -> None:
    length = past + rows
    layer = make_layer(tuple(patterns), Chunk((past,), (length,)), tile, kv_heads=1, seed=seed)
    chunk, q_BHSD, k_BGKD = captured(layer, length)
    with poisoned_memory():
        found = build_index(layer.patterns, q_BHSD, k_BGKD, chunk, tile, scale=layer.scale, builder="triton")
    wanted = build_index(
        layer.patterns, layer.q_BHSD, layer.k_BGKD, layer.chunk, tile, scale=layer.scale, builder="triton"
    )
    T = wanted.counts_BHT.shape[2]
    assert torch.equal(found.counts_BHT[:, :, :T], wanted.counts_BHT)
    assert not found.counts_BHT[:, :, T:].any()
    assert torch.equal(computed_tiles(found), computed_tiles(wanted))
    v_BGKD = torch.randn_like(layer.k_BGKD[:, :, :length])
    v_whole = torch.zeros_like(k_BGKD)
    v_whole[:, :, :length] = v_BGKD
    with poisoned_memory():
        out = prefill_attention(q_BHSD, k_BGKD, v_whole, found, chunk, scale=layer.scale, backend="triton").out_BHSD
    expected = prefill_attention(
        layer.q_BHSD, layer.k_BGKD[:, :, :length], v_BGKD, wanted, layer.chunk, scale=layer.scale, backend="reference"
    ).out_BHSD
    torch.testing.assert_close(out[:, :, :rows], expected, rtol=1e-4, atol=1e-5)


@settings(deadline=None)
@given(
    length=st.integers(1, 40_000),
    shares=st.lists(st.tuples(budgets, budgets, budgets), min_size=1, max_size=5),
    tile=st.sampled_from(TILES),
    data=st.data(),
)
def test_budgets_of_a_chunk_are_those_of_the_host(length, shares, tile, data) -> None:
    rows = data.draw(st.integers(1, length))
    patterns = tuple(VerticalSlash(vertical=v, slash=s, max_tiles=t, last_q=70) for v, s, t in shares)
    chunk, cpu = Chunk((length - rows,), (length,)), torch.device("cpu")
    layout = IndexLayout(chunk, tile, None, 1, len(patterns), 1, rows, 16, torch.float32, cpu)
    (group,) = groups_of(patterns)
    known = Budgets.of((group,))
    (part,) = vertical_slash.plan_build(group, layout, SMALL, 1 << 40)[1]
    assert [tuple(row) for row in known.in_chunk(layout)[:, known.at[group.named]].tolist()] == list(part.fields[3:7])


@pytest.mark.parametrize(
    ("past", "rows", "sampled"),
    [
        (0, 1000, 256),
        (0, 100, 100),
        (999, 1000, 256),
        (1000, 1000, 64),
        (9000, 4096, 128),
        (9000, 9000, 256),
        (70, 40, 40),
    ],
)
def test_a_chunk_behind_a_longer_past_samples_fewer_queries(past: int, rows: int, sampled: int) -> None:
    assert Chunk((past, 0), (past + rows, 20)).sampled(256) == (sampled, 20)
    assert Chunk((past,), (past + rows,)).sampled(16) == (min(16, sampled),)


def test_captured_chunks_of_equal_sizes_differ() -> None:
    """Plans of builds are found by their chunk: one for fewer sampled queries is another."""
    numbers = torch.zeros(2, 1, dtype=torch.int32).unbind()
    few, many = (AnyChunk((127,), (383,), numbers, {}, most) for most in (64, 256))
    assert few != many
    assert len({few, many}) == 2


def test_torch_does_not_build_the_index_of_a_captured_call() -> None:
    layer = make_layer(
        (VerticalSlash(vertical=tokens(9), slash=tokens(9), max_tiles=tokens(200)),), Chunk((0,), (200,)), TILES[0]
    )
    chunk, q_BHSD, k_BGKD = captured(layer, 200)
    with pytest.raises(BackendError, match="captured call"):
        build_index(layer.patterns, q_BHSD, k_BGKD, chunk, TILES[0], scale=1.0, builder="torch")
