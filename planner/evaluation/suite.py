"""Runs the tasks of a suite on held-out samples: dense and plans generate freely, and their text is scored.

Generation is greedy, whatever the checkpoint's generation_config.json asks for beside its end tokens.

Shapes: B batch, S tokens of a prompt, G tokens that are generated.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
import torch

from sparsekv.planner.evaluation.batches import prompts_at_once
from sparsekv.planner.evaluation.modes import DENSE, Mode, PlanMode
from sparsekv.planner.evaluation.predictions import prefill, until_end, without_plans
from sparsekv.planner.evaluation.results import Spent
from sparsekv.planner.evaluation.suite_results import SuiteCell, SuiteName
from sparsekv.planner.progress import Progress, StageStep, prefill_work
from sparsekv.planner.records import RunFile
from sparsekv.planner.tasks import Kit, Sample, Split, make_samples, prepare
from sparsekv.planner.tasks.ruler_suite import SUITES, RulerTask, recall
from sparsekv.planner.tasks.text import TaskError
from sparsekv.plans.errors import PromptError
from sparsekv.plans.files import executed_digest
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.describe import cache_inputs
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.model_config import device_name


@dataclass(frozen=True, slots=True)
class SuiteSamples:
    """Held-out samples of every task of the suite, and how they are fed."""

    lengths: tuple[int, ...]
    samples: int = 20
    batch: int | None = None
    seed: int = 0
    prefill_chunk: int | None = None
    suite: SuiteName = "ruler"

    @property
    def tasks(self) -> Mapping[str, RulerTask]:
        return SUITES[self.suite]

    def check_fit(self, kit: Kit) -> None:
        """Finds out, without running a model, whether every task fits every length."""
        for length, task in product(self.lengths, self.tasks.values()):
            next(self.drawn(kit, task, length))

    def drawn(self, kit: Kit, task: RulerTask, length: int) -> Iterator[Sample]:
        """The samples of one task and length, whose prompts are equally long."""
        try:
            kit = kit.shared_by(tuple(self.tasks), self.lengths)
            yield from make_samples(task, kit, length, self.seed, self.samples)
        except TaskError as error:
            raise PromptError(
                f"{task.name} of --suite {self.suite} at {format_length(length)}, of which {task.tokens} tokens "
                f"or more are for what is generated: {error}"
            ) from error


def run_suite(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    asked: SuiteSamples,
    file: RunFile[Any],
    *,
    kit: Kit | None = None,
    progress: Progress | None = None,
) -> None:
    """Runs dense and other modes on every task at every length, but for what a file holds, and adds that to it.

    Args:
        file: of records that include `SuiteCell`, of a run with the same settings.
    """
    source = kit or prepare(loaded.tokenizer, Split.EVALUATION)
    asked.check_fit(source)
    known = file.all(SuiteCell)
    open_ = {
        (length, task): [name for name in (DENSE, *modes) if (name, task.name, length) not in known]
        for length, task in product(sorted(asked.lengths), asked.tasks.values())
    }
    total = asked.samples * sum(prefill_work(length) * len(names) for (length, _), names in open_.items())
    with (progress or Progress()).stage("evaluate", total=total) as step:
        for (length, task), names in open_.items():
            if names:
                run = _Run(loaded, task.name, length, list(asked.drawn(source, task, length)), asked, step)
                file.add(*[run.cell(name, modes.get(name)) for name in names])


@dataclass(frozen=True, slots=True)
class _Run:
    """The samples of one task and length."""

    loaded: LoadedModel
    task: str
    length: int
    samples: Sequence[Sample]
    asked: SuiteSamples
    step: StageStep

    def cell(self, method: str, mode: Mode | None) -> SuiteCell:
        with mode.running(self.loaded.model) if mode else _dense() as spent:
            texts = [text for some in self._batches() for text in self._generated(method, some)]
            computed = spent()
        if isinstance(mode, PlanMode):
            mode.check(len(self.samples[0].prompt_ids), computed)
        both = list(zip(texts, self.samples, strict=True))
        return SuiteCell(
            method=method,
            plan=executed_digest(mode.plan) if isinstance(mode, PlanMode) else None,
            device=device_name(self.loaded.model.device),
            task=self.task,
            length=self.length,
            recall=tuple(recall(text, sample.answer) for text, sample in both),
            exact=tuple(float(self.asked.tasks[self.task].is_exact(text, sample.answer)) for text, sample in both),
            prefill_density=computed.density,
            decode_share=computed.attended / computed.cached if computed.cached else None,
        )

    def _batches(self) -> Iterator[Sequence[Sample]]:
        size = self.asked.batch or prompts_at_once(self.loaded.model, self.length)
        for first in range(0, len(self.samples), size):
            yield self.samples[first : first + size]

    def _generated(self, method: str, some: Sequence[Sample]) -> list[str]:
        ids_BS = torch.from_numpy(np.stack([sample.prompt_ids for sample in some]).astype(np.int64))
        with without_plans() if method == DENSE else nullcontext():
            texts = generated(self.loaded, ids_BS, self.length - ids_BS.shape[1], self.asked.prefill_chunk)
        note = f"{self.task}, {format_length(self.length)}, {method}"
        self.step.advance(len(some) * prefill_work(self.length), note)
        return texts


@contextmanager
def _dense() -> Iterator[Callable[[], Spent]]:
    yield Spent


@torch.no_grad()
def generated(loaded: LoadedModel, ids_BS: torch.Tensor, tokens: int, chunk: int | None = None) -> list[str]:
    """Continues prompts of equal length greedily by at most so many tokens, with whatever is applied to the model."""
    model: Any = loaded.model
    prompts = prefill(model, ids_BS.to(model.device), chunk)
    check_numbers(model, "logits", prompts.logits_BKV)
    picked_BG = prompts.logits_BKV[:, -1:].argmax(-1)
    goes_on_BG = goes_on(model, picked_BG)
    while picked_BG.shape[1] < tokens and bool(goes_on_BG.any()):
        last_B1 = picked_BG[:, -1:]
        logits_B1V = model(input_ids=last_B1, use_cache=True, **cache_inputs(model, prompts.cache, last_B1)).logits
        picked_BG = torch.cat([picked_BG, logits_B1V[:, -1:].argmax(-1)], 1)
        goes_on_BG = goes_on_BG & goes_on(model, picked_BG[:, -1:])
    return texts_of(loaded, picked_BG)


def texts_of(loaded: LoadedModel, picked_BG: torch.Tensor) -> list[str]:
    """Returns what was generated, each up to its end token."""
    rows = zip(picked_BG.tolist(), until_end(loaded.model, picked_BG).tolist(), strict=True)
    texts = ([token for token, counts in zip(*row, strict=True) if counts] for row in rows)
    return [str(loaded.tokenizer.decode(ids, skip_special_tokens=True)) for ids in texts]


def goes_on(model: Any, picked_B1: torch.Tensor) -> torch.Tensor:
    """[B, 1]: which tokens are no end tokens."""
    ends = model.generation_config.eos_token_id
    return ~torch.isin(picked_B1, torch.tensor([] if ends is None else ends, device=picked_B1.device))
