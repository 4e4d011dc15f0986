"""Runs the fixed test of a plan (fixed_test.py): dense and the plan on prompts that nobody chose.

Both phases run together, at every planned length that is sparse, sparse always on. Tasks are fixed here. Prompts follow
from what the plan executes and from the number of the run, so that no earlier run saw them. Dense runs first, cell by
cell: whether a cell is judged, and on how many prompts, follows from dense alone. A plan is verified where the test is
passed and every sparse bucket was run sparse near the end of its lengths. An interrupted run goes on with the same
prompts (verify_cells.py).
"""

from __future__ import annotations

import math
import os
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, Unpack, cast

import numpy as np
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from sparsekv.kernels.backends import choose_backend
from sparsekv.planner.evaluation import EvalSamples, PlanMode, opened
from sparsekv.planner.evaluation.batches import dense_step, step_of
from sparsekv.planner.evaluation.given import GivenSamples, HeldOut, samples_of
from sparsekv.planner.fixed_test import LONG, SIZES, TURNS, FixedTest, Sizes, divergence_bounds, level_of_run
from sparsekv.planner.options import (
    GivenPrompt,
    PlanArguments,
    PlanOptions,
    Settled,
    digest_of_prompts,
    lengths_to_verify,
    settle,
)
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.planner.records import RunFile, versions
from sparsekv.planner.tasks import Kit, Split, prepare
from sparsekv.planner.verify_cells import (
    CellOutcomes,
    Cells,
    OutcomesSettings,
    cell_of,
    cells_tested,
    content_seed,
    lengths_tested,
    modes_of,
    outcomes_file,
    spent_of,
    tasks_tested,
    untouched,
)
from sparsekv.plans.errors import PlanWarning, UsageError
from sparsekv.plans.files import executed_digest, load_plan
from sparsekv.plans.quality import CellScore, Excludes, LengthScore, Quality
from sparsekv.plans.schema import PhaseName, Plan, check_model
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.describe import config_of, describe_model
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.model_config import device_name, dtype_name, has_soft_cap

AnyModel = str | Path | LoadedModel | PreTrainedModel
_TEXT, _LONG_TEXT = 64, 128  # tokens of dense's own text: of a few prompts, and of all where layers evict tokens
_BROKEN_ROUNDING = 0.1  # nats
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
        options: settled: lengths, verify_tasks, verify_chosen, verify_seed, batch, prefill_chunk, backend.
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
    progress, counts = progress or Progress(), _prompts(samples, sizes)
    whole = sum(2 * prefill_work(length) * count for length, count in counts.items())
    done = sum(2 * prefill_work(cell.length) * len(cell.dense) for cell in file.all(CellOutcomes).values())
    lengths = " to ".join(dict.fromkeys((format_length(min(counts)), format_length(max(counts)))))
    progress.say(
        f"test resumed: {min(1.0, done / whole):.0%} of it was measured by an interrupted run"
        if done
        else f"test of about {sum(counts.values())} prompts of {lengths} tokens, each dense and by the plan"
    )
    text = _LONG_TEXT if plan.evicting else _TEXT
    modes = modes_of(plan, options, loaded.model.dtype)
    of_dense = options.prefill_chunk or dense_step(loaded.model, max(samples.lengths))
    with (
        opened(loaded, modes, samples.batch, samples.prefill_chunk, of_dense, text=text) as evaluator,
        progress.stage("evaluate", max(whole - done, 0.0)) as step,
    ):
        Cells(evaluator, samples, source, sizes, file, step, bool(plan.evicting)).run()
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
    tasks = options.verify_tasks or tasks_tested(plan.model.model_type, evicts=bool(plan.evicting))
    lengths = lengths_tested(plan, options.lengths)
    seed = content_seed(plan, run.number) if options.verify_seed is None else options.verify_seed
    samples = EvalSamples(tasks, lengths, 1, options.batch, seed, prefill_chunk=step_of(plan, options.prefill_chunk))
    if prompts:
        given = GivenSamples.of(samples, samples_of(loaded.tokenizer, prompts, loaded.info.context_length))
        return given, tuple(dict.fromkeys((*options.verify_chosen, "--prompts")))
    if held:
        return GivenSamples.at(samples, held.by_length), options.verify_chosen
    return samples, options.verify_chosen


def _prompts(samples: EvalSamples, sizes: Sizes) -> dict[int, int]:
    """About how many prompts of each length run, where dense answers all of them."""
    if isinstance(samples, GivenSamples):
        return {length: len(prompts) for length, prompts in samples.given.items()}
    tasks = Counter(length for length, _ in cells_tested(samples.tasks, samples.lengths))
    short = max(sizes.answered, math.ceil(sizes.judged / tasks.total()))
    return {length: count * (short if length <= LONG else sizes.long_prompts) for length, count in tasks.items()}


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


@dataclass(frozen=True, slots=True)
class PhaseScore:
    """One phase of a plan, or both, beside dense on a few prompts of a task and length: right answers, mean divergence
    in nats, and the shares of tiles and cached tokens that were computed."""

    phase: PhaseName
    task: str
    length: int
    prompts: int
    dense: int
    plan: int
    kl: float
    density: float
    read: float


def diagnose(
    loaded: LoadedModel, plan: Plan, options: Settled, progress: Progress | None = None
) -> tuple[PhaseScore, ...]:
    """Each phase alone, and both together, on a few prompts of each task. It verifies nothing."""
    samples, _ = _samples(loaded, plan, options, VerifyRun("small", 1, level_of_run(1)), (), None)
    samples, kit = replace(samples, samples=DIAGNOSED), prepare(loaded.tokenizer, Split.EVALUATION)
    samples.check_fit(kit)
    phases: tuple[PhaseName, ...] = ("prefill", "decode", "both")
    modes: dict[str, PlanMode] = {phase: PlanMode(plan, phase, options.backend, options.kv_dtype) for phase in phases}
    cells, scores = cells_tested(samples.tasks, samples.lengths), []
    whole = (1 + len(phases)) * DIAGNOSED * sum(prefill_work(length) for length, _ in cells)
    chunk = samples.prefill_chunk
    with (
        opened(loaded, modes, samples.batch, chunk, chunk) as evaluator,
        (progress or Progress()).stage("evaluate", whole) as step,
    ):
        for length, task in cells:
            dense = evaluator.dense(replace(samples, tasks=(task,)).drawn(kit, length), step)
            right = sum(bool(one.correct) for run in dense for one in run.outcomes)
            for phase in phases:
                found = evaluator.beside(dense, phase, step)
                kept = sum(bool(one.correct) for one in found.outcomes)
                shares = float(np.mean(found.kl)), found.spent.density, found.spent.read
                scores.append(PhaseScore(phase, task, length, DIAGNOSED, right, kept, *shares))
    return tuple(scores)


def verify_plan(
    model: AnyModel,
    plan: Plan | str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    progress: Progress | None = None,
    **options: Unpack[PlanArguments],
) -> Verification:
    """Tests a plan on held-out prompts beside dense, both phases together.

    Args:
        model: an alias, hub id, folder or GGUF file, a `LoadedModel`, or a Hugging Face model together with its
            tokenizer.
        plan: the plan, or the path of a plan file, which stays as it is.
        progress: where to report the stages; see `plan_model`.
        **options: of [PlanOptions](#planoptions) `verify`, `lengths`, `verify_tasks`, `batch`, `prefill_chunk`,
            `device`, `dtype` and `backend` are read; the plan's own lengths by default.

    Returns:
        The result; `recorded(plan)` is the plan with it; write that with `write_plan`.

    Raises:
        PlanMismatchError: the plan is of another architecture.
        GateError: kernels that compute everything give numbers that are not finite.
        SparseKVError: of the other kinds, for what cannot be verified; nothing of a dense plan can.
    """
    chosen = PlanOptions(**cast(dict[str, Any], options))
    if chosen.verify == "none":
        raise UsageError("expected verify='small' or 'full', found 'none': nothing would be verified")
    if chosen.prompts:
        raise UsageError("expected no prompts, found some; own prompts verify by `sparsekv verify --prompts FILE`")
    given = load_plan(plan) if isinstance(plan, str | os.PathLike) else plan
    if not isinstance(given, Plan):
        raise UsageError(f"expected a Plan, or the path of one, found {plan!r:.80}")
    loaded = loaded_from(model, tokenizer, chosen)
    for line in check_model(given, loaded.info):
        warnings.warn(line, PlanWarning, stacklevel=2)
    chosen = chosen.but(**lengths_to_verify(given, chosen.lengths, loaded.info.context_length))
    settled = settle(chosen, loaded.info.context_length, loaded.model.device.type)
    run = VerifyRun.after(given, "full" if chosen.verify == "full" else "small")
    return verify(loaded, given, settled, run, progress)


def loaded_from(model: AnyModel, tokenizer: PreTrainedTokenizerBase | None, options: PlanOptions) -> LoadedModel:
    """The model that a program passes: by name, loaded, or a model with its tokenizer.

    Raises:
        UsageError: there is no such model, or a tokenizer is missing.
    """
    if isinstance(model, LoadedModel):
        return model
    if isinstance(model, str | Path):
        return load_model(model, device=options.device, dtype=options.dtype, device_map=options.device_map)
    if not callable(tokenizer):
        found = "none" if tokenizer is None else f"{tokenizer!r:.80}"
        raise UsageError(f"expected the tokenizer of a model that is loaded already, found {found}; pass tokenizer=")
    return LoadedModel(model, tokenizer, describe_model(model))


# --- the verdict ------------------------------------------------------------------------------------------------------


def _verdict(
    plan: Plan, run: VerifyRun, file: RunFile[OutcomesSettings], samples: EvalSamples, chosen: Sequence[str]
) -> Verification:
    outcomes = tuple(file.all(CellOutcomes).values())
    test, scores = _tested(outcomes, SIZES[run.size], run.level, isinstance(samples, GivenSamples)), []
    for length in samples.lengths:
        parts = [cell for cell in outcomes if cell.length == length and cell.plan]
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
        cells=tuple(CellScore(**asdict(cell), unjudged=cell not in judged) for cell in test.cells),
        lengths=tuple(scores),
        excludes=_excludes(test),
        missed=_missed_lengths(test),
        reason="; ".join(reasons)[:500] or None,
    )
    return Verification(quality, test, reasons)


def _tested(outcomes: Sequence[CellOutcomes], sizes: Sizes, level: float, own: bool) -> FixedTest:
    keys = dict.fromkeys((cell.task, cell.length) for cell in outcomes)
    cells = tuple(cell_of([cell for cell in outcomes if (cell.task, cell.length) == key]) for key in keys)
    excess, texts = {}, {}
    for length in dict.fromkeys(cell.length for cell in outcomes if cell.plan):
        parts = [cell for cell in outcomes if cell.length == length]
        rounding = _rounding(parts)
        excess[length] = [nats - rounding for cell in parts for nats in cell.kl]
        if any(len(cell.texts) == len(cell.plan) > sizes.closely for cell in parts):
            texts[length] = [row.kl - rounding for cell in parts for row in cell.texts]
    return FixedTest(sizes, level, cells, excess, texts, own)


def _rounding(parts: Sequence[CellOutcomes]) -> float:
    nats = [value for cell in parts for value in cell.rounding]
    return float(np.mean(nats)) if nats else 0.0


def _length_score(length: int, parts: Sequence[CellOutcomes], test: FixedTest) -> LengthScore:
    mean, worst = divergence_bounds(length, test.excess[length])
    sparse = [cell for cell in parts if cell.task != TURNS] or parts  # some of the turns are dense on purpose
    spent, rows = spent_of(sparse), [row for cell in parts for row in cell.texts]
    return LengthScore(
        length=length,
        density=spent.density,
        read=spent.read,
        kl=float(np.mean([nats for cell in parts for nats in cell.kl])),
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
    if apart:
        return tuple(sorted(apart))
    together = {length for bound in test.missed for length in bound.lengths}
    losing = {cell.length for cell in test.judged if cell.lost > cell.won}
    return tuple(sorted(together & losing or together))


def _too_few(test: FixedTest) -> Iterator[str]:
    if test.own and test.too_few:
        prompts = sum(cell.prompts for cell in test.cells)
        yield f"{prompts} different prompts come near the end of a planned length, fewer than {test.sizes.own}"
    elif test.too_few:
        yield f"the model answers too few of these tasks at {', '.join(map(format_length, test.too_few))}"


def _broken_rounding(scores: Sequence[LengthScore]) -> Iterator[str]:
    for row in scores:
        if row.floor > _BROKEN_ROUNDING:
            yield (
                f"at {format_length(row.length)} the kernels with every tile computed are {row.floor:.3g} nats from "
                "the model's own attention, which is no rounding; see `sparsekv doctor`, or use another backend "
                "(--set backend=NAME)"
            )


def _chosen(names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"prompts were chosen by {', '.join(names)}; `sparsekv verify` without them may verify it"
