"""Which pages rows have once some became copies of others: full ones are shared, the next one to be written is not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import accumulate

from sparsekv.runtime.stores.page_driver import Pages
from sparsekv.runtime.stores.page_pool import PagePool
from sparsekv.runtime.stores.reservation import common, total


@dataclass(slots=True)
class Fork:
    """A row of a reservation that becomes a copy.

    Attributes:
        at: the row.
        own: pages that it has.
        source: those of the row that it becomes a copy of; may be its own.
        nbytes: of these that count.
        moves: the copy has all pages of the source, which ceases to be.
        pages: that it has then.
    """

    at: int
    own: Sequence[Pages]
    source: Sequence[Pages]
    nbytes: int
    moves: bool
    pages: list[Pages] = field(default_factory=list)

    @property
    def full(self) -> list[Pages]:
        """Pages of the source that are not written to any more."""
        return [
            one for one, end in zip(self.source, ends(self.source), strict=True) if self.moves or end <= self.nbytes
        ]

    def right(self, same: int) -> int:
        """First bytes that are right without a copy, where `same` first bytes of the row are those of its source."""
        return max(total(self.full), min(same, total(self.own[: common(self.own, self.pages)])))


def ends(pages: Sequence[Pages]) -> Iterator[int]:
    """Where each ends, in bytes from the first one's begin."""
    return accumulate(one.nbytes for one in pages)


@contextmanager
def planned(pool: PagePool, forks: Sequence[Fork]) -> Iterator[None]:
    """Inside it, every fork has the `pages` for its row to be given, with their users counted; where that fails, the
    users are as before.

    Raises:
        PageError, torch.OutOfMemoryError: there are no pages to be had.
    """
    shared = [one for fork in forks for one in fork.full]
    for one in shared:
        one.users += 1
    taken: list[Pages] = []
    try:
        for fork in forks:
            full = fork.full
            has = common(fork.own, full) == len(full)
            rest = _unshared(fork.own[len(full) :]) if has else []
            new = pool.take(fork.nbytes - total(full) - total(rest))
            taken += new
            fork.pages = [*full, *rest, *new]
        yield
    except BaseException:
        pool.give([*shared, *taken])
        raise
    for fork in forks:
        pool.give(fork.full[: common(fork.own, fork.full)])  # which the row had before


def _unshared(pages: Sequence[Pages]) -> list[Pages]:
    """The first ones that no other row has."""
    count = next((at for at, one in enumerate(pages) if one.users > 1), len(pages))
    return list(pages[:count])
