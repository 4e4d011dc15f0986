"""The next plan after one that missed its test: denser at the lengths that missed, and at last dense there.

Both phases are tested together, so that both become denser: each is planned for half of what it lost before by the
profile. Three plans are tried; a length that missed in the last of them becomes dense.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from sparsekv.planner.options import Settled
from sparsekv.plans.types import format_length


def denser(options: Settled, lengths: Collection[int]) -> Settled:
    """Options of the next denser plan at these lengths."""
    return options.but(missed={**options.missed, **{length: options.missed_at(length) + 1 for length in lengths}})


def dense_at(options: Settled, lengths: Collection[int]) -> Settled:
    """Options of a plan that is dense at these lengths."""
    return options.but(dense=tuple(sorted({*options.dense, *lengths})))


def denser_remarks(options: Settled) -> Iterator[str]:
    """A line for each length at which a plan is denser than what was asked for."""
    for length, times in sorted(options.missed.items()):
        if length not in options.dense:
            plans = "a plan" if times == 1 else f"{times} plans"
            yield f"{format_length(length)} is planned for a smaller loss: {plans} missed the test there"


def dense_remarks(options: Settled, lost: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """A line for each length that is dense, with what each plan lost there."""
    for length in options.dense:
        told = ", then ".join(lost.get(length, ()))
        yield f"{format_length(length)} is dense: every plan that was tried lost too much there ({told})"
