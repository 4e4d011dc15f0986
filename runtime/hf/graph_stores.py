"""Keys and values as a captured decode step has them: wherever the cache at hand keeps them.

The addresses of all layers are in one table, which is written when another cache is served. What layers in host memory
lack of a choice is fetched as soon as the filter layer has chosen, layer by layer, on a second stream; the attention of
a layer waits for its own rows alone. The slot tables belong to the step: what they say of a cache waits with that cache
while others take their turns.

Layers with a recurrent state have no store. In a step, a layer goes by its position among those that have one.

Shapes: B batch, G KV heads, S tokens, R rows on the device, D head size, L layers with stores, X columns of the table.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.decode.slots import MOST_SLOTS, SlotMap, SlotState, SlotTable
from sparsekv.kernels.keys import COLUMNS, HEAD, HOST, HOST_TOKENS, KEYS, ROW, ROWS, TOKEN, VALUES, KeyView
from sparsekv.plans.errors import SparseKVError
from sparsekv.runtime.core.budgets import counts_of
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.roles import Follower
from sparsekv.runtime.core.segments import SegmentProgram
from sparsekv.runtime.stores.bank import HostStore, in_host_memory
from sparsekv.runtime.stores.evicting import StepEviction
from sparsekv.runtime.stores.pinned import CopyDone, stream_for
from sparsekv.runtime.stores.store import Binding, Bytes, CachedRows, HostReads, HotRows, Layout, StepMemory, WholeStore


class FetchError(SparseKVError):
    """Bringing what a filter layer chose to the device failed in a captured step, which is then of no use."""


def obstacle(program: Program, stores: Sequence[WholeStore], lengths: tuple[int, ...], ids_BQ: torch.Tensor) -> str:
    """Returns why a step over these stores has to run as single launches; empty where it does not.

    Args:
        program: what the layers compute.
        stores: of all layers that have keys and values.
        lengths: tokens of each row, the new ones included.
        ids_BQ: of the step.
    """
    rows = ids_BQ.shape[0]
    for layer, store in zip(program.attending, stores, strict=True):
        if store.keys is None or store.keys.device != ids_BQ.device:
            return "keys and values do not all lie on the device of the tokens"
        if store.keys.shape[0] != rows:
            return f"the cache holds {store.keys.shape[0]} rows, the step has {rows}"
        hot = store.step_rows(max(lengths))
        if isinstance(hot, HotRows) and (found := _obstacle_on_host(layer, hot, lengths)):
            return f"layer {layer.layer} {found}"
    return ""


def _obstacle_on_host(layer: LayerProgram, hot: HotRows, lengths: tuple[int, ...]) -> str:
    """Returns why a layer in host memory cannot be fetched for a captured step."""
    role = layer.role
    if not isinstance(role, Follower):
        return "reads all of its tokens, which are in host memory"
    if _reads_all(role.segment, lengths):
        return "reads all of its tokens at this length, which are in host memory"
    if role.kv_map is not None or layer.window is not None:
        return "is in host memory and has a head map or a sliding window"
    if role.segment.recent < 2 or not 1 <= hot.slots <= MOST_SLOTS:
        return (
            f"is in host memory: expected 2 recent tokens or more and 1 to {MOST_SLOTS} slots, found "
            f"{role.segment.recent} and {hot.slots} (0 while the largest budget of the layer covers its context)"
        )
    return ""


def _reads_all(segment: SegmentProgram, lengths: tuple[int, ...]) -> bool:
    """Returns whether some row of the segment's layers attends to all of its tokens."""
    return ALL in counts_of(segment, lengths)


class CapturedStore:
    """Keys and values of one layer on the device.

    Args:
        layer: its position in the step.
    """

    def __init__(self, layer: int, step: StepStores) -> None:
        self.lengths: tuple[int, ...] = ()
        self.bytes = Bytes()
        self._layer = layer
        self._step = step

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Writes the newest tokens of each row."""
        from sparsekv.kernels.decode.append import append_newest  # loads Triton, which not every machine has

        hot, evicting = self._step.kinds[self._layer], self._step.evicting
        ring = (hot.slots, hot.ring) if isinstance(hot, HotRows) else None
        behind_B = evicting.behind_next(self._layer) if self._layer in evicting else self._step.lengths_B
        append_newest(replace(self.view(self._step.lengths_B), lengths_B=behind_B), k_BGSD, v_BGSD, ring)

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All tokens of the cache of the step; of a layer in host memory, its rows on the device; of an evicting one,
        what is cached."""
        if self._layer in self._step.evicting:
            lengths_B = self._step.evicting.rows(self._layer)
        shape_BGSD = self._step.shapes[self._layer]
        return KeyView(shape_BGSD, shape_BGSD, lengths_B, None, self._step.where_LX[self._layer])

    def gather(
        self,
        selection: Selection,
        lengths_B: torch.Tensor,
        window: int | None = None,
        slots: SlotMap | None = None,
    ) -> tuple[KeyView, Selection, int | None]:
        """All tokens: kernels read the selected ones where they lie. Of a layer in host memory its rows on the device,
        once what the choice missed is there."""
        if self._step.kinds[self._layer] is None:
            return self.view(lengths_B), selection, window
        return self.view(lengths_B), self._step.fetched(self._layer), None

    @property
    def cached(self) -> tuple[int, ...]:
        """As the lengths: the host knows none."""
        return self.lengths

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory beside the cache, which `commit` copies."""
        return layout.empty(tokens), layout.empty(tokens)

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Appends what was written."""
        self.append(k_BGSD, v_BGSD)

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Nothing to do: the memory is the cache's."""

    def truncate(self, lengths: Sequence[int]) -> None:
        """Nothing to do: the next step writes where its lengths say."""


@dataclass(slots=True)
class _Group:
    """Layers in host memory that follow one choice."""

    layers: tuple[int, ...]
    hot: HotRows
    recent: int
    table: SlotTable
    placed: Any  # PlacedStep
    state: Callable[[], SlotState | None] = lambda: None  # of the table; None once its stores are gone

    @property
    def selection(self) -> Selection:
        """The choice, in rows of the device."""
        return Selection(self.placed.rows_BgA, self.placed.totals_B, 0, 0)

    def take(self, stores: Sequence[HostStore]) -> None:
        """The table is that of these stores, one a layer, as the last step over them left it, and empty if there was
        none or their slots were written to since. That of the stores before waits with these."""
        state, current = stores[0].slot_state, self.state()
        if any(store.slot_state is not state for store in stores):
            state = None
        if state is not None and state is current:
            return
        if current is not None:
            current.contents = self.table.contents()
        if state is not None and state.contents is not None:
            self.table.load(state.contents)
            state.contents = None
        else:
            state = SlotState()
            self.table.clear()
        self.state = weakref.ref(state)
        for store in stores:
            store.slot_state = state


class StepStores:
    """The stores of one captured step.

    Args:
        stores: of a cache of the kind that is served, one for each layer that has keys and values.
        capacity: tokens that a row may have.
        program: what the layers compute.
        lengths_B: int32 on the device, tokens of each row: read in every step.
        reads: where to count what layers in host memory read.
    """

    def __init__(
        self, stores: Sequence[WholeStore], capacity: int, program: Program, lengths_B: torch.Tensor, reads: HostReads
    ) -> None:
        self.lengths_B = lengths_B
        self._positions = {layer.layer: position for position, layer in enumerate(program.attending)}
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
        self._stream = stream_for(lengths_B.device)
        self._done: dict[int, CopyDone] = {}  # by layer, in this step
        self._last: CopyDone = None
        self._groups = self._grouped(program, capacity)
        every = [group for groups in self._groups.values() for group in groups]
        self._of_layer = {layer: group for group in every for layer in group.layers}
        self._segments = [segment for segment in program.segments if segment.filter in self._groups]
        self._counts_3 = reads.on_device(lengths_B.device)

    def _grouped(self, program: Program, capacity: int) -> dict[int, list[_Group]]:
        """By filter layer."""
        alike: dict[tuple[SegmentProgram, HotRows], list[int]] = {}
        for position, (layer, hot) in enumerate(zip(program.attending, self.kinds, strict=True)):
            if isinstance(hot, HotRows):
                assert isinstance(layer.role, Follower), "obstacle() has seen it"
                alike.setdefault((layer.role.segment, hot), []).append(position)
        found: dict[int, list[_Group]] = {}
        for (segment, hot), layers in alike.items():
            found.setdefault(segment.filter, []).append(self._group(segment, tuple(layers), hot, capacity))
        return found

    def _group(self, segment: SegmentProgram, layers: tuple[int, ...], hot: HotRows, capacity: int) -> _Group:
        from sparsekv.kernels.decode.place import PlacedStep  # loads Triton

        batch, device = self.lengths_B.shape[0], self.lengths_B.device
        table = SlotTable(batch, segment.lists, hot.slots, capacity, device)
        most = min(hot.slots, segment.sink + segment.most)  # of any length: caches of other capacities are served too
        placed = PlacedStep.empty(table, most + segment.recent, segment.recent)
        return _Group(layers, hot, segment.recent, table, placed)

    def new_store(self, layer: int) -> CapturedStore:
        """Of the cache that the step is captured with, for layer number `layer` of the model."""
        return CapturedStore(self._positions[layer], self)

    # --- between steps ------------------------------------------------------------------------------------------------

    def serves(self, stores: Sequence[WholeStore], lengths: tuple[int, ...]) -> bool:
        """Returns whether the next step is of the very stores that it is bound to, these have room for it, and those in
        host memory are read by choice."""
        if max(lengths) > self._room or len(stores) != len(self._bound) or not self.evicting.serves(stores):
            return False
        if max(lengths) > self._room_of(stores):  # rows grow apart where each keeps what counts of its draft
            return False
        if any(_reads_all(segment, lengths) for segment in self._segments):
            return False
        return all(store.bound is bound() for store, bound in zip(stores, self._bound, strict=True))

    def bind(self, stores: Sequence[WholeStore]) -> None:
        """The next step reads and writes these, of the kinds that it was made for. Slots begin empty, unless they are
        still as the last step over these stores left them."""
        memories = [store.step_memory() for store in stores]
        rows = [_address_row(*given) for given in zip(self.shapes, memories, strict=True)]
        table_LX = torch.tensor(rows, dtype=torch.int64, device="cpu")
        if self.where_LX.is_cuda:
            table_LX = table_LX.pin_memory()  # which is not reused before the copy has read it
        self.where_LX.copy_(table_LX, non_blocking=True)
        self._binding = Binding()
        for group in (group for groups in self._groups.values() for group in groups):
            group.take(in_host_memory(stores[layer] for layer in group.layers))
        self._bound = [weakref.ref(store.bind(self._binding)) for store in stores]  # a cache that is let go of is freed
        self._room = self._room_of(stores)
        self.evicting.bind(stores)

    def _room_of(self, stores: Sequence[WholeStore]) -> int:
        """Tokens of the longest row that all of these have memory for."""
        rooms = (
            store.capacity for hot, store in zip(self.kinds, stores, strict=True) if not isinstance(hot, CachedRows)
        )
        return min(rooms, default=sys.maxsize)

    # --- inside a step ------------------------------------------------------------------------------------------------

    def fetch(self, segment: SegmentProgram, selection: Selection) -> None:
        """Begins to fetch what the layers of the segment lack of the choice. The selection stays alive for the step."""
        from sparsekv.kernels.decode.place import place_step

        for group in self._groups.get(segment.filter, ()):
            place = partial(
                place_step,
                group.table,
                selection,
                self.lengths_B,
                group.hot.ring,
                group.placed,
                self._counts_3,
                len(group.layers),
            )
            self._stream.run(place, ())
            for layer in group.layers:
                self._done[layer] = self._last = self._stream.run(partial(self._gather, group, layer), ())

    def _gather(self, group: _Group, layer: int) -> None:
        from sparsekv.kernels.decode.gather import gather_missed

        shape_BGSD = self.shapes[layer]
        gather_missed(
            self.where_LX[layer],
            group.placed,
            self.lengths_B,
            kv_heads=shape_BGSD.shape[1],
            token_bytes=shape_BGSD.shape[3] * shape_BGSD.element_size(),
            slots=group.hot.slots,
            ring=group.hot.ring,
            recent=group.recent,
        )

    def fetched(self, layer: int) -> Selection:
        """Returns what a layer in host memory attends to, in rows of the device; later work of the step comes after
        it."""
        self._stream.order(self._done[layer])
        return self._of_layer[layer].selection

    def join(self) -> None:
        """Later work of the step comes after everything that was begun."""
        self._stream.order(self._last)


def _address_row(shape_BGSD: torch.Tensor, memory: StepMemory) -> list[int]:
    """A row of the table of addresses."""
    row, k_BGRD = [0] * COLUMNS, memory.k_BGRD
    if memory.rows_PBGRD is not None and memory.host_CBPGD is not None:
        row[ROWS], row[HOST] = memory.rows_PBGRD.data_ptr(), memory.host_CBPGD.data_ptr()
        row[HOST_TOKENS] = len(memory.host_CBPGD)
    anchor, size = shape_BGSD.data_ptr(), shape_BGSD.element_size()
    row[KEYS], row[VALUES] = ((x_BGRD.data_ptr() - anchor) // size for x_BGRD in (k_BGRD, memory.v_BGRD))
    row[ROW], row[HEAD], row[TOKEN] = (step // k_BGRD.shape[3] for step in k_BGRD.stride()[:3])
    return row


def _shape(k_BGSD: torch.Tensor, tokens: int) -> torch.Tensor:
    """Keys of so many tokens, without their memory."""
    batch, heads, _, size = k_BGSD.shape
    return k_BGSD.new_empty((batch, heads, 1, size)).expand(batch, heads, tokens, size)
