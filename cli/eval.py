"""`sparsekv eval`: a model on tasks, on own prompts, on RULER's tasks (--suite), or at many densities (--curve)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, Subject, Subjects, plan_file, settings_of
from sparsekv.cli.eval_table import DENSE, prompts_data, suite_data, suite_text, tasks_data, tasks_text
from sparsekv.cli.output import columns, emit, emit_json, tell
from sparsekv.cli.plan_files import only_writer
from sparsekv.cli.prompts import answered_prompts
from sparsekv.planner.common_options import DEFAULT_TASKS, PHASES, Drawn, Hardware, Phase, check_lengths
from sparsekv.planner.flags import MOST, Flag, Key, Lengths, Names, Shares
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import executed_digest, load_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, check_model
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.planner.evaluation import EvalSamples, PlanMode
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.runtime.hf.load import LoadedModel

PhaseName = Literal["prefill", "decode", "both"]
Suite = Literal["ruler"]
PLAN = "plan"
_OF_PLAN = ("only", "backend")
_OF_SUITE = ("out", "beside")
_OF_CURVE = ("profile", "methods", "densities", "budgets")


class EvalFlags(Subjects, Drawn, Hardware, Output):
    """The arguments of `eval`."""

    group: ClassVar = "Samples"
    lengths: Annotated[
        Lengths,
        Flag(
            "Most tokens of a prompt and its answer, by default 4k; several for --suite and --curve.",
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
            "Run tasks that papers report, in generated text, by their names, sizes and metric: ruler; at --lengths, "
            "which may be several.",
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
    beside: Annotated[
        Names,
        Flag("For --suite: further plans to measure, such as minference=preset.yaml, by a name.", metavar="NAME=FILE"),
    ] = ()
    curve: Annotated[
        Path | None, Flag("Measure many densities of the plan and of other methods into this file.", metavar="FILE")
    ] = None
    profile: Annotated[
        tuple[Path, ...],
        Flag(
            "For --curve: what `plan --profile-out` wrote. Given twice, one is of --preset minference.",
            metavar="FILE",
            reads=list[Path],
        ),
    ] = ()
    methods: Annotated[Names, Key("For --curve, such as sparsekv,streamingllm,quest; all by default.", "NAMES")] = ()
    densities: Shares = ()  # for a curve: of the prefill methods that take one
    budgets: Shares = ()  # of the context, of the decode methods

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.suite is not None:
            self.refuse(("tasks", "prompts_file", "curve"), "a suite has tasks and tables of its own", "suite")
        if self.prompts_file is not None:
            self.refuse(("tasks", "lengths", "samples", "seed", "curve"), "no samples are drawn", "prompts_file")
        if self.curve is not None:
            self.refuse(("backend",), "a curve is measured by what is fastest", "curve")
        for needed, names in (("suite", _OF_SUITE), ("curve", _OF_CURVE)):
            if getattr(self, needed) is None and (unread := next(filter(self.is_given, names), None)):
                flags = self.flag_of(needed), self.flag_of(unread)
                raise UsageError("expected {0} beside {1}, found none; leave {1} out, or add {0}".format(*flags))
        if len(self.lengths) != 1 and self.suite is None and self.curve is None:
            raise UsageError(f"expected one --length, found {self.lengths}; call eval once for each")
        return self

    @property
    def phase(self) -> PhaseName:
        """Returns which phases follow the plan."""
        return self.only or "both"

    @property
    def drawn(self) -> EvalSamples:
        """The samples."""
        from sparsekv.planner.evaluation import EvalSamples

        lengths = tuple(sorted(self.lengths))
        tasks = self.tasks or DEFAULT_TASKS
        return EvalSamples(tasks, lengths, self.samples, self.batch, self.seed, self.prefill_chunk)


def evaluate(flags: EvalFlags) -> None:
    """Measure the tasks on held-out samples, or own prompts: answers by exact match, text by perplexity.

    Without a plan (--plan, or sparsekv.yaml in the model's folder or hub repository) dense is measured alone. With
    --curve FILE the divergence from dense is measured at many densities, of plans compiled from --profile and of other
    methods, on the same samples; `report PLAN FILE` draws it. With --suite ruler the tasks of RULER are run by
    its names, sizes and metric: dense and plan generate freely, and what each task loses is told, worst first.
    """
    subject = flags.subject
    unread = next(filter(flags.is_given, _OF_PLAN), None)
    if unread and not (subject.plan or flags.beside or flags.curve):
        raise UsageError(f"expected a plan beside {flags.flag_of(unread)}, found none; name one with --plan FILE")
    subject = subject.checked(flags, () if flags.prompts_file else flags.lengths)
    with only_writer(flags.out or flags.curve):
        (_suite if flags.suite else _curve if flags.curve else _tasks)(subject, flags)


def _all_dense(plan: Plan, phase: PhaseName, lengths: Sequence[int]) -> str | None:
    """A line where nothing that is measured is sparse at some lengths: dense is then compared with itself."""
    parts = [part for name, part in (("prefill", plan.prefill), ("decode", plan.decode)) if phase in (name, "both")]
    dense = [n for n in lengths if not any(part is not None and part.bucket(n).is_sparse_at(n) for part in parts)]
    if not dense or (plan.retained and phase != "prefill"):
        return None
    at = ", ".join(map(format_length, dense))
    return f"the plan is dense at {at}, and dense is compared with itself; `show` says where not"


def _loaded(subject: Subject, flags: EvalFlags, plans: dict[str, Plan]) -> tuple[LoadedModel, dict[str, PlanMode]]:
    """The model, and its plans as modes."""
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
    return loaded, {name: PlanMode(one, flags.phase, backend) for name, one in plans.items()}


def _tasks(subject: Subject, flags: EvalFlags) -> None:
    """Measures tasks, or own prompts."""
    prompts = answered_prompts(flags.prompts_file) if flags.prompts_file else ()
    from sparsekv.planner.evaluation import evaluate as measure
    from sparsekv.planner.evaluation.given import evaluate_given
    from sparsekv.planner.progress import BarProgress

    plan = subject.plan
    loaded, modes = _loaded(subject, flags, {PLAN: plan} if plan else {})
    differs = check_model(plan, loaded.info) if plan else []
    if prompts:
        found = evaluate_given(loaded, modes, prompts, flags.batch, flags.prefill_chunk, BarProgress())
    else:
        found = measure(loaded, modes, flags.drawn, progress=BarProgress())
    results = found[PLAN if plan else DENSE]
    if flags.as_json:
        data = prompts_data(results, bool(plan)) if prompts else tasks_data(results[0], flags.samples, bool(plan))
        emit_json(data | ({"differs": differs} if plan else {}))
        return
    count = f"{len(prompts)} own" if prompts else f"{flags.samples} a task"
    emit(tasks_text(results, count, flags.phase if plan else None, flags.prefill_chunk))


# --- suite ------------------------------------------------------------------------------------------------------------


def _suite(subject: Subject, flags: EvalFlags) -> None:
    """Runs what the file does not hold yet, and prints a table of each plan."""
    plans = _plans(subject, flags)
    from sparsekv.planner.evaluation.suite import SuiteSamples, run_suite
    from sparsekv.planner.evaluation.suite_results import SuiteRun, SuiteTable, check_continued
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.records import RunFile

    asked = SuiteSamples(tuple(sorted(flags.lengths)), flags.samples, flags.batch, flags.seed, flags.prefill_chunk)
    known: dict[str, Any] = {name: getattr(flags, name) for name in ("seed", "samples", "phase", "prefill_chunk")}
    known |= {"backend": settings_of(flags).backend}
    if earlier := RunFile.earlier(SuiteRun, flags.out):
        check_continued(earlier, known, {name: executed_digest(plan) for name, plan in plans.items()})
    loaded, modes = _loaded(subject, flags, plans)
    file = RunFile.of(SuiteRun.of(loaded, **known), flags.out)
    try:
        run_suite(loaded, modes, asked, file, progress=BarProgress())
    except BaseException as error:
        if flags.out is not None and flags.out.exists():
            error.add_note(f"what was measured until then is in {flags.out}; the same command goes on from there")
        raise
    table = SuiteTable(file, tuple(plans), asked.lengths)
    if flags.as_json:
        emit_json(suite_data(table) | {"path": str(flags.out) if flags.out else None})
    else:
        emit(suite_text(table))


def _plans(subject: Subject, flags: EvalFlags) -> dict[str, Plan]:
    """The plans by name, that of the subject first."""
    found = {PLAN: subject.plan} if subject.plan else {}
    for one in flags.beside:
        name, _, place = one.partition("=")
        if not (name and place) or name in (DENSE, *found):
            raise UsageError(
                f"expected --beside NAME=FILE, with a name of its own other than {DENSE} and {PLAN}, found "
                f"{one!r:.60}; write it as minference=preset.yaml"
            )
        found[name] = load_plan(plan_file(Path(place)))
    return found


# --- curve ------------------------------------------------------------------------------------------------------------


def _curve(subject: Subject, flags: EvalFlags) -> None:
    """Measures the points that the file does not hold yet, and prints those that were asked for."""
    from sparsekv.bench.curve_file import CurveRun
    from sparsekv.bench.curve_methods import BUDGETS, CurveInputs, check_profiled, chosen_methods
    from sparsekv.bench.curves import HEADER, cells, measure_curves
    from sparsekv.planner.profile.profile_data import check_model as check_profile
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.records import RunFile, digest_of

    (profile, preset), drawn, plan = _profiles(flags.profile), flags.drawn, subject.plan
    profiles = {name: one for name, one in (("profile", profile), ("preset", preset)) if one is not None}
    phases = PHASES if flags.only is None else (flags.only,)
    methods = chosen_methods(phases, flags.methods, [*profiles, *(["plan"] if plan else [])])
    check_profiled(methods, profiles, drawn.lengths)
    RunFile.earlier(CurveRun, flags.curve)

    def check(info: ModelInfo, _: str) -> None:
        check_lengths(drawn.lengths, info.context_length)
        if plan:
            check_model(plan, info)
        for one in profiles.values():
            check_profile(one, info, weights=False)

    loaded = subject.load(flags, check)
    for one in profiles.values():
        check_profile(one, loaded.info)
    asked = {"seed": drawn.seed, "samples": drawn.samples, "tasks": drawn.tasks, "prefill_chunk": drawn.prefill_chunk}
    digests = {name: digest_of(one) for name, one in profiles.items()}
    settings = CurveRun.of(loaded, plan=executed_digest(plan) if plan else None, **asked, **digests)
    file, budgets = RunFile.of(settings, flags.curve), flags.budgets or BUDGETS
    inputs = CurveInputs(loaded, plan, profile, preset, flags.densities, budgets, drawn.tasks[0], drawn.seed)
    rows = measure_curves(inputs, methods, drawn, file, BarProgress())
    missing = {name for names in methods.values() for name in names} - {row.method for row in rows}
    if missing:
        tell(f"no point of {', '.join(sorted(missing))}: it finds nothing to leave out in this model")
    if flags.as_json:
        emit_json({"path": str(flags.curve), "rows": [row.model_dump(mode="json") for row in rows]})
    else:
        emit(f"{columns([HEADER, *map(cells, rows)], right=range(4, len(HEADER)))}\n")
        told = f"{len(rows)} points, samples of each: {rows[0].samples}" if rows else "no method, no point"
        emit(f"{flags.curve}: {told}")


def _profiles(paths: Sequence[Path]) -> tuple[Profile | None, Profile | None]:
    """The profile of our search and that of the preset, as far as they are given."""
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.planner.records import read_measured

    found: dict[bool, Profile] = {}
    for path in paths:
        one = read_measured(Profile, path)
        if found.setdefault(one.preset is not None, one) is not one:
            raise UsageError(
                f"expected one --profile of our search and one of --preset minference at most, found two of a kind: "
                f"{path} and another; leave one out"
            )
    return found.get(False), found.get(True)


app = commands.app(
    evaluate,
    "sparsekv eval ./my-model --suite ruler --lengths 8k,32k -o ruler.jsonl",
    "sparsekv eval ./my-model --prompts questions.jsonl --only decode",
)
