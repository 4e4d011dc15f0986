"""Layers in host memory in a captured decode step.

What they lack of a choice is fetched as soon as the filter layer has chosen, layer by layer, on a second stream; the
attention of a layer waits for its own rows alone.

The slot tables belong to the step: what they say of a cache waits with that cache while others take their turns.

Shapes: B batch, G KV heads, S tokens, D head size, L layers with stores, X columns of the table of addresses.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.decode.slots import MOST_SLOTS, SlotState, SlotTable
from sparsekv.plans.errors import SparseKVError
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.segments import SegmentProgram, counts_of
from sparsekv.runtime.stores.bank import HostStore, in_host_memory
from sparsekv.runtime.stores.pinned import CopyDone, stream_for
from sparsekv.runtime.stores.store import HostReads, HotRows, StepRows, WholeStore


class FetchError(SparseKVError):
    """Bringing what a filter layer chose to the device failed in a captured step, which is then of no use."""


def fetch_obstacle(layer: LayerProgram, hot: HotRows, lengths: tuple[int, ...]) -> str:
    if not layer.role.gathers(lengths):
        return "reads all of its tokens at this length, which are in host memory"
    follower = layer.role.follows
    if follower is None or follower.kv_map is not None or layer.window is not None:
        return "is in host memory and has a choice of its own, a head map or a sliding window"
    if follower.segment.recent < 2 or not 1 <= hot.slots <= MOST_SLOTS:
        return (
            f"is in host memory: expected 2 recent tokens or more and 1 to {MOST_SLOTS} slots, found "
            f"{follower.segment.recent} and {hot.slots} (0 while the largest budget of the layer covers its context)"
        )
    return ""


@dataclass(slots=True)
class _Group:
    layers: tuple[int, ...]
    hot: HotRows
    recent: int
    table: SlotTable
    placed: Any  # PlacedStep
    state: Callable[[], SlotState | None] = lambda: None  # of the table; None once its stores are gone

    @property
    def selection(self) -> Selection:
        return Selection(self.placed.rows_BgA, self.placed.totals_B, 0, 0)

    def take(self, stores: Sequence[HostStore]) -> None:
        """The table becomes that of these stores, one a layer, as their last step left it; empty if their slots were
        written to since. The table of the stores before waits with these."""
        state, current = stores[0].rows.slot_state, self.state()
        if any(store.rows.slot_state is not state for store in stores):
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
            store.rows.slot_state = state


class StepFetches:
    """The layers in host memory of one captured step."""

    def __init__(
        self,
        program: Program,
        kinds: Sequence[StepRows],
        where_LX: torch.Tensor,
        shapes: Sequence[torch.Tensor],
        capacity: int,
        lengths_B: torch.Tensor,
        reads: HostReads,
    ) -> None:
        self._where_LX = where_LX
        self._shapes = shapes
        self._lengths_B = lengths_B
        self._stream = stream_for(lengths_B.device)
        self._done: dict[int, CopyDone] = {}  # by layer, in this step
        self._last: CopyDone = None
        self._groups = self._grouped(program, kinds, capacity)
        self._segments = [segment for segment in program.segments if segment.filter in self._groups]
        self._counts_3 = reads.on_device(lengths_B.device)

    def _grouped(self, program: Program, kinds: Sequence[StepRows], capacity: int) -> dict[int, list[_Group]]:
        alike: dict[tuple[SegmentProgram, HotRows], list[int]] = {}
        for position, (layer, hot) in enumerate(zip(program.caching, kinds, strict=True)):
            if isinstance(hot, HotRows):
                assert layer.role.follows is not None, "fetch_obstacle() has seen it"
                alike.setdefault((layer.role.follows.segment, hot), []).append(position)
        groups: dict[int, list[_Group]] = {}
        for (segment, hot), layers in alike.items():
            groups.setdefault(segment.filter, []).append(self._group(segment, tuple(layers), hot, capacity))
        return groups

    def _group(self, segment: SegmentProgram, layers: tuple[int, ...], hot: HotRows, capacity: int) -> _Group:
        from sparsekv.kernels.decode.place import PlacedStep  # loads Triton

        batch, device = self._lengths_B.shape[0], self._lengths_B.device
        table = SlotTable(batch, segment.lists, hot.slots, capacity, device)
        most = min(hot.slots, segment.sink + segment.most)  # of any length: caches of other capacities are served too
        placed = PlacedStep.empty(table, most + segment.recent, segment.recent)
        return _Group(layers, hot, segment.recent, table, placed)

    def reads_all(self, lengths: tuple[int, ...]) -> bool:
        """Returns whether some layer reads all of its tokens, which then cannot be fetched by choice."""
        return any(ALL in counts_of(segment, lengths) for segment in self._segments)

    def bind(self, stores: Sequence[WholeStore]) -> None:
        """The next step is of these stores. Slots begin empty, unless they are still as the last step left them."""
        for group in self._every:
            group.take(in_host_memory(stores[layer] for layer in group.layers))

    @property
    def _every(self) -> list[_Group]:
        return [group for groups in self._groups.values() for group in groups]

    def fetch(self, segment: SegmentProgram, selection: Selection) -> None:
        """Begins to fetch what the layers of the segment lack of the choice. The selection stays alive for the step."""
        from sparsekv.kernels.decode.place import place_step

        for group in self._groups.get(segment.filter, ()):
            place = partial(
                place_step,
                group.table,
                selection,
                self._lengths_B,
                group.hot.ring,
                group.placed,
                self._counts_3,
                len(group.layers),
            )
            self._stream.run(place, ())
            for layer in group.layers:
                self._done[layer] = self._last = self._stream.run(partial(self._gather, group, layer), ())

    def _gather(self, group: _Group, layer: int) -> None:
        from sparsekv.kernels.decode.place import gather_missed

        shape_BGSD = self._shapes[layer]
        gather_missed(
            self._where_LX[layer],
            group.placed,
            self._lengths_B,
            kv_heads=shape_BGSD.shape[1],
            token_bytes=shape_BGSD.shape[3] * shape_BGSD.element_size(),
            slots=group.hot.slots,
            ring=group.hot.ring,
            recent=group.recent,
        )

    def fetched(self, layer: int) -> Selection:
        """The choice of a layer in host memory, in rows of the device; later work of the step comes after it."""
        self._stream.order(self._done[layer])
        return next(group.selection for group in self._every if layer in group.layers)

    def join(self) -> None:
        """Later work of the step comes after everything that was begun."""
        self._stream.order(self._last)
