"""The engine of a plan: what every layer of a model computes, where its keys and values lie, and what was counted."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial

import torch
from transformers import Cache, PreTrainedModel

from sparsekv.kernels.backends import Fallback
from sparsekv.runtime.core.decode import count_step, decode
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.hf.attention import Executor, LayerCall, Phase
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.graphs import GraphWarning, StepGraphs, can_capture
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.placement import Placement, reads_of
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.pinned import HostMemory
from sparsekv.runtime.stores.store import Bytes, HostReads, KVStore


class PlanEngine:
    """Attention of a model as a program has it.

    Args:
        program: what every layer computes.
        model: that it is for.
        backend: the kernel backend's name; prefill goes on with another one should it fail.
        placement: the layers whose keys and values live in host memory; of caches to come, so that it may change.
        chunking: how long inputs are cut.
        memory: where blocks of host memory come from; its own when None.
    """

    differentiable = False

    def __init__(
        self,
        program: Program,
        model: PreTrainedModel,
        backend: str,
        placement: Placement,
        chunking: Chunking,
        memory: HostMemory | None = None,
    ) -> None:
        self.open = True
        self.bytes: list[Bytes] = []
        self.host_reads = HostReads()
        self.meter = Meter()
        self.fallback = Fallback(backend)
        self._backend = backend  # of decode: there is one for each kind of device
        self._device = model.device
        self._model_type: str = model.config.model_type
        self.graphs: StepGraphs | None = None
        self._told = False
        self._program = program
        self.placement = placement
        self._chunking = chunking
        self.memory = HostMemory() if memory is None else memory
        self._owns_memory = memory is None

    def new_store(self, layer: int) -> KVStore:
        """Host memory for the layers that are placed there, else the device."""
        if layer not in self.placement.layers:
            return DeviceStore()
        return HostStore(self.placement.hot, self.memory, reads_of(self._program.layers[layer]), self.host_reads)

    @property
    def remembers(self) -> tuple[int, ...]:
        """The filter layers whose selector looks at older queries, which a cache from elsewhere lacks."""
        return self._program.remembers

    def new_state(self) -> DecodeState:
        """What the layers of one cache share."""
        return DecodeState(self._program)

    def executors(self) -> Sequence[Executor]:
        """Captured decode steps, where the device has them."""
        if not can_capture(self._device, self._backend):
            return ()
        if self.graphs is None:  # else it was suspended
            self.graphs = StepGraphs(self._model_type, self._program, self.host_reads)
        return (self.graphs,)

    def begin_step(self, cache: Cache, lengths: tuple[int, ...], device: torch.device) -> None:
        """Starts a decode step at which the rows have these lengths, the new tokens included, and counts it."""
        first = cache.layers[0]
        assert isinstance(first, SparseLayer)
        first.state.begin(lengths, device)
        count_step(self._program, lengths, self.meter)
        if self.graphs is None and not self._told and can_capture(self._device, self._backend):
            self._told = True
            warnings.warn("decode steps are not captured: the decoder has a forward of its own", GraphWarning, 2)

    def release(self) -> None:
        """Gives host memory back to the system as soon as no cache uses it, and frees captured steps."""
        if self._owns_memory:
            self.memory.close()
        if self.graphs is not None:
            self.graphs.release()

    def attend(self, call: LayerCall) -> torch.Tensor:
        """The call's phase of its layer."""
        layer, entry = self._program.layers[call.layer], call.entry
        if call.phase is Phase.DECODE:
            assert entry is not None, "decode without a cache"
            step = partial(decode, layer, call.q_BHSD, entry.store, entry.state, scale=call.scale)
            return self.fallback.decode(lambda backend: step(backend=backend), self._backend, call.q_BHSD.device)
        if entry is not None:
            entry.state.remember(layer, call.q_BHSD)
        chunk = call.chunk
        return prefill(
            layer,
            call.q_BHSD,
            call.keys(chunk),
            chunk,
            scale=call.scale,
            fallback=self.fallback,
            meter=self.meter,
            overwrite_above=self._chunking.output_bytes if call.q_is_spare else None,
        )
