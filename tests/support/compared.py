"""Modes beside dense on samples of any origin, in one call."""

from collections.abc import Mapping, Sequence

from sparsekv.planner.evaluation import DENSE, PlanMode, opened
from sparsekv.planner.evaluation.results import Comparison, Outcome, Spent
from sparsekv.planner.progress import StageStep
from sparsekv.planner.tasks import Sample
from sparsekv.runtime.hf.load import LoadedModel


def compare(
    loaded: LoadedModel,
    modes: Mapping[str, PlanMode],
    samples: Sequence[Sample],
    batch: int | None = None,
    chunk: int | None = None,
    text: int = 0,
    step: StageStep | None = None,
) -> dict[str, Comparison]:
    """By mode, and for dense: outcomes in the order of the samples."""
    with opened(loaded, modes, batch, chunk, chunk, text=text) as evaluator:
        dense = evaluator.dense(samples, step)
        found = {name: evaluator.beside(dense, name, step) for name in modes}
    order = [id(sample) for run in dense for sample in run.batch.samples]
    found[DENSE] = Comparison(tuple(outcome for run in dense for outcome in run.outcomes), Spent())

    def sorted_(outcomes: Sequence[Outcome]) -> tuple[Outcome, ...]:
        placed = dict(zip(order, outcomes, strict=True))
        return tuple(placed[id(sample)] for sample in samples)

    return {name: Comparison(sorted_(side.outcomes), side.spent) for name, side in found.items()}
