"""Curves: every method at every setting on the same held-out samples, dense once a length; and Markdown tables of them.

    python -m sparsekv.bench.curves MODEL -o a.json --profile profile.json --length 16k,32k --samples 20
    python -m sparsekv.bench.curves a.json b.json --density 0.1,0.2,0.3 --kl 0.001,0.005

The first measures what the file does not hold yet, of plans compiled from the profile and of other methods; device,
precision and kernels are those of SPARSEKV_*. `sparsekv report` draws it. A table has, for
each phase and length, the divergence of every method at these densities, and the least density at which it stays
within these divergences. Between two points of a curve, both are read off a straight line in logarithms;
a method that starts above a density or does not reach a divergence has no number there. In brackets is what a curve has
at its end: where it ends below a density, the divergence of its last point (and nothing at higher densities); where its
first point already stays within a divergence, the density of that one. A point that another one beats in both density
and divergence does not count.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np

from sparsekv.bench.curve_file import CurvePoint, CurveRun
from sparsekv.bench.curve_methods import BUDGETS, CurveInputs, CurveMode, check_profiled, chosen_methods, curve_modes
from sparsekv.bench.harness import parse_lengths
from sparsekv.planner.evaluation import EvalSamples, evaluate
from sparsekv.planner.evaluation.results import EvalResult
from sparsekv.planner.flags import shares, words
from sparsekv.planner.options import DEFAULT_TASKS, PHASES, Phase, check_lengths
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profile_data import check_model as check_profile
from sparsekv.planner.progress import BarProgress, Progress
from sparsekv.planner.records import RunFile, digest_of, only_run, read_measured
from sparsekv.plans.errors import SparseKVError, UsageError
from sparsekv.plans.files import executed_digest, load_plan
from sparsekv.plans.schema import check_model
from sparsekv.plans.types import format_length, parse_length
from sparsekv.runtime.hf.load import load_model
from sparsekv.runtime.settings import read_settings

_LEAST = 1e-9  # nats: what is less is rounding
Line = Sequence[tuple[float, float]]
_SOLVED = 0.5  # share of answers


def measure_curves(
    inputs: CurveInputs,
    methods: Mapping[Phase, Sequence[str]],
    asked: EvalSamples,
    file: RunFile[CurveRun],
    progress: Progress | None = None,
) -> tuple[CurvePoint, ...]:
    """Measures methods at every length but for the points that a file holds, and adds those of each length to it.

    Args:
        asked: tasks, lengths and samples.

    Returns:
        The points of these methods: by length, phase and method in the given order, ascending in density.
    """
    modes = {length: curve_modes(methods, inputs, length) for length in asked.lengths}
    known, points = file.all(CurvePoint), list[CurvePoint]()
    for length, own in modes.items():
        missing = {one.name: one.mode for one in own if one.key(length) not in known}
        if missing:
            found = evaluate(inputs.loaded, missing, replace(asked, lengths=(length,)), progress=progress)
            file.add(*(_point(one, found[one.name][0]) for one in own if one.name in missing))
        order = list(dict.fromkeys((one.phase, one.method) for one in own))
        here = [known[one.key(length)] for one in own]
        points += sorted(here, key=lambda point: (order.index((point.phase, point.method)), point.density))
    return tuple(points)


def _point(point: CurveMode, result: EvalResult) -> CurvePoint:
    agreement = result.agreement
    density = result.spent.density if point.phase == "prefill" else result.spent.read
    solved = [task.answers for task in result.tasks.values() if task.is_accuracy and _is_solved(task.answers[0])]
    dense, sparse = ([right for answers in solved for right in answers[side]] for side in (0, 1))
    return CurvePoint(
        method=point.method,
        setting=point.setting,
        length=result.lengths[0],
        phase=point.phase,
        density=min(1.0, density),
        kl=agreement.kl,
        kl_interval=agreement.kl_interval,
        agreement=agreement.top1,
        agreement_interval=agreement.top1_interval,
        exact=agreement.exact,
        accuracy=float(np.mean(sparse)) if sparse else None,
        dense_accuracy=float(np.mean(dense)) if dense else None,
        samples=agreement.samples,
    )


def _is_solved(answers: Sequence[bool]) -> bool:
    return bool(np.mean(answers) >= _SOLVED)


# --- tables -----------------------------------------------------------------------------------------------------------


def main(argv: Sequence[str] | None = None) -> None:
    """Measures a model into a file, or reads files; prints tables."""
    try:
        args = _arguments(argv)
        curves = [_measured(args)] if args.out else [_read(Path(file)) for file in args.targets]
    except SparseKVError as error:
        raise SystemExit(f"curves: {error}") from None
    for points in curves:
        print(*tables(points, args.density, args.kl), sep="\n")


def _read(path: Path) -> tuple[CurvePoint, ...]:
    return tuple(RunFile.read(CurveRun, path).all(CurvePoint).values())


def _measured(args: argparse.Namespace) -> tuple[CurvePoint, ...]:
    (model,), plan, profiles = args.targets, load_plan(args.plan) if args.plan else None, _profiles(args.profile)
    asked = EvalSamples(args.tasks, tuple(sorted(args.length)), args.samples, None, args.seed, args.prefill_chunk)
    phases, given = (args.only,) if args.only else PHASES, [*profiles, *(["plan"] if plan else [])]
    methods = chosen_methods(phases, args.methods, given)
    check_profiled(methods, profiles, asked.lengths)
    with only_run(args.out):
        RunFile.earlier(CurveRun, args.out)
        machine = read_settings()
        loaded = load_model(model, device=machine.device, dtype=machine.dtype)
        check_lengths(asked.lengths, loaded.info.context_length)
        if plan:
            check_model(plan, loaded.info)
        for profile in profiles.values():
            check_profile(profile, loaded.info)
        drawn = {name: getattr(asked, name) for name in ("seed", "samples", "tasks", "prefill_chunk")}
        digests = {name: digest_of(profile) for name, profile in profiles.items()}
        run = CurveRun.of(loaded, plan=executed_digest(plan) if plan else None, **drawn, **digests)
        own, preset = profiles.get("profile"), profiles.get("preset")
        inputs = CurveInputs(loaded, plan, own, preset, args.densities, args.budgets, asked.tasks[0], asked.seed)
        points = measure_curves(inputs, methods, asked, RunFile.of(run, args.out), BarProgress())
    missing = {name for names in methods.values() for name in names} - {point.method for point in points}
    if missing:
        print(f"no point of {', '.join(sorted(missing))}: it finds nothing to leave out in this model", file=sys.stderr)
    return points


def _profiles(paths: Sequence[Path]) -> dict[str, Profile]:
    """The profile of our search and that of the preset, as far as they are given."""
    profiles: dict[str, Profile] = {}
    for path in paths:
        profile = read_measured(Profile, path)
        if profiles.setdefault("preset" if profile.preset else "profile", profile) is not profile:
            raise UsageError(f"expected one --profile of each search, found {path} beside another one; leave one out")
    return profiles


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    def numbers(text: str) -> tuple[float, ...]:
        return tuple(map(float, filter(None, text.split(","))))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("targets", nargs="+", metavar="MODEL | FILE", help="a model beside --out, else files")
    parser.add_argument("--out", "-o", type=Path, help="measure into this file, or go on with it")
    parser.add_argument("--plan", type=Path)
    parser.add_argument("--profile", type=Path, action="append", default=[], help="twice: one of --preset minference")
    parser.add_argument("--length", "--lengths", type=parse_lengths, default=(4096,))
    parser.add_argument("--samples", type=int, default=20)
    parser.add_argument("--tasks", type=words, default=DEFAULT_TASKS)
    parser.add_argument("--only", choices=PHASES)
    parser.add_argument("--methods", type=words, default=(), help="by default all whose inputs are given")
    parser.add_argument("--densities", type=shares, default=(), help="of prefill methods that take one")
    parser.add_argument("--budgets", type=shares, default=BUDGETS, help="of decode methods, shares of the context")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--prefill-chunk", type=parse_length)
    parser.add_argument("--density", type=numbers, default=(0.1, 0.2, 0.3, 0.5), help="columns of the table")
    parser.add_argument("--kl", type=numbers, default=(0.001, 0.002, 0.005), help="columns of the table")
    return parser.parse_args(argv)


def tables(points: Sequence[CurvePoint], densities: Sequence[float], kls: Sequence[float]) -> Iterator[str]:
    """Lines of Markdown: a table for each phase and length."""
    heads = [*(f"nats at {density:g}" for density in densities), *(f"density for {kl:g} nats" for kl in kls)]
    for phase, length in dict.fromkeys((point.phase, point.length) for point in points):
        yield f"{phase.capitalize()} at {format_length(length)}:\n"
        yield f"| method | {' | '.join(heads)} |"
        yield "|---" * (len(heads) + 1) + "|"
        for method, line in _of_kind(points, phase, length).items():
            yield f"| {method} | {' | '.join(_divergences(line, densities) + _densities(line, kls))} |"
        yield ""


def _of_kind(points: Sequence[CurvePoint], phase: str, length: int) -> Mapping[str, Line]:
    """(density, divergence) of every point of each method."""
    own = [point for point in points if (point.phase, point.length) == (phase, length)]
    return {
        method: [(p.density, max(p.kl, _LEAST)) for p in own if p.method == method and p.kl is not None]
        for method in dict.fromkeys(point.method for point in own)
    }


def _divergences(points: Line, densities: Sequence[float]) -> list[str]:
    last = max((density for density, _ in points), default=0.0)
    beyond = [density for density in densities if density > last]
    cells = []
    for density in densities:
        cell = _cell(value_at(frontier(points), density))
        cells.append(cell if density not in beyond else f"({cell})" if cell and density == min(beyond) else "")
    return cells


def _densities(points: Line, kls: Sequence[float]) -> list[str]:
    line = frontier(points)
    cells = [_cell(density_within(line, kl)) for kl in kls]
    return [f"({cell})" if line and line[0][1] <= kl else cell for kl, cell in zip(kls, cells, strict=True)]


def frontier(points: Line) -> Line:
    """(density, divergence), ascending in density and descending in divergence."""
    kept: list[tuple[float, float]] = []
    for density, kl in sorted(points):
        if not kept or kl < kept[-1][1]:
            kept.append((density, kl))
    return kept


def value_at(line: Line, density: float) -> float | None:
    """The divergence at a density: between two points interpolated, beyond the last one that of the last."""
    if not line or density < line[0][0]:
        return None
    return _interpolated(line, density)


def density_within(line: Line, kl: float) -> float | None:
    """The least density whose divergence is at most `kl`."""
    swapped = [(1.0 / value, density) for density, value in line]  # ascending
    if not swapped or 1.0 / kl > swapped[-1][0]:
        return None
    return _interpolated(swapped, max(1.0 / kl, swapped[0][0]))


def _interpolated(line: Line, at: float) -> float:
    """On a straight line in logarithms; `at` is not before the first point."""
    for (low, before), (high, after) in pairwise(line):
        if low <= at < high:
            share = math.log(at / low) / math.log(high / low)
            return float(before * (after / before) ** share)
    return line[-1][1]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


if __name__ == "__main__":
    main()
