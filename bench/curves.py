"""Curves: every method at every setting on the same held-out samples, dense once a length."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import numpy as np

from sparsekv.bench.curve_file import CurveRow
from sparsekv.bench.curve_methods import CurveInputs, CurveMode, curve_modes
from sparsekv.planner.eval_results import EvalResult
from sparsekv.planner.evaluation import EvalSamples, evaluate
from sparsekv.planner.options import Gate, Phase
from sparsekv.planner.progress import Progress

Rows = tuple[CurveRow, ...]


def measure_curves(
    inputs: CurveInputs,
    methods: Mapping[Phase, Sequence[str]],
    asked: EvalSamples,
    *,
    progress: Progress | None = None,
    done: Callable[[Rows], None] = lambda rows: None,
) -> Rows:
    """Measures methods at every length.

    Args:
        methods: of `chosen_methods`.
        asked: tasks, lengths and samples.
        done: called after each length with all rows so far.

    Returns:
        A row a point: by length, phase and method in the given order, ascending in density.

    Raises:
        UsageError, PromptError: see `curve_modes` and `evaluate`; before anything is measured.
    """
    points = {length: curve_modes(methods, inputs, length) for length in asked.lengths}
    rows: Rows = ()
    for length, own in points.items():
        modes = {point.name: point.mode for point in own}
        found = evaluate(inputs.loaded, modes, replace(asked, lengths=(length,)), progress=progress)
        measured = [_row(point, found[point.name][0]) for point in own]
        order = list(dict.fromkeys((row.phase, row.method) for row in measured))
        rows += tuple(sorted(measured, key=lambda row: (order.index((row.phase, row.method)), row.density)))
        done(rows)
    return rows


def _row(point: CurveMode, result: EvalResult) -> CurveRow:
    agreement = result.agreement
    density = result.prefill_density if point.phase == "prefill" else result.decode_share
    solved = [task.answers for task in result.tasks.values() if task.is_accuracy and _is_solved(task.answers[0])]
    dense, sparse = ([right for answers in solved for right in answers[side]] for side in (0, 1))
    return CurveRow(
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
    return bool(np.mean(answers) >= Gate().solved)
