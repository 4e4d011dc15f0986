"""`sparsekv.apply`: a plan put to work on a model that stays what it was."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import TracebackType, UnionType
from typing import Any, Literal, get_args

import torch
from transformers import Cache, PreTrainedModel

from sparsekv.kernels.backends import BackendChoice, choose_backend, float8_obstacle
from sparsekv.plans.errors import BackendError, UnsupportedError, UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.phases import IndexSharing
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import KVDtype
from sparsekv.runtime.core.pays import NEVER, Pays, parse
from sparsekv.runtime.core.stats import Meter, RunStats
from sparsekv.runtime.hf.attach import attach, check_attachable, check_runnable
from sparsekv.runtime.hf.batching import check_batching
from sparsekv.runtime.hf.cache import SparseLayer, check_owner_open, sparse_cache
from sparsekv.runtime.hf.describe import config_of, describe_model
from sparsekv.runtime.hf.exact import ExactLoop
from sparsekv.runtime.hf.graphs import StepGraphs, can_capture
from sparsekv.runtime.hf.index_sharing import is_shared, share, sources_of
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.memory import Available, MemoryModel, ModelSize, Request
from sparsekv.runtime.hf.placement import OffloadMode, layouts_of, warn_of_host_layers
from sparsekv.runtime.hf.plan_engine import Paging, PlanEngine
from sparsekv.runtime.hf.timed_model import measured_rule
from sparsekv.runtime.model_config import dtype_name, has_soft_cap, linear_layers, rope_switch
from sparsekv.runtime.plan_checks import Host, check_plan, check_stored, warn_of_spinning
from sparsekv.runtime.stores.page_pool import page_bytes
from sparsekv.runtime.stores.pinned import HostMemory


class Handle:
    """A plan at work. `close()`, or leaving its `with` block, gives the model back as it was."""

    def __init__(self, model: PreTrainedModel, engine: PlanEngine, backend: BackendChoice) -> None:
        self._backend = backend
        self._engine = engine
        self._layouts, self._memory = engine.paging.layouts, engine.paging.sizes
        self._linear = linear_layers(config_of(model))
        self._model: PreTrainedModel | None = model
        self._undo = attach(model, engine, self._memory.chunking)

    @property
    def backend(self) -> BackendChoice:
        """The backend of prefill: the one that was chosen, or the fallback when it failed."""
        fallback, choice = self._engine.fallback, self._backend
        if fallback.backend == choice.name:
            return choice
        failed = tuple((name, f"it failed: {why}") for name, why in fallback.failed.items())
        return BackendChoice(fallback.backend, "fallback", choice.rejected + failed)

    @property
    def builder_failed(self) -> str:
        """The reason why torch builds the indices in place of Triton; empty where Triton did not fail."""
        return self._engine.fallback.builder_failed

    @property
    def pays(self) -> Pays:
        """Where chunks and decode steps are sparse."""
        return self._engine.pays

    @property
    def steps(self) -> StepGraphs | None:
        """The captured decode steps; None where the device or the backend has none, or the decoder a forward of its
        own, as accelerate gives it."""
        return self._engine.graphs

    @property
    def loop(self) -> ExactLoop | None:
        """The loop that `generate` runs under `exact`."""
        return self._engine.loop

    @property
    def host_layers(self) -> frozenset[int]:
        """The layers whose keys and values are in host memory, in caches to come; see `new_cache`."""
        return self._engine.placement.layers

    @property
    def closed(self) -> bool:
        """Returns whether `close()` was called; False of a suspended handle, which `resume()` puts to work again."""
        return self._model is None

    def close(self) -> None:
        """Restores the model. Caches made under this handle cannot be used any more. Again is fine."""
        self._undo()
        self._model = None  # nor keeps it alive
        self._engine.release()

    def suspend(self) -> None:
        """Gives the model back as it was until `resume()`. Caches of this handle and captured steps stay for then, and
        another plan may be at work meanwhile."""
        self._undo()

    def resume(self) -> None:
        """Puts a suspended plan to work again.

        Raises:
            UsageError: the handle was closed, a plan is at work, or the model has changed since `apply`.
        """
        if self._model is None:
            raise UsageError("expected a suspended handle, found one that was closed; call apply again")
        if layouts_of(self._model) != self._layouts:
            raise UsageError(
                "expected the layers that the plan was applied to, found others, or on another device, or of another "
                "dtype; close the handle before changing the model, and call apply again"
            )
        self._undo = attach(self._model, self._engine, self._memory.chunking)
        self._engine.open = True

    def new_cache(
        self,
        tokens: int,
        batch: int = 1,
        *,
        answer: int = 0,
        chunk: int | None = None,
        at_most: int | None = None,
        on_bytes: Callable[[int, int], object] | None = None,
    ) -> Cache:
        """An empty cache with its memory in place, for what runs under this handle.

        With `offload="auto"` it is decided here which layers go to host memory: as few as it takes for the device to
        hold the rest. The decision holds until the next one, also for caches that are made elsewhere or reset.

        Page-locking takes about a second for each 2 GB of host memory; this does it before the prompt runs. A later
        cache of this handle takes over the memory of one that is gone or was reset. Without this call, caches allocate
        on first use.

        Args:
            tokens: prompt and answer together; the cache may grow beyond, which copies what is not in virtual memory.
            batch: rows.
            answer: how many of the tokens are the answer: decode adds them one by one, and they need nothing besides
                the cache.
            chunk: most tokens of a row that run through the model at once; they bound the working memory. None is the
                whole prompt.
            at_most: tokens that it may grow to, for the decision of `offload="auto"`; `tokens` when None.
            on_bytes: called as host memory is allocated, with the new bytes and the bytes in all; it may raise.

        Raises:
            UsageError: the memory of the device or the host does not suffice; the message names the prompt that fits.
                Also if the handle is closed or suspended, or for a wrong size. The memory is then free again.
        """
        check_owner_open(self._engine)
        at_most = tokens if at_most is None else at_most
        check_sizes(answer, tokens=tokens, batch=batch, chunk=tokens if chunk is None else chunk, at_most=at_most)
        self._engine.check_cut(chunk, tokens - answer)
        request, available = Request(tokens - answer, answer, batch, chunk), self._available()
        largest = replace(request, prompt=max(tokens, at_most) - answer)
        placement = self._memory.place(largest, available)
        # of a cache that may grow, shorter prompts change nothing of the placement
        self._memory.check(request, available, placement if largest != request else None)
        self._engine.placement = placement
        total = self._memory.use(request, placement).kv_host
        cache = sparse_cache(None, self._engine, len(self._layouts), self._linear)
        try:
            with self._engine.memory.telling(on_bytes and (lambda more: on_bytes(more, total))):
                for layer, layout in zip(cache.layers, self._layouts, strict=True):
                    if isinstance(layer, SparseLayer):
                        layer.reserve(tokens, replace(layout, batch=batch))
        except BaseException:
            cache.layers.clear()  # gives their blocks back
            self._engine.bytes = []
            self._engine.memory.trim()
            raise
        return cache

    def check_batching(self) -> None:
        """Refuses a plan that continuous batching cannot follow, before its first request.

        Raises:
            UnsupportedError: it has layers or a phase that passes of many requests do not have.
        """
        assert self._model is not None, "a closed handle"
        check_batching(self._engine, self._model)

    def _available(self) -> Available:
        """For a cache that takes over blocks that are free."""
        free = Available.here({layout.device for layout in self._layouts})
        return replace(free, host=None if free.host is None else free.host + self._engine.memory.free_bytes)

    def stats(self) -> RunStats:
        """Counts since the start or the last reset; waits for the device. Also after `close()`."""
        stores = self._engine.bytes
        counts = self._engine.meter.read(sum(store.device for store in stores), sum(store.host for store in stores))
        reads = self._engine.host_reads.collect()
        return replace(
            counts, host_steps=reads.steps, host_tokens_chosen=reads.chosen, host_tokens_fetched=reads.fetched
        )

    def reset_stats(self) -> None:
        """Starts counting anew; the bytes of the latest cache stay."""
        self._engine.meter = Meter()
        self._engine.host_reads.reset()

    def __enter__(self) -> Handle:
        """This handle.

        Raises:
            UsageError: it was closed or is suspended: the model would run dense.
        """
        if self.closed:
            raise UsageError("expected an open handle, found one that was closed; call apply again")
        if not self._engine.open:
            raise UsageError("expected a handle at work, found a suspended one; call resume() first")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


@contextmanager
def dense_prompts(handle: Handle) -> Iterator[None]:
    """Prompts run dense meanwhile, as a rule has those that sparse attention is not faster for."""
    engine = handle._engine
    pays, engine.pays = engine.pays, replace(engine.pays, prefill=NEVER.prefill)
    try:
        yield
    finally:
        engine.pays = pays


class SharingHandle(Handle):
    """Layers that share the choices of their model's indexers, and nothing else: transformers runs the model."""

    def __init__(self, model: PreTrainedModel, sharing: IndexSharing) -> None:
        self._sharing = sharing
        self._model: PreTrainedModel | None = model
        self.resume()

    def close(self) -> None:
        self._undo()
        self._model = None

    def resume(self) -> None:
        if self._model is None:
            raise UsageError("expected a suspended handle, found one that was closed; call apply again")
        self._undo = share(self._model, sources_of(self._sharing))

    @property
    def steps(self) -> None:
        """No step is captured."""

    def stats(self) -> RunStats:
        """No counts: which tokens are attended to is the model's own."""
        return RunStats(0, 0, 0, 0, 0, 0)

    def reset_stats(self) -> None:
        return None

    def __enter__(self) -> Handle:
        if self._model is None or not is_shared(self._model):
            found = "closed; call apply again" if self.closed else "suspended; call resume() first"
            raise UsageError(f"expected a handle at work, found one that was {found}")
        return self

    @property
    def _engine(self) -> Any:  # type: ignore[override]
        raise UnsupportedError(
            "expected a handle that runs the attention of its model, found one of index_sharing, which only has layers "
            "share choices; use the model and a cache of transformers"
        )


def apply(
    model: PreTrainedModel,
    plan: Plan | str | os.PathLike[str],
    *,
    prefill: bool = True,
    decode: bool = True,
    info: ModelInfo | None = None,
    backend: str = "auto",
    allow_mismatch: bool = False,
    offload: OffloadMode | None = None,
    kv_host_layers: int | Sequence[int] | None = None,
    chunking: Chunking | None = None,
    memory: HostMemory | None = None,
    exact: bool | Literal["decode"] = False,
    kv_dtype: KVDtype = "auto",
    sparse: str = "auto",
) -> Handle:
    """Runs `model` by `plan` until the returned handle is closed; `model(...)` and `model.generate(...)` as before.

    Args:
        model: a loaded model of a supported architecture, in evaluation mode.
        plan: what to compute of it, or the path of a plan file.
        prefill: False runs prefill dense.
        decode: False runs decode dense, with all KV on the device (but see `kv_host_layers`), of which nothing is
            dropped.
        info: what `load_model` said of this model; it is described again when None.
        backend: a kernel backend by name, or "auto".
        allow_mismatch: take a plan that was made for another architecture, as far as its layers and heads fit.
        offload: layers of the plan's `decode.offload` that go to host memory. "always" (and None) takes all, "never"
            none, "auto" as few as `Handle.new_cache` finds the device to need, on a CPU none.
        kv_host_layers: in place of `offload`, the layers that go there, whatever the plan permits, or their number
            (those that decode reads least come first). A layer in no segment is copied back at every step. On a CPU it
            saves nothing, and a warning says so.
        chunking: from which length on layers work in pieces, and of which size; rarely of interest.
        memory: blocks of host memory to share with other handles, which the caller closes; its own when None.
        exact: the output is that of dense attention: the plan's decode drafts, dense attention checks; prefill is
            dense, or by the plan with "decode". See docs/exact.md.
        kv_dtype: "fp8" stores keys and values in e4m3, in half the bytes of 16 bits; "auto" as the model makes them.
        sparse: "auto" is sparse where that is faster, measured once on each GPU before this returns. On a CPU it is
            sparse for a tile of rows or more. Else "always", "never", or a rule of contexts x rows of a chunk or a
            step: "prefill=18kx512,8kx4k decode=40kx1,11kx4". Prompts to 16K stand apart in
            "prefill=11kx512:16k/23kx8k decode=never". Layers that evict or are in host memory stay sparse.

    Returns:
        The handle, which is also a context manager.

    Raises:
        UsageError: the model is in training mode, has a plan applied already, or lacks a named layer. An argument has
            another type, or there is no such plan file.
        PlanError, PlanMismatchError: the file holds no plan, or one of another model.
        UnsupportedError, BackendError: an architecture, field of the plan or backend that cannot run here.
    """
    check_runnable(model)
    warn_of_spinning(model.device)
    plan = load_plan(plan) if isinstance(plan, str | os.PathLike) else plan
    check_type(Plan, "a Plan, or the path of one", plan=plan)
    check_type(bool, "True or False", prefill=prefill, decode=decode, allow_mismatch=allow_mismatch)
    if plan.index_sharing is not None:
        asked = {"prefill=False": not prefill, "decode=False": not decode, "exact": exact}
        asked |= {"offload": offload not in (None, "auto"), "kv_host_layers": kv_host_layers is not None}
        asked |= {"kv_dtype": kv_dtype != "auto", "sparse": sparse not in ("auto", "always")}
        asked |= {"backend": backend != "auto", "chunking": chunking is not None}
        if given := [name for name, is_given in asked.items() if is_given]:
            raise UsageError(f"expected index_sharing alone, found {', '.join(given)} beside it; leave it out")
        check_plan(plan, info or describe_model(model), allow_mismatch, "allow_mismatch=True", Host(indexers=True))
        return SharingHandle(model, plan.index_sharing)
    check_attachable(model)
    if not isinstance(exact, bool) and not (isinstance(exact, str) and exact == "decode"):
        raise UsageError(f'expected exact to be True, False or "decode", found {exact!r:.40}')
    check_type(str, "a name", backend=backend)
    check_type(str, "auto, always, never or a rule", sparse=sparse)
    pays = None if sparse == "auto" else parse(sparse)
    check_type(HostMemory | None, "a HostMemory", memory=memory)
    check_type(ModelInfo | None, "a ModelInfo", info=info)
    check_type(Chunking | None, "a Chunking", chunking=chunking)
    check_offload(offload, kv_host_layers)
    warn_of_host_layers(model.device, offload, kv_host_layers)
    info = info or describe_model(model)
    left_out = {"prefill": not prefill or exact is True, "decode": not decode, "kv_cache": not decode}
    executed = plan.model_copy(update={name: None for name, is_out in left_out.items() if is_out})
    phases, evicting = (executed.prefill, executed.decode), executed.evicting
    check_plan(executed, info, allow_mismatch, "allow_mismatch=True", host_of(model, bool(exact)))
    tile = phases[0].tile if phases[0] else None
    capped = has_soft_cap(config_of(model))
    choice = choose_backend(model.device, model.dtype, info.largest_head, backend, tile, capped)
    float8 = check_kv_dtype(kv_dtype, choice.name, model.device)
    if prefill or decode:
        check_stored(plan, dtype_name(model.dtype), float8)
    loaded = replace(ModelSize.of(model, info), weights=0)  # they are there already
    on_cpu, mode, chunking = model.device.type == "cpu", offload or "always", chunking or Chunking()
    page = page_bytes(model.device)
    sizes = MemoryModel(loaded, *phases, on_cpu, mode, kv_host_layers, chunking, evicting, page, float8)
    program, paging = sizes.program, Paging.of(model, sizes)
    if pays is None and can_capture(model.device, choice.name):
        pays = measured_rule(executed, program, info, model, choice.name, float8)
    pays = pays or program.hint
    engine = PlanEngine(executed, program, model, choice.name, paging, memory, bool(exact), pays)
    return Handle(model, engine, choice)


def check_sizes(answer: object, *, tokens: int, **sizes: object) -> None:
    for name, count in {"tokens": tokens, **sizes}.items():
        if type(count) is not int or count < 1:
            raise UsageError(f"expected {name} of 1 or more, found {count!r:.40}")
    if type(answer) is not int or not 0 <= answer < tokens:
        raise UsageError(f"expected answer to be 0 to {tokens - 1} of the {tokens} tokens, found {answer!r:.40}")


def check_offload(mode: object, host_layers: object) -> None:
    if mode is None:
        return
    if mode not in get_args(OffloadMode):
        raise UsageError(f"expected offload to be {', '.join(get_args(OffloadMode))}, found {mode!r:.40}")
    if host_layers is not None:
        raise UsageError(f"expected offload or kv_host_layers, found both: {mode} and {host_layers!r:.40}")


def check_kv_dtype(kv_dtype: object, backend: str, device: torch.device) -> bool:
    """Returns whether keys and values are in 8 bits. Raises BackendError where the backend does not read them."""
    if kv_dtype not in get_args(KVDtype):
        raise UsageError(f"expected kv_dtype to be {' or '.join(get_args(KVDtype))}, found {kv_dtype!r:.40}")
    if kv_dtype == "fp8" and (obstacle := float8_obstacle(backend, device)):
        raise BackendError(f"expected a device for keys and values in fp8, found {device}: {obstacle}; leave it out")
    return kv_dtype == "fp8"


def host_of(model: PreTrainedModel, exact: bool) -> Host:
    """Drafts would leave older queries behind, and cannot be taken back where rotary angles change."""
    switch = rope_switch(config_of(model)) if exact else 0
    changes = f"exact output where rotary angles are others from {switch + 1} tokens on: leave exact out"
    return Host(older_queries=not exact, drafts=exact, obstacles=(changes,) if switch else ())


def check_type(kind: type | UnionType, expected: str, **arguments: object) -> None:
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise UsageError(f"expected {name} to be {expected}, found {value!r:.80}")
