"""Bytes of device and host memory that a run takes, part by part, before it runs, and the longest prompt that fits.

Arithmetic on shapes alone, so that it needs no weights and no GPU: keys and values as the stores allocate them, what a
layer of a long prompt makes as long_inputs.py runs it, the scores of a filter layer as core/select.py computes them. On
a CPU there is one memory, which is the host's.

Symbols: B batch, S tokens of a forward pass over all rows, K keys of a row, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sparsekv.kernels.topk import BLOCK_ELEMENTS
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import AttentionGroup, ModelInfo, kv_bytes
from sparsekv.plans.phases import DecodePlan, PrefillPlan, Retention
from sparsekv.plans.types import format_ids
from sparsekv.runtime.architecture import Recurrence, architecture_of, recurrence_of
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.segments import SegmentProgram, scored_tokens
from sparsekv.runtime.hf.describe import config_of, takes_one_piece
from sparsekv.runtime.hf.graphs import bucketed_capacity
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.placement import OffloadMode, Placement, place_layers, spill_order
from sparsekv.runtime.model_config import describe_config
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.float8 import Float8
from sparsekv.runtime.stores.page_pool import pool_of
from sparsekv.runtime.stores.pinned import SPARE, available_bytes, spare_beside
from sparsekv.runtime.stores.store import Bytes, Layout, allocated_slots, grown
from sparsekv.runtime.stores.virtual import VirtualStore, pages_pay

_LONGEST = 1 << 30  # tokens: where the search for a length ends
_FRAGMENTS = 16  # a share of what a forward pass makes: freed blocks and new ones are not of the same sizes


@dataclass(frozen=True, slots=True)
class ModelSize:
    """Holds what memory depends on of a model.

    Attributes:
        info: its layers.
        dtype: of weights, keys and values.
        weights: bytes of all its tensors.
        hidden: size of a hidden state.
        intermediate: width of the MLP.
        recurrence: of its layers with a recurrent state.
        whole: whether its layers are called whole, also of long inputs.
        inputs: numbers that a token has for the layers' own inputs, all together.
    """

    info: ModelInfo
    dtype: torch.dtype
    weights: int
    hidden: int
    intermediate: int
    recurrence: Recurrence | None = None
    whole: bool = False
    inputs: int = 0

    @classmethod
    def of(cls, model: PreTrainedModel, info: ModelInfo) -> ModelSize:
        """Returns that of a model, which may be on the meta device."""
        tensors = {id(tensor): tensor.nbytes for tensor in (*model.parameters(), *model.buffers())}
        config: Any = config_of(model)
        record, recurs = architecture_of(config.model_type), any(group.kind == "linear" for group in info.attention)
        return cls(
            info,
            model.dtype,
            sum(tensors.values()),
            config.hidden_size,
            record.width_of(config),
            recurrence_of(config) if recurs else None,
            recurs or record.runs_whole(config),
            info.layers * (getattr(config, "hidden_size_per_layer_input", 0) or 0),
        )

    @classmethod
    def from_config(cls, config: PreTrainedConfig, dtype: torch.dtype, source: str | None = None) -> ModelSize:
        """Returns that of a model with this config, once loaded in `dtype`.

        Raises:
            UnsupportedError: its architecture is not supported.
        """
        info = describe_config(config, source)
        with torch.device("meta"):
            model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype))
        return cls.of(model, info)

    def check_fits(self, available: int | None, tokens: int = 0) -> None:
        """Refuses a model that is too large for one device, before its weights are read.

        Args:
            available: bytes of the device; None where nobody tells.
            tokens: of a prompt whose keys and values are there beside the weights.

        Raises:
            UsageError: it does not fit; the message has the estimate.
        """
        cached = kv_bytes(self.info.attention, tokens, self.dtype.itemsize)
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
    """Holds what is to run.

    Attributes:
        prompt: tokens of each row.
        answer: most new tokens of each row.
        batch: rows.
        chunk: most tokens of a row that run through the model at once; None is the whole prompt.
        grows: the cache outgrows its room, and so gets more than it takes.
    """

    prompt: int
    answer: int = 0
    batch: int = 1
    chunk: int | None = None
    grows: bool = False

    @property
    def tokens(self) -> int:
        """That a row has room for in the end."""
        return grown(0, self.filled) if self.grows else self.filled

    @property
    def filled(self) -> int:
        return self.prompt + self.answer

    @property
    def piece(self) -> int:
        """Most tokens of a row in one forward pass."""
        return self.prompt if self.chunk is None else min(self.chunk, self.prompt)


@dataclass(frozen=True, slots=True)
class MemoryUse:
    """Bytes by part.

    Attributes:
        weights: of the model; 0 where they are loaded already.
        kv_device: keys and values of layers that are on the device.
        hot_set: what layers in host memory have on the device all the same.
        kv_host: keys and values in host memory.
        prefill: most that a forward pass of the prompt makes on its way, let go of before decode.
        decode: most that a decode step makes, and the tables of the hot set.
        spare: left alone on the device: workspaces of libraries, compiled kernels, rounding of blocks.
    """

    weights: int
    kv_device: int
    hot_set: int
    kv_host: int
    prefill: int
    decode: int
    spare: int = 0

    @property
    def device(self) -> int:
        """All that is on the device at once at most."""
        return self.weights + self.kv_device + self.hot_set + max(self.prefill, self.decode) + self.spare


@dataclass(frozen=True, slots=True)
class Available:
    """Bytes that can be had; None where nobody tells.

    Attributes:
        device: of a GPU's memory; None on a CPU as well.
        host: of the memory that can be pinned.
    """

    device: int | None
    host: int | None

    @classmethod
    def here(cls, devices: Iterable[torch.device]) -> Available:
        """Those of this moment: what the devices have free, with what torch holds of it without need, and what the
        machine and this process's control group have left."""
        free = [_free_on(device) for device in devices if device.type == "cuda"]
        return cls(sum(free) if free else None, available_bytes())


def _free_on(device: torch.device) -> int:
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    pool = pool_of(device)
    return torch.cuda.mem_get_info(device)[0] + unused + (pool.bytes if pool else 0)


@dataclass(frozen=True)
class MemoryModel:
    """Holds what runs of a plan on a model take of memory.

    Args:
        size: of the model.
        prefill: the prefill phase that runs, or None.
        decode: the decode phase that runs, or None.
        on_cpu: whether the device is the host.
        mode: what is made of the plan's permission to offload.
        host_layers: layers in host memory, or how many, in place of the plan's.
        chunking: how long inputs are cut.
        evicting: the rules of evicting layers.
        page: bytes of a page of the device's virtual memory; 0 where it has none.
        float8: whether keys and values are stored in 8 bits.

    Raises:
        UsageError, UnsupportedError: as `place_layers` and `Program.of` do.
    """

    size: ModelSize
    prefill: PrefillPlan | None
    decode: DecodePlan | None
    on_cpu: bool
    mode: OffloadMode = "always"
    host_layers: int | Sequence[int] | None = None
    chunking: Chunking = field(default_factory=Chunking)
    evicting: Mapping[int, Retention] = field(default_factory=dict)
    page: int = 0
    float8: bool = False

    def __post_init__(self) -> None:
        assert self.mode != "auto" or self.host_layers is None
        _ = self.permitted  # what is wrong with the arguments is said here

    @cached_property
    def permitted(self) -> Placement:
        """The layers in host memory; with `auto`, those that may go there: none on a CPU, where nothing is won."""
        mode = "never" if self.mode == "auto" and self.on_cpu else self.mode
        info = self.size.info
        return place_layers(self.decode, info.layers, self.host_layers, mode, info.sharing)

    def place(self, request: Request, available: Available) -> Placement:
        """The layers in host memory for this request: with `auto` as few as it takes for the device to hold the rest,
        those first of which decode reads least. All of them where even that does not do."""
        if self.mode != "auto" or self.on_cpu:
            return self.permitted
        order = spill_order(self.decode, request.tokens)
        placements = [Placement(frozenset(order[:count]), self.permitted.hot) for count in range(len(order) + 1)]
        return next((one for one in placements if self._fits_device(self.use(request, one), available)), placements[-1])

    def use(self, request: Request, placement: Placement) -> MemoryUse:
        """The bytes of a request, part by part."""
        stores = {layer: self._store(layer, request, placement) for layer in self._groups}
        placed = [layer for layer in stores if layer in placement.layers]
        on_host = [layer for layer in placed if stores[layer].host]  # short contexts stay on the device as a whole
        prefill = self._prefill(request, on_host)
        return MemoryUse(
            weights=self.size.weights,
            kv_device=sum(stores[layer].device for layer in stores.keys() - placement.layers) + self._carried,
            hot_set=sum(stores[layer].device for layer in placed),
            kv_host=sum(stores[layer].host for layer in on_host),
            prefill=prefill,
            decode=self._decode(request, on_host) + self._slot_tables(request, placement, on_host),
            spare=0 if self.on_cpu else SPARE + prefill // _FRAGMENTS,
        )

    def fits(self, use: MemoryUse, available: Available) -> bool:
        host = self.host(use)
        enough = available.host is None or host + spare_beside(host) <= available.host
        return self._fits_device(use, available) and enough

    def host(self, use: MemoryUse) -> int:
        """Bytes of host memory: on a CPU, all there is."""
        return use.kv_host + (use.device if self.on_cpu else 0)

    def longest(self, request: Request, available: Available, placement: Placement | None = None) -> int | None:
        """The most tokens of a prompt that fit, all else being as in `request`: 0 where none does, None where nobody
        tells how much memory there is. `placement` is that of `place` when None."""

        def fits(prompt: int) -> bool:
            longer = replace(request, prompt=prompt)
            return self.fits(self.use(longer, placement or self.place(longer, available)), available)

        return None if fits(_LONGEST) else _last(fits, _LONGEST)

    def check(self, request: Request, available: Available, placement: Placement | None = None) -> None:
        """Refuses what does not fit; `placement` is that of `place` when None.

        Raises:
            UsageError: it does not; the message says what would.
        """
        placed = placement or self.place(request, available)
        use = self.use(request, placed)
        if self.fits(use, available):
            return
        longest = self.longest(request, available, placement)
        where, needed, found = "host memory", self.host(use), available.host
        spare = f" (and {SPARE >> 30} GiB to spare)"
        if not self._fits_device(use, available):
            where, needed, found, spare = "device memory", use.device, available.device, ""
        assert found is not None, "unknown memory suffices"
        raise UsageError(
            f"expected {needed / 2**30:.1f} GiB of {where}{spare} for {request.tokens:,} tokens"
            + (f", {request.answer:,} of them new" if request.answer else "")
            + (f", in each of {request.batch} rows" if request.batch > 1 else "")
            + (f", layers {format_ids(placed.layers)} in host memory" if placed.layers else "")
            + f", found {found / 2**30:.1f} GiB available; "
            + (f"a prompt of {longest:,} tokens fits: shorten it" if longest else "no prompt fits")
            + ("" if takes_one_piece(self.size.info.model_type) else ", or run longer ones in pieces (--prefill-chunk)")
            + ("" if self.on_cpu else ", or move layers (--offload)")
        )

    def _fits_device(self, use: MemoryUse, available: Available) -> bool:
        return self.on_cpu or available.device is None or use.device <= available.device

    def _store(self, layer: int, request: Request, placement: Placement) -> Bytes:
        layout, role = self._layout(layer, request.batch), self._program.layers[layer].role
        if self._groups[layer].kind == "linear":
            assert self.size.recurrence is not None
            return Bytes(request.batch * self.size.recurrence.state_bytes)
        if self._groups[layer].keys_of is not None:
            return Bytes()
        if (own := role.bytes(layout, request.prompt)) is not None:
            return own
        if layer in placement.layers:
            return HostStore.allocated(layout, placement.hot, role.hot_reads, request.tokens)
        if layer in self.paged:
            return VirtualStore.allocated(layout, request.filled, self.page)
        return Bytes(layout.bytes(request.tokens))

    @cached_property
    def paged(self) -> frozenset[int]:
        """Layers whose keys and values go to virtual memory where they are on the device."""
        layers = (layer.layer for layer in self._program.caching if layer.role.evicts is None)
        context = self.size.info.context_length
        return frozenset(layer for layer in layers if pages_pay(self._layout(layer), context, self.page))

    def _layout(self, layer: int, batch: int = 1) -> Layout:
        layout = self._read_layout(layer, batch)
        return Float8.layout(layout) if self.float8 else layout

    def _read_layout(self, layer: int, batch: int) -> Layout:
        """Returns the layout of keys and values that prefill attends to."""
        group = self._groups[layer]
        return Layout(batch, group.kv_heads, group.head_dim, self.size.dtype, torch.device("meta"))

    @cached_property
    def _groups(self) -> dict[int, AttentionGroup]:
        return self.size.info.by_layer

    @cached_property
    def _carried(self) -> int:
        """Bytes that roles carry from step to step."""
        made = (make(torch.device("meta")) for make in self._program.carried.values())
        return sum(0 if tensor is None else tensor.nbytes for tensor in made)

    @cached_property
    def _program(self) -> Program:
        return Program.of(self.prefill, self.decode, self.size.info, evicting=self.evicting)

    # --- what is made on the way --------------------------------------------------------------------------------------

    def _prefill(self, request: Request, on_host: list[int]) -> int:
        """The larger of what is alive while a layer attends and while its MLP runs, as in long_inputs.py."""
        item, rows = self.size.dtype.itemsize, request.piece * request.batch
        softmax = (group for group in self.size.info.attention if group.kind != "linear")
        group, width = max(softmax, key=lambda one: one.heads * one.head_dim), self.size.hidden
        in_linear = rows * self.size.recurrence.token_bytes if self.size.recurrence else 0
        worked_on = rows if self.size.whole else min(rows, max(self.chunking.rows, self.chunking.above))  # or cut
        always = rows * width * item + 2 * request.piece * group.head_dim * item  # hidden states, rotary angles
        always += rows * self.size.inputs * item
        in_inputs = rows * self.size.inputs * (2 * item + 8)  # a norm is in float32
        queries = rows * group.heads * group.head_dim * item
        output = min(queries, max(self.chunking.output_bytes, queries // group.kv_heads))  # of a group of heads
        attending = queries + output + self._index(request, -(-group.heads * output // queries))
        attending += self._moved(request, on_host) + self._before_eviction(request) + self._multiplied(request)
        in_mlp = queries + worked_on * (3 * self.size.intermediate + 2 * width) * item
        return always + max(attending, in_mlp, in_linear, in_inputs)

    def _moved(self, request: Request, on_host: list[int]) -> int:
        """Keys and values of a layer in host memory while it attends: packed, and all before them copied back."""
        tokens = request.piece if request.piece == request.prompt else request.piece + request.prompt
        return max((self._layout(layer, request.batch).bytes(tokens) for layer in on_host), default=0)

    def _multiplied(self, request: Request) -> int:
        """Copies of the keys and values in 8 bits that a layer attends to: of its piece, and all with those before; of
        the keys that one evicts from once more."""
        tokens = request.piece if request.piece == request.prompt else request.piece + request.prompt
        tokens += request.prompt // 2 if self.evicting else 0
        layers = [layer for layer, group in self._groups.items() if group.kind != "linear"] if self.float8 else []
        return max((self._read_layout(layer, request.batch).bytes(tokens) for layer in layers), default=0)

    def _before_eviction(self, request: Request) -> int:
        """Returns what a prompt has more in evicting layers, until they evict: in one layer after another, or where the
        prompt runs in pieces, in all of them. Beside it lies what a layer moves."""
        cached = {layer: self._store(layer, request, Placement()).device for layer in self.evicting}
        whole = {layer: self._layout(layer, request.batch).bytes(request.tokens) for layer in self.evicting}
        more = [max(0, whole[layer] - own) for layer, own in cached.items()]
        together = max(more, default=0) if request.piece == request.prompt else sum(more)
        return together + 2 * max(cached.values(), default=0)

    def _index(self, request: Request, heads: int) -> int:
        """The tile lists of the layer that has the widest, for so many heads."""
        layers = {layer.patterns_at(request.prompt): layer for layer in self._program.layers}
        rows = [_index_bytes(layer, request) for layer in layers.values()]
        return request.batch * heads * max(rows)

    def _decode(self, request: Request, on_host: list[int]) -> int:
        """The logits and scores of a filter layer; all tokens of a layer in host memory that reads them all."""
        tokens = request.tokens if self.on_cpu else bucketed_capacity(request.tokens)
        scores = [self._scores(segment, request.batch, tokens) for segment in self._program.segments]
        roles = {layer: self._program.layers[layer].role for layer in on_host}
        whole = [layer for layer, role in roles.items() if not role.gathers((request.tokens,))]
        copied = max((self._layout(layer).bytes(request.tokens) for layer in whole), default=0)
        return max(scores, default=0) + request.batch * copied

    def _scores(self, segment: SegmentProgram, batch: int, tokens: int) -> int:
        """Returns what a filter layer makes to choose among so many tokens of each row."""
        heads, layer = segment.query_heads, self._program.layers[segment.filter]
        if segment.queries == 1:
            return 4 * (heads + segment.lists) * min(scored_tokens(heads), batch * tokens)
        widened = self.on_cpu and self.size.dtype != torch.float32  # the keys of a product
        copied = 4 if widened else self.size.dtype.itemsize if batch > 1 else 0
        multiplied = self._read_layout(layer.layer, batch).bytes(tokens) // 2 if self.float8 else 0  # all keys
        return multiplied + _window_bytes(layer, segment, batch * tokens, copied * self._groups[layer.layer].head_dim)

    def _slot_tables(self, request: Request, placement: Placement, on_host: list[int]) -> int:
        """SlotTable of each choice that layers in host memory follow: where every token is, and what is in a slot."""
        columns = request.tokens if self.on_cpu else bucketed_capacity(request.tokens)  # as captured steps have it
        tables: dict[int, int] = {}
        for layer in on_host:
            role = self._program.layers[layer].role
            follower, slots = role.follows, allocated_slots(placement.hot, role.hot_reads, request.tokens)
            if follower is None or not slots:
                continue
            choice = follower.slots_key(layer)
            tables[choice] = max(tables.get(choice, 0), 4 * follower.lists * (columns + 1 + 2 * (slots + 1)))
        return request.batch * sum(tables.values())


def _window_bytes(layer: LayerProgram, segment: SegmentProgram, tokens: int, key_bytes: int) -> int:
    """Scores of several queries, as kernels/scores.py makes them: some KV heads at a time, with copies of keys."""
    window, lists = segment.queries, segment.lists
    queries = layer.heads // layer.kv_heads * window  # of a KV head
    everything = layer.kv_heads * queries * tokens
    block = min(everything, max(BLOCK_ELEMENTS, queries * tokens))
    alive = 2 if block == everything else 3  # a block's scores and its softmax, and those of the block before
    # maxima over heads: so far, of a block, and of both; or those of a block alone, and weighted
    reduced = 12 * window * tokens if lists == 1 else 8 * (block // queries) * window
    hidden, chosen = window * tokens, 4 * tokens * (3 * lists + 4)  # a mask; the scores, in order and packed
    return 4 * alive * block + block // queries * key_bytes + reduced + hidden + chosen


def _index_bytes(layer: LayerProgram, request: Request) -> int:
    """Returns the bytes of one head and batch row: a list of tiles a row tile, and columns with a bit a row tile."""
    patterns, keys = set(layer.patterns_at(request.prompt)), request.prompt
    if not patterns:
        return 0
    row_tiles = -(-request.piece // layer.tile.query)
    width = max(pattern.listed_tiles(keys, layer.tile) for pattern in patterns)
    columns = max(pattern.most_columns(keys) for pattern in patterns)
    lines = 2 * keys if columns else 0  # scores of columns and diagonals
    return 4 * (row_tiles * (width + 1 + columns // 32) + columns + lines)


def _last(holds: Callable[[int], bool], bound: int) -> int:
    """The largest number below `bound` for which it holds, which it does up to there; 0 where it never does."""
    low, high = 0, 1
    while high < bound and holds(high):
        low, high = high, 2 * high
    high = min(high, bound)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if holds(middle) else (low, middle)
    return low
