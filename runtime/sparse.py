"""The engine that runs a plan: prefill by its patterns, decode by its segments, KV where it says."""

from __future__ import annotations

import torch

from sparsekv.plans.decode import DecodePlan
from sparsekv.plans.prefill import PrefillPlan
from sparsekv.runtime.cache import Bytes
from sparsekv.runtime.decode import attend_decode, filter_windows
from sparsekv.runtime.engine import LayerCall
from sparsekv.runtime.prefill import attend_prefill
from sparsekv.runtime.stats import Meter
from sparsekv.runtime.stores.base import KVStore
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.host import HostStore


class SparseEngine:
    """Attention of a model as a plan has it. A phase that is None runs dense.

    Args:
        prefill: patterns of the prefill phase.
        decode: segments of the decode phase, and which layers are offloaded.
        backend: the kernel backend's name.
    """

    def __init__(self, prefill: PrefillPlan | None, decode: DecodePlan | None, backend: str) -> None:
        self.open = True
        self.bytes: list[Bytes] = []
        self.meter = Meter()
        self._prefill = prefill
        self._decode = decode
        self._backend = backend
        self._windows = filter_windows(decode)

    def new_store(self, layer: int) -> KVStore:
        """Host memory for the layers that the plan offloads, else the device."""
        offload = self._decode.offload if self._decode else None
        return HostStore(offload.hot) if offload and layer in offload.layers else DeviceStore()

    def attend(self, call: LayerCall) -> torch.Tensor:
        """One row behind a past is decode; everything else is prefill, after which the tail starts anew."""
        entry, window = call.entry, self._windows.get(call.layer, 1)
        if entry is not None and window > 1:
            entry.remember(call.q_BHSD, window)
        if call.queries == 1 and call.past > 0:
            return attend_decode(call, self._decode, self._backend, self.meter)
        out = attend_prefill(call, self._prefill, self._backend, self.meter)
        if entry is not None:
            entry.prompt_end = call.length
        return out
