"""The results of a suite as people read them, and as JSON: what plans lose beside dense, by task and length."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any, Literal

from sparsekv.bench.ruler_suite import ABSENT
from sparsekv.bench.suite import Metric, Paired, SuiteTable
from sparsekv.planner.evaluation.predictions import DENSE
from sparsekv.plans.schema import to_data
from sparsekv.plans.types import columns, format_length

Row = tuple[str, ...]  # of those cells of the header that it has
_HEADER = ("task", "length", "score", DENSE, "", "difference", "95%", "tiles", "tokens")
_SHARES: tuple[Literal["prefill_density"], Literal["decode_share"]] = ("prefill_density", "decode_share")
METRICS: dict[Metric, str] = {"recall": "RULER's string match", "exact": "the text begins with the answer"}


def _columns(rows: Sequence[Row], name: str) -> str:
    most = max(map(len, rows))
    every = [tuple(cell or name for cell in _HEADER[:most]), *(row + ("",) * (most - len(row)) for row in rows)]
    return columns(every, right=range(3, most))


def _suite_rows(table: SuiteTable, method: str) -> Iterator[Row]:
    """All tasks at each length and at all; then each task, the worst first."""
    lengths = [*((one,) for one in table.lengths), *([table.lengths] if len(table.lengths) > 1 else [])]
    for metric, some in product(METRICS, lengths):
        shares = (f"{table.share(method, name, some[0]):.3f}" for name in _SHARES if len(some) == 1)
        at = format_length(some[0]) if len(some) == 1 else "all"
        yield ("all", at, metric, *_compared(table.paired(method, metric, (), some)), *shares)
    for task, length in product(table.worst_first(method), table.lengths):
        yield (task, format_length(length), "recall", *_compared(table.paired(method, "recall", (task,), (length,))))


def _compared(pair: Paired) -> Iterator[str]:
    low, high = (100.0 * bound for bound in pair.interval)
    yield from (f"{100.0 * pair.dense:.1f}", f"{100.0 * pair.own:.1f}", f"{100.0 * pair.difference:+.1f}")
    yield f"{low:+.1f} to {high:+.1f}"


def suite_text(table: SuiteTable) -> str:
    tables = [_columns([*_suite_rows(table, method)], method) for method in table.methods]
    tables = tables or [_columns([row[:4] for row in _suite_rows(table, DENSE)], "")]
    suite, samples = table.file.settings.suite, table.file.settings.samples
    facts = f"{len(table.tasks)} tasks of --suite {suite}, {samples} samples of each a length, in percent\n"
    exact = {"exact": "the last of the numbers is right"} if suite == "long" else {}
    facts += "; ".join(f"{name}: {what}" for name, what in (METRICS | exact).items())
    haystacks = (f"haystack of {', '.join(tasks)}: {what}" for what, tasks in table.haystacks.items())
    absent = f"absent: {', '.join(ABSENT)}, which need a corpus of questions; use lm-evaluation-harness"
    return "\n\n".join((*tables, "\n".join((facts, *haystacks, *([absent] if suite == "ruler" else [])))))


def suite_data(table: SuiteTable) -> dict[str, Any]:
    """The JSON of the tables: scores in percent, differences in points."""
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
        "absent": list(ABSENT) if settings.suite == "ruler" else [],
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
    percent = {name: 100.0 * getattr(pair, name) for name in ("dense", "own", "difference")}
    return {**percent, "interval": [100.0 * bound for bound in pair.interval]}
