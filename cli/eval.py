"""`sparsekv eval`: a model on RULER's tasks or on long answers, dense and by its plan."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, Subject, Subjects, settings_of
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.plan_files import only_writer
from sparsekv.planner.flags import MOST, Flag, Lengths
from sparsekv.planner.options import Drawn, Hardware, Phase, check_lengths
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import executed_digest
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import PhaseName, Plan, check_model
from sparsekv.plans.types import format_length

PLAN = "plan"
_OF_PLAN = ("only", "backend")


class EvalFlags(Subjects, Drawn, Hardware, Output):
    group: ClassVar = "Samples"
    lengths: Annotated[
        Lengths,
        Flag(
            "Most tokens of a prompt and its answer; by default two inside each bucket of the plan, 4k without one.",
            ("--length", "--lengths"),
            "TOKENS",
        ),
    ] = (4096,)
    samples: Annotated[int, Field(ge=1, le=MOST), Flag("Samples a task.", metavar="N")] = 20
    only: Annotated[Phase | None, Flag("Follow the plan in this phase alone.")] = None
    suite: Annotated[
        Literal["ruler", "long"],
        Flag(
            "Tasks in generated text: ruler, by names, sizes and metric of the paper; long, whose answers have 1,000 "
            "tokens."
        ),
    ] = "ruler"
    out: Annotated[
        Path | None,
        Flag(
            "A file of results, to which each task is added; what is in it is not run again.", ("--out", "-o"), "FILE"
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


def evaluate(flags: EvalFlags) -> None:
    """Generate answers to RULER's tasks, by its names, sizes and metric, and tell what each task loses, worst first.

    Without a plan (--plan, or sparsekv.yaml in the model's folder or hub repository) dense is measured alone. Own
    prompts are measured by `verify --prompts`.
    """
    subject = flags.subject
    unread = next(filter(flags.is_given, _OF_PLAN), None)
    if unread and not subject.plan:
        raise UsageError(f"expected a plan beside {flags.flag_of(unread)}, found none; name one with --plan FILE")
    if subject.plan and not flags.is_given("lengths"):
        flags = flags.model_copy(update={"lengths": subject.plan.evaluated_lengths or flags.lengths})
    subject = subject.checked(flags, flags.lengths)
    flags.register_methods()
    with only_writer(flags.out):
        _suite(subject, flags)


def _suite(subject: Subject, flags: EvalFlags) -> None:
    """Runs what the file does not hold yet, and prints a table."""
    plans = {PLAN: subject.plan} if subject.plan else {}
    from sparsekv.bench.suite import SuiteRun, SuiteSamples, SuiteTable, check_continued, run_suite
    from sparsekv.bench.suite_table import suite_data, suite_text
    from sparsekv.planner.evaluation import PlanMode
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.records import RunFile

    of_samples = {name: getattr(flags, name) for name in ("suite", "seed", "samples")}
    earlier = RunFile.earlier(SuiteRun, flags.out)
    # As dense answers alone are, which a plan joins.
    whole = earlier is not None and earlier.settings.prefill_chunk is None
    of_samples["prefill_chunk"] = flags.prefill_chunk if whole else flags.step(plans.values())
    drawn = SuiteSamples(tuple(sorted(flags.lengths)), batch=flags.batch, **of_samples)
    backend = settings_of(flags).backend
    facts: dict[str, Any] = of_samples | {"phase": flags.phase, "backend": backend}
    if earlier:
        check_continued(earlier, facts, {name: executed_digest(plan) for name, plan in plans.items()})

    def check(info: ModelInfo, _: str) -> None:
        check_lengths(flags.lengths, info.context_length)
        for plan in plans.values():
            check_model(plan, info)

    if not plans:
        tell(f"dense is measured alone: {subject.no_plan}")
    elif note := _all_dense(plans[PLAN], flags.phase, flags.lengths):
        tell(note)
    loaded = subject.load(flags, check)
    modes = {name: PlanMode(plan, flags.phase, backend) for name, plan in plans.items()}
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


def _all_dense(plan: Plan, phase: PhaseName, lengths: Sequence[int]) -> str | None:
    """A line where nothing that is measured is sparse at some lengths: dense is then compared with itself."""
    dense = [length for length in lengths if not plan.is_sparse_at(length, phase)]
    if not dense:
        return None
    at = ", ".join(map(format_length, dense))
    return f"the plan is dense at {at}, and dense is compared with itself; `show` says where not"


app = commands.app(
    evaluate,
    "sparsekv eval ./my-model --lengths 8k,32k -o ruler.jsonl",
    "sparsekv eval ./my-model --suite long --only decode",
)
