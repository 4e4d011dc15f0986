"""Keys and values, recurrent states and what roles carry, as a captured decode step has them: where the cache has them.

The addresses of all layers are in one table, which is written when another cache is served. What layers in host memory
lack of a choice is fetched (graph_fetches.py); evicting layers count their rows (stores/evicting.py).

Layers with a recurrent state have no store. In a step, a layer goes by its position among those that have one.

Of states, the step has tensors of its own. The cache that it serves takes them in place of its own, with the contents
of those, so that nothing is copied from step to step, and steps that are not captured go on from the same tensors. A
cache that another one follows gets copies, if it still has them: it may have been reset, rewound or served by another
step since.

Shapes: B batch, G KV heads, S tokens, R rows on the device, D head size, L layers with stores, X columns of the table.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import torch
from transformers import Cache
from transformers.cache_utils import LinearAttentionLayer

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import SlotMap
from sparsekv.kernels.keys import (
    COLUMNS,
    FLOAT8,
    HEAD,
    HOST,
    HOST_TOKENS,
    KEYS,
    ROW,
    ROWS,
    TOKEN,
    VALUES,
    KeyView,
    Scales,
)
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf.cache import first_of
from sparsekv.runtime.hf.graph_fetches import StepFetches, fetch_obstacle
from sparsekv.runtime.stores.evicting import StepEviction
from sparsekv.runtime.stores.store import (
    Binding,
    Bytes,
    CachedRows,
    Gathered,
    HostReads,
    HotRows,
    KVStore,
    Layout,
    StepMemory,
    WholeStore,
)


def obstacle(program: Program, stores: Sequence[WholeStore], lengths: tuple[int, ...], ids_BQ: torch.Tensor) -> str:
    """The reason why a step over these stores is not captured; empty where it can be. Lengths count the new tokens."""
    rows = ids_BQ.shape[0]
    for layer, store in zip(program.caching, stores, strict=True):
        if store.keys is None or store.keys.device != ids_BQ.device:
            return "keys and values do not all lie on the device of the tokens"
        if store.keys.shape[0] != rows:
            return f"the cache holds {store.keys.shape[0]} rows, the step has {rows}"
        hot = store.step_rows(max(lengths))
        if isinstance(hot, HotRows) and (reason := fetch_obstacle(layer, hot, lengths)):
            return f"layer {layer.layer} {reason}"
    return ""


class CapturedStore(KVStore):
    """Keys and values of one layer on the device; `layer` is its position in the step."""

    lengths: tuple[int, ...] = ()

    def __init__(self, layer: int, step: StepStores) -> None:
        self.bytes = Bytes()
        self._layer = layer
        self._step = step

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        from sparsekv.kernels.decode.place import append_newest  # loads Triton, which not every machine has

        hot, evicting = self._step.kinds[self._layer], self._step.evicting
        ring = (hot.slots, hot.ring) if isinstance(hot, HotRows) else None
        behind_B = evicting.behind_next(self._layer) if self._layer in evicting else self._step.lengths_B
        append_newest(replace(self.view(self._step.lengths_B), lengths_B=behind_B), k_BGSD, v_BGSD, ring)

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Nothing to do: the memory is the cache's."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Nothing to do: the next step writes where its lengths say."""

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All tokens; of a layer in host memory, its rows on the device; of an evicting one, its cached tokens."""
        if self._layer in self._step.evicting:
            lengths_B = self._step.evicting.rows(self._layer)
        shape_BGSD, scales = self._step.shapes[self._layer], self._step.scales[self._layer]
        if scales is not None:
            shape_BGSD = shape_BGSD.view(FLOAT8)
        return KeyView(shape_BGSD, shape_BGSD, lengths_B, None, self._step.where_LX[self._layer], scales=scales)

    def gather(
        self, selection: Selection, lengths_B: torch.Tensor, window: int | None = None, slots: SlotMap | None = None
    ) -> Gathered:
        """All tokens; of a layer in host memory its rows on the device, once the missed tokens are there."""
        if self._step.kinds[self._layer] is None:
            return self.view(lengths_B), selection, window
        return self.view(lengths_B), self._step.fetches.fetched(self._layer), None


class StepStores:
    """The stores of one captured step. It copies scales, as others are bound later."""

    def __init__(
        self, stores: Sequence[WholeStore], capacity: int, program: Program, lengths_B: torch.Tensor, reads: HostReads,
        scales: Sequence[Scales | None] = (),
    ) -> None:  # fmt: skip
        self.lengths_B = lengths_B
        self.scales = [
            scale and replace(scale, k_G=scale.k_G.clone(), v_G=scale.v_G.clone())
            for scale in scales or [None] * len(stores)
        ]
        self._positions = {layer.layer: position for position, layer in enumerate(program.caching)}
        self.kinds = tuple(store.step_rows() for store in stores)
        self.where_LX = torch.zeros((len(stores), COLUMNS), dtype=torch.int64, device=lengths_B.device)
        self.shapes = [
            _shape(store.step_memory().k_BGRD, capacity if hot is None else hot.all)
            for store, hot in zip(stores, self.kinds, strict=True)
        ]
        self.evicting = StepEviction(self.kinds, lengths_B)
        self._bound: list[Callable[[], object]] = []
        self._binding: Binding | None = None  # with the stores in host memory
        self._room = 0
        self.fetches = StepFetches(program, self.kinds, self.where_LX, self.shapes, capacity, lengths_B, reads)

    def new_store(self, layer: int) -> CapturedStore:
        return CapturedStore(self._positions[layer], self)

    # --- between steps ------------------------------------------------------------------------------------------------

    def serves(self, stores: Sequence[WholeStore], lengths: tuple[int, ...]) -> bool:
        """Returns whether the next step is of the bound stores, these have room for it, and host memory is read by
        choice."""
        if max(lengths) > self._room or len(stores) != len(self._bound) or not self.evicting.serves(stores):
            return False
        if max(lengths) > self._room_of(stores):  # rows grow apart where each keeps what counts of its draft
            return False
        if self.fetches.reads_all(lengths):
            return False
        return all(store.bound is bound() for store, bound in zip(stores, self._bound, strict=True))

    def bind(self, stores: Sequence[WholeStore], scales: Sequence[Scales | None] = ()) -> None:
        """The next step reads and writes these. Slots begin empty, unless their last step has left them as they are."""
        memories = [store.step_memory() for store in stores]
        rows = [_address_row(*given) for given in zip(self.shapes, memories, strict=True)]
        table_LX = torch.tensor(rows, dtype=torch.int64, device="cpu")
        if self.where_LX.is_cuda:
            table_LX = table_LX.pin_memory()  # which is not reused before the copy has read it
        self.where_LX.copy_(table_LX, non_blocking=True)
        for ours, theirs in zip(self.scales, scales, strict=False):
            if ours is not None and theirs is not None:
                ours.k_G.copy_(theirs.k_G)
                ours.v_G.copy_(theirs.v_G)
        self._binding = Binding()
        self.fetches.bind(stores)
        self._bound = [weakref.ref(store.bind(self._binding)) for store in stores]  # a cache that is let go of is freed
        self._room = self._room_of(stores)
        self.evicting.bind(stores)

    def _room_of(self, stores: Sequence[WholeStore]) -> int:
        rooms = (
            store.capacity for hot, store in zip(self.kinds, stores, strict=True) if not isinstance(hot, CachedRows)
        )
        return min(rooms, default=sys.maxsize)


def _address_row(shape_BGSD: torch.Tensor, memory: StepMemory) -> list[int]:
    row, k_BGRD = [0] * COLUMNS, memory.k_BGRD
    if memory.rows_PBGRD is not None and memory.host_CBPGD is not None:
        row[ROWS], row[HOST] = memory.rows_PBGRD.data_ptr(), memory.host_CBPGD.data_ptr()
        row[HOST_TOKENS] = len(memory.host_CBPGD)
    anchor, size = shape_BGSD.data_ptr(), shape_BGSD.element_size()
    row[KEYS], row[VALUES] = ((x_BGRD.data_ptr() - anchor) // size for x_BGRD in (k_BGRD, memory.v_BGRD))
    row[ROW], row[HEAD], row[TOKEN] = (step // k_BGRD.shape[3] for step in k_BGRD.stride()[:3])
    return row


def _shape(k_BGSD: torch.Tensor, tokens: int) -> torch.Tensor:
    batch, heads, _, size = k_BGSD.shape
    return k_BGSD.new_empty((batch, heads, 1, size)).expand(batch, heads, tokens, size)


_KINDS = ("conv_states", "recurrent_states")
_CARRIED = "carried"
_Slot = tuple[int, str, int]  # layer, kind, number


class StepStates:
    """The recurrent states of one captured step, for caches like this one, whose layers have all seen tokens."""

    def __init__(self, cache: Cache) -> None:
        self._own = {slot: torch.empty_like(state) for slot, state in _states(cache).items()}
        self.carried = {layer: tensor for (layer, kind, _), tensor in self._own.items() if kind == _CARRIED}
        self._bound: Callable[[], Cache | None] = lambda: None

    def __bool__(self) -> bool:
        return bool(self._own)

    def serves(self, cache: Cache) -> bool:
        return all(_states(cache).get(slot) is tensor for slot, tensor in self._own.items())

    def bind(self, cache: Cache) -> None:
        if self.serves(cache):
            return
        if former := self._bound():
            held = _states(former)
            for slot, tensor in self._own.items():
                if held.get(slot) is tensor:
                    _put(former, slot, tensor.clone())
        states = _states(cache)
        for slot, tensor in self._own.items():
            tensor.copy_(states[slot])
            _put(cache, slot, tensor)
        self._bound = weakref.ref(cache)

    def layer(self, number: int) -> LinearAttentionLayer:
        """One layer of a cache of the step's own, over these tensors; as one that has seen tokens."""
        recurrent = LinearAttentionLayer()
        for at, kind, state in self._own:
            if at != number:
                continue
            getattr(recurrent, kind)[state] = self._own[at, kind, state]
            getattr(recurrent, f"is_{kind}_initialized")[state] = recurrent.has_previous_state[state] = True
        for state, tensor in recurrent.conv_states.items():
            recurrent.conv_kernel_size[state] = None if tensor is None else tensor.shape[-1]
        return recurrent

    @contextmanager
    def unmoved(self) -> Iterator[None]:
        saved = {slot: tensor.clone() for slot, tensor in self._own.items()}
        try:
            yield
        finally:
            for slot, tensor in self._own.items():
                tensor.copy_(saved[slot])


def _states(cache: Cache) -> dict[_Slot, torch.Tensor]:
    carried = {(layer, _CARRIED, 0): tensor for layer, tensor in first_of(cache).state.carried.items()}
    return carried | {
        (at, kind, number): tensor
        for at, layer in enumerate(cache.layers)
        if isinstance(layer, LinearAttentionLayer)
        for kind in _KINDS
        for number, tensor in getattr(layer, kind).items()
        if tensor is not None
    }


def _put(cache: Cache, slot: _Slot, tensor: torch.Tensor) -> None:
    at, kind, number = slot
    if kind == _CARRIED:
        first_of(cache).state.carried[at] = tensor
        return
    getattr(cache.layers[at], kind)[number] = tensor
