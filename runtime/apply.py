"""`sparsekv.apply`: a plan put to work on a model that stays what it was."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import TracebackType

from transformers import Cache, PreTrainedModel

from sparsekv.kernels.backends import BackendChoice, choose_backend
from sparsekv.plans.schema import Plan
from sparsekv.runtime.attach import attach, check_attachable
from sparsekv.runtime.cache import SparseLayer, check_owner_open, sparse_cache
from sparsekv.runtime.checks import check_plan, check_target
from sparsekv.runtime.chunking import Chunking
from sparsekv.runtime.describe import describe_model
from sparsekv.runtime.place import device_name, dtype_name
from sparsekv.runtime.placement import layouts_of, place_layers
from sparsekv.runtime.sparse import SparseEngine
from sparsekv.runtime.stats import Meter, RunStats


class Handle:
    """A plan at work. `close()`, or leaving its `with` block, gives the model back as it was."""

    def __init__(
        self, model: PreTrainedModel, engine: SparseEngine, backend: BackendChoice, chunking: Chunking
    ) -> None:
        self._backend = backend
        self._engine = engine
        self._layouts = layouts_of(model)
        self._undo = attach(model, engine, chunking)

    @property
    def backend(self) -> BackendChoice:
        """What computes prefill: the backend that was chosen, or the one that took over when it failed."""
        fallback, choice = self._engine.fallback, self._backend
        if fallback.backend == choice.name:
            return choice
        failed = tuple((name, f"it failed: {why}") for name, why in fallback.failed.items())
        return BackendChoice(fallback.backend, "took over", choice.rejected + failed)

    @property
    def builder_failed(self) -> str:
        """Why torch builds the indices in place of Triton; empty where Triton did not fail."""
        return self._engine.fallback.builder_failed

    @property
    def closed(self) -> bool:
        """Whether the model is back as it was."""
        return not self._engine.open

    def close(self) -> None:
        """Restores the model. Caches made under this handle cannot be used any more. Again is fine."""
        self._undo()
        self._engine.release()

    def new_cache(self, tokens: int, batch: int = 1) -> Cache:
        """An empty cache with its memory in place: `past_key_values` of what runs under this handle.

        Page-locking host memory takes a second or so for each 2 GB; this does it before the prompt runs, and once:
        a later cache of this handle takes over the memory of one that is gone or was reset. Without it, caches
        allocate on first use, and `reserve` in cache.py says how much.

        Args:
            tokens: prompt and answer together; the cache may grow beyond, which copies it.
            batch: rows.

        Raises:
            UsageError: host memory does not suffice, or the handle is closed.
        """
        check_owner_open(self._engine)
        cache = sparse_cache(None, self._engine, len(self._layouts))
        for layer, layout in zip(cache.layers, self._layouts, strict=True):
            assert isinstance(layer, SparseLayer)
            layer.reserve(tokens, replace(layout, batch=batch))
        return cache

    def stats(self) -> RunStats:
        """What was computed since the start or the last reset; waits for the device. Also after `close()`."""
        return self._engine.meter.read(self._engine.bytes)

    def reset_stats(self) -> None:
        """Starts counting anew; the bytes of the latest cache stay."""
        self._engine.meter = Meter()

    def __enter__(self) -> Handle:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def apply(
    model: PreTrainedModel,
    plan: Plan,
    *,
    prefill: bool = True,
    decode: bool = True,
    backend: str = "auto",
    allow_mismatch: bool = False,
    kv_host_layers: int | Sequence[int] | None = None,
    chunking: Chunking | None = None,
) -> Handle:
    """Runs `model` by `plan` until the returned handle is closed; `model(...)` and `model.generate(...)` as before.

    Args:
        model: a loaded model of a supported architecture, in evaluation mode.
        plan: what to compute of it.
        prefill: False runs prefill dense.
        decode: False runs decode dense, with all KV on the device (but see `kv_host_layers`).
        backend: a kernel backend by name, or "auto".
        allow_mismatch: take a plan that was made for another architecture, as far as its layers and heads fit.
        kv_host_layers: the layers whose keys and values go to host memory, or how many (those that decode reads
            least of come first), in place of the plan's `decode.offload`; None leaves it to the plan. Decode of a
            layer in no segment copies all of its keys and values back at every step: 80 ms a layer at 1M tokens.
        chunking: from which length on layers work in pieces, and of which size; rarely of interest.

    Returns:
        The handle, which is also a context manager.

    Raises:
        UsageError: the model is in training mode, or has a plan applied already, or lacks a layer that is named.
        UnsupportedError: an architecture, or a field of the plan, that this version cannot execute.
        PlanMismatchError: the plan was made for another model.
        BackendError: `backend` cannot run here.
    """
    check_attachable(model)
    info = describe_model(model)
    check_plan(plan, info, allow_mismatch)
    tile = plan.prefill.tile if prefill and plan.prefill else None
    choice = choose_backend(model.device, model.dtype, info.attention[0].head_dim, backend, tile)
    if prefill or decode:
        check_target(plan, device_name(model.device), choice.name, dtype_name(model.dtype))
    chunking, phase = chunking or Chunking(), plan.decode if decode else None
    placement = place_layers(phase, model.config.num_hidden_layers, kv_host_layers)
    engine = SparseEngine(plan.prefill if prefill else None, phase, choice.name, placement, chunking)
    return Handle(model, engine, choice, chunking)
