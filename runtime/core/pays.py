"""From how many tokens on sparse attention is faster than dense attention on the device at hand, and how many tokens
of a draft pay that dense attention verifies (docs/exact.md).

A host measures both for a few sizes of step, before the first prompt, and keeps the thresholds: a chunk or a decode
step with at least so many rows is sparse from that context on. More rows never raise a threshold, as they share an
index or the launches of a step. Contexts to choose from are powers of sqrt(2), the first of every bucket of lengths and
the longest, so that noise of a few percent moves a threshold to a neighbour at most. A plan computes another share in
each bucket. Chunks have thresholds in each; decode steps are sparse from where that is faster in all later buckets,
as rows of several buckets share a step.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby

from sparsekv.plans.brief import DRAFTS, tokens_a_cycle
from sparsekv.plans.errors import UsageError
from sparsekv.plans.types import format_length, parse_length

Gain = Callable[[int, int], float]
"""Dense time over sparse time of a step with so many rows at a context of so many tokens; nan where that cannot be
measured."""

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The contexts from which steps of each size are sparse."""

    rows: tuple[int, ...] = ()  # sizes of step, ascending; smaller steps than the first are dense
    tokens: tuple[int, ...] = ()  # the context of each size, descending or equal
    until: int = 0  # the longest context that these are of, where others are `behind`
    behind: Thresholds | None = None

    def at(self, rows: int) -> int | None:
        """The context from which a step with so many rows is sparse; None where it is dense at every length."""
        position = bisect_right(self.rows, rows)
        return self.tokens[position - 1] if position else None

    def pays(self, rows: int, tokens: int) -> bool:
        if self.behind is not None and tokens > self.until:
            return self.behind.pays(rows, tokens)
        least = self.at(rows)
        return least is not None and tokens >= least

    def least(self, lengths: Iterable[int]) -> int | None:
        """The context from which requests of such lengths are sparse in one step; None where all are dense. As many as
        a size counts have to be so long: shorter ones save nothing of what the step costs more."""
        longest = sorted(lengths, reverse=True)
        sizes = zip(reversed(self.rows), reversed(self.tokens), strict=True)
        return next((least for rows, least in sizes if rows <= len(longest) and longest[rows - 1] >= least), None)

    def said(self, form: Callable[[int, int], str], between: str) -> str:
        return between.join(map(form, self.rows, self.tokens))

    def __str__(self) -> str:
        own = self.said(lambda rows, tokens: f"{format_length(tokens)}x{rows}", ",") or "never"
        return own if self.behind is None else f"{own}:{format_length(self.until)}/{self.behind}"


EVERYWHERE, NOWHERE = Thresholds((1,), (0,)), Thresholds()


@dataclass(frozen=True, slots=True)
class Pays:
    """Where sparse attention is faster: prompts by rows of a chunk, decode by requests of a step."""

    prefill: Thresholds = EVERYWHERE
    decode: Thresholds = EVERYWHERE
    mixed: Thresholds | None = None  # decode in a step that is not captured, as beside prompts; None: as `decode`

    def of_decode(self, captured: bool) -> Thresholds:
        return self.decode if captured or self.mixed is None else self.mixed

    def __str__(self) -> str:
        """As `parse` reads it, such as `prefill=11kx512:16k/23kx8k decode=40kx1,11kx4 mixed=64kx4`."""
        mixed = "" if self.mixed is None else f" mixed={self.mixed}"
        return f"prefill={self.prefill} decode={self.decode}{mixed}"

    @property
    def told(self) -> str:
        """The rule in words."""
        said = [("prefill", _chunks(self.prefill)), ("decode", _times(self.decode))]
        if self.mixed not in (None, self.decode):
            said.append(("decode beside prompts", _times(self.mixed)))
        return "; ".join(
            f"sparse {phase} from {where}" if where else f"{phase} is dense at every length" for phase, where in said
        )


def _chunks(thresholds: Thresholds) -> str:
    said = thresholds.said(lambda rows, tokens: f"{_about(tokens)} in chunks of {rows} rows or more", ", ")
    if thresholds.behind is None:
        return said
    parts = f"{said} to {_about(thresholds.until)}" if said else "", _chunks(thresholds.behind)
    return ", from ".join(part for part in parts if part)


def _times(thresholds: Thresholds) -> str:
    return thresholds.said(lambda rows, tokens: f"{_about(tokens)} x {rows}", ", ")


def _about(tokens: int) -> str:
    return f"{tokens / 1024:.0f}k tokens" if tokens >= 1024 else f"{tokens} tokens"


ALWAYS = Pays()
NEVER = Pays(NOWHERE, NOWHERE)

_RULE = re.compile(r"prefill=(\S+) decode=(\S+)(?: mixed=(\S+))?")


def parse(text: str) -> Pays:
    """Reads `always`, `never`, or thresholds as `str` of them writes."""
    if text in ("always", "never"):
        return ALWAYS if text == "always" else NEVER
    try:
        match = _RULE.fullmatch(text)
        if match is None:
            raise ValueError
        prefill, *others = (_thresholds(phase) for phase in match.groups() if phase is not None)
        if any(phase.behind is not None for phase in others):
            raise ValueError
        return Pays(prefill, *others)
    except (ValueError, UsageError):
        raise UsageError(
            "expected always, never, or thresholds such as 'prefill=18kx512,8kx4k decode=40kx1,11kx4' (context x "
            "rows, rows ascending, contexts descending; of prompts to 16k tokens and longer ones apart as in "
            f"prefill=11kx512:16k/23kx8k), found {text!r:.120}"
        ) from None


def _thresholds(text: str) -> Thresholds:
    *parts, last = text.split("/")
    thresholds = _of_pairs(last)
    for part in reversed(parts):
        pairs, _, end = part.partition(":")
        before, until = _of_pairs(pairs), parse_length(end)
        if before.tokens[:1] > (until,) or (thresholds.behind is not None and until >= thresholds.until):
            raise ValueError
        thresholds = replace(before, until=until, behind=thresholds)
    return thresholds


def _of_pairs(text: str) -> Thresholds:
    if text == "never":
        return Thresholds()
    pairs = [part.split("x") for part in text.split(",")]
    tokens, rows = zip(*((_tokens(context), _tokens(size)) for context, size in pairs), strict=True)
    if list(rows) != sorted(set(rows)) or list(tokens) != sorted(tokens, reverse=True):
        raise ValueError
    return Thresholds(rows, tokens)


def _tokens(text: str) -> int:
    return 0 if text == "0" else parse_length(text)


def contexts(shortest: int, longest: int) -> tuple[int, ...]:
    """Powers of sqrt(2), rounded up to whole tokens, from `shortest` to `longest`."""
    first, last = (round(2 * math.log2(max(1, length)) + up, 6) for length, up in ((shortest, 0), (longest, 1e-9)))
    return tuple(math.ceil(2 ** (half / 2)) for half in range(math.ceil(first), math.floor(last) + 1))


def measure_each(
    sizes: Sequence[int],
    lengths: Sequence[int],
    gain: Gain,
    *,
    bounds: Sequence[int],
    margin: float = 1.0,
    until: Clock | None = None,
    hint: Thresholds = EVERYWHERE,
) -> Thresholds:
    """Finds the thresholds of every bucket by itself, short contexts first; arguments as in `measure`. A bucket that
    cannot be measured, or that time does not reach, goes on with those of the one before it."""
    known: list[bool] = []  # whether each measurement gave a number

    def timed(rows: int, length: int) -> float:
        times = gain(rows, length)
        known.append(not math.isnan(times))
        return times

    parts: list[tuple[int, Thresholds, int]] = []  # the first context and the last of each
    for bucket, of_bucket in groupby(lengths, partial(bisect_left, bounds)):
        choices, before = tuple(of_bucket), len(known)
        end = bounds[bucket] if bucket < len(bounds) else choices[-1]
        part = measure(sizes, choices, timed, margin=margin, until=until, hint=NOWHERE)
        if parts and not any(known[before:]):
            parts[-1] = (*parts[-1][:2], end)
        else:
            parts.append((choices[0], part, end))
    if known and not any(known):
        return _descending((size, context) for size in sorted(sizes) if (context := hint.at(size)) is not None)
    return _joined(parts)


def _joined(parts: Sequence[tuple[int, Thresholds, int]]) -> Thresholds:
    """One set for buckets of which the later ones are sparse from their first context on."""
    begin, joined = math.inf, NOWHERE
    for first, part, end in reversed(parts):
        goes_on = begin < math.inf and (joined.rows, joined.tokens) == (part.rows[:1], (begin,))
        if begin == math.inf:
            joined = part
        elif goes_on:
            joined = replace(joined, rows=part.rows, tokens=part.tokens)
        elif part.rows:
            joined = replace(part, until=end, behind=joined)
        begin = first
    return joined


def measure(
    sizes: Iterable[int],
    lengths: Sequence[int],
    gain: Gain,
    *,
    bounds: Sequence[int] = (),
    margin: float = 1.0,
    until: Clock | None = None,
    hint: Thresholds = EVERYWHERE,
) -> Thresholds:
    """Finds the threshold of each size, the largest size first, from short contexts to long ones: a long one takes many
    times as long to time. In the time left, each is confirmed at the first context of every later bucket.

    Args:
        lengths: contexts to choose from, ascending.
        gain: measures; a size with more rows than the context is never asked.
        bounds: the longest context of every bucket but the last.
        margin: the gain from which sparse is taken.
        until: seconds that are left; sizes whose turn comes later are dense, and thresholds are not confirmed.
        hint: of sizes that cannot be measured at any context.
    """

    gains: dict[int, dict[int, float]] = {size: {} for size in sorted(set(sizes), reverse=True)}

    def timed(size: int, length: int) -> float:
        if length not in gains[size]:
            if until is not None and until() <= 0:
                raise _LateError
            gains[size][length] = gain(size, length)
        return gains[size][length]

    thresholds: dict[int, int] = {}
    with suppress(_LateError):
        least = 0  # a smaller step never has a lower threshold
        for size, asked in gains.items():
            at = [length for length in lengths if length >= max(least, size)]
            if not at and not least:  # a chunk has no more rows than its context, and smaller ones are left
                continue
            first = _first(at, partial(timed, size), margin)
            if first is None:
                if not asked or not all(map(math.isnan, asked.values())):
                    break  # nor does any smaller step gain
                hinted = hint.at(size)
                if hinted is None:
                    continue
                first = least = max(least, hinted)
            elif first > at[0]:  # the shortest context that so many rows can have says nothing of shorter ones
                least = first
            thresholds[size] = first
        begins = {next(bucket) for _, bucket in groupby(lengths, partial(bisect_left, bounds))}
        for size in tuple(thresholds):
            for length in lengths:
                confirms = length in begins or length == thresholds[size]  # which a larger step may have moved
                if confirms and length >= max(size, thresholds[size]) and timed(size, length) < margin:
                    behind = [longer for longer in lengths if longer > length]
                    first = _first(behind, partial(timed, size), margin) or _ENDLESS
                    thresholds |= {rows: max(first, now) for rows, now in thresholds.items() if rows <= size}
    return _descending((size, first) for size, first in reversed(thresholds.items()) if first != _ENDLESS)


_ENDLESS = 1 << 62


class _LateError(Exception):
    """No time is left."""


def _first(lengths: Sequence[int], gain: Callable[[int], float], margin: float) -> int | None:
    """The first length at which sparse is faster, taken to be so at all longer ones."""
    if not lengths:
        return None
    low, high, last = 0, 0, len(lengths) - 1
    while not gain(lengths[high]) >= margin:
        if high == last:
            return None
        low, high = high + 1, min(2 * high + 1, last)
    while low < high:
        middle = (low + high) // 2
        if gain(lengths[middle]) >= margin:
            high = middle
        else:
            low = middle + 1
    return lengths[high]


def _descending(thresholds: Iterable[tuple[int, int]]) -> Thresholds:
    """Each size that lowers the threshold, of sizes in ascending order."""
    lower: list[tuple[int, int]] = []
    for size, tokens in thresholds:
        if not lower or tokens < lower[-1][1]:
            lower.append((size, tokens))
    return Thresholds(tuple(size for size, _ in lower), tuple(tokens for _, tokens in lower))


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
