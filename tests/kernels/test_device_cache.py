"""What is kept between builds: it changes no index, nobody writes to it, and equal layers share it."""

from itertools import product

import pytest
import torch
from index_cases import PARTS, TILES, Layer, build, differences, make_layer
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from triton_index import call_of

from sparsekv.kernels import device_cache
from sparsekv.kernels.device_cache import cached_on_device, on_device
from sparsekv.kernels.index.build import build_index, group_heads
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, VerticalSlash, fraction, tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")

CPU = torch.device("cpu")
A, B = AShape(sink=tokens(64), window=tokens(128)), AShape(sink=tokens(1), window=fraction(0.5))
LINES = VerticalSlash(vertical=tokens(20), slash=tokens(12), max_tiles=fraction(0.6))
BLOCKS = BlockSparse(keep=fraction(0.4))
LAYERS = {
    "all lines": (LINES,) * 2,
    "lines and a_shape": (A, LINES),
    "all a_shape": (A,) * 4,
    "one a_shape": (A,),
    "two a_shapes": (A, B, B, A),
    "every kind": (B, LINES, Dense(), A, BLOCKS, BLOCKS),
}
PLACES = (Chunk((7,), (200,)), Chunk((64, 0), (190, 150)))


def copy_of(index: TileIndex) -> TileIndex:
    return TileIndex(index.tile, *(getattr(index, name).clone() for name in PARTS), index.dense_heads)


def layer_at(patterns, chunk: Chunk, window: int | None = None, seed: int = 3) -> Layer:
    return make_layer(patterns, chunk, TILES[0], window=window, spare=9, seed=seed)


class NothingCached(TorchDispatchMode):
    """Everything is made anew, as while a graph is traced or captured; otherwise nothing changes."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("name", "builder"), [*product(LAYERS, ["torch"]), ("all lines", "triton"), ("every kind", "triton")]
)
def test_a_second_build_is_the_first_whatever_was_built_in_between(name: str, builder: str) -> None:
    layer = layer_at(LAYERS[name], PLACES[0])
    others = [layer_at(LAYERS[name], *place, seed=8) for place in ((PLACES[0], None), (PLACES[1], 77))]
    first = build(layer, builder=builder)
    as_it_was = copy_of(first)
    found = [build(other, builder=builder) for other in others]
    assert differences(build(layer, builder=builder), as_it_was) == []
    assert differences(first, as_it_was) == []
    with NothingCached():
        anew = [build(one, builder=builder) for one in (layer, *others)]
    for index, expected in zip(anew, (as_it_was, *found), strict=True):
        assert differences(index, expected) == []


@pytest.mark.parametrize("name", ["all a_shape", "every kind"])
def test_whoever_writes_to_lists_of_one_index_harms_no_other(name: str) -> None:
    layer = layer_at(LAYERS[name], PLACES[1])
    first = build(layer, builder="triton")
    expected = copy_of(first)
    for part in (first.tiles_BHTW, first.counts_BHT, first.columns_BHC, first.live_BHTN):
        part.fill_(99)
    assert differences(build(layer, builder="triton"), expected) == []


def test_long_a_shapes_are_not_cached_and_are_those_of_their_last_rows() -> None:
    length, last = 24_576, 24_000  # 384 tiles squared are too many numbers to cache, the last rows are not
    q_BHSD, k_BGKD = torch.zeros(1, 3, length, 8), torch.zeros(1, 1, length, 8)
    patterns = (A, A, AShape(sink=tokens(1), window=tokens(700)))
    whole = build_index(patterns, q_BHSD, k_BGKD, Chunk((0,), (length,)), TILES[0], scale=1.0)
    rows = build_index(patterns, q_BHSD[:, :, last:], k_BGKD, Chunk((last,), (length,)), TILES[0], scale=1.0)
    count = rows.counts_BHT.shape[2]
    assert torch.equal(whole.counts_BHT[:, :, -count:], rows.counts_BHT)
    width = int(rows.counts_BHT.max())
    assert torch.equal(whole.tiles_BHTW[:, :, -count:, :width], rows.tiles_BHTW[..., :width])


def test_equal_layers_share_their_groups_whoever_made_the_patterns() -> None:
    mine, yours = ((LINES.model_copy(deep=True), Dense(), A.model_copy(deep=True)) for _ in range(2))
    assert all(one is other for one, other in zip(group_heads(mine), group_heads(yours), strict=True))
    assert group_heads(mine) != group_heads((mine[0], mine[2], mine[1]))


def test_equal_numbers_of_another_type_or_shape_are_other_tensors() -> None:
    assert on_device([1, 0], CPU) is on_device((1, 0), CPU)
    assert on_device([1, 0], CPU, torch.bool).tolist() == [True, False]
    assert on_device([[1, 0]], CPU).shape == (1, 2)
    assert on_device([1.5, 0.0], CPU, torch.float32).tolist() == [1.5, 0.0]


def test_every_stream_has_its_own_and_a_captured_one_keeps_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made = cached_on_device(most=4)(lambda device, count: torch.arange(count, device=device))
    found = []
    for stream in (1, 2, 1, None, None):
        monkeypatch.setattr(device_cache, "_stream", lambda device, stream=stream: stream)
        found.append(made(CPU, 3))
    assert found[0] is found[2]
    assert len({id(tensor) for tensor in found}) == 4


def test_what_inference_mode_made_first_serves_training_later() -> None:
    with torch.inference_mode():
        heads = on_device([2, 0, 5, 1], CPU)
    weights = torch.ones(6, 3, requires_grad=True)
    (weights * 2).index_select(0, heads).sum().backward()
    assert weights.grad is not None


def test_what_tracing_makes_is_not_kept_and_not_given_what_is() -> None:
    on_device([4, 2], CPU)
    with FakeTensorMode():
        traced = [on_device([6, 0, 5], CPU), on_device([4, 2], CPU)]
    assert all(isinstance(tensor, FakeTensor) for tensor in traced)
    assert on_device([6, 0, 5], CPU).tolist() == [6, 0, 5]


def test_calls_of_the_same_place_and_other_tensors_share_a_layout_and_are_not_equal() -> None:
    one, other = (call_of(layer_at(LAYERS["all lines"], PLACES[0], seed=seed)) for seed in (3, 8))
    assert one.layout == other.layout
    assert one != other
    assert len({one, other}) == 2
