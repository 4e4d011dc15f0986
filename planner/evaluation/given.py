"""Prompts of the caller with their answers, measured like samples of a task, by length.

A length is a power of two, and holds the prompts that are at most that long with their answers and longer than half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np

from sparsekv.planner.evaluation.batches import MOST_TEXT, EvalSamples
from sparsekv.planner.evaluation.evaluator import compare
from sparsekv.planner.evaluation.modes import DENSE, Mode
from sparsekv.planner.evaluation.results import EvalResult
from sparsekv.planner.own_prompts import GivenPrompt
from sparsekv.planner.profile.calibration import OWN_ANSWER
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.planner.tasks import Kit, PieceEncoder, Sample
from sparsekv.plans.errors import PromptError
from sparsekv.runtime.hf.load import LoadedModel

NEAR_END = 0.7  # of a length: with fixed budgets a bucket is sparsest at its end


def evaluate_given(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    prompts: Iterable[GivenPrompt],
    batch: int | None = None,
    chunk: int | None = None,
    progress: Progress | None = None,
) -> dict[str, tuple[EvalResult, ...]]:
    """Compares modes with dense on prompts of the caller.

    Args:
        loaded: the model, with nothing applied to it.
        modes: what to compare with dense, by name; may be empty.
        batch, chunk: as in `compare`.

    Returns:
        For each mode, and for "dense" with dense on both sides, a result for each length that has prompts, ascending.

    Raises:
        PromptError: a prompt is longer than the model's context, or an answer than `MOST_TEXT` tokens.
        PlanMismatchError, UnsupportedError, BackendError: a plan cannot be applied.
    """
    by_length: dict[int, list[Sample]] = defaultdict(list)
    for sample in samples_of(loaded.tokenizer, prompts, loaded.info.context_length):
        by_length[1 << (sample.length - 1).bit_length()].append(sample)
    results: dict[str, list[EvalResult]] = defaultdict(list)
    total = (1 + len(modes)) * sum(prefill_work(one.length) for some in by_length.values() for one in some)
    with (progress or Progress()).stage("evaluate", total=total) as step:
        for length, samples in sorted(by_length.items()):
            found = compare(loaded, modes, samples, batch=batch, chunk=chunk, step=step)
            tasks = tuple(dict.fromkeys(sample.task for sample in samples))
            for name, own in found.items():
                results[name].append(EvalResult.of(length, tasks, samples, found[DENSE], own))
    return {name: tuple(own) for name, own in results.items()}


@dataclass(frozen=True, slots=True)
class GivenSamples(EvalSamples):
    """Prompts of the caller in place of samples of tasks, as one task: each is drawn once."""

    given: Mapping[int, Sequence[Sample]] = field(default_factory=dict)  # by length

    @classmethod
    def of(cls, samples: EvalSamples, given: Sequence[Sample]) -> GivenSamples:
        """These at the lengths of `samples`, in an order that follows from their seed. A length has those that are at
        most that long and longer than the one before it; the longest has all that are longer."""
        own: dict[int, list[Sample]] = {length: [] for length in samples.lengths}
        for at in np.random.default_rng(samples.seed).permutation(len(given)):
            longer = (length for length in samples.lengths if given[at].length <= length)
            own[min(longer, default=max(samples.lengths))].append(replace(given[at], task="prompts"))
        return cls._with(samples, own)

    @classmethod
    def cut(
        cls, samples: EvalSamples, tokenizer: Any, prompts: Sequence[GivenPrompt], skipped: int = 0
    ) -> GivenSamples:
        """Prompts in their order, but for the first ones, at those lengths of `samples` that some come near the end of:
        the longer ones as text that is cut there."""
        found = {
            length: [one for prompt in prompts if (one := _at_length(tokenizer, prompt, length))][skipped:]
            for length in samples.lengths
        }
        return cls._with(samples, {length: own for length, own in found.items() if own})

    @classmethod
    def _with(cls, samples: EvalSamples, given: Mapping[int, Sequence[Sample]]) -> GivenSamples:
        settings = {one.name: getattr(samples, one.name) for one in fields(EvalSamples)}
        return cls(**settings | {"tasks": ("prompts",), "lengths": tuple(given)}, given=given)

    def check_fit(self, kit: Kit) -> None:
        """Raises PromptError where a length has no prompt."""
        for length, own in self.given.items():
            if not own:
                raise PromptError(f"expected prompts for every length that is verified, found none of {length} tokens")

    def drawn(self, kit: Kit, length: int) -> list[Sample]:
        """Those of a length that are next; fewer than asked for, or none, at the end."""
        return list(self.given[length][self.first : self.first + self.samples])


def _at_length(tokenizer: Any, given: GivenPrompt, length: int) -> Sample | None:
    """A prompt that comes near the end of a length; None of a shorter one."""
    if given.answer:
        whole = _sample(tokenizer, PieceEncoder.of(tokenizer), replace(given, task="prompts"))
        if NEAR_END * length < whole.length <= length and 0 < len(whole.answer_ids) <= MOST_TEXT:
            return whole
    ids = np.asarray(tokenizer(given.text)["input_ids"][:length], np.int32)
    if len(ids) <= max(NEAR_END * length, OWN_ANSWER):
        return None
    return Sample(ids[:-OWN_ANSWER], ids[-OWN_ANSWER:], "", "prompts", len(ids))


def samples_of(tokenizer: Any, prompts: Iterable[GivenPrompt], context: int) -> list[Sample]:
    """Prompts as samples, tokenized as they are; no chat template is put around them.

    Raises:
        PromptError: one is too long.
    """
    encoder = PieceEncoder.of(tokenizer)
    samples = [_sample(tokenizer, encoder, prompt) for prompt in prompts]
    for number, sample in enumerate(samples, start=1):
        if sample.length > context:
            raise PromptError(
                f"expected prompts and answers within the model's context of {context} tokens, found {sample.length} "
                f"in prompt {number}; shorten it"
            )
        if not 0 < len(sample.answer_ids) <= MOST_TEXT:
            raise PromptError(
                f"expected answers of 1 to {MOST_TEXT} tokens, found {len(sample.answer_ids)} in prompt {number}; give "
                "its beginning"
            )
    return samples


def _sample(tokenizer: Any, encoder: PieceEncoder, given: GivenPrompt) -> Sample:
    text = given.prompt.rstrip(" ")  # tokenizers put a space to the word behind it
    answer = given.prompt[len(text) :] + given.answer
    prompt, whole = (list(tokenizer(one)["input_ids"]) for one in (text, text + answer))
    is_prefix = whole[: len(prompt)] == prompt  # otherwise a token spans both, and the answer is tokenized by itself
    answer_ids = whole[len(prompt) :] if is_prefix else encoder.encode([answer])
    length = len(prompt) + len(answer_ids)
    return Sample(np.asarray(prompt, np.int32), np.asarray(answer_ids, np.int32), answer, given.task, length)
