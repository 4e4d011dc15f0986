"""The outcomes of a test under way, cell by cell: an interrupted run goes on with the same prompts; and the sparse
buckets of a plan that a test did not run sparse near the end of their lengths."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from sparsekv.planner.evaluation.given import NEAR_END
from sparsekv.planner.evaluation.results import Outcome, Spent
from sparsekv.planner.fixed_test import LONG, Cell
from sparsekv.planner.records import RunFile, RunRecord, RunSettings
from sparsekv.plans.phases import DecodeBucket, PrefillBucket
from sparsekv.plans.quality import LengthScore
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import Digest, KVDtype, Length, Natural, Part, Positive, Text, format_length

BROKEN = 20.0  # nats, of a prompt without finite probabilities

Exact = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # not rounded: two halves are to give one whole
Truth = Annotated[bool, Field(strict=True)]


class TextRow(Part):
    """Dense's own continuation of a prompt, read by the plan: divergence in nats, and tokens that agree."""

    kl: Exact
    agreed: Natural
    scored: Positive


class CellOutcomes(RunRecord):
    """Prompts of one task and length, in the order in which they were drawn.

    Attributes:
        more: they are behind those that decided whether the cell is judged.
        dense: whether dense answers each; None where there is no answer to compare.
        plan, kl: the same of the plan, and its divergence in nats; empty where the cell is not judged.
        rounding: divergence of the kernels with every tile and token computed, of the first prompts.
    """

    task: Text
    length: Length
    more: Truth = False
    dense: tuple[Truth | None, ...]
    plan: tuple[Truth | None, ...] = ()
    kl: tuple[Exact, ...] = ()
    rounding: tuple[Exact, ...] = ()
    texts: tuple[TextRow, ...] = ()
    spent: tuple[Exact, Exact, Exact, Exact] = (0.0, 0.0, 0.0, 0.0)

    @property
    def key(self) -> tuple[str, int, bool]:
        """See `RunRecord`."""
        return self.task, self.length, self.more


class OutcomesSettings(RunSettings):
    """The run of a test: only cells of equal settings are one run."""

    WHAT: ClassVar[str] = "outcomes of a verification"
    RECORDS: ClassVar = CellOutcomes
    kind: Literal["sparsekv.outcomes"] = "sparsekv.outcomes"
    schema_version: Literal[2] = 2
    plan: Digest
    architecture: Digest
    weights: Digest | None = None
    dtype: Text
    device: Text
    backend: Text
    versions: dict[Text, Text]
    sizes: dict[Text, Exact | Natural]
    seed: Natural
    run: Positive
    tasks: tuple[Text, ...]
    lengths: tuple[Length, ...]
    prefill_chunk: Length | None = None
    kv_dtype: KVDtype = "auto"
    prompts: Digest | None = None


def outcomes_file(settings: OutcomesSettings, path: Path | None) -> RunFile[OutcomesSettings]:
    """The file of an interrupted run with the same settings, or a new one in place of any other."""
    earlier = RunFile.earlier(OutcomesSettings, path) if _is_of_tests(path) else None
    if earlier is not None and not list(earlier.settings.differences(dict(settings))):
        return earlier
    if path is not None:
        path.unlink(missing_ok=True)
    return RunFile(settings, path)


def _is_of_tests(path: Path | None) -> bool:
    """Returns whether a file is of this version; one of another is begun anew."""
    if path is None or not path.exists():
        return False
    with path.open("rb") as file:
        return b'"schema_version": 2' in file.readline(1 << 16)


def cell_of(parts: Sequence[CellOutcomes]) -> Cell:
    """Right answers of all prompts of a cell."""
    pairs = [pair for one in parts for pair in zip(one.dense, one.plan or one.dense, strict=True)]
    return Cell(
        task=parts[0].task,
        length=parts[0].length,
        prompts=len(pairs),
        answered=sum(bool(dense) for dense, _ in pairs),
        lost=sum(bool(dense) and not plan for dense, plan in pairs),
        won=sum(bool(plan) and not dense for dense, plan in pairs),
    )


def finite(outcome: Outcome) -> tuple[bool | None, float]:
    """Whether an outcome is right, and its divergence; one without finite probabilities is wrong and far away."""
    if outcome.is_finite:
        return outcome.correct, outcome.kl
    return None if outcome.correct is None else False, BROKEN


def spent_of(parts: Sequence[CellOutcomes]) -> Spent:
    """The attention that all of them computed."""
    return sum((Spent(*one.spent) for one in parts), Spent())


# --- buckets that were not run ----------------------------------------------------------------------------------------

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
    return PrefillBucket(up_to=length, heads=tuple(at_its_end)).heads == before.heads
