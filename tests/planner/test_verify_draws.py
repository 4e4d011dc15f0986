"""Which samples a verification runs, of what, with outcomes that are made up: what is decided costs nothing more."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import pytest
import torch
from planner_models import loaded_tiny, quick_options
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.planner import verify as verification
from sparsekv.planner.evaluation import DENSE, EvalSamples
from sparsekv.planner.evaluation.results import Comparison, Outcome, Spent
from sparsekv.planner.settled import settle
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
    names: frozenset[str]
    tasks: frozenset[str]
    length: int
    greedy: bool


@dataclass(frozen=True)
class Made:
    """In place of an evaluator: makes up what each mode does on a sample."""

    loaded: object
    draw: Draw
    calls: list[Call]
    rng: np.random.Generator
    greedy: bool = True
    text: int = 0

    def compare(self, samples: Sequence[Sample], names: Collection[str], **_: object) -> dict[str, Comparison]:
        tasks = frozenset(one.task for one in samples)
        self.calls.append(Call(frozenset(names), tasks, samples[0].length, self.greedy))
        answers = [self.draw(self.rng, DENSE, one.task) for one in samples]
        found = {DENSE: Comparison(tuple(answers), Spent())}
        for name in names:
            found[name] = Comparison(tuple(self._outcome(name, one) for one in samples), SPENT)
        return found

    def _outcome(self, name: str, sample: Sample) -> Outcome:
        made = self.draw(self.rng, name, sample.task)
        return made if self.greedy else replace(made, exact=None)


def outcome(rng: np.random.Generator, name: str, task: str, lost: float = 0.01) -> Outcome:
    """Dense and floors are right but on the hard task; a plan loses some, and diverges by a tenth of its gate."""
    plan = name in PHASES
    right = None if task == "perplexity" else task != HARD and not (plan and rng.random() < lost)
    return Outcome(right, 1.0, 0.005 * rng.random() if plan else 0.0, 100 - plan, 100, exact=True)


@dataclass(frozen=True)
class MadeUp(EvalSamples):
    """Samples without prompts."""

    def check_fit(self, kit: object) -> None:
        """They always do."""

    def drawn(self, kit: object, length: int) -> list[Sample]:
        """Of each task, so many."""
        none = np.zeros(0, np.int32)
        return [Sample(none, none, "", task, length) for task in self.tasks for _ in range(self.samples)]


def verified(
    monkeypatch: pytest.MonkeyPatch, draw: Draw = outcome, dtype: torch.dtype = torch.bfloat16, seed: int = 0
) -> tuple[Verification, list[Call]]:
    loaded, calls = loaded_tiny(dtype=dtype), []
    heads = every_head(loaded.model, AShape(sink=tokens(64), window=tokens(64)))
    plan = plan_for(loaded.model, heads, decode_plan(segment(0, (1, 2), 64)))

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[Made]:
        yield Made(loaded, draw, calls, np.random.default_rng(seed))

    monkeypatch.setattr(verification, "opened", opened)
    monkeypatch.setattr(verification, "prepare", lambda *_: None)
    monkeypatch.setattr(verification, "held_out_samples", lambda *_: MadeUp(TASKS, LENGTHS))
    asked = quick_options(lengths=LENGTHS, verify_samples=None, verify_time=1e6, tasks=TASKS)
    return verify(loaded, plan, settle(asked, 4096, "cpu").but(verify_chosen=())), calls


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_once_only_right_answers_are_undecided_nothing_else_is_run(monkeypatch: pytest.MonkeyPatch, dtype) -> None:
    found, calls = verified(monkeypatch, dtype=dtype)
    assert found.conclusive, found.reasons
    floors = {f"{phase} floor" for phase in PHASES} if dtype == torch.bfloat16 else set()
    whole = Call(frozenset(PHASES | floors), frozenset(TASKS), LENGTHS[0], greedy=True)
    assert calls[0] == whole
    last = calls[-1]
    assert (last.tasks, last.greedy) == ({"niah_single", "niah_multikey"}, False)
    assert last.names <= PHASES
    kinds = list(dict.fromkeys((call.names, call.tasks, call.greedy) for call in calls if call.length == LENGTHS[0]))
    assert len(kinds) <= 6  # each call asks for what the one before it did, or less
    for before, after in pairwise(call for call in calls if call.length == LENGTHS[0]):
        assert after.names <= before.names
        assert after.tasks <= before.tasks
        assert after.greedy <= before.greedy
    both, evidence = found.quality.both, found.quality.evidence
    assert both.claims["failed"].prompts < both.claims["accuracy"].prompts < evidence.prompts
    assert both.agreement.exact == 1.0


def test_a_length_that_misses_ends_the_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(rng: np.random.Generator, name: str, task: str) -> Outcome:
        return outcome(rng, name, task, lost=0.5)

    found, calls = verified(monkeypatch, draw)
    assert not found.passed
    assert len(calls) < 40


def test_a_plan_that_loses_more_than_its_gate_is_rarely_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(rng: np.random.Generator, name: str, task: str) -> Outcome:
        return outcome(rng, name, task, lost=0.036)

    assert sum(verified(monkeypatch, draw, seed=seed)[0].conclusive for seed in range(6)) <= 1
