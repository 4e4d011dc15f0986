"""`sparsekv compare`: a plan and other methods on the same prompts, held to one share of what dense computes, reads or
caches, or to one time.

Of a batch dense prefills once; selectors and evictions go on from that cache, what is a plan prefills by itself. Each
method then reads the first tokens of dense's own text, step by step (divergence, time of a step), and generates freely
(the score of the task) unless it picked all of dense's text. Selectors and evictions run in plain torch and have no
time.

Shapes: B batch, S tokens of a prompt, G tokens of a text, T tokens of it that are scored, V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from itertools import product

import numpy as np
import torch

from sparsekv.bench import ruler_suite
from sparsekv.bench.compare_file import DENSE_NAME, CompareFile, Name, Sampled
from sparsekv.bench.entrants import Entrant, Entrants
from sparsekv.bench.eviction_rules import ObservedPrompt, observed_prompt
from sparsekv.bench.selectors import RuleSteps
from sparsekv.bench.suite import SuiteName, texts_of
from sparsekv.bench.text_runs import Text, followed, timed_prefill, until_end
from sparsekv.planner.evaluation.batches import prompts_at_once
from sparsekv.planner.evaluation.predictions import Prefilled
from sparsekv.planner.evaluation.results import Spent
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.planner.tasks import Sample, Split, make_sample, prepare
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.load import LoadedModel

SCORED = 32  # tokens of dense's text that divergence is measured on


@dataclass(frozen=True, slots=True, kw_only=True)
class Asked:
    """The prompts of a comparison.

    Attributes:
        tasks: of the suite.
        deadline: of `time.monotonic`; no batch begins after it.
    """

    lengths: tuple[int, ...]
    suite: SuiteName = "ruler"
    tasks: tuple[str, ...] = ()
    samples: int = 20
    batch: int | None = None
    seed: int = 0
    chunk: int | None = None
    deadline: float = float("inf")


def compare_methods(
    loaded: LoadedModel, entrants: Entrants, asked: Asked, file: CompareFile, progress: Progress | None = None
) -> bool:
    """Runs what a file does not hold yet, and adds each batch to it; returns whether all of it is there."""
    suite = ruler_suite.SUITES[asked.suite]
    tasks = asked.tasks or tuple(suite)
    kit = prepare(loaded.tokenizer, Split.EVALUATION).shared_by(tuple(suite), asked.lengths)
    for length, task in product(asked.lengths, tasks):
        make_sample(suite[task], kit, length, asked.seed, 0)  # refused before anything runs
    total = asked.samples * len(tasks) * sum(map(prefill_work, asked.lengths))
    with (progress or Progress()).stage("compare", total=total) as step:
        for length in asked.lengths:
            held = entrants.at(length, file)
            size = asked.batch or prompts_at_once(loaded.model, length)
            for task, first in product(tasks, range(0, asked.samples, size)):
                numbers = range(first, min(asked.samples, first + size))
                step.advance(0, f"{task}, {format_length(length)}, prompt {first + 1}")
                missing = file.missing(DENSE_NAME, *held, task=task, length=length, numbers=numbers)
                if missing:
                    if time.monotonic() > asked.deadline:
                        return False
                    samples = [make_sample(suite[task], kit, length, asked.seed, number) for number in numbers]
                    batch = Batch.of(loaded, samples, numbers, asked)
                    file.add(*batch.sampled({name: held[name] for name in missing if name in held}))
                step.advance(len(numbers) * prefill_work(length))
    return True


@dataclass(slots=True, eq=False)
class Batch:
    """Samples of one task and length, and dense's text behind them."""

    loaded: LoadedModel
    samples: Sequence[Sample]
    numbers: Sequence[int]
    asked: Asked
    ids_BS: torch.Tensor
    dense: Text = field(init=False)
    log_BTV: torch.Tensor = field(init=False)

    @classmethod
    def of(cls, loaded: LoadedModel, samples: Sequence[Sample], numbers: Sequence[int], asked: Asked) -> Batch:
        """Prompts that are equally long."""
        ids_BS = torch.from_numpy(np.stack([sample.prompt_ids for sample in samples]).astype(np.int64))
        return cls(loaded, samples, numbers, asked, ids_BS.to(loaded.model.device))

    @property
    def tokens(self) -> int:
        """Most tokens of an answer."""
        return self.samples[0].length - self.ids_BS.shape[1]

    @torch.no_grad()
    def sampled(self, entrants: Mapping[Name, Entrant]) -> Iterator[Sampled]:
        """Dense, what goes on from its prefill, then what prefills by itself."""
        model = self.loaded.model
        stepping = {name: one for name, one in entrants.items() if one.steps is not None}
        scores = [one.score for one in stepping.values() if one.score is not None]
        watched = {"observed": bool(scores), "with_statistics": any(one.needs_statistics for one in scores)}
        with observed_prompt(model, self.ids_BS, self.asked.chunk, **watched) as (seen, steps):
            check_numbers(model, "logits", seen.prompts.logits_BKV)
            self.dense = followed(model, deepcopy(seen.prompts), self.tokens, SCORED)
            self.log_BTV = self.dense.logits_BTV.log_softmax(-1)
            for name, one in stepping.items():
                yield from self._stepped(name, one, seen, steps)
        yield from self._timed_dense()
        for name, one in entrants.items():
            if one.mode is not None:
                yield from self._run(name, one)

    def _stepped(self, name: Name, one: Entrant, seen: ObservedPrompt, steps: RuleSteps) -> Iterator[Sampled]:
        assert one.steps is not None
        steps.rule, cached = one.steps(seen)
        steps.spent = Spent()
        read, picked_BG = self._read(lambda last: deepcopy(seen.prompts))
        share = _read_share(steps.spent) if cached is None else cached
        yield from self._records(name, read, picked_BG, share, None, None)

    def _run(self, name: Name, one: Entrant) -> Iterator[Sampled]:
        mode, model = one.mode, self.loaded.model
        assert mode is not None
        with mode.running(model) as spent:
            prompts, seconds = timed_prefill(model, self.ids_BS, self.asked.chunk)
            read, picked_BG = self._read(lambda last: prompts if last else deepcopy(prompts))
            computed = spent()
        share = computed.density if one.phase == "prefill" else _read_share(computed)
        if one.cached is not None:
            share = one.cached
        first = 1 if mode.dense_prefill else 0
        yield from self._records(name, read, picked_BG, share, seconds, read.step_seconds, first)

    def _timed_dense(self) -> Iterator[Sampled]:
        """Dense by this runtime, whose steps are captured where those of a plan are: its divergence is of rounding."""
        mode, model, count = Entrant.of_dense(self.loaded.info), self.loaded.model, self.dense.logits_BTV.shape[1]
        with mode.running(model):
            prompts, seconds = timed_prefill(model, self.ids_BS, self.asked.chunk)
            read = followed(model, prompts, count, count, self.dense.picked_BG)
        yield from self._records(DENSE_NAME, read, self.dense.picked_BG, 1.0, seconds, read.step_seconds, 0)

    def _read(self, prompts: Callable[[bool], Prefilled]) -> tuple[Text, torch.Tensor]:
        """Reads dense's text, and generates where a row picked otherwise or its text goes on.

        Args:
            prompts: gives a cache of its own each time; the argument says whether it is the last time.
        """
        dense_BG, model = self.dense.picked_BG, self.loaded.model
        count = self.dense.logits_BTV.shape[1]
        read = followed(model, prompts(False), count, count, dense_BG)
        same_BT = (read.picked_BG == dense_BG[:, :count]) | ~until_end(model, dense_BG)[:, :count]
        if count == dense_BG.shape[1] and bool(same_BT.all()):
            return read, dense_BG
        return read, followed(model, prompts(True), self.tokens, 1).picked_BG

    def _records(
        self,
        name: Name,
        read: Text,
        picked_BG: torch.Tensor,
        share: float | None,
        prefill_seconds: float | None,
        step_seconds: float | None,
        first: int = 1,
    ) -> Iterator[Sampled]:
        """Args: first: the first row of the text that the method computes itself."""
        rows = zip(
            self.numbers, self.samples, texts_of(self.loaded, picked_BG), self._divergence(read, first), strict=True
        )
        for number, sample, text, kl in rows:
            yield Sampled(
                method=name[0],
                at=name[1],
                task=sample.task,
                length=sample.length,
                number=number,
                score=ruler_suite.recall(text, sample.answer),
                kl=kl,
                share=None if share is None else min(1.0, share),
                prefill_seconds=prefill_seconds,
                step_seconds=step_seconds,
            )

    def _divergence(self, read: Text, first: int) -> list[float]:
        """KL(dense || method) of each sample, over the rows of dense's text up to its end; 0 where it has none."""
        log_BTV, dense_BTV = read.logits_BTV[:, first:].log_softmax(-1), self.log_BTV[:, first:]
        counted_BT = until_end(self.loaded.model, self.dense.picked_BG)[:, first : self.log_BTV.shape[1]]
        kl_BT = (dense_BTV.exp() * (dense_BTV - log_BTV)).sum(-1).double().clamp(min=0.0) * counted_BT
        mean_B: list[float] = (kl_BT.sum(1) / counted_BT.sum(1).clamp(min=1)).tolist()
        return mean_B


def _read_share(spent: Spent) -> float | None:
    return spent.read if spent.cached else None
