"""Outcomes that are made up, in place of those of models on held-out samples: `verify` without running a model."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import numpy as np
import pytest

from sparsekv.planner import verify as verification
from sparsekv.planner.evaluation import EvalSamples
from sparsekv.planner.evaluation.results import Comparison, LongText, Outcome, Spent
from sparsekv.planner.tasks import Kit, Sample, Split

SPENT = Spent(tiles=1.0, causal_tiles=4.0, attended=1.0, cached=4.0)
Right = Callable[[Sample, np.random.Generator], bool]


@dataclass(frozen=True)
class Batch:
    """Samples with dense's outcomes."""

    samples: Sequence[Sample]
    outcomes: tuple[Outcome, ...]


@dataclass(frozen=True)
class Made:
    """In place of an evaluator: makes up the outcome of each side on a sample, always the same.

    Attributes:
        sides: whether dense and the plan answer a sample.
        calls: side, task, length and count of each run.
    """

    sides: Mapping[str, Right]
    nats: float = 0.005
    modes: Mapping[str, None] = field(default_factory=lambda: {"both": None})
    calls: list[tuple[str, str, int, int]] = field(default_factory=list)
    text: int = 64

    def dense(self, samples: Sequence[Sample], step: object) -> tuple[Batch, ...]:
        self.calls.append(("dense", samples[0].task, samples[0].length, len(samples)))
        return (Batch(samples, tuple(self._outcome("dense", one) for one in samples)),)

    def beside(self, dense: Sequence[Batch], name: str, step: object = None) -> Comparison:
        samples = [one for batch in dense for one in batch.samples]
        self.calls.append((name, samples[0].task, samples[0].length, len(samples)))
        return Comparison(tuple(self._outcome(name, one) for one in samples), SPENT)

    def _outcome(self, name: str, sample: Sample) -> Outcome:
        rng = np.random.default_rng(zlib.crc32(f"{name} {sample.task} {sample.length} {sample.answer}".encode()))
        text = LongText(self.nats, 60, 64) if self.text else None
        return Outcome(self.sides[name](sample, rng), 2 * self.nats * rng.random(), text)


class MadeUp(EvalSamples):
    """Samples without prompts, whose answers are their numbers."""

    def check_fit(self, kit: object) -> None:
        """They always do."""

    def drawn(self, kit: object, length: int) -> list[Sample]:
        """Of each task, so many."""
        none, numbers = np.zeros(0, np.int32), range(self.first, self.first + self.samples)
        return [Sample(none, none, str(number), task, length) for task in self.tasks for number in numbers]


def made_up(monkeypatch: pytest.MonkeyPatch, made: Made) -> None:
    """From the call on `verify` measures these outcomes."""

    @contextmanager
    def opened(*_: object, **__: object) -> Iterator[Made]:
        yield made

    monkeypatch.setattr(verification, "opened", opened)
    monkeypatch.setattr(verification, "EvalSamples", MadeUp)
    monkeypatch.setattr(verification, "prepare", lambda *_: Kit(Split.VERIFICATION, None, None))
