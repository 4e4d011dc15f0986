"""The heads of a layer by the kind of their pattern, known again at the next call.

What the host works out for a layer follows from its patterns, and every layer and every prompt brings the same few
again. Patterns are compared by identity, which takes a tenth of the time of comparing what is in them.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from sparsekv.plans.patterns import Dense, Pattern

_DENSE = Dense()


class Same:
    """Objects in order, equal to nothing but the same objects; for keys of what is kept."""

    __slots__ = ("objects",)

    def __init__(self, objects: tuple[Any, ...]) -> None:
        self.objects = objects

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.objects)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Same)
            and len(self.objects) == len(other.objects)
            and all(map(operator.is_, self.objects, other.objects))
        )


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """The heads of one kind."""

    kind: type[Pattern]
    heads: tuple[int, ...]
    patterns: tuple[Pattern, ...]


def by_kind(patterns: Sequence[Pattern]) -> tuple[HeadGroup, ...]:
    """The heads of each kind, in the order of their first heads.

    Equal layers are given the very same patterns, whoever made those that they brought.
    """
    # Plans make the patterns of dense heads anew for every call.
    return _of_same(Same(tuple([_DENSE if type(pattern) is Dense else pattern for pattern in patterns])))


@lru_cache(maxsize=512)
def _of_same(patterns: Same) -> tuple[HeadGroup, ...]:
    return _of_equal(patterns.objects)


@lru_cache(maxsize=512)
def _of_equal(patterns: tuple[Pattern, ...]) -> tuple[HeadGroup, ...]:
    kinds: dict[type[Pattern], list[int]] = {}
    for head, pattern in enumerate(patterns):
        kinds.setdefault(type(pattern), []).append(head)
    return tuple(
        HeadGroup(kind, tuple(heads), tuple(patterns[head] for head in heads)) for kind, heads in kinds.items()
    )
