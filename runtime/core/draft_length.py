"""The length of drafts that dense attention verifies (docs/exact.md), by the time and gain of earlier cycles."""

from __future__ import annotations

from collections.abc import Sequence

from sparsekv.plans.brief import DRAFTS, tokens_a_cycle

_FIRST = 4  # before anything was measured
_UNTRIED = 0.97  # of what a length promises that would be captured first
_FRESH = 0.3  # weight of the latest time among those before it
_FADING = 0.98  # of what was agreed on before, a token
_PRIOR_AGREED, _PRIOR_ASKED = 4.5, 5.0
_FIRST_PAUSE = 256  # dense tokens before drafts that did not pay are tried again; twice as many each time


class DraftLength:
    """Chooses the number of tokens to draft that gives most tokens a second, by the share of drafts that counted lately
    and the seconds that cycles of each length took. Where no draft pays it is 0, dense decoding, but for a draft now
    and then of the shortest length that was tried, which is captured already.

    Args:
        sizes: the lengths to choose from, ascending, 0 among them.
    """

    def __init__(self, sizes: Sequence[int] = DRAFTS) -> None:
        self._sizes = sizes
        self._seconds: dict[int, float] = {}  # of a cycle
        self._seen: set[int] = set()
        self._agreed, self._asked = _PRIOR_AGREED, _PRIOR_ASKED
        self._pause, self._dense = _FIRST_PAUSE, 0

    @property
    def agreement(self) -> float:
        """Estimated share of drafted tokens that count where the ones before them do."""
        return self._agreed / self._asked

    def next(self, most: int) -> int:
        """Returns one of the sizes, at most `most`."""
        if 0 not in self._seconds:
            return 0
        sizes = [size for size in self._sizes if size <= most]
        if len(self._seconds) < 2:
            first = max(_FIRST, min(size for size in self._sizes if size))
            return max(size for size in sizes if size <= first)
        best = max(sizes, key=self._tokens_a_second)
        shortest = min(size for size in self._seen if size)
        if best or self._dense < self._pause or most < shortest:
            return best
        self._pause *= 2
        self._dense = 0  # a host may ask again before it has run what it asked for
        return shortest

    def ran(self, drafted: int, seconds: float, accepted: Sequence[int]) -> None:
        """A cycle is over, the check included; `accepted` are the drafted tokens that counted, of each growing row."""
        self._dense = 0 if drafted else self._dense + 1
        for count in accepted if drafted else ():
            asked = min(count + 1, drafted)
            self._agreed = self._agreed * _FADING**asked + count
            self._asked = self._asked * _FADING**asked + asked
        if drafted not in self._seen:  # it compiled, or was captured
            self._seen.add(drafted)
            return
        before = self._seconds.get(drafted, seconds)
        self._seconds[drafted] = before + _FRESH * (seconds - before)

    def _tokens_a_second(self, drafted: int) -> float:
        tokens = tokens_a_cycle(self.agreement, drafted)
        return tokens / self._expected_seconds(drafted) * (1.0 if drafted in self._seen else _UNTRIED)

    def _expected_seconds(self, drafted: int) -> float:
        if drafted in self._seconds:
            return self._seconds[drafted]
        dense = self._seconds[0]
        steps = [max(seconds - dense, 0.0) / size for size, seconds in self._seconds.items() if size]
        return dense + drafted * sum(steps) / len(steps)
