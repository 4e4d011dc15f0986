"""How much of a layer in host memory is on the device: sizes of its hot set, for stores and for estimates of memory."""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.plans.patterns import Budget

LEAVING = 64  # tokens move to the host so many at a time


@dataclass(frozen=True, slots=True)
class Reads:
    """What decode steps of a layer read of a long context, which sizes the layer's part on the device.

    Attributes:
        budgets: of chosen tokens; none where every step reads everything.
        sink: tokens that are read beside them.
        recent: tokens that are read beside them.
        whole_up_to: contexts of so many tokens are read as a whole.
    """

    budgets: tuple[Budget, ...] = ()
    sink: int = 0
    recent: int = 0
    whole_up_to: int = 0

    def listed(self, length: int) -> int | None:
        """Tokens that a step reads at most of contexts up to this length; None where it reads everything."""
        if not self.budgets:
            return None
        most = self.sink + max(budget.resolve(length) for budget in self.budgets) + self.recent
        return most if most < length else None


@dataclass(frozen=True, slots=True)
class HotSet:
    """What a layer has on the device, in tokens.

    Attributes:
        slots: of chosen tokens; 0 where a step reads everything.
        ring: rows behind them for the newest tokens.
        listed: tokens that a step attends to at most; 0 where it reads everything.
        whole: the longest context that lies there as a whole.
    """

    slots: int
    ring: int
    listed: int
    whole: int

    @classmethod
    def of(cls, hot: Budget, reads: Reads, capacity: int) -> HotSet:
        """That of a layer with room for `capacity` tokens."""
        rows, ring, listed = hot.resolve(capacity), reads.recent + LEAVING, reads.listed(capacity) or 0
        slots = max(rows - ring, listed) if listed else 0
        return cls(slots, ring, listed, max(rows, slots + ring, reads.whole_up_to))

    @property
    def rows(self) -> int:
        """Of a longer context."""
        return self.slots + self.ring


def allocated_tokens(hot: Budget, reads: Reads, capacity: int) -> tuple[int, int]:
    """How many tokens of a layer in host memory are allocated on the device at most, and on the host, where there is
    room for `capacity`."""
    whole = HotSet.of(hot, reads, capacity).whole
    return min(capacity, whole), capacity - reads.recent if capacity > whole else 0


def allocated_slots(hot: Budget, reads: Reads, capacity: int) -> int:
    """How many slots a layer in host memory has for chosen tokens, where there is room for `capacity`."""
    sizes = HotSet.of(hot, reads, capacity)
    return sizes.slots if capacity > sizes.whole else 0
