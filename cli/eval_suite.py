"""`sparsekv eval --suite`: the tables that papers print of a suite of tasks, from generated text."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from sparsekv.cli.arguments import Output, Subject, Subjects, plan_file, settings_of
from sparsekv.cli.output import columns, emit, emit_json, tell
from sparsekv.cli.plan_files import check_replaceable
from sparsekv.planner.flags import MOST, Flag, Lengths, Names, Options
from sparsekv.planner.options import Drawn, Hardware, check_lengths
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, check_model, to_data
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.planner.evaluation.suite_file import Metric, Paired, SuiteMethod, SuiteModel, SuiteResult
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
    if flags.out is not None:
        check_replaceable(flags.out, "-o", "suite")
    from sparsekv.planner.evaluation import PlanMode
    from sparsekv.planner.evaluation.suite import SuiteSamples, run_suite
    from sparsekv.planner.evaluation.suite_file import write_suite
    from sparsekv.planner.progress import BarProgress

    asked = SuiteSamples(tuple(sorted(flags.lengths)), flags.samples, flags.batch, flags.seed, flags.prefill_chunk)
    kept = _Kept(flags, plans)

    def check(info: ModelInfo, _: str) -> None:
        check_lengths(flags.lengths, info.context_length)
        for plan in plans.values():
            check_model(plan, info, flags.allow_mismatch)

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
    table = SuiteTable(whole.restricted((DENSE, *plans), asked.lengths), tuple(plans), asked.lengths)
    if flags.as_json:
        emit_json(table.as_data() | {"path": str(flags.out) if flags.out else None})
    else:
        emit(table.as_text())


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

        named = (SuiteMethod(name=name, plan=_digest(plan)) for name, plan in self.plans.items())
        return (SuiteMethod(name=DENSE), *named)


def _digest(plan: Plan) -> str:
    """The digest of what a plan does: what was measured of it meanwhile is left out."""
    from sparsekv.plans.files import content_digest

    return content_digest({name: value for name, value in to_data(plan).items() if name in _PHASES})


# --- tables -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class SuiteTable:
    """Results as they are shown: scores in percent, differences in points.

    Attributes:
        methods: beside dense.
        lengths: ascending.
    """

    result: SuiteResult
    methods: tuple[str, ...]
    lengths: tuple[int, ...]

    @property
    def tasks(self) -> tuple[str, ...]:
        """RULER's names, in its order."""
        from sparsekv.planner.tasks.ruler_suite import RULER_SUITE

        return tuple(RULER_SUITE)

    def mean(self, method: str, metric: Metric, lengths: Sequence[int]) -> float:
        """A method's score over all tasks; each task and length has as many samples."""
        scores = self.result.scores(method, metric, self.tasks, lengths)
        return sum(scores) / len(scores)

    def worst_first(self, method: str) -> list[str]:
        """The tasks, by what a method loses of RULER's score over all lengths, the greatest loss first."""
        lost = {task: self.result.paired(method, "recall", (task,), self.lengths).difference for task in self.tasks}
        return sorted(self.tasks, key=lost.__getitem__)

    def as_text(self) -> str:
        """Methods by length; then for each plan dense beside it, task by task, the worst first."""
        settings = self.result.settings
        parts = [columns(list(self._methods()), right=range(2, 3 + len(self.lengths)))]
        parts += [
            f"{method}\n{columns(list(self._compared(method)), right=range(1, 6))}\n{self._whole(method)}"
            for method in self.methods
        ]
        if not self.methods:
            parts.append(columns(list(self._dense_alone()), right=range(1, 2 + len(self.lengths))))
        if self.methods:
            parts.append(self._shares())
        facts = f"{self.result.suite}: {len(self.tasks)} tasks, {settings.samples} samples of each at each length"
        parts.append("\n".join((facts, *_told_of_metrics(), *_told_of_haystacks())))
        return "\n\n".join(parts)

    def _methods(self) -> Iterator[tuple[str, ...]]:
        yield ("method", "score", *map(format_length, self.lengths), "mean")
        for metric in METRICS:
            for method in (DENSE, *self.methods):
                each = [self.mean(method, metric, (length,)) for length in self.lengths]
                yield (method, metric, *map(_percent, (*each, self.mean(method, metric, self.lengths))))

    def _compared(self, method: str) -> Iterator[tuple[str, ...]]:
        yield ("task", "length", "dense", method, "difference", "95%", "exact", "difference", "95%")
        for task in self.worst_first(method):
            for length in self.lengths:
                recall, exact = (self.result.paired(method, metric, (task,), (length,)) for metric in METRICS)
                cells = (_percent(recall.dense), _percent(recall.own), *_moved(recall))
                yield (task, format_length(length), *cells, _percent(exact.dense), *_moved(exact))

    def _dense_alone(self) -> Iterator[tuple[str, ...]]:
        yield ("task", *map(format_length, self.lengths), "mean")
        for task in self.tasks:
            each = [self.result.scores(DENSE, "recall", (task,), (length,)) for length in self.lengths]
            means = [sum(scores) / len(scores) for scores in each]
            yield (task, *map(_percent, (*means, sum(means) / len(means))))

    def _whole(self, method: str) -> str:
        told = []
        for metric in METRICS:
            moved, interval = _moved(self.result.paired(method, metric, self.tasks, self.lengths))
            told.append(f"{metric} {moved} points (95% {interval})")
        return f"{method} less dense, over all tasks and lengths: {', '.join(told)}"

    def _shares(self) -> str:
        rows = [("computed", *map(format_length, self.lengths))]
        for method in self.methods:
            for what, name in (("prefill tiles", "prefill_density"), ("decode tokens", "decode_share")):
                rows.append((f"{method}: {what}", *(f"{self._share(method, name, n):.3f}" for n in self.lengths)))
        return columns(rows, right=range(1, 1 + len(self.lengths)))

    def _share(self, method: str, name: str, length: int) -> float:
        """The mean over tasks of the share that was computed."""
        cells = self.result.by_key
        each: list[float] = [getattr(cells[method, task, length], name) for task in self.tasks]
        return sum(each) / len(each)

    def as_data(self) -> dict[str, Any]:
        """The JSON of the tables."""
        from sparsekv.planner.tasks.ruler_suite import ABSENT, HAYSTACKS, RULER_SUITE

        return {
            "suite": self.result.suite,
            "model": to_data(self.result.model),
            "settings": to_data(self.result.settings),
            "devices": list(self.result.devices),
            "lengths": list(self.lengths),
            "absent": list(ABSENT),
            "haystacks": {name: HAYSTACKS[task.haystack] for name, task in RULER_SUITE.items()},
            "methods": [self._method_data(method) for method in (DENSE, *self.methods)],
            "differences": {
                method: {
                    metric: _data(self.result.paired(method, metric, self.tasks, self.lengths)) for metric in METRICS
                }
                for method in self.methods
            },
            "tasks": [self._task_data(method, task) for method in self.methods for task in self.worst_first(method)],
        }

    def _method_data(self, method: str) -> dict[str, Any]:
        data: dict[str, Any] = {"method": method}
        for metric in METRICS:
            each = {str(length): 100.0 * self.mean(method, metric, (length,)) for length in self.lengths}
            data[metric] = each | {"mean": 100.0 * self.mean(method, metric, self.lengths)}
        for name in ("prefill_density", "decode_share"):
            data[name] = {str(length): self._share(method, name, length) for length in self.lengths}
        return data

    def _task_data(self, method: str, task: str) -> dict[str, Any]:
        lengths = {
            str(length): {metric: _data(self.result.paired(method, metric, (task,), (length,))) for metric in METRICS}
            for length in self.lengths
        }
        return {"method": method, "task": task, "lengths": lengths}


def _told_of_metrics() -> Iterator[str]:
    yield "; ".join(f"{name}: {what}" for name, what in METRICS.items()) + ", in percent of generated text"


def _told_of_haystacks() -> Iterator[str]:
    from sparsekv.planner.tasks.ruler_suite import ABSENT, HAYSTACKS, RULER_SUITE

    for haystack, what in HAYSTACKS.items():
        names = ", ".join(name for name, task in RULER_SUITE.items() if task.haystack == haystack)
        yield f"haystack of {names}: {what}"
    yield f"absent: {', '.join(ABSENT)}, which need a corpus of questions; use lm-evaluation-harness"


def _percent(share: float) -> str:
    return f"{100.0 * share:.1f}"


def _moved(pair: Paired) -> tuple[str, str]:
    low, high = pair.interval
    return f"{100.0 * pair.difference:+.1f}", f"{100.0 * low:+.1f} to {100.0 * high:+.1f}"


def _data(pair: Paired) -> dict[str, Any]:
    low, high = pair.interval
    return {
        "dense": 100.0 * pair.dense,
        "own": 100.0 * pair.own,
        "difference": 100.0 * pair.difference,
        "interval": [100.0 * low, 100.0 * high],
    }
