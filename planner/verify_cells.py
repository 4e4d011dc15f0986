"""The cells of a test and their outcomes: dense first, then the plan on the prompts of those that are judged.

Outcomes are saved cell by cell: an interrupted run goes on with the same prompts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import torch
from pydantic import Field

from sparsekv.planner.evaluation import EvalSamples, Evaluator, PlanMode
from sparsekv.planner.evaluation.evaluator import DenseBatch
from sparsekv.planner.evaluation.given import NEAR_END, GivenSamples
from sparsekv.planner.evaluation.results import Exact, LongText, Outcome, Spent
from sparsekv.planner.fixed_test import LONG, TURNS, Cell, Sizes, missing_prompts, more_prompts
from sparsekv.planner.options import Settled
from sparsekv.planner.progress import StageStep
from sparsekv.planner.records import RunFile, RunRecord, RunSettings
from sparsekv.planner.tasks import Kit
from sparsekv.plans.errors import GateError
from sparsekv.plans.files import executed_digest
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.quality import HURT_BY_EVICTION, LengthScore
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import Digest, KVDtype, Length, Natural, Positive, Text, format_length
from sparsekv.runtime.hf.describe import takes_one_piece

# One key among hundreds like it, several values, two stages; and three that small models answer too. Each further cell
# is one more that a lossless plan can miss: the simulation of the test holds for as many as there are.
TESTED = ("kv_retrieval", "niah_multivalue", "two_stage", "niah_single", "quote_text", "quote_code")
BROKEN = 20.0  # nats, of a prompt without finite probabilities

Truth = Annotated[bool, Field(strict=True)]


def tasks_tested(model_type: str, *, evicts: bool) -> tuple[str, ...]:
    """The tasks of a test. Turns are left out where layers evict, whose second question is one, and where transformers
    cannot go on behind a prompt."""
    if evicts:
        return (*TESTED[:-2], *HURT_BY_EVICTION)
    return TESTED if takes_one_piece(model_type) else (*TESTED, TURNS)


def cells_tested(tasks: Sequence[str], lengths: Sequence[int]) -> list[tuple[int, str]]:
    """Lengths with their tasks: all at each, but for turns, which are at the longest that has bounds of its own."""
    longest = max((n for n in lengths if n <= LONG), default=max(lengths))
    return [(n, task) for n, task in product(lengths, tasks) if task != TURNS or n == longest]


def lengths_tested(plan: Plan, lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths at which a plan is sparse, all if it is at none; of those above `LONG` the longest alone."""
    sparse = list(filter(plan.is_sparse_at, lengths)) or lengths
    return tuple(n for n in sparse if n <= LONG or n == max(sparse))


def content_seed(plan: Plan, run: int) -> int:
    return int(hashlib.sha256(f"{executed_digest(plan)}/{run}".encode()).hexdigest()[:8], 16)


def modes_of(plan: Plan, options: Settled, dtype: torch.dtype) -> dict[str, PlanMode]:
    """The plan; and the kernels with every tile and token computed, over keys and values as the plan has them, but in
    float32, where their rounding is nothing, and but for shared choices, which transformers' own kernels attend to."""
    how = (options.backend, options.kv_dtype)
    modes = {BOTH: PlanMode(plan, "both", *how)}
    is_exact = plan.index_sharing is not None or (dtype == torch.float32 and options.kv_dtype == "auto")
    return modes if is_exact else modes | {WHOLE: PlanMode(_whole(plan), "both", *how)}


def _whole(plan: Plan) -> Plan:
    """The same phases by the same kernels, with every tile and token computed."""
    prefill = decode = None
    if plan.prefill:
        model, every = plan.model, AShape(sink=tokens(1), window=tokens(plan.model.context_length))
        heads = tuple(
            HeadGroup(layer=layer, heads=tuple(range(model.group_of(layer).heads)), pattern=every)
            for layer in model.full_layers
        )
        prefill = PrefillPlan(tile=plan.prefill.tile, lengths=(PrefillBucket(up_to=None, heads=heads),))
    if plan.decode:
        decode = DecodePlan(lengths=(DecodeBucket(up_to=None, dense=True),))
    return plan.model_copy(update={"prefill": prefill, "decode": decode, "kv_cache": None})


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
    texts: tuple[LongText, ...] = ()
    spent: tuple[Exact, Exact, Exact, Exact] = (0.0, 0.0, 0.0, 0.0)

    @property
    def key(self) -> tuple[str, int, bool]:
        return self.task, self.length, self.more


class OutcomesSettings(RunSettings):
    """The run of a test: only cells of equal settings are one run."""

    WHAT: ClassVar[str] = "outcomes of a verification"
    RECORDS: ClassVar = CellOutcomes
    kind: Literal["sparsekv.outcomes"] = "sparsekv.outcomes"
    schema_version: Literal[3] = 3
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
    """True of a file of this version; one of another is begun anew."""
    if path is None or not path.exists():
        return False
    with path.open("rb") as file:
        return b'"schema_version": 3' in file.readline(1 << 16)


def cell_of(parts: Sequence[CellOutcomes]) -> Cell:
    pairs = [pair for part in parts for pair in zip(part.dense, part.plan or part.dense, strict=True)]
    return Cell(
        task=parts[0].task,
        length=parts[0].length,
        prompts=len(pairs),
        answered=sum(bool(dense) for dense, _ in pairs),
        lost=sum(bool(dense) and not plan for dense, plan in pairs),
        won=sum(bool(plan) and not dense for dense, plan in pairs),
    )


def finite(outcome: Outcome) -> tuple[bool | None, float]:
    """The answer and divergence of an outcome; one without finite probabilities is wrong and far away."""
    if outcome.is_finite:
        return outcome.correct, outcome.kl
    return None if outcome.correct is None else False, BROKEN


def spent_of(parts: Sequence[CellOutcomes]) -> Spent:
    return sum((Spent(*part.spent) for part in parts), Spent())


# --- buckets that were not run ----------------------------------------------------------------------------------------

_DENSE_FROM = 0.999  # a density that computes everything, but for how shares are counted


def untouched(plan: Plan, scores: Sequence[LengthScore]) -> Iterator[str]:
    """The sparse buckets of a plan that were not run sparse near the end of their own lengths; of those above `LONG`
    one is run for all."""
    shares = {
        "prefill": {score.length: score.density for score in scores},
        "decode": {score.length: score.read for score in scores},
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


BOTH, WHOLE = "both", "every tile and token"  # modes: the plan, and its kernels alone


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a run, each measured once.

    Attributes:
        reads_texts: dense's own text is read after every prompt.
    """

    evaluator: Evaluator
    samples: EvalSamples
    kit: Kit
    sizes: Sizes
    file: RunFile[OutcomesSettings]
    step: StageStep
    reads_texts: bool

    def run(self) -> None:
        """Measures every cell, then further prompts of the judged ones."""
        measured = self.file.all(CellOutcomes)
        for length, task in cells_tested(self.samples.tasks, self.samples.lengths):
            if (task, length, False) not in measured:
                self.file.add(self._first(task, length))
        if isinstance(self.samples, GivenSamples):
            return
        cells = [cell_of([part]) for part in measured.values() if not part.more and part.plan and part.length <= LONG]
        count = more_prompts(self.sizes, cells)
        for cell in cells if count else ():
            if (cell.task, cell.length, True) not in measured:
                dense = self._dense(cell.task, cell.length, cell.prompts, count)
                self.file.add(self._beside(cell.task, cell.length, dense, more=True))

    def _first(self, task: str, length: int) -> CellOutcomes:
        """The first prompts of a cell: of dense alone where it answers too few."""
        if isinstance(self.samples, GivenSamples):
            return self._beside(task, length, self._dense(task, length, 0, len(self.samples.given[length])))
        if length > LONG:
            return self._beside(task, length, self._dense(task, length, 0, self.sizes.long_prompts))
        dense: list[DenseBatch] = []
        tried = answered = 0
        while count := missing_prompts(self.sizes, tried, answered):
            batches = self._dense(task, length, tried, count)
            tried, answered = tried + count, answered + sum(bool(outcome.correct) for outcome in _outcomes(batches))
            dense += batches
        if answered < self.sizes.answered:
            return CellOutcomes(task=task, length=length, dense=tuple(outcome.correct for outcome in _outcomes(dense)))
        return self._beside(task, length, dense)

    def _dense(self, task: str, length: int, first: int, count: int) -> list[DenseBatch]:
        """Runs dense on the next prompts, the first few of a cell apart, which are looked at closely."""
        asked = replace(self.samples, tasks=(task,), lengths=(length,), samples=count, first=first)
        drawn = asked.drawn(self.kit, length)
        closely = max(0, self.sizes.closely - first)
        plain = self.evaluator if self.reads_texts else replace(self.evaluator, text=0)
        parts = ((self.evaluator, drawn[:closely]), (plain, drawn[closely:]))
        return [one for evaluator, some in parts for one in (evaluator.dense(some, self.step) if some else ())]

    def _beside(self, task: str, length: int, dense: Sequence[DenseBatch], *, more: bool = False) -> CellOutcomes:
        plan = self.evaluator.beside(dense, BOTH, self.step)
        rounding: tuple[float, ...] = ()
        if WHOLE in self.evaluator.modes and not more:
            whole = self.evaluator.beside(_first_prompts(dense, self.sizes.closely), WHOLE)
            check_finite(whole.outcomes)
            rounding = whole.kl
        right, kl = zip(*map(finite, plan.outcomes), strict=True)
        return CellOutcomes(
            task=task,
            length=length,
            more=more,
            dense=tuple(outcome.correct for outcome in _outcomes(dense)),
            plan=right,
            kl=kl,
            rounding=rounding,
            texts=tuple(outcome.text for outcome in plan.outcomes if outcome.text and outcome.is_finite),
            spent=(plan.spent.tiles, plan.spent.causal_tiles, plan.spent.attended, plan.spent.cached),
        )


def _outcomes(dense: Sequence[DenseBatch]) -> tuple[Outcome, ...]:
    return tuple(outcome for batch in dense for outcome in batch.outcomes)


def _first_prompts(dense: Sequence[DenseBatch], least: int) -> Iterator[DenseBatch]:
    """The first batches with so many prompts."""
    count = 0
    for batch in dense:
        if count < least:
            yield batch
        count += len(batch.outcomes)


def check_finite(outcomes: Sequence[Outcome]) -> None:
    """Refuses kernels that a plan cannot be compared with."""
    bad = sum(not outcome.is_finite for outcome in outcomes)
    if bad:
        raise GateError(
            f"expected finite probabilities with every tile computed, found nan or infinity in {bad} of "
            f"{len(outcomes)} samples; check the model in this precision, or use another backend (--set backend=NAME)"
        )
