"""Outcomes that are made up, in place of what models do on held-out samples: `verify` without running a model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planner_models import loaded_tiny, quick_options
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.planner import verify as verification
from sparsekv.planner.evaluation import DENSE, EvalSamples
from sparsekv.planner.evaluation.results import Comparison, Outcome, Spent
from sparsekv.planner.options import settle
from sparsekv.planner.outcomes_file import OutcomesRecord
from sparsekv.planner.tasks import Sample
from sparsekv.planner.verify import Verification, verify
from sparsekv.plans.patterns import AShape, tokens

TASKS = ("niah_single", "niah_multikey", "kv_retrieval", "perplexity")
HARD = "kv_retrieval"
LENGTHS = (2048, 4096)
PHASES = {"prefill", "decode", "both"}
SPENT = Spent(tiles=1.0, causal_tiles=4.0, attended=1.0, cached=4.0)
Draw = Callable[[np.random.Generator, str, str], Outcome]


@dataclass(frozen=True)
class Call:
    """Which modes ran on which samples."""

    names: frozenset[str]
    tasks: frozenset[str]
    length: int
    greedy: bool
    numbers: tuple[str, ...]


@dataclass(frozen=True)
class Made:
    """In place of an evaluator: makes up what each mode does on a sample, always the same."""

    loaded: object
    draw: Draw
    calls: list[Call]
    seed: int
    greedy: bool = True
    text: int = 0

    def compare(self, samples: Sequence[Sample], names: Collection[str], **_: object) -> dict[str, Comparison]:
        tasks, numbers = frozenset(one.task for one in samples), tuple(dict.fromkeys(one.answer for one in samples))
        self.calls.append(Call(frozenset(names), tasks, samples[0].length, self.greedy, numbers))
        answers = [self._outcome(DENSE, one) for one in samples]
        found = {DENSE: Comparison(tuple(answers), Spent())}
        for name in names:
            found[name] = Comparison(tuple(self._outcome(name, one) for one in samples), SPENT)
        return found

    def _outcome(self, name: str, sample: Sample) -> Outcome:
        of_it = f"{self.seed} {name} {sample.task} {sample.length} {sample.answer}"
        made = self.draw(np.random.default_rng(zlib.crc32(of_it.encode())), name, sample.task)
        return made if self.greedy else replace(made, exact=None)


def outcome(rng: np.random.Generator, name: str, task: str, lost: float = 0.01) -> Outcome:
    """Dense and floors are right but on the hard task; a plan loses some, and diverges by a tenth of its gate."""
    plan = name in PHASES
    right = None if task == "perplexity" else task != HARD and not (plan and rng.random() < lost)
    return Outcome(right, 1.0, 0.005 * rng.random() if plan else 0.0, 100 - plan, 100, exact=True)


@dataclass(frozen=True)
class MadeUp(EvalSamples):
    """Samples without prompts, whose answers are their numbers."""

    def check_fit(self, kit: object) -> None:
        """They always do."""

    def drawn(self, kit: object, length: int) -> list[Sample]:
        """Of each task, so many."""
        none, numbers = np.zeros(0, np.int32), range(self.first, self.first + self.samples)
        return [Sample(none, none, str(number), task, length) for task in self.tasks for number in numbers]


def verified(
    monkeypatch: pytest.MonkeyPatch,
    draw: Draw = outcome,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    calls: list[Call] | None = None,
    earlier: OutcomesRecord | None = None,
    **changes: object,
) -> tuple[Verification, list[Call]]:
    """Verifies a plan on made-up outcomes; a call of the evaluator takes a second."""
    loaded, calls = loaded_tiny(dtype=dtype), [] if calls is None else calls
    heads = every_head(loaded.model, AShape(sink=tokens(64), window=tokens(64)))
    plan = plan_for(loaded.model, heads, decode_plan(segment(0, (1, 2), 64)))

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[Made]:
        yield Made(loaded, draw, calls, seed)

    monkeypatch.setattr(verification, "opened", opened)
    monkeypatch.setattr(verification, "prepare", lambda *_: None)
    monkeypatch.setattr(verification, "held_out_samples", lambda *_: MadeUp(TASKS, LENGTHS))
    monkeypatch.setattr(verification, "time", SimpleNamespace(monotonic=lambda: float(len(calls))))
    asked = quick_options(lengths=LENGTHS, verify_samples=None, verify_time=1e6, tasks=TASKS)
    settled = settle(asked, 4096, "cpu").but(**{"verify_chosen": (), **changes})
    return verify(loaded, plan, settled, earlier=earlier), calls
