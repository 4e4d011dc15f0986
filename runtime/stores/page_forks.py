"""Decides which pages rows have once some became copies of others: full ones are shared, the next one to be written is
not."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import takewhile

from sparsekv.runtime.stores.page_driver import Pages
from sparsekv.runtime.stores.page_pool import PagePool
from sparsekv.runtime.stores.reservation import Change, common, total


@dataclass(slots=True)
class Fork:
    """A row of a reservation that becomes a copy.

    Attributes:
        at: the row.
        own: pages that it has.
        full: pages of the row that it becomes a copy of, which may be itself, that are not written to any more.
        nbytes: that count of that row.
        change: what becomes of its pages.
    """

    at: int
    own: Sequence[Pages]
    full: Sequence[Pages]
    nbytes: int
    change: Change = (0, ())

    def right(self, same: int) -> int:
        """First bytes that are right without a copy, where `same` first bytes of the row are those of its source."""
        return max(total(self.full), min(same, total(self.own[: self.change[0]])))


@contextmanager
def planned(pool: PagePool, forks: Sequence[Fork]) -> Iterator[None]:
    """Inside it, every fork has its `change`, with the users of the pages counted; where that fails, the users are as
    before.

    Raises:
        PageError, torch.OutOfMemoryError: there are no pages to be had.
    """
    shared = [one for fork in forks for one in fork.full]
    for one in shared:
        one.users += 1
    taken: list[Pages] = []
    had: list[Pages] = []  # of `shared`, in the same row as before
    try:
        for fork in forks:
            keep, rest = common(fork.own, fork.full), list[Pages]()
            had += fork.full[:keep]
            if keep == len(fork.full):
                rest += takewhile(lambda one: one.users == 1, fork.own[keep:])
            new = pool.take(fork.nbytes - total(fork.full) - total(rest))
            taken += new
            fork.change = keep + len(rest), [*fork.full[keep:], *new]
        yield
    except BaseException:
        pool.give([*shared, *taken])
        raise
    pool.give(had)
