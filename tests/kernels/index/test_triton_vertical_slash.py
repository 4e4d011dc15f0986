"""The Triton builder of vertical-slash, in the interpreter, against the torch builder and against brute force."""

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_cases import TILES, Layer, brute_rows, budgets, build, differences, layers, make_layer
from masks import brute_mask
from triton_index import SMALL, call_of, group_of, torch_index, triton_index

from sparsekv.kernels.index.build import builds_by_triton
from sparsekv.kernels.index.triton import vertical_slash
from sparsekv.kernels.reference import mask_of
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")

LINES = VerticalSlash(vertical=tokens(20), slash=tokens(12), max_tiles=fraction(0.6))
NONE = VerticalSlash(vertical=tokens(0), slash=tokens(0), max_tiles=tokens(0))
EVERY = VerticalSlash(vertical=fraction(1.0), slash=fraction(1.0), max_tiles=tokens(200), last_q=7)
WHOLE = VerticalSlash(vertical=tokens(9), slash=fraction(1.0), max_tiles=fraction(1.0))
MIDDLE, LONG = LINES.model_copy(update={"last_q": 100}), LINES.model_copy(update={"last_q": 256})


def check(layer: Layer) -> None:
    assert differences(triton_index(layer), torch_index(layer)) == []


@pytest.mark.parametrize(
    ("patterns", "chunk", "tile", "kv_heads", "window"),
    [
        ((LINES, EVERY), Chunk((0,), (200,)), TILES[0], 1, None),
        ((LINES, NONE, EVERY), Chunk((201, 0), (290, 133)), TILES[1], 1, None),
        ((MIDDLE, LINES), Chunk((64,), (280,)), TILES[2], 2, None),
        ((LONG,), Chunk((0,), (330,)), TILES[2], 1, None),
        ((LINES, MIDDLE), Chunk((100, 0), (250, 90)), TILES[0], 2, 77),
        ((NONE, NONE), Chunk((150,), (290,)), TILES[1], 1, None),
        ((LINES,), Chunk((300, 0, 40), (300, 0, 140)), TILES[1], 1, None),
        ((WHOLE, LINES), Chunk((37, 161), (303, 300)), TILES[1], 1, None),
        ((WHOLE, EVERY), Chunk((0, 70), (266, 300)), TILES[2], 1, None),
    ],
    ids=[
        "group",
        "ragged past",
        "two strips",
        "four strips",
        "window",
        "no lines",
        "rows without queries or tokens",
        "the whole context, off the grid",
        "the whole context, a ragged last row",
    ],
)
def test_triton_builds_the_index_of_torch_in_poisoned_memory(patterns, chunk, tile, kv_heads, window) -> None:
    check(make_layer(patterns, chunk, tile, kv_heads=kv_heads, window=window, spare=40, seed=3))


@pytest.mark.parametrize(
    ("patterns", "chunk", "window", "at_once"),
    [((LONG, LINES), Chunk((0,), (330,)), None, 2), ((MIDDLE, LONG), Chunk((140, 0), (400, 90)), 177, 1)],
    ids=["whole prompt", "ragged, window"],
)
def test_strips_may_come_in_several_launches(patterns, chunk, window, at_once) -> None:
    sizes = replace(SMALL, lines_at_once=at_once)
    layer = make_layer(patterns, chunk, TILES[2], kv_heads=1, window=window, spare=40, seed=4)
    assert differences(triton_index(layer, sizes), torch_index(layer)) == []


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_and_odd_head_sizes_build_the_index_of_torch(dtype: torch.dtype) -> None:
    check(make_layer((LINES, EVERY), Chunk((9,), (209,)), TILES[0], dtype=dtype, seed=5, size=24))


small = st.builds(
    VerticalSlash,
    vertical=st.one_of(st.integers(0, 60).map(tokens), budgets),
    slash=st.one_of(st.integers(0, 12).map(tokens), budgets),
    last_q=st.sampled_from([1, 7, 64, 70]),
    max_tiles=budgets,
)


@settings(
    max_examples=4,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.filter_too_much],
)
@given(layers(small))
def test_index_of_triton_is_what_brute_force_says(layer: Layer) -> None:
    rows = brute_rows(layer)
    index, queries = triton_index(layer), layer.q_BHSD.shape[2]
    assert torch.equal(
        mask_of(index, layer.chunk, queries, layer.window),
        brute_mask(rows, layer.chunk, layer.tile, queries, layer.window),
    )
    assert differences(index, torch_index(layer)) == []


MIXED = (
    AShape(sink=tokens(64), window=tokens(128)),
    LINES,
    Dense(),
    EVERY,
    BlockSparse(keep=fraction(0.4)),
    NONE,
)


def test_heads_of_other_patterns_keep_their_places_beside_those_of_triton() -> None:
    layer = make_layer(MIXED, Chunk((7, 64), (200, 190)), TILES[0], kv_heads=2, spare=9, seed=3)
    found, expected = build(layer, builder="triton"), build(layer, builder="torch")
    assert differences(found, expected) == []
    assert found.dense_heads == expected.dense_heads == (2,)


def test_long_layers_are_built_in_groups_of_heads(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = make_layer((LINES, EVERY, NONE, LINES), Chunk((0,), (150,)), TILES[0], kv_heads=2, seed=1)
    monkeypatch.setattr(vertical_slash, "MOST_SCORES", 3 * 2 * 150)
    check(layer)


def test_auto_is_triton_on_nvidia_gpus_that_have_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = torch.device("cuda", 0)
    assert builds_by_triton(cuda)
    assert not builds_by_triton(torch.device("cpu"))
    monkeypatch.setattr(torch.version, "hip", "6.2")
    assert not builds_by_triton(cuda)


def test_what_triton_does_not_build_is_built_by_torch() -> None:
    chunk = Chunk((0,), (80,))
    wide = LINES.model_copy(update={"last_q": 257})
    for layer in (
        make_layer((LINES, wide), chunk, TILES[0]),
        make_layer((LINES,), chunk, TILES[0], size=256),
        make_layer((LINES,), chunk, TILES[0], size=20),
        make_layer((LINES,), chunk, TILES[0], dtype=torch.float64),
        make_layer((LINES,), Chunk((0,), (0,)), TILES[0], spare=3),
    ):
        assert not vertical_slash.takes(group_of(layer), call_of(layer))
        assert differences(build(layer, builder="triton"), build(layer, builder="torch")) == []
    long = replace(make_layer((LINES,), chunk, TILES[0]), chunk=Chunk((2_000_000,), (2_000_001,)))
    assert not vertical_slash.takes(group_of(long), call_of(long))
    strided = make_layer((LINES,), chunk, TILES[0])
    assert vertical_slash.takes(group_of(strided), call_of(strided))
    spread = strided.q_BHSD.repeat_interleave(2, 3)[..., ::2]
    layer = Layer(strided.patterns, spread, strided.k_BGKD, chunk, TILES[0], strided.scale, None)
    assert not vertical_slash.takes(group_of(layer), call_of(layer))


def test_where_triton_does_not_run_auto_is_torch() -> None:
    layer = make_layer((LINES,), Chunk((0,), (80,)), TileShape())
    assert differences(build(layer, builder="auto"), build(layer, builder="torch")) == []
