"""`sparsekv eval`: a model on the tasks, dense and with its plan; or, with --curve, at many densities."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import AfterValidator, model_validator

from sparsekv.cli import commands
from sparsekv.cli.arguments import Subject, settings_of
from sparsekv.cli.eval_suite import OF_SUITE, MeasureFlags, PhaseName, all_dense, measure_suite
from sparsekv.cli.output import agreement_table, columns, emit, emit_json, tell
from sparsekv.cli.plan_files import only_writer
from sparsekv.cli.prompts import answered_prompts
from sparsekv.planner.flags import Flag, Names, Options, Shares, each_once, text, words
from sparsekv.planner.options import DEFAULT_TASKS, PHASES, Phase, check_lengths
from sparsekv.plans.brief import percent
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Measurement, Quality, check_model, to_data
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.bench.curve_file import CurveRow
    from sparsekv.planner.evaluation import EvalSamples
    from sparsekv.planner.evaluation.results import EvalResult
    from sparsekv.planner.profile.profile_data import Profile

OF_PLAN = ("phase", "backend", "allow_mismatch")


class CurveFlags(Options):
    """Holds what to measure a curve of; nothing given is all there is."""

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


CURVE_OPTIONS = tuple(name for name in CurveFlags.model_fields if name != "curve")


class EvalFlags(MeasureFlags, CurveFlags):
    """Holds what `eval` is asked to do."""

    prompts_file: Annotated[
        Path | None,
        Flag(
            'Instead of tasks, own prompts: JSON lines of {"prompt", "answer", "task"?}, measured by length.',
            ("--prompts",),
            "FILE",
        ),
    ] = None

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.suite is not None:
            self.refuse(("tasks", "prompts_file", "curve"), "a suite has tasks and tables of its own", "suite")
        elif unread := next(filter(self.is_given, OF_SUITE), None):
            flag = self.flag_of(unread)
            raise UsageError(f"expected --suite ruler beside {flag}, found none; leave {flag} out, or name the suite")
        if self.prompts_file is not None:
            self.refuse(("tasks", "lengths", "samples", "seed", "curve"), "no samples are drawn", "prompts_file")
        if self.curve is not None:
            self.refuse(OF_PLAN, "a curve is of both phases, by what is fastest", "curve")
        elif unread := next(filter(self.is_given, CURVE_OPTIONS), None):
            flag = self.flag_of(unread)
            raise UsageError(f"expected --curve FILE beside {flag}, found none; leave {flag} out, or name the file")
        elif len(self.lengths) != 1 and self.suite is None:
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
    if subject.plan is None and not flags.beside and (unread := next(filter(flags.is_given, OF_PLAN), None)):
        raise UsageError(f"expected a plan beside {flags.flag_of(unread)}, found none; name one with --plan FILE")
    subject = subject.checked(flags, () if flags.prompts_file else flags.lengths)
    if flags.suite is not None:
        with only_writer(flags.out, "-o", "suite"):
            measure_suite(subject, flags)
        return
    if flags.curve is not None:
        with only_writer(flags.curve, "--curve", "curve"):
            measure_curve(subject, flags)
        return
    backend = settings_of(flags).backend
    prompts = answered_prompts(flags.prompts_file) if flags.prompts_file else ()
    from sparsekv.planner.evaluation import DENSE, Mode, PlanMode
    from sparsekv.planner.evaluation import evaluate as measure
    from sparsekv.planner.evaluation.given import evaluate_given
    from sparsekv.planner.evaluation.results import measurement_of
    from sparsekv.planner.progress import BarProgress

    plan, phase, length = subject.plan, flags.phase, flags.lengths[0]
    if plan is None:
        tell(f"dense is measured alone: {subject.no_plan}")

    def check(info: ModelInfo, _: str) -> None:
        if not prompts:
            check_lengths(flags.lengths, info.context_length)
        if plan is not None:
            flags.check_model(plan, info)

    loaded = subject.load(flags, check)
    differs = flags.check_model(plan, loaded.info) if plan else []
    modes: dict[str, Mode] = {}
    if plan is not None:
        modes[phase] = PlanMode(plan, phase, backend, flags.allow_mismatch)
        if not prompts and (note := all_dense(plan, phase, (length,))):
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


_HEADER = (
    "length", "phase", "method", "setting", "computed", "KL", "95%", "top-1", "exact", "accuracy", "of dense",
)  # fmt: skip


def measure_curve(subject: Subject, flags: EvalFlags) -> None:
    """Measures, writes the file after each length, and prints a table."""
    assert flags.curve is not None
    out = flags.curve
    from sparsekv.bench.curve_file import write_curve
    from sparsekv.bench.curve_methods import BUDGETS, CurveInputs, check_profiled, chosen_methods
    from sparsekv.bench.curves import measure_curves
    from sparsekv.planner.data_files import check_model as check_profile
    from sparsekv.planner.progress import BarProgress

    (profile, preset), drawn = _profiles(flags.profile), flags.drawn
    profiles = {name: one for name, one in (("profile", profile), ("preset", preset)) if one is not None}
    phases = tuple(phase for phase in PHASES if not flags.phases or phase in flags.phases)
    methods = chosen_methods(phases, flags.methods, [*profiles, *(["plan"] if subject.plan else [])])
    check_profiled(methods, profiles, drawn.lengths)

    def check(info: ModelInfo, _: str) -> None:
        check_lengths(drawn.lengths, info.context_length)
        if subject.plan:
            check_model(subject.plan, info)
        for one in profiles.values():
            check_profile(one, info, weights=False)

    loaded = subject.load(flags, check)
    for one in profiles.values():
        check_profile(one, loaded.info)
    budgets = flags.budgets or BUDGETS
    rows = measure_curves(
        CurveInputs(loaded, subject.plan, profile, preset, flags.densities, budgets, drawn.tasks[0], drawn.seed),
        methods,
        drawn,
        progress=BarProgress(),
        done=lambda rows: write_curve(rows, out),
    )
    missing = {name for names in methods.values() for name in names} - {row.method for row in rows}
    if missing:
        tell(f"no point of {', '.join(sorted(missing))}: it finds nothing to leave out in this model")
    if flags.as_json:
        emit_json({"path": str(out), "rows": [row.model_dump(mode="json") for row in rows]})
    else:
        emit(f"{columns([_HEADER, *map(_cells, rows)], right=range(4, len(_HEADER)))}\n")
        emit(f"{out}: {len(rows)} points, samples of each: {rows[0].samples}" if rows else "no method, no point")


def _profiles(paths: Sequence[Path]) -> tuple[Profile | None, Profile | None]:
    """The profile of our search and that of the preset, as far as they are given."""
    from sparsekv.planner.data_files import read_measured
    from sparsekv.planner.profile.profile_data import Profile

    found: dict[bool, Profile] = {}
    for path in paths:
        one = read_measured(Profile, path)
        if found.setdefault(one.preset is not None, one) is not one:
            raise UsageError(
                f"expected one --profile of our search and one of --preset minference at most, found two of a kind: "
                f"{path} and another; leave one out"
            )
    return found.get(False), found.get(True)


def _cells(row: CurveRow) -> tuple[str, ...]:
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
