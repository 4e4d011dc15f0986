"""A model with and without a plan on the same held-out samples.

Dense is run once a batch and shared by everything that is compared with it. What is compared are `Mode`s: mostly a plan
and the phases of it that are switched on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
from transformers import PreTrainedModel

from sparsekv.planner.evaluation.forced import Batch, answered, batches, divergence, forced_logits, log_likelihood
from sparsekv.planner.evaluation.results import EvalResult, Outcome, Spent, TaskResult
from sparsekv.planner.progress import NoProgress, Progress
from sparsekv.planner.search.prompts import held_out
from sparsekv.planner.tasks import Kit, Split, prepare
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import LoadedModel

PhaseName = Literal["prefill", "decode", "both"]
DENSE = "dense"


class Mode(Protocol):
    """Something to compare with dense."""

    @property
    def stepwise(self) -> bool:
        """Whether answers are fed token by token, as decode does."""

    def running(self, model: PreTrainedModel) -> AbstractContextManager[Callable[[], Spent]]:
        """Switches it on for the length of a `with` block, which gets what tells what was computed so far."""


@dataclass(frozen=True, slots=True)
class PlanMode:
    """A plan at work: prefill alone, decode alone, or both."""

    plan: Plan
    phase: PhaseName = "both"
    backend: str = "auto"
    allow_mismatch: bool = False  # take a plan of another architecture, see `apply`

    @property
    def stepwise(self) -> bool:
        """See `Mode`."""
        return self.phase != "prefill"

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """See `Mode`."""
        prefill, decode = self.phase != "decode", self.phase != "prefill"
        with apply(
            model,
            self.plan,
            prefill=prefill,
            decode=decode,
            backend=self.backend,
            allow_mismatch=self.allow_mismatch,
        ) as handle:
            yield lambda: _spent(handle.stats())


def evaluate(
    loaded: LoadedModel,
    plan: Plan | None,
    tasks: Sequence[str],
    length: int,
    samples: int,
    *,
    phase: PhaseName = "both",
    backend: str = "auto",
    batch: int = 1,
    seed: int = 0,
    prefill_chunk: int | None = None,
    allow_mismatch: bool = False,
    progress: Progress | None = None,
) -> EvalResult:
    """Evaluates one plan against dense; without a plan, dense is on both sides.

    See `evaluate_modes` for the arguments and errors, `apply` for `allow_mismatch`.
    """
    modes: dict[str, Mode] = {phase: PlanMode(plan, phase, backend, allow_mismatch)} if plan else {}
    results = evaluate_modes(
        loaded, modes, tasks, length, samples, batch=batch, seed=seed, prefill_chunk=prefill_chunk, progress=progress
    )
    return results[phase if plan else DENSE]


def evaluate_modes(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    tasks: Sequence[str],
    length: int,
    samples: int,
    *,
    batch: int = 1,
    seed: int = 0,
    prefill_chunk: int | None = None,
    kit: Kit | None = None,
    progress: Progress | None = None,
) -> dict[str, EvalResult]:
    """Evaluates some modes, and dense once, on samples that neither training nor calibration used.

    Args:
        loaded: the model, with nothing applied to it.
        modes: what to compare with dense, by name; may be empty.
        tasks: names of tasks.
        length: most tokens of prompt and answer together.
        samples: of each task.
        batch: most samples run at once; only samples of equal shape share a batch.
        seed: of the sample set.
        prefill_chunk: most tokens of a prompt given to the model at once; None is all.
        kit: the evaluation split's, `prepare(tokenizer, Split.EVALUATION)`, for those who call this often.
        progress: where to report.

    Returns:
        A result a mode, and one named "dense" with dense on both sides.

    Raises:
        UsageError: an unknown task.
        PromptError: a task does not fit the length.
        PlanMismatchError, UnsupportedError, BackendError: a plan cannot be applied.
    """
    found: dict[str, dict[str, list[Outcome]]] = {name: {task: [] for task in tasks} for name in (DENSE, *modes)}
    spent = {name: Spent() for name in found}
    source = kit or prepare(loaded.tokenizer, Split.EVALUATION)
    drawn = (sample for task in tasks for sample in held_out(source, task, length, samples, seed))
    with (progress or NoProgress()).stage("evaluate", total=samples * len(tasks) * len(found)) as step:
        for some in batches(drawn, batch, loaded.model.device):
            dense = forced_logits(loaded, some, stepwise=False, chunk=prefill_chunk)
            _note(found[DENSE], some, _outcomes(loaded, some, dense, dense))
            step.advance(len(some.samples), f"{length} tokens, dense")
            for name, mode in modes.items():
                sparse, cost = _run(loaded, mode, some, prefill_chunk)
                _note(found[name], some, _outcomes(loaded, some, dense, sparse))
                spent[name] += cost
                step.advance(len(some.samples), f"{length} tokens, {name}")
    return {
        name: EvalResult(
            (length,), {task: TaskResult(tuple(found[DENSE][task]), tuple(own[task])) for task in tasks}, spent[name]
        )
        for name, own in found.items()
    }


def _run(loaded: LoadedModel, mode: Mode, batch: Batch, chunk: int | None) -> tuple[torch.Tensor, Spent]:
    with mode.running(loaded.model) as spent:
        return forced_logits(loaded, batch, stepwise=mode.stepwise, chunk=chunk), spent()


def _spent(stats: RunStats) -> Spent:
    return Spent(
        stats.prefill_tiles_computed,
        float(stats.prefill_tiles_causal),
        float(stats.decode_tokens_attended),
        float(stats.decode_tokens_cached),
    )


def _outcomes(loaded: LoadedModel, batch: Batch, dense: torch.Tensor, sparse: torch.Tensor) -> list[Outcome]:
    kl = [0.0] * len(batch.samples) if dense is sparse else divergence(dense, sparse)
    rows = zip(answered(loaded, batch, sparse), log_likelihood(batch, sparse), kl, strict=True)
    return [Outcome(*row) for row in rows]


def _note(found: dict[str, list[Outcome]], batch: Batch, outcomes: Sequence[Outcome]) -> None:
    for sample, outcome in zip(batch.samples, outcomes, strict=True):
        found[sample.task].append(outcome)
