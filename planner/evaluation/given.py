"""Prompts of the caller with their answers, measured like samples of a task, by length.

A length is a power of two, and holds the prompts that are at most that long with their answers and longer than half.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from sparsekv.planner.evaluation.batches import MOST_TEXT
from sparsekv.planner.evaluation.evaluator import compare
from sparsekv.planner.evaluation.modes import DENSE, Mode
from sparsekv.planner.evaluation.results import EvalResult
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.planner.tasks import PieceEncoder, Sample
from sparsekv.plans.errors import PromptError
from sparsekv.runtime.hf.load import LoadedModel


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt, the answer that follows it as it is (with its leading space, if any), and what it counts as."""

    prompt: str
    answer: str
    task: str = "prompts"


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
