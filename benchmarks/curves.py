"""Markdown tables of curve files, as RESULTS.md has them.

    sparsekv eval MODEL --curve a.json --profile profile.json --length 16k,32k --samples 20
    python benchmarks/curves.py a.json b.json --density 0.1,0.2,0.3 --kl 0.001,0.005

For each file, phase and length: the divergence of every method at these densities, and the least density at which it
stays within these divergences. Between two points of a curve, both are read off a straight line in logarithms; a method
that does not reach a density or a divergence has no number there. Curves that are not monotonic are read by their best:
a point that another one beats in both density and divergence does not count.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from pathlib import Path

from sparsekv.planner.curve import CurvePoint, read_curve
from sparsekv.plans.types import format_length

_LEAST = 1e-9  # nats: what is less is rounding


def main() -> None:
    """Prints the tables."""
    args = _arguments()
    for path in args.files:
        for line in tables(read_curve(path), args.density, args.kl):
            print(line)


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> tuple[float, ...]:
        return tuple(map(float, text.split(",")))

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+")
    parser.add_argument("--density", type=numbers, default=(0.1, 0.2, 0.3, 0.5))
    parser.add_argument("--kl", type=numbers, default=(0.001, 0.002, 0.005))
    return parser.parse_args()


def tables(points: Sequence[CurvePoint], densities: Sequence[float], kls: Sequence[float]) -> Iterator[str]:
    """Lines of Markdown: a table for each phase and length."""
    for phase, length in dict.fromkeys((point.phase, point.length) for point in points):
        own = [point for point in points if (point.phase, point.length) == (phase, length)]
        yield f"{phase.capitalize()} at {format_length(length)}:\n"
        heads = [*(f"nats at {density:g}" for density in densities), *(f"density for {kl:g} nats" for kl in kls)]
        yield f"| method | {' | '.join(heads)} |"
        yield "|---" * (len(heads) + 1) + "|"
        for method in dict.fromkeys(point.method for point in own):
            line = frontier([(p.density, max(p.kl, _LEAST)) for p in own if p.method == method and p.kl is not None])
            cells = [_cell(value_at(line, density)) for density in densities]
            cells += [_cell(density_within(line, kl)) for kl in kls]
            yield f"| {method} | {' | '.join(cells)} |"
        yield ""


Line = Sequence[tuple[float, float]]


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
    for (low, high_kl), (high, low_kl) in pairwise(line):
        if low <= density < high:
            share = (math.log(density) - math.log(low)) / (math.log(high) - math.log(low))
            return math.exp(math.log(high_kl) + share * (math.log(low_kl) - math.log(high_kl)))
    return line[-1][1]


def density_within(line: Line, kl: float) -> float | None:
    """The least density whose divergence is at most `kl`."""
    swapped = [(1.0 / value, density) for density, value in line]  # ascending
    if not swapped or 1.0 / kl > swapped[-1][0]:
        return None
    for (low, below), (high, above) in pairwise(swapped):
        if low <= 1.0 / kl < high:
            share = (math.log(1.0 / kl) - math.log(low)) / (math.log(high) - math.log(low))
            return math.exp(math.log(below) + share * (math.log(above) - math.log(below)))
    return line[0][0] if 1.0 / kl < swapped[0][0] else line[-1][0]


def _cell(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


if __name__ == "__main__":
    main()
