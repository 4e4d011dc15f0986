"""Task scores as tables: shares of right answers, or perplexities."""

from __future__ import annotations

from typing import TYPE_CHECKING

from sparsekv.cli.output import columns

if TYPE_CHECKING:
    from sparsekv.plans.schema import Quality, Score

SCORE_HEADER = ("task", "dense", "sparse", "sparse - dense, 95%")


def score_row(task: str, score: Score, has_plan: bool = True) -> tuple[str, str, str, str]:
    """One task. Without a plan there is no sparse side."""
    if not has_plan:
        return task, f"{score.dense:.4g}", "", ""
    low, high = score.interval
    return task, f"{score.dense:.4g}", f"{score.sparse:.4g}", f"{low:+.3g} to {high:+.3g}"


def quality_table(quality: Quality) -> str:
    """What was measured of a plan, phase by phase."""
    rows = [("phase", "density", *SCORE_HEADER, "samples")]
    for phase in ("prefill", "decode", "both"):
        measured = getattr(quality, phase)
        for task, score in measured.tasks.items() if measured else ():
            rows.append((phase, f"{measured.density:.3f}", *score_row(task, score), str(score.samples)))
    return columns(rows, right=(1, 3, 4, 6))
