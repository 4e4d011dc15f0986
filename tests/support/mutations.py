"""Valid documents after a few changes that know their structure, and what becomes of them behind a reader.

A change replaces, removes, doubles, moves, retypes or nudges one value, or puts in what stands under the same name
elsewhere, so that many of the documents still pass the reader and reach what lies behind it.
"""

from __future__ import annotations

import random
import signal
import traceback
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

from sparsekv.plans.errors import SparseKVError

MOST_MESSAGE = 3000  # characters
MOST_SECONDS = 20.0  # of one document, on the CPU

_INTS = (0, 1, -1, 2, 3, 63, 64, 65, 127, 128, 1023, 1024, 2048, 1 << 16, 1 << 20, (1 << 31) - 1, 1 << 31, 1 << 40)
_HUGE = ((1 << 40) + 1, (1 << 53) - 1, 1 << 53, (1 << 63) - 1, 1 << 63, -(1 << 63), 1 << 64, 10**99)
_FLOATS = (0.0, -0.0, 1.0, 0.5, 1e-6, 5e-324, 1e-300, 1e300, 1.7e308, 1e9, -1e-9, 1.0000001, 0.1 + 0.2)
_NO_NUMBERS = (float("nan"), float("inf"), float("-inf"))
_TEXTS = (
    *("", " ", "0", "0-3", "3-0", "0-1023", "0-99999", "0,0", "5", "-1", "1m", "1M", "max", "same", "all", "dense"),
    *("null", "true", "no", "é", "漢字", "\u202e", "\U0001f600", "a\nb", "\x7f", "\x00", "[red]x[/red]", "{x}", "%s"),
    *("a" * 513, "k" * 6000, "/etc/passwd", "sha256:" + "0" * 64, "1e-05", "4\u0664"),
)
_VALUES = (*_INTS, *_HUGE, *_FLOATS, *_NO_NUMBERS, *_TEXTS, None, True, False)


class Mutations:
    """Documents made of JSON data, after one to four changes; document `n` is always the same."""

    def __init__(self, *documents: Any) -> None:
        self._documents = documents
        self._named: dict[str, list[Any]] = {}
        for document in documents:
            self._collect(document)

    def _collect(self, value: Any) -> None:
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(key, str):
                self._named.setdefault(key, []).append(item)
            if isinstance(item, dict | list):
                self._collect(item)

    def __getitem__(self, number: int) -> Any:
        draw = random.Random(number)
        document = draw.choice(self._documents)
        for _ in range(draw.choice((1, 1, 1, 2, 2, 3, 4))):
            document = self._changed(document, draw)
        return document

    def _changed(self, value: Any, draw: random.Random) -> Any:
        """A copy as far as it differs."""
        copy = value.copy()
        if not copy:
            return copy
        key = draw.choice(list(copy)) if isinstance(copy, dict) else draw.randrange(len(copy))
        item = copy[key]
        if isinstance(item, dict | list) and item and draw.random() < 0.85:
            copy[key] = self._changed(item, draw)
        else:
            draw.choice(_ACTIONS)(self, copy, key, draw)
        return copy

    def _replace(self, place: Any, key: Any, draw: random.Random) -> None:
        many = ([place[key]] * 1100, {"k" * 6000: place[key]})
        place[key] = draw.choice((*_VALUES, *many, [], {}, [place[key]], {"tokens": draw.choice(_INTS)}))

    def _remove(self, place: Any, key: Any, draw: random.Random) -> None:
        del place[key]

    def _double(self, place: Any, key: Any, draw: random.Random) -> None:
        if isinstance(place, list):
            place.insert(draw.choice((key, len(place))), place[key])
        else:
            place[draw.choice((f"{key}s", f" {key}", key.upper(), *self._named))] = place[key]

    def _swap(self, place: Any, key: Any, draw: random.Random) -> None:
        other = draw.choice(list(place)) if isinstance(place, dict) else draw.randrange(len(place))
        place[key], place[other] = place[other], place[key]

    def _take(self, place: Any, key: Any, draw: random.Random) -> None:
        """What stands under the same name elsewhere, or under any name."""
        name = key if isinstance(key, str) and key in self._named and draw.random() < 0.9 else None
        place[key] = draw.choice(self._named[name or draw.choice(list(self._named))])

    def _nudge(self, place: Any, key: Any, draw: random.Random) -> None:
        item = place[key]
        if isinstance(item, bool) or item is None:
            place[key] = draw.choice((True, False, None, 1))
        elif isinstance(item, int):
            near = (item + 1, item - 1, 2 * item, item // 2, -item, item * 1000, item + 64, float(item))
            place[key] = draw.choice(near)
        elif isinstance(item, float):
            near = (item * 1.01, item * 0.99, item * 10, item / 10, 1 - item, item * 1e300, item * 1e-300, -item)
            place[key] = draw.choice(near)
        elif isinstance(item, str):
            at = draw.randrange(len(item) + 1)
            place[key] = item[:at] + draw.choice(("", *"0159-, a\tf", "é", "\u2028")) + item[at + draw.randrange(2) :]
        elif isinstance(item, list):
            half = len(item) // 2
            place[key] = draw.choice((item[:-1], item[1:], item[::-1], item + item[-1:], item[:half], item * 2))
        else:
            place[key] = dict(reversed(item.items()))

    def _retype(self, place: Any, key: Any, draw: random.Random) -> None:
        item = place[key]
        if isinstance(item, dict):
            place[key] = draw.choice((list(item.values()), list(item), str(item)[:99], item | {"more": 1}))
        elif isinstance(item, list):
            place[key] = draw.choice(({str(n): one for n, one in enumerate(item)}, item[:1], [item], str(item)[:99]))
        else:
            place[key] = draw.choice((str(item), [item], {str(key): item}, bool(item)))


_ACTIONS = (
    *(Mutations._replace, Mutations._remove, Mutations._double, Mutations._swap),
    *(Mutations._take, Mutations._take, Mutations._nudge, Mutations._nudge, Mutations._retype),
)


def survey(documents: Mutations, work: Callable[[Any], None], numbers: Sequence[int]) -> tuple[Counter[str], str]:
    """`work` on each of the documents.

    Returns:
        How many it passed and refused with each error of ours; and a line for each other way in which it ended, with
        the first document that shows it.
    """
    ends: Counter[str] = Counter()
    faults: dict[str, list[int]] = {}
    before = signal.signal(signal.SIGVTALRM, _out_of_time)
    try:
        for number in numbers:
            document = documents[number]
            signal.setitimer(signal.ITIMER_VIRTUAL, MOST_SECONDS)
            try:
                end, fault = _end(work, document)
            finally:
                signal.setitimer(signal.ITIMER_VIRTUAL, 0.0)
            ends[end] += 1
            if fault:
                faults.setdefault(fault, []).append(number)
    finally:
        signal.signal(signal.SIGVTALRM, before)
    return ends, "\n".join(f"{len(at)} times, document {at[0]}: {fault}" for fault, at in faults.items())


def _end(work: Callable[[Any], None], document: Any) -> tuple[str, str]:
    try:
        work(document)
    except SparseKVError as error:
        long = len(str(error)) > MOST_MESSAGE
        return type(error).__name__, f"a message of {len(str(error))}: {error!s:.60}" if long else ""
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        where = " < ".join(f"{frame.filename.split('/')[-1]}:{frame.lineno}" for frame in reversed(frames[-4:]))
        return "unexpected", f"{type(error).__name__} at {where}: {str(error)[:150]!r}"
    return "passed", ""


class _OutOfTime(BaseException):
    """One document took too long."""


def _out_of_time(number: int, frame: object) -> None:
    raise _OutOfTime(f"more than {MOST_SECONDS:g} s")
