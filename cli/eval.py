"""`sparsekv eval`: a model on the tasks, dense and with its plan."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from sparsekv.cli import commands
from sparsekv.cli.arguments import settings_of
from sparsekv.cli.bench_curves import measure_curve
from sparsekv.cli.eval_flags import OF_PLAN, EvalFlags, PhaseName, check_length
from sparsekv.cli.output import agreement_table, columns, emit, emit_json, tell
from sparsekv.cli.prompts import answered_prompts
from sparsekv.plans.errors import UsageError
from sparsekv.plans.schema import Quality, to_data

if TYPE_CHECKING:
    from sparsekv.planner.evaluation.results import EvalResult
    from sparsekv.plans.model import ModelInfo
    from sparsekv.plans.schema import Measurement, Plan


def evaluate(flags: EvalFlags) -> None:
    """Measure the tasks on held-out samples, or own prompts: answers by exact match, text by perplexity.

    Without a plan (--plan, or sparsekv.yaml in the model's folder or hub repository) dense is measured alone. With
    --curve FILE the divergence from dense is measured at many densities, of plans compiled from --profile and of other
    methods, on the same samples; `show --html --curve FILE` draws it.
    """
    subject = flags.subject
    if subject.plan is None and (unread := next(filter(flags.is_given, OF_PLAN), None)):
        raise UsageError(f"expected a plan beside {flags.flag_of(unread)}, found none; name one with --plan FILE")
    if flags.curve is not None:
        measure_curve(subject, flags)
        return
    backend = settings_of(flags).backend
    prompts = answered_prompts(flags.prompts_file) if flags.prompts_file else ()
    from sparsekv.planner.evaluation import DENSE, Mode, PlanMode
    from sparsekv.planner.evaluation import evaluate as measure
    from sparsekv.planner.evaluation.given import evaluate_given
    from sparsekv.planner.evaluation.results import measurement_of
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.schema import check_model

    plan, phase, length = subject.plan, flags.phase, flags.lengths[0]
    if plan is None:
        tell(f"dense is measured alone: {subject.no_plan}")

    def check(info: ModelInfo, _: str) -> None:
        if not prompts:
            check_length(length, info.context_length)
        if plan is not None:
            check_model(plan, info, flags.allow_mismatch)

    loaded = subject.load(flags, check)
    differs = check_model(plan, loaded.info, flags.allow_mismatch) if plan else []
    modes: dict[str, Mode] = {}
    if plan is not None:
        modes[phase] = PlanMode(plan, phase, backend, flags.allow_mismatch)
        if not prompts and (note := _all_dense(plan, phase, length)):
            tell(note)
    if prompts:
        found = evaluate_given(loaded, modes, prompts, flags.batch, flags.prefill_chunk, BarProgress())
    else:
        found = measure(loaded, modes, flags.drawn, progress=BarProgress())
    results = found[phase if modes else DENSE]
    if flags.as_json:
        has_plan = plan is not None
        report = _of_all_lengths(results, has_plan) if prompts else _report(results[0], flags.samples, has_plan)
        emit_json(report | ({"differs": differs} if plan else {}))
    else:
        count = f"{len(prompts)} own" if prompts else f"{flags.samples} a task"
        emit(_text(results, count, measurement_of(results, phase, flags.prefill_chunk) if plan else None, phase))


def _all_dense(plan: Plan, phase: PhaseName, length: int) -> str | None:
    """A line where nothing that is measured is sparse at the length: dense is then compared with itself."""
    from sparsekv.planner.verify import is_sparse_at
    from sparsekv.plans.types import format_length

    parts = [part for name, part in (("prefill", plan.prefill), ("decode", plan.decode)) if phase in (name, "both")]
    if any(part is not None and is_sparse_at(part.bucket(length), length) for part in parts):
        return None
    return f"the plan is dense at {format_length(length)}, and dense is compared with itself; `show` says where not"


def _of_all_lengths(results: Sequence[EvalResult], has_plan: bool) -> dict[str, Any]:
    from sparsekv.planner.evaluation.results import merged

    whole, *each = [_report(one, len(one.outcomes), has_plan) for one in (merged(results), *results)]
    return whole | {"by_length": each}


def _report(result: EvalResult, samples: int, has_plan: bool) -> dict[str, Any]:
    scores = {name: task.score for name, task in result.tasks.items()}
    tasks: dict[str, Any] = {name: {"dense": score.dense, "sparse": None} for name, score in scores.items()}
    measured: dict[str, Any] = {"prefill_density": None}
    if has_plan:
        for name, score in scores.items():
            tasks[name] |= {"sparse": score.sparse, "interval": score.interval}
            tasks[name] |= {"agreement": to_data(score.agreement) if score.agreement else None}
        measured = {"prefill_density": result.prefill_density, "decode_share": result.decode_share, "kl": result.kl}
        measured |= {"agreement": to_data(result.agreement)}
    return {"tasks": tasks, "samples": samples, "length": result.lengths[-1], **measured}


def _text(results: Sequence[EvalResult], count: str, measured: Measurement | None, phase: PhaseName) -> str:
    from sparsekv.planner.evaluation.results import merged
    from sparsekv.plans.show import SCORE_HEADER, score_row
    from sparsekv.plans.types import format_length

    def named(task: str, result: EvalResult) -> str:
        return f"{task}, {format_length(result.lengths[0])}" if len(results) > 1 else task

    rows = [score_row(named(name, one), task.score) for one in results for name, task in one.tasks.items()]
    if measured is None:  # there is no sparse side
        rows = [(task, dense, "", "") for task, dense, *_ in rows]
    parts = [columns([tuple(map(str.lower, SCORE_HEADER)), *rows], right=(1, 2))]
    whole = merged(results)
    facts = f"samples: {count}, of up to {whole.lengths[-1]:,} tokens"
    if measured is not None:
        parts.append(agreement_table(Quality.model_validate({phase: measured})))
        facts += f"; prefill computed {whole.prefill_density:.3f} of the tiles"
        facts += f", decode attended to {whole.decode_share:.3f} of the tokens; KL {whole.kl:.3g}"
    return "\n\n".join((*parts, facts))


app = commands.app(commands.command(evaluate))
