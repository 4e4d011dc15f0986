"""Says whether the steps of an engine draft, by what drafts gave at such rows and lengths, and counts them."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from sparsekv.plans.types import format_length
from sparsekv.runtime.core.draft_length import DraftLength
from sparsekv.runtime.paged.metrics import REPORT_SECONDS, Drafted

Say = Callable[[str], None]
_SHARE = 1 << 10  # shorter contexts are counted as one


@dataclass(frozen=True, slots=True)
class Step:
    """Holds a step that is over.

    Attributes:
        rows: of each request.
        drafts: tokens of its draft that it verified, where it had any.
        accepted: of these.
        lengths: tokens of each request, those of the step included.
    """

    rows: Mapping[str, int]
    drafts: Mapping[str, int]
    accepted: Mapping[str, int]
    lengths: Mapping[str, int]

    @property
    def drafted(self) -> int | None:
        """Returns how many tokens every request verified; None where they differ, or one of them was not decoding."""
        sizes = {self.drafts.get(one, 0) for one in self.rows}
        decoding = all(rows == 1 + self.drafts.get(one, 0) for one, rows in self.rows.items())
        return sizes.pop() if len(sizes) == 1 and decoding else None


class Drafting:
    """The drafts of one engine: of one length, or none.

    Between two steps of the same requests lie a draft and the pass that verifies it, so the time between their outputs
    is that of a cycle.

    Args:
        drafted: tokens of a draft.
        dense_up_to: contexts that the plan decodes dense, where drafts cost as much as what they save.
        say: logs a line.
        publish: takes new counts, by length.
    """

    def __init__(
        self, drafted: int, dense_up_to: int, say: Say, publish: Callable[[Mapping[str, Drafted]], None]
    ) -> None:
        self._drafted, self._dense_up_to, self._say, self._publish = drafted, dense_up_to, say, publish
        self._paces: dict[tuple[int, int], DraftLength] = defaultdict(lambda: DraftLength((0, drafted)))
        self._last: dict[tuple[int, int], int] = {}
        self._told: set[tuple[int, int]] = set()
        self._before: tuple[frozenset[str], float] = (frozenset(), -math.inf)
        self._new: dict[str, Drafted] = defaultdict(Drafted)
        self._reported_at: float | None = None
        self.counts: dict[str, Drafted] = defaultdict(Drafted)  # by length

    def next(self, lengths: Mapping[str, int]) -> int:
        """Returns how many tokens are drafted behind a step."""
        key = self._key(lengths)
        if not lengths or sum(lengths.values()) <= self._dense_up_to * len(lengths):
            return 0
        pace = self._paces[key]
        size = pace.next(self._drafted)
        if self._last.get(key) and not size and key not in self._told:
            self._told.add(key)
            rows, length = (1 << max(0, bits - 1) for bits in key)
            self._say(
                f"drafts of {self._drafted} tokens do not pay for {rows} or more rows of {format_length(length)} or "
                f"more: {pace.agreement:.0%} of them count; it decodes dense there, and tries again now and then"
            )
        self._last[key] = size
        return size

    def ran(self, step: Step, now: float) -> None:
        """A step is over.

        Args:
            now: when its output came, in seconds of a clock that never goes back.
        """
        for one, tokens in step.drafts.items():
            for counts in (self.counts, self._new):
                count = counts[_bucket(step.lengths[one])]
                count.drafted += tokens
                count.accepted += step.accepted.get(one, 0)
        requests, drafted = frozenset(step.rows), step.drafted
        before, began = self._before
        if (
            drafted is not None
            and requests == before
            and sum(step.lengths.values()) > self._dense_up_to * len(requests)
        ):
            pace = self._paces[self._key(step.lengths)]
            pace.ran(drafted, now - began, [step.accepted.get(one, 0) for one in step.drafts])
        self._before = (requests if drafted is not None else frozenset(), now)
        self._report(now)

    def _report(self, now: float) -> None:
        self._reported_at = now if self._reported_at is None else self._reported_at
        if self._new and now - self._reported_at >= REPORT_SECONDS:
            told = (f"{one.accepted:,} of {one.drafted:,} at {length}" for length, one in self._new.items())
            self._say(f"drafted tokens that count: {', '.join(told)}")
            self._publish(self._new)
            self._new, self._reported_at = defaultdict(Drafted), now

    @staticmethod
    def _key(lengths: Mapping[str, int]) -> tuple[int, int]:
        return len(lengths).bit_length(), (sum(lengths.values()) // max(1, len(lengths))).bit_length()


def _bucket(length: int) -> str:
    """The power of two below a length."""
    return format_length(max(_SHARE, 1 << (max(1, length).bit_length() - 1)))
