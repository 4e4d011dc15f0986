"""Sparse buckets of a plan that a test did not run sparse near the end of their lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sparsekv.planner.evaluation.given import NEAR_END
from sparsekv.planner.fixed_test import LONG
from sparsekv.plans.phases import DecodeBucket, PrefillBucket
from sparsekv.plans.quality import LengthScore
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length

_DENSE_FROM = 0.999  # a density that computes everything, but for how shares are counted


def untouched(plan: Plan, scores: Sequence[LengthScore]) -> Iterator[str]:
    """The sparse buckets of a plan that were not run sparse near the end of their own lengths; of those above `LONG`
    one is run for all."""
    shares = {
        "prefill": {one.length: one.density for one in scores},
        "decode": {one.length: one.read for one in scores},
    }
    for phase, part in (("prefill", plan.prefill), ("decode", plan.decode)):
        run = [
            n for n, share in shares[phase].items() if part and part.bucket(n).is_sparse_at(n) and share < _DENSE_FROM
        ]
        after, before = 0, None
        for bucket in part.lengths if part else ():
            end, longest = _end(plan, bucket), bucket.up_to or plan.model.context_length
            continued = isinstance(bucket, PrefillBucket) and _continues(bucket, before)
            was_run = any(max(after, NEAR_END * end) < length <= longest for length in run)
            was_run |= end > LONG and any(length > LONG for length in run)
            if bucket.is_sparse_at(longest) and not (continued or was_run):
                yield f"{phase} up to {format_length(end)} is sparse and was not run sparse near that length"
            after, before = bucket.up_to or after, bucket


def _end(plan: Plan, bucket: PrefillBucket | DecodeBucket) -> int:
    """The longest length that a bucket was made for. Decode beyond the longest planned one has the same budgets."""
    if bucket.up_to is not None:
        return bucket.up_to
    planned = [entry.length for entry in plan.cost.lengths] if plan.cost and isinstance(bucket, DecodeBucket) else []
    return max(planned, default=plan.model.context_length)


def _continues(bucket: PrefillBucket, before: object) -> bool:
    """Returns whether an extrapolated bucket is as another, or has the tokens that the one before it has at its end, as
    shares of the context."""
    if bucket.same_as or not (bucket.extrapolated and isinstance(before, PrefillBucket) and before.up_to):
        return bucket.extrapolated and bucket.same_as is not None
    length = before.up_to
    at_its_end = (group.model_copy(update={"pattern": group.pattern.of_context(length)}) for group in bucket.heads)
    return tuple(at_its_end) == before.heads
