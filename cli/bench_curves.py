"""`sparsekv eval --curve`: our plans and other methods at many densities, into a file that `show --html` draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.cli import arguments
from sparsekv.cli.output import columns, emit, emit_json, tell
from sparsekv.cli.plan import check_replaceable, check_writable
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.bench.curve_file import CurveRow
    from sparsekv.planner.options import Phase
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.plans.model import ModelInfo

CURVE_OPTIONS = ("profile", "phases", "methods", "densities", "budgets")
_HEADER = ("length", "phase", "method", "setting", "density", "KL", "95%", "top-1", "exact", "accuracy", "of dense")


@dataclass(frozen=True, slots=True)
class Curve:
    """What the options ask for; empty for all there is."""

    out: Path
    profiles: tuple[Path, ...]
    phases: tuple[Phase, ...]
    methods: tuple[str, ...]
    densities: tuple[float, ...]
    budgets: tuple[float, ...]

    @classmethod
    def of(
        cls,
        out: Path,
        profiles: Sequence[Path],
        phases: str | None,
        methods: str | None,
        densities: str | None,
        budgets: str | None,
    ) -> Curve:
        """From the flags.

        Raises:
            UsageError: a flag means nothing, or the file cannot be written.
        """
        from sparsekv.planner.options import PHASES

        check_writable(out)
        check_replaceable(out, "--curve", "curve")
        named = arguments.names_from(phases, "--phases") if phases is not None else PHASES
        if unknown := [name for name in named if name not in PHASES]:
            raise UsageError(f"--phases: expected {', '.join(PHASES)}, found {unknown[0]!r:.40}")
        return cls(
            out,
            tuple(profiles),
            tuple(phase for phase in PHASES if phase in named),
            () if methods is None else arguments.names_from(methods, "--methods"),
            () if densities is None else arguments.shares_from(densities, "--densities"),
            () if budgets is None else arguments.shares_from(budgets, "--budgets"),
        )


def measure_curve(
    subject: arguments.Subject,
    asked: Curve,
    tasks: Sequence[str],
    lengths: tuple[int, ...],
    samples: int,
    seed: int,
    batch: int | None,
    chunk: int | None,
    device: str | None,
    dtype: str | None,
    as_json: bool,
) -> None:
    """Measures, writes the file after each length, and prints a table."""
    from sparsekv.bench.curve_file import write_curve
    from sparsekv.bench.curve_methods import BUDGETS, CurveInputs, chosen_methods
    from sparsekv.bench.curves import measure_curves
    from sparsekv.planner.data_files import check_model
    from sparsekv.planner.evaluation import EvalSamples
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.schema import check_model as check_plan

    profile, preset = _profiles(asked.profiles)
    inputs = {"plan": subject.plan, "profile": profile, "preset": preset}
    methods = chosen_methods(asked.phases, asked.methods, [name for name, one in inputs.items() if one is not None])

    def check(info: ModelInfo, _: str) -> None:
        if max(lengths) > info.context_length:
            raise PromptError(
                f"expected lengths within the model's context of {info.context_length} tokens, found {max(lengths)}; "
                "give a shorter --length"
            )
        if subject.plan:
            check_plan(subject.plan, info, False)
        for one in (profile, preset):
            if one is not None:
                check_model(one, info, weights=False)

    loaded = subject.load(device, dtype, check)
    for one in (profile, preset):
        if one is not None:
            check_model(one, loaded.info)
    rows = measure_curves(
        CurveInputs(loaded, subject.plan, profile, preset, asked.densities, asked.budgets or BUDGETS, tasks[0], seed),
        methods,
        EvalSamples(tuple(tasks), tuple(sorted(lengths)), samples, batch, seed, chunk),
        progress=BarProgress(),
        done=lambda rows: write_curve(rows, asked.out),
    )
    missing = {name for names in methods.values() for name in names} - {row.method for row in rows}
    if missing:
        tell(f"no point of {', '.join(sorted(missing))}: it finds nothing to leave out in this model")
    if as_json:
        emit_json({"path": str(asked.out), "rows": [row.model_dump(mode="json") for row in rows]})
    else:
        emit(f"{columns([_HEADER, *map(_cells, rows)], right=range(4, len(_HEADER)))}\n")
        emit(f"{asked.out}: {len(rows)} points, samples of each: {rows[0].samples}" if rows else "no method, no point")


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
        f"{row.density:.3f}",
        "" if row.kl is None else f"{row.kl:.3g}",
        interval,
        *("" if share is None else f"{share:.3f}" for share in shares),
    )
