"""Runs the fixed test of a plan (fixed_test.py): dense and the plan on prompts that nobody chose.

Both phases run together, at every planned length that is sparse, sparse always on. Tasks are fixed here. Prompts follow
from what the plan executes and from the number of the run, so that no earlier run saw them. Dense runs first, cell by
cell: whether a cell is judged, and on how many prompts, follows from dense alone (verify_cells.py). A plan is verified
where the test is passed and every sparse bucket was run sparse near the end of its lengths (verify_record.py). An
interrupted run goes on with the same prompts (verify_record.py).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from sparsekv.kernels.backends import choose_backend
from sparsekv.planner.common_options import GivenPrompt, digest_of_prompts
from sparsekv.planner.evaluation import EvalSamples, Mode, PhaseName, PlanMode, evaluate, opened
from sparsekv.planner.evaluation.given import GivenSamples, HeldOut, samples_of
from sparsekv.planner.evaluation.results import EvalResult
from sparsekv.planner.fixed_test import (
    LONG,
    SIZES,
    FixedTest,
    Sizes,
    divergence_bounds,
    level_of_run,
)
from sparsekv.planner.options import Settled
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.planner.records import RunFile, versions
from sparsekv.planner.tasks import Kit, Split, prepare
from sparsekv.planner.verify_cells import BOTH, WHOLE, Cells
from sparsekv.planner.verify_record import CellOutcomes, OutcomesSettings, cell_of, outcomes_file, spent_of, untouched
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import executed_digest
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.quality import HURT_BY_EVICTION, CellScore, Excludes, LengthScore, Quality
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.describe import config_of, takes_one_piece
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.model_config import device_name, dtype_name, has_soft_cap

# One key among hundreds like it, several values, two stages; and three that small models answer too. Each further cell
# is one more that a lossless plan can miss: the simulation of the test holds for as many as there are.
TESTED = ("kv_retrieval", "niah_multivalue", "two_stage", "niah_single", "quote_text", "quote_code")
_TEXT, _LONG_TEXT = 64, 128  # tokens of dense's own text: of a few prompts, and of all where layers evict tokens
_BROKEN_ROUNDING = 0.1  # nats
STEP = 16_384  # tokens of a prompt at once
DIAGNOSED = 8  # prompts of a task and length


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of a test.

    Attributes:
        reasons: each fact that keeps the plan from being verified, in a line.
    """

    quality: Quality
    test: FixedTest
    reasons: tuple[str, ...]

    @property
    def verified(self) -> bool:
        return not self.reasons

    @property
    def passed(self) -> bool:
        """Returns whether no bound is above its limit."""
        return not self.quality.missed

    def recorded(self, plan: Plan) -> Plan:
        """The plan with its quality and its status."""
        status = "verified" if self.verified else "unverified"
        return plan.model_copy(update={"status": status, "quality": self.quality})


@dataclass(frozen=True, slots=True)
class VerifyRun:
    """One run of the test on a plan.

    Attributes:
        size: a name in `SIZES`.
        number: of the run on this plan, from 1.
        level: the probability of verifying it by mistake.
        path: where outcomes are until the run ends; None keeps them in memory.
    """

    size: Literal["small", "full"]
    number: int
    level: float
    path: Path | None = None

    @classmethod
    def after(cls, plan: Plan, size: Literal["small", "full"], path: Path | None = None) -> VerifyRun:
        """The run behind those that a plan records."""
        number = plan.quality.run + 1 if plan.quality else 1
        return cls(size, number, level_of_run(number), path)


def verify(
    loaded: LoadedModel,
    plan: Plan,
    options: Settled,
    run: VerifyRun,
    progress: Progress | None = None,
    kit: Kit | None = None,
    *,
    prompts: Sequence[GivenPrompt] = (),
    held_out: HeldOut | None = None,
) -> Verification:
    """Runs the test of a plan beside dense.

    Args:
        options: settled: verify_lengths, verify_tasks, verify_chosen, verify_seed, batch, prefill_chunk, backend. By
            default prompts run in steps of `STEP` tokens, whole where layers evict or are in host memory.
        prompts: of the caller, in place of samples of tasks; they verify nothing, as they were chosen.
        held_out: prompts of the caller that were set aside before the plan was searched for.
    """
    if plan.is_dense:
        raise UsageError("expected a plan that is sparse somewhere, found none: there is nothing to verify")
    source, sizes = kit or prepare(loaded.tokenizer, Split.VERIFICATION), SIZES[run.size]
    samples, chosen = _samples(loaded, plan, options, run, prompts, held_out)
    source = source.shared_by(samples.tasks, samples.lengths)
    samples.check_fit(source)
    digest = held_out.digest if held_out else digest_of_prompts(prompts) if prompts else None
    file = outcomes_file(_settings(loaded, plan, options, samples, run, digest), run.path)
    text = _LONG_TEXT if plan.retained else _TEXT
    modes = _modes(plan, options, loaded.model.dtype)
    with (
        opened(loaded, modes, batch=samples.batch, chunk=samples.prefill_chunk, text=text) as evaluator,
        (progress or Progress()).stage("evaluate", _work(samples, sizes)) as step,
    ):
        Cells(evaluator, samples, source, sizes, file, step, bool(plan.retained)).run()
    return _verdict(plan, run, file, samples, chosen)


def _samples(
    loaded: LoadedModel,
    plan: Plan,
    options: Settled,
    run: VerifyRun,
    prompts: Sequence[GivenPrompt],
    held: HeldOut | None,
) -> tuple[EvalSamples, tuple[str, ...]]:
    """The prompts of a run, and the options by which they were chosen, which verify nothing."""
    tasks = options.verify_tasks or tasks_tested(evicts=bool(plan.retained))
    lengths = lengths_tested(plan, options.verify_lengths)
    seed = content_seed(plan, run.number) if options.verify_seed is None else options.verify_seed
    samples = EvalSamples(tasks, lengths, 1, options.batch, seed, prefill_chunk=_step(plan, options))
    if prompts:
        given = GivenSamples.of(samples, samples_of(loaded.tokenizer, prompts, loaded.info.context_length))
        return given, tuple(dict.fromkeys((*options.verify_chosen, "--prompts")))
    if held:
        return GivenSamples.at(samples, held.by_length), options.verify_chosen
    return samples, options.verify_chosen


def _step(plan: Plan, options: Settled) -> int | None:
    """Most tokens of a prompt at once. Layers that evict choose at the end of a prompt, layers in host memory are read
    back by each piece, and transformers begins recurrent states anew in each."""
    is_whole = plan.retained or (plan.decode and plan.decode.offload) or takes_one_piece(plan.model.model_type)
    return options.prefill_chunk or (None if is_whole else STEP)


def tasks_tested(*, evicts: bool) -> tuple[str, ...]:
    """The tasks of a test, as many for every plan."""
    return (*TESTED[:-2], *HURT_BY_EVICTION) if evicts else TESTED


def lengths_tested(plan: Plan, lengths: Sequence[int]) -> tuple[int, ...]:
    """The lengths at which a plan is sparse, all if it is at none; of those above `LONG` the longest alone."""
    parts = [part for part in (plan.prefill, plan.decode) if part]
    rules = plan.retained.values()
    sparse = [
        n
        for n in lengths
        if any(part.bucket(n).is_sparse_at(n) for part in parts) or any(rule.kept_tokens(n) < n for rule in rules)
    ] or list(lengths)
    return tuple(n for n in sparse if n <= LONG or n == max(sparse))


def content_seed(plan: Plan, run: int) -> int:
    """The seed of the prompts of a run."""
    return int(hashlib.sha256(f"{executed_digest(plan)}/{run}".encode()).hexdigest()[:8], 16)


def _work(samples: EvalSamples, sizes: Sizes) -> float | None:
    """The units of all prompts, about, where dense answers all of them."""
    if isinstance(samples, GivenSamples):
        return 2 * sum(prefill_work(length) * len(some) for length, some in samples.given.items())
    cells = len(samples.tasks) * len(samples.lengths)
    short = max(sizes.answered, sizes.judged / cells)
    counts = ((length, short if length <= LONG else sizes.long_prompts) for length in samples.lengths)
    return 2 * len(samples.tasks) * sum(prefill_work(length) * count for length, count in counts)


def _modes(plan: Plan, options: Settled, dtype: torch.dtype) -> dict[str, Mode]:
    """The plan; and the kernels with every tile and token computed, over keys and values as the plan has them, but in
    float32, where their rounding is nothing."""
    how = (options.backend, options.kv_dtype)
    modes: dict[str, Mode] = {BOTH: PlanMode(plan, "both", *how)}
    is_exact = dtype == torch.float32 and options.kv_dtype == "auto"
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


def _settings(
    loaded: LoadedModel, plan: Plan, options: Settled, samples: EvalSamples, run: VerifyRun, prompts: str | None
) -> OutcomesSettings:
    model, fingerprint = loaded.model, loaded.info.fingerprint
    tile, capped = plan.prefill.tile if plan.prefill else None, has_soft_cap(config_of(model))
    head_dim = loaded.info.largest_head
    return OutcomesSettings(
        plan=executed_digest(plan),
        architecture=fingerprint.architecture,
        weights=fingerprint.weights,
        dtype=dtype_name(model.dtype),
        device=device_name(model.device),
        backend=choose_backend(model.device, model.dtype, head_dim, options.backend, tile, capped).name,
        versions=versions(),
        sizes=asdict(SIZES[run.size]),
        seed=samples.seed,
        run=run.number,
        tasks=samples.tasks,
        lengths=samples.lengths,
        prefill_chunk=samples.prefill_chunk,
        kv_dtype=options.kv_dtype,
        prompts=prompts,
    )


def diagnose(
    loaded: LoadedModel, plan: Plan, options: Settled, progress: Progress | None = None
) -> dict[PhaseName, tuple[EvalResult, ...]]:
    """Each phase alone, and both together, on a few prompts of each task; a result a length. It verifies nothing."""
    samples, _ = _samples(loaded, plan, options, VerifyRun("small", 1, level_of_run(1)), (), None)
    how = (options.backend, options.kv_dtype)
    phases: tuple[PhaseName, ...] = ("prefill", "decode", "both")
    modes: dict[str, Mode] = {phase: PlanMode(plan, phase, *how) for phase in phases}
    found = evaluate(loaded, modes, replace(samples, samples=DIAGNOSED), None, progress)
    return {phase: found[phase] for phase in phases}


# --- the verdict ------------------------------------------------------------------------------------------------------


def _verdict(
    plan: Plan, run: VerifyRun, file: RunFile[OutcomesSettings], samples: EvalSamples, chosen: Sequence[str]
) -> Verification:
    outcomes = tuple(file.all(CellOutcomes).values())
    test, scores = _tested(outcomes, SIZES[run.size], run.level, isinstance(samples, GivenSamples)), []
    for length in samples.lengths:
        parts = [one for one in outcomes if one.length == length and one.plan]
        scores += [_length_score(length, parts, test)] if parts else []
    missed = test.missed
    too_few = tuple(_too_few(test))
    not_run = () if too_few else untouched(plan, scores)  # of which there is one reason then
    reasons = (*too_few, *map(str, missed), *_broken_rounding(scores), *not_run, *_chosen(chosen))
    judged = set(test.judged)
    quality = Quality(
        test="prompts" if test.own else run.size,
        run=run.number,
        level=run.level,
        step=samples.prefill_chunk if plan.prefill else None,
        cells=tuple(CellScore(**asdict(one), unjudged=one not in judged) for one in test.cells),
        lengths=tuple(scores),
        excludes=_excludes(test),
        missed=_missed_lengths(test),
        reason="; ".join(reasons)[:500] or None,
    )
    return Verification(quality, test, reasons)


def _tested(outcomes: Sequence[CellOutcomes], sizes: Sizes, level: float, own: bool) -> FixedTest:
    keys = dict.fromkeys((one.task, one.length) for one in outcomes)
    cells = tuple(cell_of([one for one in outcomes if (one.task, one.length) == key]) for key in keys)
    excess, texts = {}, {}
    for length in dict.fromkeys(one.length for one in outcomes if one.plan):
        parts = [one for one in outcomes if one.length == length]
        rounding = _rounding(parts)
        excess[length] = [nats - rounding for one in parts for nats in one.kl]
        if any(len(one.texts) == len(one.plan) > sizes.closely for one in parts):
            texts[length] = [row.kl - rounding for one in parts for row in one.texts]
    return FixedTest(sizes, level, cells, excess, texts, own)


def _rounding(parts: Sequence[CellOutcomes]) -> float:
    nats = [value for one in parts for value in one.rounding]
    return float(np.mean(nats)) if nats else 0.0


def _length_score(length: int, parts: Sequence[CellOutcomes], test: FixedTest) -> LengthScore:
    mean, worst = divergence_bounds(length, test.excess[length])
    spent, rows = spent_of(parts), [row for one in parts for row in one.texts]
    return LengthScore(
        length=length,
        density=spent.density,
        read=spent.read,
        kl=float(np.mean([nats for one in parts for nats in one.kl])),
        floor=_rounding(parts),
        upper=min(mean.upper, 1e6),
        worst=worst.mean,
        agreed=sum(row.agreed for row in rows) / sum(row.scored for row in rows) if rows else None,
    )


def _excludes(test: FixedTest) -> Excludes:
    tasks, pooled = list(test.task_losses), list(test.pooled_losses)
    return Excludes(
        net_loss=max(0.0, test.net_loss.upper) if tasks else None,
        task_loss=max((bound.upper for bound in tasks), default=None),
        pooled_loss=max((bound.upper for bound in pooled), default=None),
    )


def _missed_lengths(test: FixedTest) -> tuple[int, ...]:
    """The lengths that miss by themselves; where only all together do, those with a net loss."""
    apart = {bound.lengths[0] for bound in test.missed if len(bound.lengths) == 1}
    if apart or not test.missed:
        return tuple(sorted(apart))
    losing = {one.length for one in test.judged if one.lost > one.won}
    return tuple(sorted(losing or {one.length for one in test.judged}))


def _too_few(test: FixedTest) -> Iterator[str]:
    if test.own and test.too_few:
        prompts = sum(one.prompts for one in test.cells)
        yield f"{prompts} different prompts come near the end of a planned length, fewer than {test.sizes.own}"
    elif test.too_few:
        yield f"the model answers too few of these tasks at {', '.join(map(format_length, test.too_few))}"


def _broken_rounding(scores: Sequence[LengthScore]) -> Iterator[str]:
    for one in scores:
        if one.floor > _BROKEN_ROUNDING:
            yield (
                f"at {format_length(one.length)} the kernels with every tile computed are {one.floor:.3g} nats from "
                "the model's own attention, which is no rounding; see `sparsekv doctor`, or use another backend "
                "(--set backend=NAME)"
            )


def _chosen(names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"prompts were chosen by {', '.join(names)}; `sparsekv verify` without them may verify it"
