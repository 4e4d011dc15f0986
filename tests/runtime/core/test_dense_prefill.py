"""Which contexts a layer computes dense, and what follows when a kernel fails."""

from collections.abc import Callable

import pytest
import torch
from plans_samples import model_info
from torch.utils._python_dispatch import TorchDispatchMode

from sparsekv.kernels.backends import BackendWarning, Fallback
from sparsekv.kernels.keys import full_view
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import AShape, TileShape, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.runtime.core import prefill as stage
from sparsekv.runtime.core.prefill import DenseLayers, prefill
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.core.stats import Meter

SPARSE = AShape(sink=tokens(64), window=tokens(64))
OPEN_END = PrefillBucket(
    up_to=None, heads=tuple(HeadGroup(layer=layer, heads=(0, 1, 2, 3), pattern=SPARSE) for layer in (0, 1))
)
LAYER = Program.of(None, None, model_info(1, 4, 2)).layers[0]
CHUNK = Chunk((0,), (100,))


def test_the_hint_has_chunks_of_less_than_a_row_tile_dense() -> None:
    heads = (HeadGroup(layer=0, heads=(0, 1, 2, 3), pattern=SPARSE),)
    tile, dense = TileShape(query=64, key=64), PrefillBucket(up_to=512, dense=True)
    plan = PrefillPlan(tile=tile, lengths=(dense, PrefillBucket(up_to=8192, heads=heads), OPEN_END))
    program = Program.of(plan, None, model_info(2, 4, 2))
    assert [program.hint.prefill.pays(rows, 9000) for rows in (63, 64)] == [False, True]
    layer, dense_layer = program.layers
    assert [bool(layer.patterns_at(length)) for length in (512, 513)] == [False, True]
    assert not dense_layer.patterns_at(8192)
    assert dense_layer.patterns_at(9000) == layer.patterns_at(9000) != ()  # dense in one bucket, sparse in another


@pytest.fixture(params=["a layer by itself", "decided for all layers"])
def attend(request) -> Callable[[Fallback], torch.Tensor]:
    """Computes a dense layer."""
    generator = torch.Generator().manual_seed(0)
    q_BHSD, k_BGSD, v_BGSD = (torch.randn(1, heads, 100, 16, generator=generator) for heads in (4, 2, 2))

    def attend(fallback: Fallback) -> torch.Tensor:
        if request.param == "a layer by itself":
            return prefill(LAYER, q_BHSD, full_view(k_BGSD, v_BGSD), CHUNK, scale=0.25, fallback=fallback)
        return DenseLayers({0: LAYER}, {None: 1}, CHUNK, fallback, Meter()).attend(0, q_BHSD, k_BGSD, v_BGSD, 0.25)

    return attend


def test_a_dense_layer_that_breaks_its_backend_is_computed_by_the_next(attend, monkeypatch: pytest.MonkeyPatch) -> None:
    def dense(*tensors, backend, **how):
        if backend == "triton":
            raise RuntimeError("no kernel image")
        return dense_attention(*tensors, **how)

    expected, fallback = attend(Fallback("cpu")), Fallback("triton")
    monkeypatch.setattr(stage, "dense_by_flash", lambda *tensors, backend: backend == "triton")
    monkeypatch.setattr(stage, "dense_prefill", dense)
    with pytest.warns(BackendWarning, match="triton backend"):
        found = attend(fallback)
    assert fallback.backend == "cpu"
    assert torch.equal(found, expected)


def test_our_own_dense_kernel_that_fails_leaves_its_layers_to_torch(attend, monkeypatch: pytest.MonkeyPatch) -> None:
    names = []

    def dense(*tensors, backend, **how):
        names.append(backend)
        if backend == "triton":
            raise RuntimeError("no kernel image")
        return dense_attention(*tensors, **how)

    expected, fallback = attend(Fallback("cpu")), Fallback("triton")
    monkeypatch.setattr(stage, "dense_by_triton", lambda q_BHSD, backend: True)
    monkeypatch.setattr(stage, "dense_prefill", dense)
    with pytest.warns(BackendWarning, match="dense attention"):
        found = attend(fallback)
    assert torch.equal(attend(fallback), found)
    assert torch.equal(found, expected)
    assert (names, fallback.backend) == (["triton", "reference", "reference"], "triton")


class NoMemory(TorchDispatchMode):
    """A device on which attention does not fit."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "scaled_dot_product" in func.name():
            raise torch.OutOfMemoryError("CUDA out of memory")
        return func(*args, **(kwargs or {}))


def test_what_fails_in_torch_is_not_blamed_on_the_backend(attend) -> None:
    fallback = Fallback("triton")
    with NoMemory(), pytest.raises(torch.OutOfMemoryError):
        attend(fallback)
    assert fallback.backend == "triton"
