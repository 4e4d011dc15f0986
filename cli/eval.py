"""`sparsekv eval`: a model on tasks, on own prompts, on RULER's tasks (--suite), or at many densities (--curve)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

from pydantic import AfterValidator, Field, model_validator

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, Subject, Subjects, plan_file, settings_of
from sparsekv.cli.output import agreement_table, columns, emit, emit_json, tell
from sparsekv.cli.plan_files import only_writer
from sparsekv.cli.prompts import answered_prompts
from sparsekv.planner.flags import MOST, Flag, Lengths, Names, Shares, each_once, text, words
from sparsekv.planner.options import DEFAULT_TASKS, PHASES, Drawn, Hardware, Phase, check_lengths
from sparsekv.plans.brief import percent
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import executed_digest, load_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, Quality, check_model, to_data
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.bench.curve_file import CurvePoint
    from sparsekv.planner.evaluation import EvalSamples, PlanMode
    from sparsekv.planner.evaluation.results import EvalResult
    from sparsekv.planner.evaluation.suite_results import Metric, Paired, SuiteTable
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.runtime.hf.load import LoadedModel

PhaseName = Literal["prefill", "decode", "both"]
Suite = Literal["ruler"]
Row = tuple[str, str, str, str, str, str, str, str, str]
DENSE, PLAN = "dense", "plan"
METRICS: dict[Metric, str] = {"recall": "RULER's string match", "exact": "the text begins with the answer"}
_OF_PLAN = ("phase", "backend", "allow_mismatch")
_OF_SUITE = ("out", "beside")
_OF_CURVE = ("profile", "phases", "methods", "densities", "budgets")


class EvalFlags(Subjects, Drawn, Hardware, Output):
    """The arguments of `eval`."""

    lengths: Annotated[
        Lengths,
        Flag(
            "Most tokens of a prompt and its answer, by default 4k; several for --suite and --curve.",
            ("--length", "--lengths"),
            "TOKENS",
        ),
    ] = (4096,)
    samples: Annotated[int, Field(ge=1, le=MOST), Flag("Samples a task.", metavar="N")] = 20
    phase: Annotated[PhaseName, Flag("Phases that follow the plan.")] = "both"
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
            "For --suite: a JSON file of results, written after each task; what is in it is not run again.",
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
    phases: Annotated[
        tuple[Phase, ...], text(words), AfterValidator(each_once), Flag("For --curve: prefill,decode.", metavar="NAMES")
    ] = ()
    methods: Annotated[
        Names, Flag("For --curve, such as sparsekv,streamingllm,quest; all by default.", metavar="NAMES")
    ] = ()
    densities: Annotated[
        Shares,
        Flag("For --curve: of the prefill methods that take one.", ("--densities", "--density"), "SHARES"),
    ] = ()
    budgets: Annotated[
        Shares, Flag("For --curve: of the context, of the decode methods.", ("--budgets", "--budget"), "SHARES")
    ] = ()

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.suite is not None:
            self.refuse(("tasks", "prompts_file", "curve"), "a suite has tasks and tables of its own", "suite")
        if self.prompts_file is not None:
            self.refuse(("tasks", "lengths", "samples", "seed", "curve"), "no samples are drawn", "prompts_file")
        if self.curve is not None:
            self.refuse(_OF_PLAN, "a curve is of both phases, by what is fastest", "curve")
        for needed, names in (("suite", _OF_SUITE), ("curve", _OF_CURVE)):
            if getattr(self, needed) is None and (unread := next(filter(self.is_given, names), None)):
                flags = self.flag_of(needed), self.flag_of(unread)
                raise UsageError("expected {0} beside {1}, found none; leave {1} out, or add {0}".format(*flags))
        if len(self.lengths) != 1 and self.suite is None and self.curve is None:
            raise UsageError(f"expected one --length, found {self.lengths}; call eval once for each")
        return self

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
    methods, on the same samples; `report --curve FILE` draws it. With --suite ruler the tasks of RULER are run by
    its names, sizes and metric: dense and plan generate freely, and what each task loses is told, worst first.
    """
    subject = flags.subject
    if subject.plan is None and not flags.beside and (unread := next(filter(flags.is_given, _OF_PLAN), None)):
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
            flags.check_model(plan, info)

    loaded, backend = subject.load(flags, check), settings_of(flags).backend
    return loaded, {name: PlanMode(one, flags.phase, backend, flags.allow_mismatch) for name, one in plans.items()}


def _tasks(subject: Subject, flags: EvalFlags) -> None:
    """Measures tasks, or own prompts."""
    prompts = answered_prompts(flags.prompts_file) if flags.prompts_file else ()
    from sparsekv.planner.evaluation import evaluate as measure
    from sparsekv.planner.evaluation.given import evaluate_given
    from sparsekv.planner.progress import BarProgress

    plan = subject.plan
    loaded, modes = _loaded(subject, flags, {PLAN: plan} if plan else {})
    differs = flags.check_model(plan, loaded.info) if plan else []
    if prompts:
        found = evaluate_given(loaded, modes, prompts, flags.batch, flags.prefill_chunk, BarProgress())
    else:
        found = measure(loaded, modes, flags.drawn, progress=BarProgress())
    results = found[PLAN if plan else DENSE]
    if flags.as_json:
        has_plan = plan is not None
        report = _of_all_lengths(results, has_plan) if prompts else _report(results[0], flags.samples, has_plan)
        emit_json(report | ({"differs": differs} if plan else {}))
        return
    rows = [_task_row(name, one, plan is not None) for one in results for name in one.tasks]
    count = f"{len(prompts)} own" if prompts else f"{flags.samples} a task"
    emit("\n\n".join((_table(rows, "sparse"), *_facts(results, flags, count, plan is not None))))


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


def _facts(results: Sequence[EvalResult], flags: EvalFlags, count: str, has_plan: bool) -> Iterator[str]:
    from sparsekv.planner.evaluation.results import measurement_of, merged

    whole = merged(results)
    facts = f"samples: {count}, of up to {whole.lengths[-1]:,} tokens"
    if has_plan:
        measured = measurement_of(results, flags.phase, flags.prefill_chunk)
        yield agreement_table(Quality.model_validate({flags.phase: measured}))
        facts += f"; prefill computed {whole.prefill_density:.3f} of the tiles"
        facts += f", decode attended to {whole.decode_share:.3f} of the tokens; KL {whole.kl:.3g}"
    yield facts


# --- the table --------------------------------------------------------------------------------------------------------


def _table(rows: Sequence[Row], name: str) -> str:
    """Dense beside one method, task by task; columns that no row has are left out."""
    every = [("task", "length", "score", DENSE, name, "difference", "95%", "tiles", "tokens"), *rows]
    has = [at for at in range(len(every[0])) if any(row[at] for row in rows)]
    return columns([[row[at] for at in has] for row in every], right=range(3, len(has)))


def _task_row(name: str, result: EvalResult, has_plan: bool) -> Row:
    task, at = result.tasks[name], format_length(result.lengths[0])
    score = task.score
    row = (name, at, "exact match" if task.is_accuracy else "perplexity", f"{score.dense:.4g}")
    if not has_plan:
        return (*row, "", "", "", "", "")
    interval = "-" if score.interval is None else "{:+.3g} to {:+.3g}".format(*score.interval)
    return (*row, f"{score.sparse:.4g}", f"{score.sparse - score.dense:+.3g}", interval, "", "")


def _suite_rows(table: SuiteTable, method: str) -> Iterator[Row]:
    """All tasks at each length and at all; then each task, the worst first."""
    lengths = [*((one,) for one in table.lengths), *([table.lengths] if len(table.lengths) > 1 else [])]
    for metric in METRICS:
        for some in lengths:
            at = format_length(some[0]) if len(some) == 1 else "all"
            is_of_cells = metric == "recall" and len(some) == 1
            shares = [f"{table.share(method, name, some[0]):.3f}" for name in _SHARES] if is_of_cells else ["", ""]
            yield _suite_row(("all", at, metric), table.paired(method, metric, (), some), shares)
    for task in table.worst_first(method):
        for length in table.lengths:
            pair = table.paired(method, "recall", (task,), (length,))
            yield _suite_row((task, format_length(length), "recall"), pair, ["", ""])


_SHARES: tuple[Literal["prefill_density"], Literal["decode_share"]] = ("prefill_density", "decode_share")


def _suite_row(named: tuple[str, str, str], pair: Paired, shares: Sequence[str]) -> Row:
    dense, own, moved = (100.0 * score for score in (pair.dense, pair.own, pair.difference))
    low, high = (100.0 * bound for bound in pair.interval)
    tiles, tokens = shares
    return (*named, f"{dense:.1f}", f"{own:.1f}", f"{moved:+.1f}", f"{low:+.1f} to {high:+.1f}", tiles, tokens)


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
        emit_json(_suite_data(table) | {"path": str(flags.out) if flags.out else None})
    else:
        emit(_suite_text(table))


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


def _suite_text(table: SuiteTable) -> str:
    from sparsekv.planner.tasks.ruler_suite import ABSENT

    tables = [_table(list(_suite_rows(table, method)), method) for method in table.methods]
    if not tables:
        rows = [(*row[:4], "", "", "", "", "") for row in _suite_rows(table, DENSE)]
        tables = [_table(rows, "")]
    facts = f"{len(table.tasks)} tasks of RULER, {table.file.settings.samples} samples of each a length, in percent\n"
    facts += "; ".join(f"{name}: {what}" for name, what in METRICS.items())
    haystacks = (f"haystack of {', '.join(tasks)}: {what}" for what, tasks in table.haystacks.items())
    absent = f"absent: {', '.join(ABSENT)}, which need a corpus of questions; use lm-evaluation-harness"
    return "\n\n".join((*tables, "\n".join((facts, *haystacks, absent))))


def _suite_data(table: SuiteTable) -> dict[str, Any]:
    """The JSON of the tables: scores in percent, differences in points."""
    from sparsekv.planner.tasks.ruler_suite import ABSENT

    lengths, settings = table.lengths, table.file.settings

    def pairs(method: str, tasks: tuple[str, ...], some: tuple[int, ...]) -> dict[str, Any]:
        return {metric: _pair_data(table.paired(method, metric, tasks, some)) for metric in METRICS}

    def method_data(method: str) -> dict[str, Any]:
        data: dict[str, Any] = {"method": method}
        for metric in METRICS:
            each = {str(n): 100.0 * table.paired(method, metric, (), (n,)).own for n in lengths}
            data[metric] = each | {"mean": 100.0 * table.paired(method, metric).own}
        return data | {name: {str(n): table.share(method, name, n) for n in lengths} for name in _SHARES}

    return {
        "suite": settings.suite,
        "model": settings.model,
        "settings": to_data(settings),
        "devices": list(dict.fromkeys(cell.device for cell in table.cells.values())),
        "lengths": list(lengths),
        "absent": list(ABSENT),
        "haystacks": {task: what for what, tasks in table.haystacks.items() for task in tasks},
        "methods": [method_data(method) for method in (DENSE, *table.methods)],
        "differences": {method: pairs(method, (), lengths) for method in table.methods},
        "tasks": [
            {"method": method, "task": task, "lengths": {str(n): pairs(method, (task,), (n,)) for n in lengths}}
            for method in table.methods
            for task in table.worst_first(method)
        ],
    }


def _pair_data(pair: Paired) -> dict[str, Any]:
    low, high = pair.interval
    return {
        "dense": 100.0 * pair.dense,
        "own": 100.0 * pair.own,
        "difference": 100.0 * pair.difference,
        "interval": [100.0 * low, 100.0 * high],
    }


# --- curve ------------------------------------------------------------------------------------------------------------

_CURVE_HEADER = (
    "length", "phase", "method", "setting", "computed", "KL", "95%", "top-1", "exact", "accuracy", "of dense",
)  # fmt: skip


def _curve(subject: Subject, flags: EvalFlags) -> None:
    """Measures the points that the file does not hold yet, and prints those that were asked for."""
    from sparsekv.bench.curve_file import CurveRun
    from sparsekv.bench.curve_methods import BUDGETS, CurveInputs, check_profiled, chosen_methods
    from sparsekv.bench.curves import measure_curves
    from sparsekv.planner.profile.profile_data import check_model as check_profile
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.records import RunFile, digest_of

    (profile, preset), drawn, plan = _profiles(flags.profile), flags.drawn, subject.plan
    profiles = {name: one for name, one in (("profile", profile), ("preset", preset)) if one is not None}
    phases = tuple(phase for phase in PHASES if not flags.phases or phase in flags.phases)
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
        emit(f"{columns([_CURVE_HEADER, *map(_point_cells, rows)], right=range(4, len(_CURVE_HEADER)))}\n")
        emit(
            f"{flags.curve}: {len(rows)} points, samples of each: {rows[0].samples}" if rows else "no method, no point"
        )


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


def _point_cells(row: CurvePoint) -> tuple[str, ...]:
    interval = "" if row.kl_interval is None else "{:.2g} to {:.2g}".format(*row.kl_interval)
    shares = (row.agreement, row.exact, row.accuracy, row.dense_accuracy)
    return (
        format_length(row.length),
        row.phase,
        row.method,
        row.setting,
        percent(row.density),
        "" if row.kl is None else f"{row.kl:.3g}",
        interval,
        *("" if share is None else f"{share:.3f}" for share in shares),
    )


app = commands.app(commands.command(evaluate))
