"""CUDA graphs as far as runtime/hf/graphs.py sees them, on a CPU: a replay runs what was captured once more.

What is captured there must read its inputs from tensors of fixed address, and the kernels find keys by `where`: all of
that runs here as on a GPU, in Triton's interpreter. Streams and pinned memory are taken as done.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sparsekv.kernels import backends
from sparsekv.runtime.hf import graphs, plan_engine
from sparsekv.runtime.hf.attention import NAME
from sparsekv.runtime.hf.describe import attention_modules


class _Device:
    """Refuses to destroy a graph while another one is captured, and fails that capture."""

    def __init__(self) -> None:
        self.captures = self.failed = False

    @contextmanager
    def capture(self) -> Iterator[None]:
        self.captures, self.failed = True, False
        try:
            yield
        finally:
            self.captures = False
        if self.failed:
            raise RuntimeError("operation failed due to a previous error during capture")


_DEVICE = _Device()


class _Graph:
    run: Callable[[], object] | None = None  # of a graph that was captured

    def replay(self) -> None:
        assert self.run is not None
        self.run()

    def reset(self) -> None:
        _DEVICE.failed |= self.run is not None and _DEVICE.captures
        self.run = None

    def __del__(self) -> None:
        self.reset()


class _Torch:
    """torch, whose CUDA is of this file."""

    def __init__(self, cuda: Any) -> None:
        self.cuda = cuda

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


class _Stream:
    def __init__(self, device: object = None) -> None:
        pass

    def wait_stream(self, other: object) -> None:
        pass


def _capture(self: Any, attached: Any, engine: Any, pool: Any, stream: Any) -> None:
    """As StepGraph.capture, whose graph computes anew into the output of the first time."""
    step = self.step_of(attached, engine)
    step()
    with _DEVICE.capture():
        out = self._out_BQE = step()
    self.captured_of, this = (attached.decoder, engine), weakref.ref(self)  # a graph keeps nothing of Python alive

    def run() -> None:
        decoder, engine = this().captured_of
        out.copy_(this().step_of(vars(attention_modules(decoder)[0])[NAME], engine)())  # attached anew since, perhaps

    self._graph.run = run


def emulate(patch: pytest.MonkeyPatch) -> None:
    """`apply(model, plan, backend="triton")` captures decode steps of models on the CPU from here on."""
    current = _Stream()
    cuda = SimpleNamespace(
        CUDAGraph=_Graph,
        Stream=_Stream,
        current_stream=lambda device: current,
        device=lambda device: nullcontext(),
        graph_pool_handle=lambda: None,
        synchronize=lambda device: None,
        OutOfMemoryError=torch.OutOfMemoryError,
    )
    patch.setattr(graphs, "torch", _Torch(cuda))
    patch.setattr(graphs.StepGraph, "capture", _capture)
    patch.setattr(plan_engine, "can_capture", lambda device, backend: backend == "triton")
    patch.setattr(backends, "_obstacle", lambda name, *rest: None if name in ("triton", "cpu") else "not here")
