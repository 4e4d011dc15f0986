"""A slot map: which tokens of a context have their keys and values in a hot set on the device, and in which slot.

A choice of tokens is placed at once: tokens that have a slot keep it, the others take the slots that are worth least.
Being chosen is worth `USE`, and every step takes a sixteenth off. Source: Lee et al., LRFU: a spectrum of policies that
subsumes the least recently used and least frequently used policies (IEEE Transactions on Computers 50, 2001).

Nothing asks the device, and shapes follow from capacities alone. Which tokens go does not depend on the order in which
the device works: numbers are whole, and of slots that are worth the same, lower ones go first.

Shapes: B batch, g lists of a row (1 or G), M listed tokens, H slots, C tokens a row may have, n tokens to fetch.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch

from sparsekv.kernels.decode.selection import ALL, Selection
from sparsekv.kernels.tiles import NO_TOKEN

NO_SLOT = -1
USE = 1 << 12
AGEING = 4  # of what a slot is worth, one part in two to this power goes a step
MOST_SLOTS = 1 << 15  # of a list, that one program of kernels/decode/place.py can choose from
_STAYS = torch.iinfo(torch.int32).max


@dataclass(frozen=True, slots=True, eq=False)
class Placed:
    """Where the tokens of one choice are, and which of them were not there before. All int32 on the device."""

    slots_BgM: torch.Tensor  # of every listed token; NO_SLOT where the list has none
    missed_BgM: torch.Tensor  # tokens to fetch, in the order of the list; the rest NO_TOKEN
    into_BgM: torch.Tensor  # their slots, ascending; the rest NO_SLOT


@dataclass(frozen=True, slots=True, eq=False)
class SlotContents:
    """The content of the slots of a table, without its memory: int32 copies on the device."""

    token_BgH: torch.Tensor
    worth_BgH: torch.Tensor


class SlotTable:
    """The slots of one batch. Addresses do not change.

    Args:
        lists: of a row, each with slots of its own.
        slots: of a list: at least as many as it ever has tokens.
        capacity: tokens that a row may have.
    """

    @torch.inference_mode(False)  # else what is allocated there could not be written to under torch.no_grad()
    def __init__(self, batch: int, lists: int, slots: int, capacity: int, device: torch.device) -> None:
        def table(columns: int, value: int) -> torch.Tensor:
            return torch.full((batch, lists, columns), value, dtype=torch.int32, device=device)

        self.slots = slots
        self.capacity = capacity
        # The last column of these takes what must not be written anywhere.
        self.slot_of_BgC = table(capacity + 1, NO_SLOT)
        self.token_BgH = table(slots + 1, NO_TOKEN)
        self.worth_BgH = table(slots + 1, 0)

    @property
    def present_BgH(self) -> torch.Tensor:  # noqa: N802
        """The token of every slot, or NO_TOKEN."""
        return self.token_BgH[:, :, : self.slots]

    def contents(self) -> SlotContents:
        return SlotContents(self.token_BgH.clone(), self.worth_BgH.clone())

    def load(self, contents: SlotContents) -> None:
        """The slots become those of `contents`, of a table of as many slots, whose tokens are below our capacity."""
        self.slot_of_BgC.fill_(NO_SLOT)
        self.token_BgH.copy_(contents.token_BgH)
        self.worth_BgH.copy_(contents.worth_BgH)
        present_BgH = self.present_BgH
        slot_H = torch.arange(self.slots, dtype=torch.int32, device=present_BgH.device)
        column_BgH = self._column(present_BgH >= 0, present_BgH, self.capacity)
        self.slot_of_BgC.scatter_(2, column_BgH, slot_H.expand_as(present_BgH))

    def clear(self) -> None:
        self.slot_of_BgC.fill_(NO_SLOT)
        self.token_BgH.fill_(NO_TOKEN)
        self.worth_BgH.zero_()

    def place(self, tokens_BgM: torch.Tensor) -> Placed:
        """Gives every listed token a slot: each is there once, in any order; negative entries are skipped."""
        self.worth_BgH -= self.worth_BgH >> AGEING
        listed_BgM = tokens_BgM >= 0
        slots_BgM = self.slot_of_BgC.gather(2, torch.where(listed_BgM, tokens_BgM, self.capacity).long())
        hit_BgM = listed_BgM & (slots_BgM >= 0)
        missed_BgM = listed_BgM & ~hit_BgM
        hit_at_BgM = self._column(hit_BgM, slots_BgM, self.slots)
        self.worth_BgH.scatter_(2, hit_at_BgM, self.worth_BgH.gather(2, hit_at_BgM) + USE)
        rank_BgM = missed_BgM.cumsum(2) - 1  # of a miss among those of the list
        free_BgH = self._worth_least(missed_BgM.sum(2, keepdim=True), hit_at_BgM)
        into_BgM = torch.where(missed_BgM, free_BgH.gather(2, rank_BgM.clamp(min=0)), NO_SLOT)
        self._replace(missed_BgM, tokens_BgM, into_BgM)
        column_BgM = self._column(missed_BgM, rank_BgM, tokens_BgM.shape[2])
        return Placed(
            torch.where(hit_BgM, slots_BgM, into_BgM),
            _compacted(column_BgM, tokens_BgM, NO_TOKEN),
            _compacted(column_BgM, into_BgM, NO_SLOT),
        )

    def _worth_least(self, count_Bg1: torch.Tensor, hit_at_BgM: torch.Tensor) -> torch.Tensor:
        """The slots that are worth least, without those of hits: so many, ascending; [B, g, H], the rest anything."""
        stays_BgM = torch.full_like(hit_at_BgM, _STAYS, dtype=torch.int32)
        worth_BgH = self.worth_BgH.scatter(2, hit_at_BgM, stays_BgM)[:, :, : self.slots]
        by_worth_BgH = worth_BgH.argsort(dim=2, stable=True)
        slot_H = torch.arange(self.slots, device=worth_BgH.device)
        rank_BgH = torch.empty_like(by_worth_BgH).scatter_(2, by_worth_BgH, slot_H.expand_as(by_worth_BgH))
        goes_BgH = rank_BgH < count_Bg1
        column_BgH = self._column(goes_BgH, goes_BgH.cumsum(2) - 1, self.slots)
        return _compacted(column_BgH, slot_H.int().expand_as(by_worth_BgH), NO_SLOT)

    def _replace(self, missed_BgM: torch.Tensor, tokens_BgM: torch.Tensor, into_BgM: torch.Tensor) -> None:
        column_BgM = self._column(missed_BgM, into_BgM, self.slots)
        former_BgM = self.token_BgH.gather(2, column_BgM)
        had_BgM = missed_BgM & (former_BgM >= 0)
        none_BgM = torch.full_like(tokens_BgM, NO_SLOT)
        self.slot_of_BgC.scatter_(2, self._column(had_BgM, former_BgM, self.capacity), none_BgM)
        self.slot_of_BgC.scatter_(2, self._column(missed_BgM, tokens_BgM, self.capacity), into_BgM)
        self.token_BgH.scatter_(2, column_BgM, tokens_BgM)
        self.worth_BgH.scatter_(2, column_BgM, torch.full_like(tokens_BgM, USE))

    @staticmethod
    def _column(valid: torch.Tensor, column: torch.Tensor, spare: int) -> torch.Tensor:
        return torch.where(valid, column, spare).long()


def _compacted(column_BgN: torch.Tensor, values_BgN: torch.Tensor, empty: int) -> torch.Tensor:
    """Values in their columns; those of column N are left out."""
    batch, lists, count = values_BgN.shape
    whole = values_BgN.new_full((batch, lists, count + 1), empty)
    return whole.scatter_(2, column_BgN, values_BgN)[:, :, :count].contiguous()


@dataclass(frozen=True, slots=True, eq=False)
class Fetch:
    """Tokens to bring to the device; int64 [n] each."""

    lists: int  # g
    batch: torch.Tensor  # these three on the host, where the tokens are read
    list: torch.Tensor
    token: torch.Tensor
    into: tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # batch, list and slot, on the device
    newest: int  # of the tokens; -1 where there are none

    @classmethod
    def of(cls, tokens_BgN: torch.Tensor, slots_BgN: torch.Tensor, device: torch.device) -> Fetch:
        """Makes it of two lists on the host; negative tokens are skipped."""
        batch, listed, at = (tokens_BgN >= 0).nonzero(as_tuple=True)
        token, slot = tokens_BgN[batch, listed, at].long(), slots_BgN[batch, listed, at].long()
        into = (batch.to(device), listed.to(device), slot.to(device))
        return cls(tokens_BgN.shape[1], batch, listed, token, into, int(token.max()) if len(token) else -1)

    def __len__(self) -> int:
        return len(self.token)


class SlotState:
    """Stands for one state of a slot table: stores whose slots have the tokens of that state hold the same object."""

    def __init__(self) -> None:
        self.contents: SlotContents | None = None  # of the table, where it serves other stores meanwhile


@dataclass(frozen=True)
class SlotStep:
    """One choice of tokens, and where they are. The tensors of the choice are on the device."""

    before: SlotState
    state: SlotState  # of the slots, with the choice placed
    tokens_BgM: torch.Tensor  # int32, in the order of attention: sinks, chosen, recent; NO_TOKEN behind them
    counts_B: torch.Tensor
    placed: Placed  # of the tokens that may be in a slot: those before `hot_from`
    hot_from: int  # tokens from here on are on the device without a slot
    _table: SlotTable = field(repr=False)
    _reads_all_B: torch.Tensor = field(repr=False)

    @cached_property
    def _on_host(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Misses, their slots, and two numbers: one copy from the device, the only one of all layers of a step."""
        slotted = (self.tokens_BgM >= 0) & (self.tokens_BgM < self.hot_from)
        numbers_2 = torch.stack((self._reads_all_B.any().int(), slotted.sum(dtype=torch.int32)))
        missed, into = self.placed.missed_BgM, self.placed.into_BgM
        everything = torch.cat((missed.flatten(), into.flatten(), numbers_2)).cpu()
        missed_n, into_n, numbers_2 = everything.split([missed.numel(), into.numel(), 2])
        return missed_n.view(missed.shape), into_n.view(into.shape), numbers_2

    @property
    def reads_all(self) -> bool:
        """Returns whether some row reads all of its tokens. Waits for the device, once a step."""
        return bool(self._on_host[2][0])

    @property
    def slotted(self) -> int:
        """The number of tokens, of all rows and lists, that need a slot. Waits for the device, once a step."""
        return int(self._on_host[2][1])

    @cached_property
    def missed(self) -> Fetch:
        """The tokens that had no slot before. Waits for the device, once a step."""
        return Fetch.of(*self._on_host[:2], self.tokens_BgM.device)

    @cached_property
    def present(self) -> Fetch:
        """All tokens that have a slot. Waits for the device, once a step."""
        present_BgH = self._table.present_BgH.cpu()
        slot_BgH = torch.arange(present_BgH.shape[2], device="cpu").expand_as(present_BgH)
        return Fetch.of(present_BgH, slot_BgH, self.tokens_BgM.device)


class SlotMap:
    """The slots that layers with the same choice share, and the last choice that was placed. A layer whose slots are as
    the step before left them fetches the misses of a step alone; any other one all that is present. A copy is empty."""

    def __init__(self) -> None:
        self._state = SlotState()
        self._table: SlotTable | None = None
        self._last: tuple[Selection, SlotStep] | None = None

    def __deepcopy__(self, memo: dict[int, Any]) -> SlotMap:
        return SlotMap()

    def place(
        self, selection: Selection, lengths_B: torch.Tensor, *, most: int, slots: int, capacity: int, hot_from: int
    ) -> SlotStep:
        """Places a choice, once for all layers that ask for the same one. Rows that attend to everything have no slots.

        Args:
            most: tokens that a row selects in fact, which may be fewer than its list has room for.
            slots: of the hot set; `most` or more.
            capacity: tokens that a row may have.
            hot_from: tokens from here on need no slot.
        """
        if self._last is not None and self._last[0] is selection:
            return self._last[1]
        tokens_BgM, counts_B = selection.listed(lengths_B)
        tokens_BgM = tokens_BgM[:, :, :most]
        batch, lists, _ = tokens_BgM.shape
        table = self._table
        if (
            table is None
            or (table.slots, table.slot_of_BgC.shape[:2]) != (slots, (batch, lists))
            or (table.capacity < capacity)
        ):  # the tokens of a larger table are fetched anew
            table = self._table = SlotTable(batch, lists, slots, capacity, tokens_BgM.device)
        placed = table.place(tokens_BgM.masked_fill(tokens_BgM >= hot_from, NO_TOKEN))
        before, self._state = self._state, SlotState()
        step = SlotStep(before, self._state, tokens_BgM, counts_B, placed, hot_from, table, selection.counts_B == ALL)
        self._last = (selection, step)
        return step
