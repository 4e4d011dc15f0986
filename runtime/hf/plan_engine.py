"""Attention of a model's layers as a plan has it: where their keys and values go, virtual memory ahead of a prompt, and
the call of each phase.

`generate` says where its prompt ends: each layer then evicts as soon as it has attended, so that all of a prompt is in
memory for one layer at a time. Behind other forward passes a prompt is complete when the first token behind it comes.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from transformers import Cache, PreTrainedModel

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import UsageError
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.pays import ALWAYS, Pays
from sparsekv.runtime.core.prefill import DenseLayers, prefill
from sparsekv.runtime.core.program import LayerProgram, Program, count_step, decode
from sparsekv.runtime.core.state import DecodeState, Observed
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.hf.attention import Attachment, Engine, Executor, LayerCall, Phase
from sparsekv.runtime.hf.cache import SparseLayer, attending, first_of, is_autocast
from sparsekv.runtime.hf.exact import ExactLoop
from sparsekv.runtime.hf.graphs import GraphWarning, StepGraphs, can_capture
from sparsekv.runtime.hf.memory import MemoryModel, Request
from sparsekv.runtime.hf.placement import FixedRows, Placement, layouts_of
from sparsekv.runtime.plan_checks import check_cut
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.page_pool import PagePool, pool_of
from sparsekv.runtime.stores.pinned import HostMemory
from sparsekv.runtime.stores.store import Float8, HostReads, Layout, Seen, WholeStore
from sparsekv.runtime.stores.virtual import VirtualStore


class PlanEngine(Engine):
    """Attention of a model as a program has it.

    Args:
        backend: the kernel backend's name; prefill goes on with another one should it fail.
        exact: the program's steps are drafts, and what they draft is checked.
        pays: where chunks and steps are sparse; everywhere else they are dense.
    """

    def __init__(
        self,
        plan: Plan,
        program: Program,
        model: PreTrainedModel,
        backend: str,
        paging: Paging,
        memory: HostMemory | None = None,
        exact: bool = False,
        pays: Pays = ALWAYS,
    ) -> None:
        super().__init__()
        self.float8 = paging.sizes.float8
        self.loop = ExactLoop(lambda: self.meter, lambda: self.fixed_rows) if exact else None
        self.host_reads = HostReads()
        self.meter = Meter()
        self.fallback = Fallback(backend, paging.relieve)
        self.decode_backend = backend  # of decode: there is one for each kind of device
        self.device = model.device
        self.graphs: StepGraphs | None = None
        self._told = False
        self.plan, self.program = plan, program
        self._dense = [layer.without_patterns for layer in program.layers]
        self._plain = {
            layer.layer: layer for layer in program.caching if not layer.role.remembers and layer.role.evicts is None
        }
        self._tile, self._windows = program.layers[0].tile, {layer.window for layer in program.layers}
        self.sees_all = bool(program.remembers)
        self.pays = pays
        self._programs = {Phase.DECODE: program, Phase.CHECK if exact else Phase.DENSE: program.dense_in_decode}
        self.placement = paging.sizes.permitted  # layers in host memory, of caches to come, so that it may change
        self._output_bytes = paging.sizes.chunking.output_bytes
        self.memory = HostMemory() if memory is None else memory
        self._owns_memory = memory is None
        self.paging = paging

    def taking_over(self, attached: Attachment, given: dict[str, Any]) -> dict[str, Any]:
        return given if self.loop is None else self.loop.taking_over(attached, given)

    def new_store(self, layer: int) -> WholeStore:
        role = self.program.layers[layer].role
        if (store := role.new_store()) is not None:
            return store
        if layer not in self.placement.layers:
            return self.paging.new_store(layer)
        return HostStore(self.placement.hot, self.memory, role.hot_reads, self.host_reads)

    @property
    def fixed_rows(self) -> FixedRows:
        return FixedRows(frozenset(self.program.evicting), self.placement.layers)

    def new_state(self) -> DecodeState:
        return DecodeState(self.program.segments, carried=self.program.carried, readers=self.program.readers)

    def executors(self) -> Sequence[Executor]:
        if not can_capture(self.device, self.decode_backend):
            return ()
        if self.graphs is None:  # else it was suspended
            self.graphs = StepGraphs(self._programs, self.host_reads)
        return (self.graphs,)

    def step_phase(self, cache: Cache, lengths: tuple[int, ...]) -> Phase:
        if self.loop is not None:
            return Phase.CHECK
        if not self.program.sparse or self.pays.decode.least(length + 1 for length in lengths) is not None:
            return Phase.DECODE
        # A dense step reads layers in host memory back as a whole, which costs more than a choice at any length.
        stores = {type(layer.store) for layer in attending(cache)}
        return Phase.DECODE if HostStore in stores else Phase.DENSE

    def check_cut(self, chunk: int | None, tokens: int) -> None:
        check_cut(self.plan, chunk, tokens)

    def begin(self, cache: Cache, phase: Phase, lengths: tuple[int, ...], device: torch.device) -> DenseLayers | None:
        """Starts a pass at which the rows have these lengths, the new tokens included, and counts a step."""
        if phase is Phase.PREFILL:
            self.paging.expect(cache, lengths, self.placement)
            for layer, entry in _attending(self.program, cache):
                layer.role.begin_prompt(layer.layer, entry.store, entry.state)
            return self._dense_layers(cache, lengths)
        for layer, entry in _attending(self.program, cache):  # the prompt is complete
            layer.role.end_prompt(layer.layer, entry.store, entry.state, self._attempt, entry.scales)
            layer.role.count_step(entry.store, self.meter)
        first_of(cache).state.begin(lengths, device)
        count_step(self._programs[phase], lengths, self.meter)
        if self.graphs is None and not self._told and can_capture(self.device, self.decode_backend):
            self._told = True
            warnings.warn("decode steps are not captured: the decoder has a forward of its own", GraphWarning, 2)
        return None

    def _dense_layers(self, cache: Cache, lengths: tuple[int, ...]) -> DenseLayers | None:
        past = first_of(cache).store.lengths or (0,) * len(lengths)
        if self.float8 or is_autocast(self.device.type) or len(set(zip(past, lengths, strict=True))) > 1:
            return None
        chunk, layers = Chunk(past, lengths), self._plain
        if self.pays.prefill.pays(chunk.rows[0], chunk.longest):
            layers = {number: layer for number, layer in layers.items() if not layer.patterns_at(chunk.longest)}
        tiles = {window: chunk.causal_tiles(self._tile, window) for window in self._windows}
        return DenseLayers(layers, tiles, chunk, self.fallback, self.meter)

    def _attempt(self, call: Callable[[str], Any], device: torch.device) -> Any:
        return self.fallback.decode(call, self.decode_backend, device)

    def release(self) -> None:
        """Frees host memory as soon as no cache uses it, pages that none uses now, and captured steps."""
        if self._owns_memory:
            self.memory.close()
        if self.graphs is not None:
            self.graphs.release()
        self.paging.relieve()

    def attend(self, call: LayerCall) -> torch.Tensor:
        layer, entry = self.program.layers[call.layer], call.entry
        if call.phase is not Phase.PREFILL:
            assert entry is not None, "a step without a cache"
            step = partial(
                decode, layer, call.q_BHSD, Seen(entry.store, call.seen), entry.state, scale=call.scale,
                verifies=call.phase is not Phase.DECODE, new_B=call.new_B,
            )  # fmt: skip
            return self.fallback.decode(lambda backend: step(backend=backend), self.decode_backend, call.q_BHSD.device)
        chunk = call.chunk
        pays = self.pays.prefill.pays(max(chunk.rows), chunk.longest)
        if call.is_cut or not pays:  # an index of the few rows that are cut off costs more than it saves
            layer = self._dense[call.layer]
        if entry is None:
            return self._prefill(layer, call, chunk)
        layer.role.observe(layer.layer, Observed(call.q_BHSD, call.scale, call.softmax), entry.state)
        is_whole = chunk.lengths == entry.store.lengths
        out_BHSD = self._prefill(layer if is_whole else self._dense[call.layer], call, chunk)
        if call.ends_prompt:
            layer.role.end_prompt(layer.layer, entry.store, entry.state, self._attempt, entry.scales)
        return out_BHSD

    def _prefill(self, layer: LayerProgram, call: LayerCall, chunk: Chunk) -> torch.Tensor:
        above = self._output_bytes if call.q_is_spare else None
        attend = partial(prefill, fallback=self.fallback, meter=self.meter, overwrite_above=above)
        return attend(layer, call.q_BHSD, call.keys(chunk), chunk, scale=call.scale)


def _attending(program: Program, cache: Cache) -> Iterator[tuple[LayerProgram, SparseLayer]]:
    for layer, entry in zip(program.layers, cache.layers, strict=False):
        if isinstance(entry, SparseLayer):
            yield layer, entry


@dataclass(frozen=True, slots=True)
class Paging:
    sizes: MemoryModel
    layouts: Sequence[Layout]
    pools: dict[int, PagePool]

    @classmethod
    def of(cls, model: PreTrainedModel, sizes: MemoryModel) -> Paging:
        """All layers that it pays for, on devices that have it."""
        layouts = layouts_of(model)
        pools = {layer: pool_of(layouts[layer].device) for layer in sizes.paged}
        return cls(sizes, layouts, {layer: pool for layer, pool in pools.items() if pool is not None})

    def new_store(self, layer: int) -> DeviceStore:
        pool = self.pools.get(layer)
        return DeviceStore() if pool is None else VirtualStore(pool, self.sizes.size.info.context_length)

    def relieve(self) -> bool:
        """Gives the pages back that no cache uses, before something is tried again; whether there were any."""
        return any([pool.trim() for pool in self.pools.values()])

    def expect(self, cache: Cache, lengths: tuple[int, ...], placement: Placement) -> None:
        """Maps pages ahead of a prompt layer by layer, in order, while the device works on the layers before. Raises
        UsageError where memory does not suffice, and has mapped nothing then."""
        virtual = {
            layer: layer.store
            for layer in cache.layers
            if isinstance(layer, SparseLayer) and layer.layer in self.pools and isinstance(layer.store, VirtualStore)
        }
        if not virtual or any(is_autocast(pool.driver.device.type) for pool in self.pools.values()):
            return
        cached = next(iter(virtual.values())).lengths or (0,) * len(lengths)
        new = max(map(int.__sub__, lengths, cached))  # the longest row need not be the one with most new tokens
        layouts = {layer: replace(self.layouts[layer.layer], batch=len(lengths)) for layer in virtual}
        request = Request(max(lengths), batch=len(lengths), chunk=new)
        needed: dict[SparseLayer, int] = {}
        for pool in {id(pool): pool for pool in self.pools.values()}.values():
            mine = [layer for layer in virtual if self.pools.get(layer.layer) is pool]
            with pool.first():  # what nobody uses any more is free then
                needed |= {layer: virtual[layer].missing(lengths, layer.stored(layouts[layer])) for layer in mine}
                missing = sum(needed[layer] for layer in mine)
                self._check(pool, missing, lengths)
                pool.make_way(missing, lambda: self.sizes.use(request, placement).working)
        for layer in filter(needed.get, needed):  # the thread that maps takes time from this one
            layer.expect(lengths, layouts[layer])

    def _check(self, pool: PagePool, missing: int, lengths: tuple[int, ...]) -> None:
        free = pool.driver.available() + pool.bytes
        if missing <= free:
            return
        layouts = [self.layouts[layer] for layer, mine in self.pools.items() if mine is pool]
        token = sum((Float8.layout(layout) if self.sizes.float8 else layout).bytes(1) for layout in layouts)
        fit = max(lengths) - -(-(missing - free) // (token * len(lengths)))
        raise UsageError(
            f"expected {missing / 2**30:.1f} GiB of device memory for keys and values of {max(lengths):,} tokens in "
            f"{len(lengths)} rows, found {free / 2**30:.1f} GiB; {max(fit, 0):,} tokens a row fit"
        )
