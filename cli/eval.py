"""`sparsekv eval`: a model on tasks, on own prompts, or on RULER's tasks (--suite)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, Subject, Subjects, settings_of
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.plan_files import answered_prompts, only_writer
from sparsekv.planner.flags import MOST, Flag, Lengths, Unread
from sparsekv.planner.options import DEFAULT_TASKS, Drawn, Hardware, Phase, check_lengths
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import executed_digest
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import PhaseName, Plan, check_model, to_data
from sparsekv.plans.types import columns, format_length

if TYPE_CHECKING:
    from sparsekv.planner.evaluation import EvalSamples, PlanMode
    from sparsekv.planner.evaluation.results import Agreement, EvalResult
    from sparsekv.runtime.hf.load import LoadedModel

Suite = Literal["ruler", "long"]
PLAN, DENSE = "plan", "dense"
_OF_PLAN = ("only", "backend")


class EvalFlags(Subjects, Drawn, Hardware, Output):
    group: ClassVar = "Samples"
    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("tasks", "prompts_file"), "a suite has tasks and tables of its own", ("suite",)),
        Unread(("tasks", "lengths", "samples", "seed"), "no samples are drawn", ("prompts_file",)),
        Unread(("out",), "--suite reads it", without=("suite",)),
    )
    lengths: Annotated[
        Lengths,
        Flag(
            "Most tokens of a prompt and its answer, by default 4k; with --suite two inside each bucket of the plan.",
            ("--length", "--lengths"),
            "TOKENS",
        ),
    ] = (4096,)
    samples: Annotated[int, Field(ge=1, le=MOST), Flag("Samples a task.", metavar="N")] = 20
    only: Annotated[Phase | None, Flag("Follow the plan in this phase alone.")] = None
    prompts_file: Annotated[
        Path | None,
        Flag(
            'Instead of tasks, own prompts: JSON lines of {"prompt", "answer", "task"?}, measured by length.',
            ("--prompts",),
            "FILE",
        ),
    ] = None
    suite: Annotated[
        Suite | None,
        Flag(
            "Run tasks in generated text: ruler, by names, sizes and metric of the paper; long, whose answers have "
            "1,000 tokens.",
            metavar="NAME",
            reads=str,
        ),
    ] = None
    out: Annotated[
        Path | None,
        Flag(
            "For --suite: a file of results, to which each task is added; what is in it is not run again.",
            ("--out", "-o"),
            "FILE",
        ),
    ] = None

    @property
    def phase(self) -> PhaseName:
        return self.only or "both"

    def step(self, plans: Collection[Plan]) -> int | None:
        """Most tokens of a prompt at once: as the plans are tested, where all are tested alike."""
        from sparsekv.planner.evaluation.batches import step_of

        steps = {step_of(plan, self.prefill_chunk) for plan in plans}
        return steps.pop() if len(steps) == 1 else self.prefill_chunk

    def drawn(self, step: int | None) -> EvalSamples:
        from sparsekv.planner.evaluation import EvalSamples

        lengths = tuple(sorted(self.lengths))
        tasks = self.tasks or DEFAULT_TASKS
        return EvalSamples(tasks, lengths, self.samples, self.batch, self.seed, step)


def evaluate(flags: EvalFlags) -> None:
    """Measure the tasks on held-out samples, or own prompts: answers by exact match, text by perplexity.

    Without a plan (--plan, or sparsekv.yaml in the model's folder or hub repository) dense is measured alone. --suite
    ruler runs RULER's tasks by its names, sizes and metric. Dense and plan generate freely, and the losses of tasks are
    printed, the largest first.
    """
    subject = flags.subject
    unread = next(filter(flags.is_given, _OF_PLAN), None)
    if unread and not subject.plan:
        raise UsageError(f"expected a plan beside {flags.flag_of(unread)}, found none; name one with --plan FILE")
    if flags.suite and subject.plan and not flags.is_given("lengths"):
        flags = flags.model_copy(update={"lengths": subject.plan.evaluated_lengths or flags.lengths})
    subject = subject.checked(flags, () if flags.prompts_file else flags.lengths)
    flags.register_methods()
    with only_writer(flags.out):
        (_suite if flags.suite else _tasks)(subject, flags)


def _all_dense(plan: Plan, phase: PhaseName, lengths: Sequence[int]) -> str | None:
    """A line where nothing that is measured is sparse at some lengths: dense is then compared with itself."""
    dense = [length for length in lengths if not plan.is_sparse_at(length, phase)]
    if not dense:
        return None
    at = ", ".join(map(format_length, dense))
    return f"the plan is dense at {at}, and dense is compared with itself; `show` says where not"


def _loaded(subject: Subject, flags: EvalFlags, plans: dict[str, Plan]) -> tuple[LoadedModel, dict[str, PlanMode]]:
    from sparsekv.planner.evaluation import PlanMode

    lengths = () if flags.prompts_file else flags.lengths
    if not plans:
        tell(f"dense is measured alone: {subject.no_plan}")
    for name, plan in plans.items():
        if note := _all_dense(plan, flags.phase, lengths):
            tell(note if name == PLAN else f"{name}: {note}")

    def check(info: ModelInfo, _: str) -> None:
        check_lengths(lengths, info.context_length)
        for plan in plans.values():
            check_model(plan, info)

    loaded, backend = subject.load(flags, check), settings_of(flags).backend
    return loaded, {name: PlanMode(part, flags.phase, backend) for name, part in plans.items()}


def _tasks(subject: Subject, flags: EvalFlags) -> None:
    prompts = answered_prompts(flags.prompts_file) if flags.prompts_file else ()
    from sparsekv.planner.evaluation import evaluate as measure
    from sparsekv.planner.evaluation.given import evaluate_given
    from sparsekv.planner.progress import BarProgress

    plan = subject.plan
    loaded, modes = _loaded(subject, flags, {PLAN: plan} if plan else {})
    differs = check_model(plan, loaded.info) if plan else []
    step = flags.step([plan] if plan else [])
    if prompts:
        by_mode = evaluate_given(loaded, modes, prompts, flags.batch, step, BarProgress())
    else:
        by_mode = measure(loaded, modes, flags.drawn(step), progress=BarProgress())
    results = by_mode[PLAN if plan else DENSE]
    if flags.as_json:
        data = results_data(results, None if prompts else flags.samples, bool(plan))
        emit_json(data | ({"differs": differs} if plan else {}))
        return
    count = f"{len(prompts)} own" if prompts else f"{flags.samples} a task"
    emit(tasks_text(results, count, flags.phase if plan else None))


# --- suite ------------------------------------------------------------------------------------------------------------


def _suite(subject: Subject, flags: EvalFlags) -> None:
    """Runs what the file does not hold yet, and prints a table of each plan."""
    plans = {PLAN: subject.plan} if subject.plan else {}
    from sparsekv.bench.suite import SuiteRun, SuiteSamples, SuiteTable, check_continued, run_suite
    from sparsekv.bench.suite_table import suite_data, suite_text
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.records import RunFile

    of_samples = {name: getattr(flags, name) for name in ("suite", "seed", "samples")}
    earlier = RunFile.earlier(SuiteRun, flags.out)
    # As dense answers alone are, which a plan joins.
    whole = earlier is not None and earlier.settings.prefill_chunk is None
    of_samples["prefill_chunk"] = flags.prefill_chunk if whole else flags.step(plans.values())
    drawn = SuiteSamples(tuple(sorted(flags.lengths)), batch=flags.batch, **of_samples)
    facts: dict[str, Any] = of_samples | {"phase": flags.phase}
    facts |= {"backend": settings_of(flags).backend}
    if earlier:
        check_continued(earlier, facts, {name: executed_digest(plan) for name, plan in plans.items()})
    loaded, modes = _loaded(subject, flags, plans)
    file = RunFile.of(SuiteRun.of(loaded, **facts), flags.out)
    try:
        run_suite(loaded, modes, drawn, file, progress=BarProgress())
    except BaseException as error:
        if flags.out is not None and flags.out.exists():
            error.add_note(f"what was measured until then is in {flags.out}; the same command goes on from there")
        raise
    table = SuiteTable(file, tuple(plans), drawn.lengths)
    if flags.as_json:
        emit_json(suite_data(table) | {"path": str(flags.out) if flags.out else None})
    else:
        emit(suite_text(table))


# --- the table, and its JSON ------------------------------------------------------------------------------------------

Row = tuple[str, ...]
_HEADER = ("task", "length", "score", DENSE, "sparse", "difference", "95%")  # the last three beside a plan


def _task_row(name: str, result: EvalResult, has_plan: bool) -> Row:
    task = result.tasks[name]
    score, kind = task.score, "exact match" if task.is_accuracy else "perplexity"
    row = (name, format_length(result.lengths[0]), kind, f"{score.dense:.4g}")
    interval = "-" if score.interval is None else "{:+.3g} to {:+.3g}".format(*score.interval)
    return (*row, f"{score.sparse:.4g}", f"{score.sparse - score.dense:+.3g}", interval) if has_plan else row


def tasks_text(results: Sequence[EvalResult], count: str, phase: PhaseName | None) -> str:
    """Tasks at each length, and what a plan computed of them; without a phase dense alone."""
    from sparsekv.planner.evaluation.results import merged

    whole = merged(results)
    rows = [_task_row(name, one, phase is not None) for one in results for name in one.tasks]
    parts = [columns([_HEADER[: len(rows[0])], *rows], right=range(3, len(rows[0])))]
    facts = f"samples: {count}, of up to {whole.lengths[-1]:,} tokens"
    if phase is not None:
        parts.append(columns([_AGREEMENT, *_agreement_rows(results, phase)], right=(2,)))
        facts += f"; prefill computed {whole.spent.density:.3f} of the tiles"
        facts += f", decode attended to {whole.spent.read:.3f} of the tokens; KL {whole.kl:.3g}"
    return "\n\n".join((*parts, facts))


_AGREEMENT = ("phase", "over", "samples", "divergence, nats", "top-1 token", "exact text")


def _agreement_rows(results: Sequence[EvalResult], phase: str) -> Iterator[Row]:
    """Agreement with dense over everything, at each of several lengths, and of each task."""
    from sparsekv.planner.evaluation.results import merged

    whole = merged(results)
    yield phase, "all", *_agreed(whole.agreement)
    for result in results if len(results) > 1 else ():
        yield "", format_length(result.lengths[0]), *_agreed(result.agreement)
    for name, task in whole.tasks.items():
        if task.score.agreement:
            yield "", name, *_agreed(task.score.agreement)


def _agreed(score: Agreement) -> Row:
    kl = f"{score.kl:.3g}" + (" [{:.3g}, {:.3g}]".format(*score.kl_interval) if score.kl_interval else "")
    return str(score.samples), kl, _share(score.top1, score.top1_interval), _share(score.exact, score.exact_interval)


def _share(share: float | None, interval: tuple[float, float] | None) -> str:
    bounds = "" if interval is None else f" [{100 * interval[0]:.1f}, {100 * interval[1]:.1f}]"
    return "-" if share is None else f"{share:.1%}{bounds}"


def results_data(results: Sequence[EvalResult], samples: int | None, has_plan: bool) -> dict[str, Any]:
    from sparsekv.planner.evaluation.results import merged

    parts = (merged(results), *results)
    whole, *each = [tasks_data(part, samples or len(part.outcomes), has_plan) for part in parts]
    return whole if samples and len(each) == 1 else whole | {"by_length": each}


def tasks_data(result: EvalResult, samples: int, has_plan: bool) -> dict[str, Any]:
    scores = {name: task.score for name, task in result.tasks.items()}
    tasks: dict[str, Any] = {name: {"dense": score.dense, "sparse": None} for name, score in scores.items()}
    measured: dict[str, Any] = {"prefill_density": None}
    if has_plan:
        for name, score in scores.items():
            tasks[name] |= {"sparse": score.sparse, "interval": score.interval}
            tasks[name] |= {"agreement": to_data(score.agreement) if score.agreement else None}
        measured = {"prefill_density": result.spent.density, "decode_share": result.spent.read, "kl": result.kl}
        measured |= {"agreement": to_data(result.agreement)}
    return {"tasks": tasks, "samples": samples, "length": result.lengths[-1], **measured}


app = commands.app(
    evaluate,
    "sparsekv eval ./my-model --suite ruler --lengths 8k,32k -o ruler.jsonl",
    "sparsekv eval ./my-model --prompts questions.jsonl --only decode",
)
