"""`sparsekv eval --suite`: the tables that papers print of a suite of tasks, from generated text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from sparsekv.cli.arguments import Output, Subject, Subjects, plan_file, settings_of
from sparsekv.cli.output import columns, emit, emit_json, tell
from sparsekv.planner.flags import MOST, Flag, Lengths, Names, Options
from sparsekv.planner.options import Drawn, Hardware, check_lengths
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, to_data
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.planner.evaluation.suite_file import Metric, Paired, SuiteMethod, SuiteModel, SuiteResult
    from sparsekv.planner.evaluation.suite_table import SuiteTable
    from sparsekv.runtime.hf.load import LoadedModel

PhaseName = Literal["prefill", "decode", "both"]
Suite = Literal["ruler"]
DENSE, PLAN = "dense", "plan"
_PHASES = ("prefill", "decode", "kv_cache")
METRICS: dict[Metric, str] = {"recall": "RULER's string match", "exact": "the text begins with the answer"}


class SuiteFlags(Options):
    """Says which suite is run, and where its results are kept."""

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


OF_SUITE = ("out", "beside")


class MeasureFlags(Subjects, SuiteFlags, Drawn, Hardware, Output):
    """Holds what is measured on samples of tasks."""

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


def all_dense(plan: Plan, phase: PhaseName, lengths: Sequence[int]) -> str | None:
    """A line where nothing that is measured is sparse at some lengths: dense is then compared with itself."""
    parts = [part for name, part in (("prefill", plan.prefill), ("decode", plan.decode)) if phase in (name, "both")]
    dense = [n for n in lengths if not any(part is not None and part.bucket(n).is_sparse_at(n) for part in parts)]
    if not dense or (plan.retained and phase != "prefill"):
        return None
    at = ", ".join(map(format_length, dense))
    return f"the plan is dense at {at}, and dense is compared with itself; `show` says where not"


def measure_suite(subject: Subject, flags: MeasureFlags) -> None:
    """Runs what the file does not hold yet, and prints the tables."""
    plans = _plans(subject, flags)
    from sparsekv.planner.evaluation import PlanMode
    from sparsekv.planner.evaluation.suite import SuiteSamples, run_suite
    from sparsekv.planner.evaluation.suite_file import write_suite
    from sparsekv.planner.evaluation.suite_table import SuiteTable
    from sparsekv.planner.progress import BarProgress

    asked = SuiteSamples(tuple(sorted(flags.lengths)), flags.samples, flags.batch, flags.seed, flags.prefill_chunk)
    kept = _Kept(flags, plans)

    def check(info: ModelInfo, _: str) -> None:
        check_lengths(flags.lengths, info.context_length)
        for plan in plans.values():
            flags.check_model(plan, info)

    if not plans:
        tell(f"dense is measured alone: {subject.no_plan}")
    for name, plan in plans.items():
        if note := all_dense(plan, flags.phase, asked.lengths):
            tell(note if name == PLAN else f"{name}: {note}")
    loaded = subject.load(flags, check)
    backend = settings_of(flags).backend
    modes = {name: PlanMode(plan, flags.phase, backend, flags.allow_mismatch) for name, plan in plans.items()}

    def done(result: SuiteResult) -> None:
        if flags.out is not None:
            write_suite(result, flags.out)

    try:
        whole = run_suite(loaded, modes, asked, kept.begun(loaded), progress=BarProgress(), done=done)
    except BaseException as error:
        if flags.out is not None and flags.out.exists():
            error.add_note(f"what was measured until then is in {flags.out}; the same command goes on from there")
        raise
    table = SuiteTable(whole, tuple(plans), asked.lengths)
    if flags.as_json:
        emit_json(_data(table) | {"path": str(flags.out) if flags.out else None})
    else:
        emit(_text(table))


def _plans(subject: Subject, flags: MeasureFlags) -> dict[str, Plan]:
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


@dataclass(frozen=True, slots=True)
class _Kept:
    """The results of earlier runs, read and held against the flags before a model is loaded."""

    flags: MeasureFlags
    plans: dict[str, Plan]

    def __post_init__(self) -> None:
        if found := self._found():
            self._continued(found, found.model)

    def begun(self, loaded: LoadedModel) -> SuiteResult:
        """Returns what is known of the model that was loaded."""
        from sparsekv.planner.evaluation.suite_file import SuiteModel
        from sparsekv.runtime.model_config import device_name, dtype_name

        info = loaded.info
        model = SuiteModel(
            id=info.id,
            architecture=info.fingerprint.architecture,
            weights=info.fingerprint.weights,
            dtype=dtype_name(loaded.model.dtype),
        )
        return self._continued(self._found(), model, (device_name(loaded.model.device),))

    def _found(self) -> SuiteResult | None:
        from sparsekv.planner.evaluation.suite_file import read_suite

        out = self.flags.out
        return read_suite(out) if out is not None and out.exists() and out.stat().st_size else None

    def _continued(self, found: SuiteResult | None, model: SuiteModel, devices: tuple[str, ...] = ()) -> SuiteResult:
        from sparsekv.planner.data_files import versions
        from sparsekv.planner.evaluation.suite_file import SuiteResult, SuiteSettings, continued_from

        flags = self.flags
        settings = SuiteSettings(
            seed=flags.seed,
            samples=flags.samples,
            phase=flags.phase,
            backend=settings_of(flags).backend,
            prefill_chunk=flags.prefill_chunk,
        )
        wanted = SuiteResult(
            model=model, settings=settings, methods=self._methods(), devices=devices, versions=versions()
        )
        if found is None:
            return wanted
        assert flags.out is not None
        return continued_from(found, wanted, flags.out)

    def _methods(self) -> tuple[SuiteMethod, ...]:
        from sparsekv.planner.evaluation.suite_file import SuiteMethod

        named = (SuiteMethod(name=name, plan=digest_of(plan)) for name, plan in self.plans.items())
        return (SuiteMethod(name=DENSE), *named)


def digest_of(plan: Plan) -> str:
    """The digest of what a plan does: what was measured of it meanwhile is left out."""
    from sparsekv.plans.files import content_digest

    return content_digest({name: value for name, value in to_data(plan).items() if name in _PHASES})


# --- tables -----------------------------------------------------------------------------------------------------------


def _text(table: SuiteTable) -> str:
    """Methods by length; then for each plan dense beside it, task by task, the worst first."""
    count = len(table.lengths)
    parts = [columns(list(_methods(table)), right=range(2, 3 + count))]
    for method in table.methods:
        rows = columns(list(_compared(table, method)), right=range(1, 9))
        parts.append(f"{rows}\n{_whole(table, method)}")
    parts.append(columns(list(_shares(table) if table.methods else _dense_alone(table)), right=range(1, 2 + count)))
    facts = f"{table.result.suite}: {len(table.tasks)} tasks, {table.result.settings.samples} samples of each a length"
    metrics = "; ".join(f"{name}: {what}" for name, what in METRICS.items())
    parts.append("\n".join((facts, f"{metrics}, in percent, of generated text", *_haystacks(table))))
    return "\n\n".join(parts)


def _methods(table: SuiteTable) -> Iterator[tuple[str, ...]]:
    yield ("method", "score", *map(format_length, table.lengths), "mean")
    for metric in METRICS:
        for method in (DENSE, *table.methods):
            each = [table.mean(method, metric, (length,)) for length in table.lengths]
            yield (method, metric, *map(_percent, (*each, table.mean(method, metric, table.lengths))))


def _compared(table: SuiteTable, method: str) -> Iterator[tuple[str, ...]]:
    yield ("task", "length", "dense", method, "difference", "95%", "exact", "difference", "95%")
    for task in table.worst_first(method):
        for length in table.lengths:
            recall, exact = (table.result.paired(method, metric, (task,), (length,)) for metric in METRICS)
            cells = (_percent(recall.dense), _percent(recall.own), *_moved(recall), _percent(exact.dense))
            yield (task, format_length(length), *cells, *_moved(exact))


def _dense_alone(table: SuiteTable) -> Iterator[tuple[str, ...]]:
    yield ("task", *map(format_length, table.lengths), "mean")
    for task in table.tasks:
        each = [table.mean(DENSE, "recall", some, (task,)) for some in (*((n,) for n in table.lengths), table.lengths)]
        yield (task, *map(_percent, each))


def _whole(table: SuiteTable, method: str) -> str:
    told = []
    for metric in METRICS:
        moved, interval = _moved(table.result.paired(method, metric, table.tasks, table.lengths))
        told.append(f"{metric} {moved} points (95% {interval})")
    return f"{method} minus dense, over all tasks and lengths: {', '.join(told)}"


def _shares(table: SuiteTable) -> Iterator[tuple[str, ...]]:
    yield ("computed", *map(format_length, table.lengths))
    for method in table.methods:
        for what, share in (("prefill tiles", table.prefill_density), ("decode tokens", table.decode_share)):
            yield (f"{method}: {what}", *(f"{share(method, length):.3f}" for length in table.lengths))


def _haystacks(table: SuiteTable) -> Iterator[str]:
    for what, tasks in table.haystacks.items():
        yield f"haystack of {', '.join(tasks)}: {what}"
    yield f"absent: {', '.join(table.absent)}, which need a corpus of questions; use lm-evaluation-harness"


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f}"


def _moved(pair: Paired) -> tuple[str, str]:
    low, high = pair.interval
    return f"{100.0 * pair.difference:+.1f}", f"{100.0 * low:+.1f} to {100.0 * high:+.1f}"


def _data(table: SuiteTable) -> dict[str, Any]:
    """The JSON of the tables: scores in percent, differences in points."""
    lengths, result = table.lengths, table.result

    def task_data(method: str, task: str) -> dict[str, Any]:
        each = {
            str(n): {metric: _pair_data(result.paired(method, metric, (task,), (n,))) for metric in METRICS}
            for n in lengths
        }
        return {"method": method, "task": task, "lengths": each}

    return {
        "suite": result.suite,
        "model": to_data(result.model),
        "settings": to_data(result.settings),
        "devices": list(result.devices),
        "lengths": list(lengths),
        "absent": list(table.absent),
        "haystacks": {task: what for what, tasks in table.haystacks.items() for task in tasks},
        "methods": [_method_data(table, method) for method in (DENSE, *table.methods)],
        "differences": {
            method: {metric: _pair_data(result.paired(method, metric, table.tasks, lengths)) for metric in METRICS}
            for method in table.methods
        },
        "tasks": [task_data(method, task) for method in table.methods for task in table.worst_first(method)],
    }


def _method_data(table: SuiteTable, method: str) -> dict[str, Any]:
    data: dict[str, Any] = {"method": method}
    for metric in METRICS:
        each = {str(length): 100.0 * table.mean(method, metric, (length,)) for length in table.lengths}
        data[metric] = each | {"mean": 100.0 * table.mean(method, metric, table.lengths)}
    for name, share in (("prefill_density", table.prefill_density), ("decode_share", table.decode_share)):
        data[name] = {str(length): share(method, length) for length in table.lengths}
    return data


def _pair_data(pair: Paired) -> dict[str, Any]:
    low, high = pair.interval
    return {
        "dense": 100.0 * pair.dense,
        "own": 100.0 * pair.own,
        "difference": 100.0 * pair.difference,
        "interval": [100.0 * low, 100.0 * high],
    }
