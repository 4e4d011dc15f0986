"""Dense and modes on the same samples, batch by batch.

Dense prefills the prompts of a batch, continues them greedily where that is asked for, and reads their answers in one
pass. A mode then prefills them by itself, and what it predicts is what a user gets: tokens are fed one by one. Two
texts are fed after each prompt, each from a copy of the cache:

1. The sample's answer, or the true text (its first `MOST_TEXT` tokens) where the task is plain text. Divergence is
   measured on it, and whether the model generates it: its greedy continuation is the answer exactly when, fed the
   answer, it picks every next token of it.
2. On request dense's own greedy continuation of the prompt, an end token among it or not: divergence and top-1
   agreement. Where dense gives the answer, both texts are one.

A sample may be a conversation: its turns run as a user's do, prompts as prefill and the replies between them token by
token, and the answer is that to the last prompt. The shorter half of a plan's later prompts is dense behind sparse
ones, as a host runs turns of few tokens.

Logits count from the first row that the mode computed itself: with decode alone, the prompt's last row is dense's own
and would dilute the divergence. With prefill alone, the rows after the prompt attend to all of a cache that was
prefilled sparse.

Shapes: B batch, S tokens of a prompt, A tokens of the answer, G tokens of dense's continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import repeat
from typing import Any

import torch

from sparsekv.planner.evaluation.batches import Batch, batches
from sparsekv.planner.evaluation.predictions import (
    DENSE,
    PlanMode,
    after_prompt,
    answered,
    continued,
    divergence,
    prefill_turns,
    spent_by,
    without_plans,
)
from sparsekv.planner.evaluation.results import Comparison, LongText, Outcome, Spent
from sparsekv.planner.progress import StageStep, prefill_work
from sparsekv.planner.tasks import Sample
from sparsekv.runtime.hf.apply import Handle, dense_prompts
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.stores.pinned import HostMemory


@contextmanager
def opened(
    loaded: LoadedModel,
    modes: Mapping[str, PlanMode],
    batch: int | None = None,
    chunk: int | None = None,
    dense_chunk: int | None = None,
    *,
    text: int = 0,
) -> Iterator[Evaluator]:
    """Modes that are compared with dense again and again; the model is given back at the end.

    Args:
        batch: most samples run at once; None: as many as surely fit.
        chunk: most tokens of a prompt given to the model at once by a mode; None is all.
        dense_chunk: the same by the unmodified model, which attends through a mask behind a past: slower.
        text: tokens of dense's own continuation that are read too, fewer where the context ends before.

    Raises:
        PlanMismatchError, UnsupportedError, BackendError: a plan cannot be applied; before anything runs.
    """
    with ExitStack() as stack:
        memory = HostMemory()
        stack.callback(memory.close)
        applied = {
            name: _Applied.of(mode, stack.enter_context(mode.applied(loaded.model, memory)))
            for name, mode in modes.items()
        }
        yield Evaluator(loaded, applied, batch, chunk, dense_chunk, text)


@dataclass(frozen=True, slots=True, eq=False)
class _Applied:
    """A mode on a handle that serves all batches, and is suspended in between."""

    mode: PlanMode
    handle: Handle

    @classmethod
    def of(cls, mode: PlanMode, handle: Handle) -> _Applied:
        handle.suspend()
        return cls(mode, handle)

    def dense_prompts(self) -> AbstractContextManager[None]:
        return nullcontext() if self.mode.plan.prefill is None else dense_prompts(self.handle)

    @contextmanager
    def running(self) -> Iterator[Callable[[], Spent]]:
        """Gives a function that counts the work of this block."""
        self.handle.resume()
        self.handle.reset_stats()
        try:
            yield partial(spent_by, self.handle)
        finally:
            self.handle.suspend()


@dataclass(frozen=True, slots=True, eq=False)
class DenseBatch:
    """Prompts that dense ran on, and what it predicts for them.

    Attributes:
        log_BAV: [B, A + 1, V], log-probabilities on the way through the answer, float32.
        text_BG: dense's greedy continuation of the prompts; no token where it is not asked for.
        text_BGV: log-probabilities of it.
    """

    batch: Batch
    outcomes: tuple[Outcome, ...]
    log_BAV: torch.Tensor
    text_BG: torch.Tensor
    text_BGV: torch.Tensor

    @property
    def fed(self) -> list[torch.Tensor]:
        """[B, A] each: what a mode is fed after the prompts; the longer one where both begin alike."""
        answer_BA, text_BG = self.batch.answer_BA, self.text_BG[:, :-1]
        tokens = min(answer_BA.shape[1], text_BG.shape[1])
        if torch.equal(answer_BA[:, :tokens], text_BG[:, :tokens]):
            return [max(answer_BA, text_BG, key=lambda fed_BA: fed_BA.shape[1])]
        return [answer_BA, text_BG]


@dataclass(frozen=True, slots=True, eq=False)
class Evaluator:
    """Made by `opened`."""

    loaded: LoadedModel
    modes: Mapping[str, _Applied]
    batch: int | None
    chunk: int | None
    dense_chunk: int | None
    text: int

    def dense(self, samples: Sequence[Sample], step: StageStep | None = None) -> tuple[DenseBatch, ...]:
        """Runs dense, in batches that modes may run beside; their order is that of the batches.

        Args:
            samples: prompts and answers with at least one token; where the wording of an answer is "", no generated
                text is compared with it.
            step: advanced by the `prefill_work` of each sample.
        """
        runs = []
        for batch in batches(samples, self.loaded.model, self.batch, self.text):
            runs.append(self._dense(batch))
            _advance(step, batch.samples, DENSE)
        return tuple(runs)

    def beside(self, dense: Iterable[DenseBatch], name: str, step: StageStep | None = None) -> Comparison:
        """Runs a mode on what dense ran on: outcomes in the order of the batches, and what was computed."""
        outcomes: list[Outcome] = []
        total, applied = Spent(), self.modes[name]
        for run in dense:
            with applied.running() as spent:
                read, computed = self._read(run, applied), spent()
            applied.mode.check(run.batch.past, computed)
            # a later prompt runs behind what was decoded
            outcomes += self._outcomes(run, read, first=int(applied.mode.dense_prefill and not run.batch.later))
            total += computed
            _advance(step, run.batch.samples, name)
        return Comparison(tuple(outcomes), total)

    @torch.no_grad()
    def _dense(self, batch: Batch) -> DenseBatch:
        model: Any = self.loaded.model
        prompts = prefill_turns(model, batch, self.dense_chunk)
        text_BGV = prompts.logits_BKV[:, :0].float()
        tokens = min(self.text, self.loaded.info.context_length - batch.past)
        with without_plans():
            if tokens:
                text_BGV = continued(model, deepcopy(prompts), tokens)
            logits_BAV = after_prompt(model, prompts, batch.answer_BA, stepwise=False)
        check_numbers(model, "logits", logits_BAV)
        correct = answered(self.loaded, batch, logits_BAV.argmax(-1))
        texts = [LongText(0.0, tokens, tokens) if tokens else None] * len(correct)
        outcomes = tuple(Outcome(right, text=text) for right, text in zip(correct, texts, strict=True))
        return DenseBatch(batch, outcomes, logits_BAV.log_softmax(-1), text_BGV.argmax(-1), text_BGV.log_softmax(-1))

    @torch.no_grad()
    def _read(self, run: DenseBatch, applied: _Applied) -> list[torch.Tensor]:
        """Logits for each text."""
        model, texts = self.loaded.model, run.fed
        prompts = prefill_turns(model, run.batch, self.chunk, applied.dense_prompts)
        return [
            after_prompt(model, prompts if fed_BA is texts[-1] else deepcopy(prompts), fed_BA, stepwise=True)
            for fed_BA in texts
        ]

    def _outcomes(self, run: DenseBatch, read: Sequence[torch.Tensor], first: int) -> Iterator[Outcome]:
        """Predictions for the texts beside dense; rows before the `first` are dense's own."""
        logits_BAV = read[0][:, : run.log_BAV.shape[1]]
        kl_B = divergence(run.log_BAV[:, first:], logits_BAV.log_softmax(-1)[:, first:])
        correct, texts = answered(self.loaded, run.batch, logits_BAV.argmax(-1)), self._texts(run, read[-1], first)
        return map(Outcome, correct, kl_B.tolist(), texts)

    def _texts(self, run: DenseBatch, logits_BGV: torch.Tensor, first: int) -> Iterator[LongText | None]:
        if not (tokens := run.text_BG.shape[1]):
            return repeat(None)
        log_BGV = logits_BGV[:, first:tokens].log_softmax(-1)
        agreed_B = (log_BGV.argmax(-1) == run.text_BG[:, first:]).sum(1)
        kl_B = divergence(run.text_BGV[:, first:], log_BGV)
        return map(LongText, kl_B.tolist(), agreed_B.tolist(), repeat(tokens - first))


def _advance(step: StageStep | None, samples: Iterable[Sample], name: str) -> None:
    for sample in samples:
        (step or StageStep()).advance(prefill_work(sample.length), f"{sample.task}, {sample.length} tokens, {name}")
