"""An engine of vLLM on the CPU, which chunks it makes, and the transformers host given the same ones."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import pytest
import torch
from transformers import DynamicCache

from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.cache import handed_over

BUDGET = 512  # tokens of a step
LONGEST = 3072
PAGES = 64  # of 128 tokens
NEW = 8  # tokens of an answer
CROSSOVER = 384
TILE = 64  # rows and keys of a tile


def make_engine(model: str, **settings: Any) -> Any:
    """An engine on the CPU."""
    from vllm import LLM

    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": LONGEST,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": PAGES,
        "disable_log_stats": False,
    }
    return LLM(model, **(given | settings))


def generate(llm: Any, prompts: Sequence[Sequence[int]]) -> list[Any]:
    """The engine's outputs for prompts that it gets at once: NEW tokens each, greedy."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=NEW, ignore_eos=True, logprobs=0)
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], asked, use_tqdm=False)


def preemptions(engine: Any) -> int:
    """How often a request lost its pages so far."""
    return next(metric.value for metric in engine.get_metrics() if metric.name == "vllm:num_preemptions")


def tokens_of(output: Any) -> list[int]:
    """The answer."""
    return list(output.outputs[0].token_ids)


def chunks_of(lengths: Sequence[int]) -> list[list[int]]:
    """Where the engine cuts prompts that it gets at once: a step spends BUDGET tokens, requests that run come first."""
    done, made, cuts = [0] * len(lengths), [0] * len(lengths), [[] for _ in lengths]
    while any(new < NEW for new in made):
        left = BUDGET
        for number, length in enumerate(lengths):
            if made[number] == NEW or not left:
                continue
            rows = min(length - done[number], left) if done[number] < length else 1
            left -= rows
            if done[number] < length:
                done[number] += rows
                cuts[number].append(done[number])
            made[number] += done[number] == length
    return [ends[:-1] for ends in cuts]


@dataclass(frozen=True)
class Answer:
    """Greedy tokens, the log-probability of each, and the density of prefill."""

    tokens: list[int]
    logprobs: list[float]
    density: float | None


class Oracle:
    """The transformers host, given the same chunks."""

    def __init__(self, model: Any, plan: Plan | None) -> None:
        self.model, self._plan = model, plan

    def applied(self, decode: bool = True) -> AbstractContextManager[Any]:
        """The plan at work in the model; gives its handle, or None without a plan."""
        return nullcontext() if self._plan is None else apply(self.model, self._plan, decode=decode)

    def __call__(self, prompt: Sequence[int], cuts: Sequence[int]) -> Answer:
        """NEW tokens, where chunks end at `cuts` and at the end of the prompt. Decode begins behind it: a chunk of one
        token is a part of the prompt."""
        with self.applied(decode=False) as handle, torch.no_grad():
            out = None
            for first, end in pairwise((0, *cuts, len(prompt))):
                out = self._step(prompt[first:end], out and out.past_key_values)
            layers = list(handed_over(out.past_key_values, len(prompt)))
            density = handle and handle.stats().prefill_density
        with self.applied() as handle, torch.no_grad():
            cache = DynamicCache(layers) if handle is None else handle.cache_of(layers)
            return Answer(*self._decode(out.logits, cache), density)

    def _decode(self, logits: torch.Tensor, cache: Any) -> tuple[list[int], list[float]]:
        new, logprobs = [], []
        for _ in range(NEW):
            best = logits[0, -1].log_softmax(0).max(0)
            new.append(int(best.indices))
            logprobs.append(float(best.values))
            logits = self._step(new[-1:], cache).logits
        return new, logprobs

    def _step(self, tokens: Sequence[int], cache: Any) -> Any:
        return self.model(torch.tensor([tokens]), past_key_values=cache, use_cache=True)


def same(output: Any, answer: Answer) -> bool:
    """Whether the engine gave the same tokens, with the same probabilities within float32's reach."""
    chosen = output.outputs[0]
    logprobs = [at[token].logprob for at, token in zip(chosen.logprobs, chosen.token_ids, strict=True)]
    return tokens_of(output) == answer.tokens and logprobs == pytest.approx(answer.logprobs, abs=1e-3)
