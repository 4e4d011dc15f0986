"""The table of `eval`, and its JSON: dense beside a method, task by task."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from sparsekv.cli.output import agreement_table, columns
from sparsekv.plans.schema import Quality, to_data
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.planner.evaluation.modes import PhaseName
    from sparsekv.planner.evaluation.results import EvalResult
    from sparsekv.planner.evaluation.suite_results import Metric, Paired, SuiteTable

Row = tuple[str, ...]  # of those cells of the header that it has
DENSE = "dense"
_HEADER = ("task", "length", "score", DENSE, "", "difference", "95%", "tiles", "tokens")
_SHARES: tuple[Literal["prefill_density"], Literal["decode_share"]] = ("prefill_density", "decode_share")
METRICS: dict[Metric, str] = {"recall": "RULER's string match", "exact": "the text begins with the answer"}


def _table(rows: Sequence[Row], name: str) -> str:
    """Dense beside one method, task by task."""
    most = max(map(len, rows))
    every = [tuple(cell or name for cell in _HEADER[:most]), *(row + ("",) * (most - len(row)) for row in rows)]
    return columns(every, right=range(3, most))


def _task_row(name: str, result: EvalResult, has_plan: bool) -> Row:
    task = result.tasks[name]
    score, kind = task.score, "exact match" if task.is_accuracy else "perplexity"
    row = (name, format_length(result.lengths[0]), kind, f"{score.dense:.4g}")
    interval = "-" if score.interval is None else "{:+.3g} to {:+.3g}".format(*score.interval)
    return (*row, f"{score.sparse:.4g}", f"{score.sparse - score.dense:+.3g}", interval) if has_plan else row


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


def tasks_text(results: Sequence[EvalResult], count: str, phase: PhaseName | None, chunk: int | None) -> str:
    """Tasks at each length, and what a plan computed of them; without a phase dense alone."""
    from sparsekv.planner.evaluation.results import measurement_of, merged

    whole = merged(results)
    parts = [_table([_task_row(name, one, phase is not None) for one in results for name in one.tasks], "sparse")]
    facts = f"samples: {count}, of up to {whole.lengths[-1]:,} tokens"
    if phase is not None:
        parts.append(agreement_table(Quality.model_validate({phase: measurement_of(results, phase, chunk)})))
        facts += f"; prefill computed {whole.prefill_density:.3f} of the tiles"
        facts += f", decode attended to {whole.decode_share:.3f} of the tokens; KL {whole.kl:.3g}"
    return "\n\n".join((*parts, facts))


def prompts_data(results: Sequence[EvalResult], has_plan: bool) -> dict[str, Any]:
    """The JSON of own prompts, of all lengths together and of each."""
    from sparsekv.planner.evaluation.results import merged

    whole, *each = [tasks_data(one, len(one.outcomes), has_plan) for one in (merged(results), *results)]
    return whole | {"by_length": each}


def tasks_data(result: EvalResult, samples: int, has_plan: bool) -> dict[str, Any]:
    """The JSON of tasks at one length."""
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


def suite_text(table: SuiteTable) -> str:
    """A table of each plan, and what the tasks are."""
    from sparsekv.planner.tasks.ruler_suite import ABSENT

    tables = [_table([*_suite_rows(table, method)], method) for method in table.methods]
    tables = tables or [_table([row[:4] for row in _suite_rows(table, DENSE)], "")]
    facts = f"{len(table.tasks)} tasks of RULER, {table.file.settings.samples} samples of each a length, in percent\n"
    facts += "; ".join(f"{name}: {what}" for name, what in METRICS.items())
    haystacks = (f"haystack of {', '.join(tasks)}: {what}" for what, tasks in table.haystacks.items())
    absent = f"absent: {', '.join(ABSENT)}, which need a corpus of questions; use lm-evaluation-harness"
    return "\n\n".join((*tables, "\n".join((facts, *haystacks, absent))))


def suite_data(table: SuiteTable) -> dict[str, Any]:
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
    percent = {name: 100.0 * getattr(pair, name) for name in ("dense", "own", "difference")}
    return {**percent, "interval": [100.0 * bound for bound in pair.interval]}
