"""The engine that runs a plan: prefill by its patterns, decode by its segments, KV where it says."""

from __future__ import annotations

import torch

from sparsekv.kernels.fallback import Fallback
from sparsekv.plans.phases import DecodePlan, PrefillPlan
from sparsekv.runtime.core.decode import attend_decode, filter_windows
from sparsekv.runtime.core.prefill import attend_prefill
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.engine import LayerCall
from sparsekv.runtime.groups import attend_in_groups
from sparsekv.runtime.hf.cache import Bytes
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.placement import Placement
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore, KVStore
from sparsekv.runtime.stores.pinned import HostMemory


class SparseEngine:
    """Attention of a model as a plan has it. A phase that is None runs dense.

    Args:
        prefill: patterns of the prefill phase.
        decode: segments of the decode phase.
        backend: the kernel backend's name; prefill goes on with another one should it fail.
        placement: the layers whose keys and values live in host memory.
        chunking: how long inputs are cut.
    """

    def __init__(
        self,
        prefill: PrefillPlan | None,
        decode: DecodePlan | None,
        backend: str,
        placement: Placement | None = None,
        chunking: Chunking | None = None,
    ) -> None:
        self.open = True
        self.bytes: list[Bytes] = []
        self.meter = Meter()
        self._prefill = prefill
        self._decode = decode
        self.fallback = Fallback(backend)
        self._backend = backend  # of decode: there is one for each kind of device
        self._placement = placement or Placement()
        self._chunking = chunking or Chunking()
        self._memory = HostMemory()
        self._windows = filter_windows(decode)

    def new_store(self, layer: int) -> KVStore:
        """Host memory for the layers that are placed there, else the device."""
        return HostStore(self._placement.hot, self._memory) if layer in self._placement.layers else DeviceStore()

    def release(self) -> None:
        """Gives host memory back to the system as soon as no cache uses it."""
        self._memory.close()

    def attend(self, call: LayerCall) -> torch.Tensor:
        """One row behind a past is decode; everything else is prefill, after which the tail starts anew."""
        entry, window = call.entry, self._windows.get(call.layer, 1)
        if entry is not None and window > 1:
            entry.remember(call.q_BHSD, window)
        if call.queries == 1 and call.past > 0:
            return attend_decode(call, self._decode, self._backend, self.meter)
        out = attend_in_groups(call, self._attend_prefill, self._chunking.output_bytes)
        if entry is not None:
            entry.prompt_end = call.length
        return out

    def _attend_prefill(self, call: LayerCall) -> torch.Tensor:
        return attend_prefill(call, self._prefill, self.fallback, self.meter)
