"""A file of `bench own` as Markdown: the result first, then a table by half, then the machine."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from sparsekv.bench.own_file import TITLES, OwnFigure, OwnFile, figures, plan_of, result
from sparsekv.plans.brief import percent
from sparsekv.plans.types import format_length

Row = Sequence[str]
_HEADER = ("", "at once", "computed", "dense", "plan", "faster")


def page(file: OwnFile, picture: str | None = None) -> str:
    """The page of one model, with a link to its picture where there is one."""
    plan, parts = plan_of(file), figures(file)
    shares = (
        f"{format_length(one.length)}: prefill {percent(one.prefill)}, decode {percent(one.decode)}"
        for one in plan.lengths
    )
    blocks = [
        f"# {file.settings.model}, by its own plan",
        f"**{result(file)}.**",
        f"The plan is {plan.verdict}. It computes, of attention: {'; '.join(shares)}.",
        *([f"![Times by length and turn, dense and by the plan]({picture})"] if picture else []),
    ]
    for half in TITLES:
        if own := [figure for figure in parts if figure.half == half]:
            blocks += [f"## In {TITLES[half]}", "\n".join(markdown(table(own))), *remarks(own)]
    return "\n\n".join(blocks) + "\n"


def table(parts: Sequence[OwnFigure]) -> list[Row]:
    """A header and a row a figure; turns of an agent's session share a row by their new tokens."""
    rows = [_row(figure) for figure in parts if figure.name != "turn" and (figure.medians or figure.failed)]
    turns = sorted((figure for figure in parts if figure.name == "turn" and figure.medians), key=_alike)
    return [_HEADER, *rows, *(_turns(list(alike)) for _, alike in groupby(turns, key=_alike))]


def markdown(rows: Sequence[Row]) -> Iterator[str]:
    header, *others = rows
    yield f"| {' | '.join(header)} |"
    yield "|---" * len(header) + "|"
    yield from (f"| {' | '.join(row)} |" for row in others)


def _row(figure: OwnFigure) -> Row:
    name = f"session of {figure.turn} turns, to" if figure.name == "session" else f"{figure.name} at"
    return (f"{name} {format_length(figure.length)}", *cells(figure))


def cells(figure: OwnFigure) -> Row:
    """The cells of a row behind its name."""
    share = percent(figure.share) if figure.share is not None else ""
    if figure.medians is None:
        return str(figure.at_once), share, "", "", f"failed: {figure.failed}"
    dense, plan = (value_of(figure, value) for value in figure.medians)
    return str(figure.at_once), share, dense, plan, ratio(figure)


def value_of(figure: OwnFigure, value: float) -> str:
    if figure.name == "tokens/s":
        return f"{value:,.0f}"
    return f"{value / 1e3:,.2f} s" if value >= 1e3 else f"{value:.3g} ms"


def ratio(figure: OwnFigure) -> str:
    """The gain, and its range over pairs of repeats."""
    return f"{figure.gain:.2f}x ({min(figure.ratios):.2f} to {max(figure.ratios):.2f})"


def _alike(figure: OwnFigure) -> tuple[int, bool, int]:
    return figure.at_once, figure.turn > 1, figure.new


def _turns(alike: Sequence[OwnFigure]) -> Row:
    first = alike[0]
    dense, plan = zip(*(figure.medians for figure in alike if figure.medians), strict=True)
    gains = [figure.gain or 1.0 for figure in alike]
    name = f"first token, turns of {format_length(first.new)} ({len(alike)})"
    if first.turn == 1:
        name = f"first token of a session, {format_length(first.new)}"
    median = statistics.median(gains)
    times = (value_of(first, statistics.median(values)) for values in (dense, plan))
    return name, str(first.at_once), "", *times, f"{median:.2f}x ({min(gains):.2f} to {max(gains):.2f})"


def remarks(parts: Iterable[OwnFigure]) -> Iterator[str]:
    own = list(parts)
    machines = dict.fromkeys(f"{figure.device}; {figure.host}" for figure in own if figure.host)
    if machines:
        yield f"{' / '.join(machines)}. Dense is {_fastest(own)}."
    notes = dict.fromkeys(figure.note for figure in own if figure.note)
    failed = dict.fromkeys(f"{figure.words} failed: {figure.failed}" for figure in own if figure.failed)
    if notes or failed:
        yield "\n".join(f"- {text}" for text in (*notes, *failed))


def _fastest(parts: Sequence[OwnFigure]) -> str:
    ways = dict.fromkeys(way for figure in parts for way in figure.ways or (figure.way,) if way)
    return f"the fastest of {', '.join(ways)}" if len(ways) > 1 else "".join(ways)
