"""Builders on meta tensors: nothing asks the device for a value, and memory stays linear in the length."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.scores import token_scores
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.kernels.topk import top_ascending
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens

WAITS = {"_local_scalar_dense", "nonzero", "masked_select", "unique", "_unique2", "equal"}
KINDS = {
    "a_shape": AShape(sink=tokens(128), window=tokens(4096)),
    "vertical_slash": VerticalSlash(vertical=tokens(1000), slash=tokens(2000), max_tiles=tokens(16384)),
    "block_sparse": BlockSparse(keep=tokens(8192)),
    "dense": Dense(),
}


class Watch(TorchDispatchMode):
    """Notes every operation and the largest tensor that any of them makes, inputs left out."""

    def __init__(self, *inputs: torch.Tensor) -> None:
        super().__init__()
        self.inputs = {tensor.untyped_storage()._cdata for tensor in inputs}
        self.names: set[str] = set()
        self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.add(func.overloadpacket.__name__)
        result = func(*args, **(kwargs or {}))
        for tensor in result if isinstance(result, tuple | list) else (result,):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage()._cdata not in self.inputs:
                self.largest = max(self.largest, tensor.untyped_storage().nbytes())
        return result


def watch_build(patterns, length: int, past: int = 0, heads_per_kv: int = 2) -> Watch:
    heads = len(patterns)
    q = torch.empty(1, heads, length - past, 64, dtype=torch.bfloat16, device="meta")
    k = torch.empty(1, heads // heads_per_kv, length, 64, dtype=torch.bfloat16, device="meta")
    chunk = Chunk.uniform(1, past, length)
    with Watch(q, k) as watch:
        index = build_index(patterns, q, k, chunk, TileShape(), scale=0.125, window=None)
        density(index, chunk)
    return watch


@pytest.mark.parametrize("past", [0, 5000])
def test_no_builder_waits_for_the_device(past: int) -> None:
    watch = watch_build([*KINDS.values(), *KINDS.values()], 20000, past)
    assert not watch.names & WAITS


@pytest.mark.parametrize("kind", KINDS)
def test_memory_is_linear_in_the_length(kind: str) -> None:
    longest = 1 << 20
    short, long = (watch_build([KINDS[kind]] * 4, length).largest for length in (longest >> 2, longest))
    assert long <= 4.2 * short
    assert long <= longest * 64 * 4 * 1.1  # one head's sampled rows: 64 float32 for each key


def test_budgets_in_shares_bound_the_lists_by_max_tiles() -> None:
    pattern = VerticalSlash(vertical=tokens(32), slash=fraction(1.0), max_tiles=fraction(0.1))
    q = torch.empty(1, 2, 65536, 64, device="meta")
    index = build_index([pattern] * 2, q, q, Chunk.uniform(1, 0, 65536), TileShape(), scale=0.125)
    assert index.tiles_BHTW.shape == (1, 2, 512, 52)


def test_choosing_tokens_does_not_wait_for_the_device() -> None:
    q = torch.empty(2, 8, 4, 64, device="meta")
    k = torch.empty(2, 2, 1000, 64, device="meta")
    with Watch() as watch:
        positions_1W, weights_W = torch.empty(1, 4, dtype=torch.int64, device="meta"), torch.empty(4, device="meta")
        for heads in ("max", "per_kv_head"):
            scores = token_scores(q, k, positions_1W, weights_W, scale=0.1, heads=heads)
            top_ascending(scores, torch.full(scores.shape[:2], 100, device="meta"), 100, -1)
    assert not watch.names & WAITS
