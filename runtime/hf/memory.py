"""Bytes of device and host memory that a run takes, part by part, before it runs, and the longest prompt that fits.

Weights and the stores of keys and values to the byte; the largest tensors of a layer that works on a long prompt, times
one factor that was measured, or the scores of a filter layer that looks at several queries. Arithmetic on shapes alone
needs no weights and no GPU. On a CPU there is one memory, the host's.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sparsekv.kernels.topk import BLOCK_ELEMENTS
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import INDEXED, AttentionGroup, ModelInfo, kv_bytes
from sparsekv.plans.phases import DecodePlan, Eviction, PrefillPlan
from sparsekv.plans.types import format_ids
from sparsekv.runtime.architecture import Recurrence, record_of, recurrence_of
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.core.segments import SegmentProgram
from sparsekv.runtime.hf.describe import config_of, takes_one_piece
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.placement import OffloadMode, Placement, place_layers, spill_order
from sparsekv.runtime.model_config import describe_config
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.page_pool import pool_of
from sparsekv.runtime.stores.pinned import SPARE, available_bytes, spare_beside
from sparsekv.runtime.stores.store import Bytes, Float8, Layout
from sparsekv.runtime.stores.virtual import VirtualStore, pages_pay

_LONGEST = 1 << 30  # tokens: where the search for a length ends
# Room for index lists, a query's scores and slot tables of decode, and blocks of other sizes than the freed ones: seven
# measured passes of 32K to 1.5M tokens took 0.93 to 1.07 times as much as is counted without it.
_MEASURED = 11 / 10
_LATENT = ("kv_lora_rank", "qk_rope_head_dim", "index_head_dim")  # of keys and values, and of an indexer's keys


def latent_numbers(config: Any) -> int:
    """Numbers of a token in transformers' cache of a model with indexers, at least; 0 of any other."""
    if config.model_type not in INDEXED:
        return 0
    numbers: int = config.num_hidden_layers * sum(getattr(config, name) for name in _LATENT)
    return numbers


@dataclass(frozen=True, slots=True)
class ModelSize:
    """The sizes of a model that memory depends on."""

    info: ModelInfo  # its layers
    dtype: torch.dtype  # of weights, keys and values
    weights: int  # bytes of all its tensors
    hidden: int  # size of a hidden state
    intermediate: int  # width of the MLP
    recurrence: Recurrence | None = None  # of its layers with a recurrent state
    whole: bool = False  # whether its layers are called whole, also of long inputs
    inputs: int = 0  # numbers that a token has for the layers' own inputs, all together
    latent: int = 0  # numbers of a token in transformers' cache of a model with indexers, at least

    @classmethod
    def of(cls, model: PreTrainedModel, info: ModelInfo) -> ModelSize:
        """The sizes of a model, which may be on the meta device."""
        tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        config: Any = config_of(model)
        record, recurs = record_of(config.model_type), any(group.kind == "linear" for group in info.attention)
        return cls(
            info,
            model.dtype,
            sum(tensors.values()),
            config.hidden_size,
            record.width_of(config),
            recurrence_of(config) if recurs else None,
            recurs or record.runs_whole(config),
            info.layers * (getattr(config, "hidden_size_per_layer_input", 0) or 0),
            latent_numbers(config),
        )

    @classmethod
    def from_config(cls, config: PreTrainedConfig, dtype: torch.dtype, source: str | None = None) -> ModelSize:
        """The sizes of a model with this config, once loaded in `dtype`."""
        info = describe_config(config, source)
        with torch.device("meta"):
            model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype))
        return cls.of(model, info)

    def cached(self, tokens: int) -> int:
        """Bytes of the keys and values of so many tokens."""
        item = self.dtype.itemsize
        return tokens * self.latent * item if self.latent else kv_bytes(self.info.attention, tokens, item)

    def check_fits(self, available: int | None, tokens: int = 0) -> None:
        """Refuses a model too large for one device beside a prompt's keys and values, before its weights are read."""
        cached = self.cached(tokens)
        if available is None or self.weights + cached <= available:
            return
        beside = f" and {cached / 2**30:.1f} GiB for keys and values of {tokens:,} tokens" if cached else ""
        shorter = ", or take shorter --lengths" if self.weights <= available else ""
        raise UsageError(
            f"expected {self.weights / 2**30:.1f} GiB of the device for the weights of {self.info.id} in "
            f"{str(self.dtype).removeprefix('torch.')}{beside}, at least, found {available / 2**30:.1f} GiB; spread it "
            f"over several devices with --set device_map=auto{shorter}"
        )


@dataclass(frozen=True, slots=True)
class Request:
    """A prompt and its answer."""

    prompt: int  # tokens of each row
    answer: int = 0  # most new tokens of each row
    batch: int = 1  # rows
    chunk: int | None = None  # most tokens of a row that run through the model at once; None is the whole prompt

    @property
    def tokens(self) -> int:
        return self.prompt + self.answer

    @property
    def piece(self) -> int:
        """Most tokens of a row in one forward pass."""
        return self.prompt if self.chunk is None else min(self.chunk, self.prompt)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes by part."""

    weights: int  # of the model; 0 where they are loaded already
    kv_device: int  # keys and values of layers that are on the device
    hot_set: int  # tokens of layers in host memory that are on the device all the same
    kv_host: int  # keys and values in host memory
    working: int  # most that a pass makes on its way
    spare: int = 0  # left alone on the device: workspaces of libraries, compiled kernels, rounding of blocks

    @property
    def device(self) -> int:
        return self.weights + self.kv_device + self.hot_set + self.working + self.spare


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can be had; None where nobody tells."""

    device: int | None  # of a GPU's memory; None on a CPU as well
    host: int | None  # of the memory that can be pinned

    @classmethod
    def here(cls, devices: Iterable[torch.device]) -> Available:
        """Memory that devices have free or torch holds without need, and that the machine and our control group have
        left."""
        free = [_free_on(device) for device in devices if device.type == "cuda"]
        return cls(sum(free) if free else None, available_bytes())


def _free_on(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    pool = pool_of(device)
    return torch.cuda.mem_get_info(device)[0] + unused + (pool.bytes if pool else 0)


@dataclass(frozen=True)
class MemoryModel:
    """The memory of runs of a plan on a model. Refuses as `place_layers` and `Program.of` do."""

    size: ModelSize  # of the model
    prefill: PrefillPlan | None  # the prefill phase that runs, or None
    decode: DecodePlan | None  # the decode phase that runs, or None
    on_cpu: bool  # whether the device is the host
    mode: OffloadMode = "always"  # use of the plan's permission to offload
    host_layers: int | Sequence[int] | None = None  # layers in host memory, or how many, in place of the plan's
    chunking: Chunking = field(default_factory=Chunking)  # how long inputs are cut
    evicting: Mapping[int, Eviction] = field(default_factory=dict)  # the rules of evicting layers
    page: int = 0  # bytes of a page of the device's virtual memory; 0 where it has none
    float8: bool = False  # whether keys and values are stored in 8 bits

    def __post_init__(self) -> None:
        assert self.mode != "auto" or self.host_layers is None
        _ = self.permitted  # wrong arguments are refused here

    @cached_property
    def permitted(self) -> Placement:
        """The layers in host memory; with `auto`, those that may go there: none on a CPU, where nothing is won."""
        mode = "never" if self.mode == "auto" and self.on_cpu else self.mode
        info = self.size.info
        return place_layers(self.decode, info.layers, self.host_layers, mode, info.sharing | self.evicting.keys())

    def place(self, request: Request, available: Available) -> Placement:
        """The layers in host memory for this request: with `auto` as few as it takes to fit the device, those first of
        which decode reads least; all where even that does not do."""
        if self.mode != "auto" or self.on_cpu:
            return self.permitted
        order = spill_order(self.decode, request.tokens)
        placements = [Placement(frozenset(order[:count]), self.permitted.hot) for count in range(len(order) + 1)]
        fitting = (placed for placed in placements if self._fits_device(self.use(request, placed), available))
        return next(fitting, placements[-1])

    def use(self, request: Request, placement: Placement) -> MemoryUse:
        stores = {layer: self._store(layer, request, placement) for layer in self._groups}
        placed = [layer for layer in stores if layer in placement.layers]
        on_host = [layer for layer in placed if stores[layer].host]  # short contexts stay on the device as a whole
        return MemoryUse(
            weights=self.size.weights,
            kv_device=sum(stores[layer].device for layer in stores.keys() - placement.layers) + self._carried,
            hot_set=sum(stores[layer].device for layer in placed),
            kv_host=sum(stores[layer].host for layer in on_host),
            working=max(self._pass_bytes(request, on_host), self._window_bytes(request, on_host)),
            spare=0 if self.on_cpu else SPARE,
        )

    def fits(self, use: MemoryUse, available: Available) -> bool:
        host = self.host(use)
        enough = available.host is None or host + spare_beside(host) <= available.host
        return self._fits_device(use, available) and enough

    def host(self, use: MemoryUse) -> int:
        """Bytes of host memory: on a CPU, all there is."""
        return use.kv_host + (use.device if self.on_cpu else 0)

    def longest(self, request: Request, available: Available, placement: Placement | None = None) -> int | None:
        """The most tokens of a prompt that fit beside the rest of `request`: 0 where none does, None where nobody tells
        how much memory there is. `placement` is of `place` when None."""

        def fits(prompt: int) -> bool:
            longer = replace(request, prompt=prompt)
            return self.fits(self.use(longer, placement or self.place(longer, available)), available)

        return None if fits(_LONGEST) else bisect_left(range(1, _LONGEST), True, key=lambda prompt: not fits(prompt))

    def check(self, request: Request, available: Available, placement: Placement | None = None) -> None:
        """Refuses a request that does not fit, with the longest prompt that would."""
        placed = placement or self.place(request, available)
        use = self.use(request, placed)
        if self.fits(use, available):
            return
        longest = self.longest(request, available, placement)
        where, needed, free = "host memory", self.host(use), available.host
        spare = f" (and {SPARE >> 30} GiB to spare)"
        if not self._fits_device(use, available):
            where, needed, free, spare = "device memory", use.device, available.device, ""
        assert free is not None, "unknown memory suffices"
        raise UsageError(
            f"expected {needed / 2**30:.1f} GiB of {where}{spare} for {request.tokens:,} tokens"
            + (f", {request.answer:,} of them new" if request.answer else "")
            + (f", in each of {request.batch} rows" if request.batch > 1 else "")
            + (f", layers {format_ids(placed.layers)} in host memory" if placed.layers else "")
            + f", found {free / 2**30:.1f} GiB available; "
            + (f"a prompt of {longest:,} tokens fits: shorten it" if longest else "no prompt fits")
            + ("" if takes_one_piece(self.size.info.model_type) else ", or run longer ones in pieces (--prefill-chunk)")
            + ("" if self.on_cpu else ", or move layers (--offload)")
        )

    def _fits_device(self, use: MemoryUse, available: Available) -> bool:
        return self.on_cpu or available.device is None or use.device <= available.device

    def _store(self, layer: int, request: Request, placement: Placement) -> Bytes:
        layout, role = self._layout(layer, request.batch), self.program.layers[layer].role
        if self._groups[layer].kind == "linear":
            assert self.size.recurrence is not None
            return Bytes(request.batch * self.size.recurrence.state_bytes)
        if self._groups[layer].keys_of is not None:
            return Bytes()
        if (of_role := role.bytes(layout, request.prompt)) is not None:
            return of_role
        if layer in placement.layers:
            return HostStore.allocated(layout, placement.hot, role.hot_reads, request.tokens)
        if layer in self.paged:
            return VirtualStore.allocated(layout, request.tokens, self.page)
        return Bytes(layout.bytes(request.tokens))

    @cached_property
    def paged(self) -> frozenset[int]:
        """Layers whose keys and values go to virtual memory where they are on the device."""
        layers = (layer.layer for layer in self.program.caching if layer.role.evicts is None)
        context = self.size.info.context_length
        return frozenset(layer for layer in layers if pages_pay(self._layout(layer), context, self.page))

    def _layout(self, layer: int, batch: int = 1) -> Layout:
        layout = self._read_layout(layer, batch)
        return Float8.layout(layout) if self.float8 else layout

    def _read_layout(self, layer: int, batch: int) -> Layout:
        group = self._groups[layer]
        return Layout(batch, group.kv_heads, group.head_dim, self.size.dtype, torch.device("meta"))

    @cached_property
    def _groups(self) -> dict[int, AttentionGroup]:
        return self.size.info.by_layer

    @cached_property
    def _carried(self) -> int:
        made = (make(torch.device("meta")) for make in self.program.carried.values())
        return sum(0 if tensor is None else tensor.nbytes for tensor in made)

    @cached_property
    def program(self) -> Program:
        return Program.of(self.prefill, self.decode, self.size.info, evicting=self.evicting)

    def _pass_bytes(self, request: Request, on_host: list[int]) -> int:
        """Most that a pass of the prompt makes on its way, as long_inputs.py runs it: hidden states and rotary angles
        throughout, and while a layer attends or its MLP runs, queries and the output or the rows worked on."""
        size, rows, item = self.size, request.piece * request.batch, self.size.dtype.itemsize
        group = max((g for g in size.info.attention if g.kind != "linear"), key=lambda g: g.heads * g.head_dim)
        queries = rows * group.heads * group.head_dim * item
        output = min(queries, max(self.chunking.output_bytes, queries // group.kv_heads))  # of a group of heads
        cut = rows if size.whole else min(rows, max(self.chunking.rows, self.chunking.above))
        in_mlp = cut * (3 * size.intermediate + 2 * size.hidden) * item
        in_layer = max(
            queries + max(output + self._copies(request, on_host), in_mlp),
            rows * size.recurrence.token_bytes if size.recurrence else 0,
            rows * size.inputs * (2 * item + 8),  # a norm is in float32
        )
        throughout = rows * (size.hidden + size.inputs) * item + 2 * request.piece * group.head_dim * item
        return int(_MEASURED * (throughout + in_layer))

    def _copies(self, request: Request, on_host: list[int]) -> int:
        """Keys and values of an attending layer beside its store: copied back from host memory, in the model's
        precision where they are stored in 8 bits, and before it evicts, which scores a copy of its keys."""
        tokens = request.tokens if request.piece == request.prompt else request.piece + request.tokens
        copied = max((self._layout(layer, request.batch).bytes(tokens) for layer in on_host), default=0)
        if self.float8:
            attending = [layer for layer, group in self._groups.items() if group.kind != "linear"]
            tokens += request.prompt // 2 if self.evicting else 0
            copied += max(self._read_layout(layer, request.batch).bytes(tokens) for layer in attending)
        stored = {layer: self._store(layer, request, Placement()).device for layer in self.evicting}
        whole = {layer: self._layout(layer, request.batch).bytes(request.tokens) for layer in self.evicting}
        evicted = [max(0, whole[layer] - stored[layer]) for layer in self.evicting]
        # A prompt in pieces evicts at its end, in all layers.
        waiting = max(evicted, default=0) if request.piece == request.prompt else sum(evicted)
        return copied + waiting + 2 * max(stored.values(), default=0)

    def _window_bytes(self, request: Request, on_host: list[int]) -> int:
        """Most that a decode step makes in a filter layer that looks at several queries, as kernels/scores.py computes
        it: scores of some KV heads at a time, beside keys copied from host memory or multiplied out of 8 bits."""
        sizes = []
        for segment in self.program.segments:
            if segment.queries > 1:
                layer, layout = segment.filter, self._read_layout(segment.filter, request.batch)
                copied = self._layout(layer, request.batch).bytes(request.tokens) if layer in on_host else 0
                copied += layout.bytes(request.tokens) // 2 if self.float8 else 0
                sizes.append(copied + self._score_bytes(segment, request))
        return max(sizes, default=0)

    def _score_bytes(self, segment: SegmentProgram, request: Request) -> int:
        group, window, lists = self._groups[segment.filter], segment.queries, segment.lists
        tokens, queries = request.batch * request.tokens, group.heads // group.kv_heads * window  # of a KV head
        everything = group.kv_heads * queries * tokens
        block = min(everything, max(BLOCK_ELEMENTS, queries * tokens))
        alive = 2 if block == everything else 3  # a block's scores and its softmax, and those of the block before
        widened = self.on_cpu and self.size.dtype != torch.float32  # the keys of a product
        copied = 4 if widened else self.size.dtype.itemsize if request.batch > 1 else 0
        # maxima over heads: so far, of a block, and of both; or those of a block alone, and weighted
        reduced = 12 * window * tokens if lists == 1 else 8 * (block // queries) * window
        hidden, chosen = window * tokens, 4 * tokens * (3 * lists + 4)  # a mask; the scores, in order and packed
        return 4 * alive * block + block // queries * copied * group.head_dim + reduced + hidden + chosen
