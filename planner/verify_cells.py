"""Measures the cells of a test: dense first, then the plan on the prompts of those that are judged."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from sparsekv.planner.evaluation import EvalSamples, Evaluator
from sparsekv.planner.evaluation.evaluator import DenseBatch
from sparsekv.planner.evaluation.given import GivenSamples
from sparsekv.planner.evaluation.results import Outcome
from sparsekv.planner.fixed_test import LONG, Sizes, missing_prompts, more_prompts
from sparsekv.planner.progress import StageStep
from sparsekv.planner.records import RunFile
from sparsekv.planner.tasks import Kit
from sparsekv.planner.verify_record import CellOutcomes, OutcomesSettings, TextRow, cell_of, finite
from sparsekv.plans.errors import GateError

BOTH, WHOLE = "both", "every tile and token"  # modes: the plan, and its kernels alone


@dataclass(frozen=True, slots=True)
class Cells:
    """The cells of a run, each measured once.

    Attributes:
        reads_texts: dense's own text is read after every prompt.
    """

    evaluator: Evaluator
    samples: EvalSamples
    kit: Kit
    sizes: Sizes
    file: RunFile[OutcomesSettings]
    step: StageStep
    reads_texts: bool

    def run(self) -> None:
        """Measures every cell, then further prompts of the judged ones."""
        known = self.file.all(CellOutcomes)
        for length, task in product(self.samples.lengths, self.samples.tasks):
            if (task, length, False) not in known:
                self.file.add(self._first(task, length))
        if isinstance(self.samples, GivenSamples):
            return
        cells = [cell_of([one]) for one in known.values() if not one.more and one.plan and one.length <= LONG]
        count = more_prompts(self.sizes, cells)
        for cell in cells if count else ():
            if (cell.task, cell.length, True) not in known:
                dense = self._dense(cell.task, cell.length, cell.prompts, count)
                self.file.add(self._beside(cell.task, cell.length, dense, more=True))

    def _first(self, task: str, length: int) -> CellOutcomes:
        """The first prompts of a cell: of dense alone where it answers too few."""
        if isinstance(self.samples, GivenSamples):
            return self._beside(task, length, self._dense(task, length, 0, len(self.samples.given[length])))
        if length > LONG:
            return self._beside(task, length, self._dense(task, length, 0, self.sizes.long_prompts))
        dense: list[DenseBatch] = []
        tried = answered = 0
        while count := missing_prompts(self.sizes, tried, answered):
            some = self._dense(task, length, tried, count)
            tried, answered = tried + count, answered + sum(bool(one.correct) for one in _outcomes(some))
            dense += some
        if answered < self.sizes.answered:
            return CellOutcomes(task=task, length=length, dense=tuple(one.correct for one in _outcomes(dense)))
        return self._beside(task, length, dense)

    def _dense(self, task: str, length: int, first: int, count: int) -> list[DenseBatch]:
        """Runs dense on the next prompts, the first few of a cell apart, which are looked at closely."""
        asked = replace(self.samples, tasks=(task,), lengths=(length,), samples=count, first=first)
        drawn = asked.drawn(self.kit, length)
        closely = max(0, self.sizes.closely - first)
        plain = self.evaluator if self.reads_texts else replace(self.evaluator, greedy=False, text=0)
        parts = ((self.evaluator, drawn[:closely]), (plain, drawn[closely:]))
        found = [one for evaluator, some in parts for one in (evaluator.dense(some, self.step) if some else ())]
        check_finite(_outcomes(found), "without a plan")
        return found

    def _beside(self, task: str, length: int, dense: Sequence[DenseBatch], *, more: bool = False) -> CellOutcomes:
        plan = self.evaluator.beside(dense, BOTH, self.step)
        rounding: tuple[float, ...] = ()
        if WHOLE in self.evaluator.modes and not more:
            whole = self.evaluator.beside(_first_prompts(dense, self.sizes.closely), WHOLE)
            check_finite(whole.outcomes, "with every tile computed")
            rounding = whole.kl
        right, kl = zip(*map(finite, plan.outcomes), strict=True)
        texts = (one.text for one in plan.outcomes if one.text and one.is_finite)
        return CellOutcomes(
            task=task,
            length=length,
            more=more,
            dense=tuple(one.correct for one in _outcomes(dense)),
            plan=right,
            kl=kl,
            rounding=rounding,
            texts=tuple(TextRow(kl=one.kl, agreed=one.agreed, scored=one.scored) for one in texts),
            spent=(plan.spent.tiles, plan.spent.causal_tiles, plan.spent.attended, plan.spent.cached),
        )


def _outcomes(dense: Sequence[DenseBatch]) -> tuple[Outcome, ...]:
    return tuple(outcome for one in dense for outcome in one.outcomes)


def _first_prompts(dense: Sequence[DenseBatch], least: int) -> Iterator[DenseBatch]:
    """The first batches with so many prompts."""
    count = 0
    for one in dense:
        if count < least:
            yield one
        count += len(one.outcomes)


def check_finite(outcomes: Sequence[Outcome], how: str) -> None:
    """Refuses a model, or kernels, that a plan cannot be compared with."""
    bad = sum(not outcome.is_finite for outcome in outcomes)
    if bad:
        raise GateError(
            f"expected finite probabilities {how}, found nan or infinity in {bad} of {len(outcomes)} samples; "
            "check the model in this precision, or use another backend (--set backend=NAME)"
        )
