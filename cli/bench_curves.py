"""`sparsekv eval --curve`: our plans and other methods at many densities, into a file that `show --html` draws."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.cli.arguments import Subject
from sparsekv.cli.eval_flags import EvalFlags, check_length
from sparsekv.cli.output import columns, emit, emit_json, tell
from sparsekv.cli.plan_files import check_replaceable, check_writable
from sparsekv.planner.options import PHASES
from sparsekv.plans.errors import UsageError
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.bench.curve_file import CurveRow
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.plans.model import ModelInfo

_HEADER = ("length", "phase", "method", "setting", "density", "KL", "95%", "top-1", "exact", "accuracy", "of dense")


def measure_curve(subject: Subject, flags: EvalFlags) -> None:
    """Measures, writes the file after each length, and prints a table."""
    assert flags.curve is not None
    out = flags.curve
    check_writable(out)
    check_replaceable(out, "--curve", "curve")
    from sparsekv.bench.curve_file import write_curve
    from sparsekv.bench.curve_methods import BUDGETS, CurveInputs, chosen_methods
    from sparsekv.bench.curves import measure_curves
    from sparsekv.planner.data_files import check_model
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.schema import check_model as check_plan

    (profile, preset), drawn = _profiles(flags.profile), flags.drawn
    inputs = {"plan": subject.plan, "profile": profile, "preset": preset}
    phases = tuple(phase for phase in PHASES if not flags.phases or phase in flags.phases)
    methods = chosen_methods(phases, flags.methods, [name for name, one in inputs.items() if one is not None])

    def check(info: ModelInfo, _: str) -> None:
        check_length(max(drawn.lengths), info.context_length)
        if subject.plan:
            check_plan(subject.plan, info, False)
        for one in (profile, preset):
            if one is not None:
                check_model(one, info, weights=False)

    loaded = subject.load(flags, check)
    for one in (profile, preset):
        if one is not None:
            check_model(one, loaded.info)
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
        f"{row.density:.3f}",
        "" if row.kl is None else f"{row.kl:.3g}",
        interval,
        *("" if share is None else f"{share:.3f}" for share in shares),
    )
