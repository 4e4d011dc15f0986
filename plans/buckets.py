"""Length buckets: a phase says what to do up to each length; the last one is open-ended."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Protocol, TypeVar

from sparsekv.plans.parts import FieldError


class Bucket(Protocol):
    """Anything with an upper bound of the context length; None is no bound."""

    @property
    def up_to(self) -> int | None:
        """The longest context, past + chunk, that this bucket is for."""


AnyBucket = TypeVar("AnyBucket", bound=Bucket)


def check_ascending(buckets: Sequence[Bucket]) -> None:
    """Every context length falls in exactly one bucket.

    Raises:
        FieldError: the bounds do not ascend, or the last bucket is not open-ended, or another one is.
    """
    if not buckets or buckets[-1].up_to is not None:
        raise FieldError("expected a last bucket with `up_to: null`, for every longer context", "lengths")
    bounds = [bucket.up_to for bucket in buckets[:-1]]
    for position, bound in enumerate(bounds):
        if bound is None:
            raise FieldError("expected `up_to: null` in the last bucket only", "lengths", position, "up_to")
    for position, (shorter, longer) in enumerate(pairwise(bound for bound in bounds if bound is not None), start=1):
        if shorter >= longer:
            message = f"expected ascending lengths, found {shorter} before {longer}"
            raise FieldError(message, "lengths", position, "up_to")


def bucket_of(buckets: Sequence[AnyBucket], length: int) -> AnyBucket:
    """The first bucket that reaches `length` (past + chunk tokens)."""
    return next(bucket for bucket in buckets if bucket.up_to is None or length <= bucket.up_to)
