"""The state that layers of a decode step share: lengths, budgets, choices, the newest queries of filter layers; and
the step of one of them.

Shapes: B batch, H query heads, S queries, Q new tokens of a row, W queries of a selector, D head size; F filter layers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, TypeVar

import torch

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode.selection import ALL, Scoring, Selection
from sparsekv.kernels.decode.slots import SlotMap
from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.keys import KeyView, Softmax
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.core.segments import Budgets, SegmentProgram, scored_tokens
from sparsekv.runtime.stores.store import KeySource

Gather = Callable[[torch.Tensor], torch.Tensor]
"""The tensors that all ranks give, [ranks, ...], in the order of the ranks."""

NewCarried = Callable[[torch.device], torch.Tensor | None]
"""Makes the tensor that a role carries from step to step."""

OnChoice = Callable[[SegmentProgram, Selection], None]
"""Is told what a segment's filter layer chose, before its layers follow."""


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """The newest queries of a prompt in one layer, and how they attend."""

    q_BHWD: torch.Tensor
    scale: float
    softmax: Softmax

    def before(self, older: Observed | None, most: int) -> Observed:
        """These queries behind older ones, at most so many."""
        q_BHWD = self.q_BHWD if older is None else torch.cat((older.q_BHWD, self.q_BHWD), 2)
        return replace(self, q_BHWD=q_BHWD[:, :, -most:])


Kept = TypeVar("Kept")


class Remembered(NamedTuple):
    """By layer, the newest queries [B, H, W, D] and those of a prompt, neither ever written to in place; copies of what
    roles carry."""

    queries: dict[int, torch.Tensor]
    observed: dict[int, Observed]
    carried: dict[int, torch.Tensor]


class DecodeState:
    """The state of one batch of sequences. Nothing in it asks the device, so that a step can be captured.

    Args:
        segments: of all filter layers, in their order.
        gather: over the ranks; needed where filter layers choose across them.
        on_choice: what to do right behind every choice.
        scratch: float32 memory of the host for the scores of one filter layer after another; its size bounds them.
        carried: makers of what roles carry from step to step, by layer.
        readers: by layer with keys and values of its own, itself and the layers that attend to these.

    Raises:
        UsageError: a segment is chosen for across ranks and there is no `gather`.
    """

    def __init__(
        self,
        segments: Sequence[SegmentProgram],
        gather: Gather | None = None,
        on_choice: OnChoice | None = None,
        scratch: torch.Tensor | None = None,
        carried: Mapping[int, NewCarried] | None = None,
        readers: Mapping[int, tuple[int, ...]] | None = None,
    ) -> None:
        if gather is None and any(segment.across_ranks for segment in segments):
            raise UsageError(
                "expected gather for ranks whose filter layers choose together, found none; "
                "pass an all-gather over the ranks, or plan with `scope: local`"
            )
        self.gather = gather
        self.scratch = scratch
        self._on_choice = on_choice
        self._new_carried = carried or {}
        self._readers = readers or {}
        self._segments = tuple(segments)
        self._numbers = {segment.filter: number for number, segment in enumerate(segments)}
        self._tables: dict[torch.device, Budgets] = {}
        self._constants: dict[object, torch.Tensor] = {}
        self.reset()

    def reset(self) -> None:
        self.lengths: tuple[int, ...] | None = None  # of the step under way, where the host knows them
        self._lengths_B: torch.Tensor | None = None
        self._budgets_2FB: tuple[torch.Tensor, torch.Tensor] | None = None
        self._choosing_FB: torch.Tensor | None = None
        self._selected: dict[int, Selection | None] = {}
        self._moved: dict[tuple[int, torch.device], Selection] = {}  # to the devices of other layers
        self._slots: dict[tuple[int, torch.device], SlotMap] = {}
        self._remembered: set[int] = set()
        self._queries: dict[int, torch.Tensor] = {}
        self.carried: dict[int, torch.Tensor] = {}  # what the role of a layer carries from step to step
        self._observed: dict[int, Observed] = {}  # of the prompt under way, of evicting layers

    @torch.inference_mode(False)  # else what is allocated there could not be written to under torch.no_grad()
    def begin(self, lengths: Sequence[int] | torch.Tensor, device: torch.device) -> None:
        """Starts a decode step at these tokens of each row, the new one included: numbers, or int32 on the device,
        which the host then never learns. `device` is of the tensors to come."""
        self.lengths = None if isinstance(lengths, torch.Tensor) else tuple(lengths)
        self._selected.clear()
        self._moved.clear()
        self._remembered.clear()
        self._budgets_2FB = self._choosing_FB = None
        for layer, make in self._new_carried.items():
            if layer not in self.carried and (made := make(device)) is not None:
                self.carried[layer] = made
        if isinstance(lengths, torch.Tensor):
            self._lengths_B = lengths
            return
        if self._lengths_B is None or self._lengths_B.shape[0] != len(lengths):
            self._lengths_B = torch.empty(len(lengths), dtype=torch.int32, device=device)
        if len(set(lengths)) == 1:
            self._lengths_B.fill_(lengths[0])  # a launch; a copy from the host would wait
        else:
            self._lengths_B.copy_(on_device(self.lengths, device, torch.int32))

    def budget(self, segment: SegmentProgram, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        """Tokens that every row chooses in this step, or ALL, and where its scores begin, or -1: int32 [B] each.
        `backend` is that of the attention."""
        counts_FB, starts_FB = self._budget(backend)
        number = self._numbers[segment.filter]
        return counts_FB[number], starts_FB[number]

    def choosing(self, segment: SegmentProgram, backend: str) -> torch.Tensor:
        """int32 [B]: lengths of the rows that choose for the segment in this step, 0 for the others."""
        if self._choosing_FB is None:
            self._choosing_FB = self.lengths_B * (self._budget(backend)[0] != ALL)
        return self._choosing_FB[self._numbers[segment.filter]]

    def room(self, segment: SegmentProgram) -> int:
        return scored_tokens(segment.query_heads, self.scratch, segment.lists)

    def _budget(self, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
        if self._budgets_2FB is None:
            self._budgets_2FB = self.budgets(self.lengths_B.device).of(self.lengths_B, backend)
        return self._budgets_2FB

    def budgets(self, device: torch.device) -> Budgets:
        if device not in self._tables:
            with torch.inference_mode(False):
                self._tables[device] = Budgets(
                    self._segments, [self.room(segment) for segment in self._segments], device
                )
        return self._tables[device]

    def constant(self, values: tuple[float, ...], device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Numbers of the plan as a tensor that lives as long as the state, so that a captured step can read it."""
        key = (values, device, dtype)
        if key not in self._constants:
            with torch.inference_mode(False):
                self._constants[key] = torch.tensor(values, dtype=dtype, device=device)
        return self._constants[key]

    @property
    def lengths_B(self) -> torch.Tensor:  # noqa: N802
        """int32 [B] on the device: tokens of each row, the new one included."""
        assert self._lengths_B is not None, "begin() comes first"
        return self._lengths_B

    @torch.inference_mode(False)
    def remember(self, segment: SegmentProgram, q_BHSD: torch.Tensor) -> None:
        """Remembers the newest queries of a filter layer whose selector looks at several; called for every token."""
        if (count := segment.queries) == 1:
            return
        batch, heads, new, size = q_BHSD.shape
        newest_BHWD = q_BHSD[:, :, -count:].detach().clone()  # leaving inference mode turns autograd on
        if new < count:
            older = self._queries.get(segment.filter)
            older_BHWD = q_BHSD.new_zeros((batch, heads, count, size)) if older is None else older
            newest_BHWD = torch.cat((older_BHWD[:, :, new:], newest_BHWD), 2)
        self._queries[segment.filter] = newest_BHWD

    def remember_step(self, segment: SegmentProgram, q_BH1D: torch.Tensor) -> None:
        """`remember` of the step under way, once: another backend may begin the layer again."""
        if segment.filter not in self._remembered:
            self._remembered.add(segment.filter)
            self.remember(segment, q_BH1D)

    @torch.inference_mode(False)
    def observe(self, layer: int, new: Observed, most: int) -> None:
        """Remembers at most so many of the newest queries of a prompt in an evicting layer."""
        newest = Observed(new.q_BHWD[:, :, -most:].detach().clone(), new.scale, new.softmax)
        self._observed[layer] = newest.before(self._observed.get(layer), most)

    def observed(self, layer: int) -> Observed | None:
        """The queries that `observe` remembers of the prompt, which is complete; None from then on."""
        return self._observed.pop(layer, None)

    @property
    def remembered(self) -> Remembered:
        carried = {layer: tensor.clone() for layer, tensor in self.carried.items()}
        return Remembered(dict(self._queries), dict(self._observed), carried)

    @remembered.setter
    def remembered(self, before: Remembered) -> None:
        self._queries, self._observed, self.carried = dict(before.queries), dict(before.observed), dict(before.carried)

    def restore(self, cached: int, before: Remembered) -> None:
        """Puts back the queries of a layer with keys of its own, and of the layers that read them."""
        for layer in self._readers.get(cached, (cached,)):
            _put_back(self._queries, before.queries, layer)
            _put_back(self._observed, before.observed, layer)
            if layer in before.carried:
                self.carried[layer].copy_(before.carried[layer])

    def select(self, cached: int, rows_B: torch.Tensor) -> None:
        """Row i becomes a copy of row `rows_B[i]`, for a layer with keys of its own and those that read them."""
        for layer in self._queries.keys() & {*self._readers.get(cached, (cached,))}:
            queries_BHWD = self._queries[layer]
            self._queries[layer] = queries_BHWD.index_select(0, rows_B.to(queries_BHWD.device))

    def queries(self, segment: SegmentProgram, q_BH1D: torch.Tensor) -> torch.Tensor:
        """[B, H, W, D]: the newest queries of a filter layer, zeros before the first token."""
        return self._queries.get(segment.filter, q_BH1D)

    def choose(self, segment: SegmentProgram, selection: Selection | None) -> None:
        """Records what a filter layer chose in this step; None is everything in every row."""
        if selection is not None and self._on_choice is not None:
            self._on_choice(segment, selection)
        self._selected[segment.filter] = selection
        self._moved.clear()

    def chosen(self, segment: SegmentProgram, device: torch.device | None = None) -> Selection | None:
        """The choice of the filter layer in this step, for keys on `device`: one object for all layers."""
        assert segment.filter in self._selected, "the filter layer comes first"
        selection = self._selected[segment.filter]
        if selection is None or device is None or selection.counts_B.device == device:
            return selection
        key = segment.filter, device
        if key not in self._moved:
            self._moved[key] = selection.to(device)
        return self._moved[key]

    def has_chosen(self, segment: SegmentProgram) -> bool:
        return segment.filter in self._selected

    def slots(self, choice: int, device: torch.device) -> SlotMap:
        """The slots that layers on the device with the very same choice share; see `Follower.slots_key`."""
        return self._slots.setdefault((choice, device), SlotMap())


def _put_back(now: dict[int, Kept], then: dict[int, Kept], layer: int) -> None:
    now.pop(layer, None)
    if layer in then:
        now[layer] = then[layer]


@dataclass(frozen=True, slots=True, eq=False)
class Step:
    """A decode step of one layer; see `core.program.decode`."""

    layer: int
    window: int | None  # the layer's own sliding window
    q_BHQD: torch.Tensor
    source: KeySource
    state: DecodeState
    scale: float
    backend: str
    verifies: bool = False
    new_B: torch.Tensor | None = None
    out_BHQD: torch.Tensor | None = None

    @property
    def lengths_B(self) -> torch.Tensor:  # noqa: N802
        """int32 [B] on the device of the layer, which others may not be on."""
        return self.state.lengths_B.to(self.q_BHQD.device)

    def attend(
        self, keys: KeyView, selection: Selection | None = None, *, window: int | None, scoring: Scoring | None = None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        new_B = None if self.new_B is None else self.new_B.to(self.q_BHQD.device)
        attended = decode_attention(
            self.q_BHQD, keys, selection, scoring=scoring, window=window, new_B=new_B, scale=self.scale,
            backend=self.backend, out=self.out_BHQD,
        )  # fmt: skip
        return attended.out_BHSD, attended.scores_gT

    def attend_all(self) -> torch.Tensor:
        return self.attend(self.source.view(self.lengths_B), window=self.window)[0]

    def attend_to(self, selection: Selection, slots: SlotMap | None = None) -> torch.Tensor:
        """[B, H, Q, D] over the selected tokens; layers in host memory with one choice share `slots`."""
        keys, selected, window = self.source.gather(selection, self.lengths_B, self.window, slots)
        return self.attend(keys, selected, window=window)[0]
