"""An engine of vLLM on the CPU, which chunks it makes, and the transformers host given the same ones."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

import pytest
import torch
from handed_over import cache_of, handed_over

from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.apply import apply

BUDGET = 512  # tokens of a step
LONGEST = 3072
PAGES = 64  # of 128 tokens
NEW = 8  # tokens of an answer
CROSSOVER = 384
TILE = 64  # rows and keys of a tile
DECODE_BOUND = 740  # tokens up to which decode is dense
# Without compilation, which these tests turn off.
CAPTURED = {"enforce_eager": False, "compilation_config": {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}}


def make_engine(model: str, **settings: Any) -> Any:
    """An engine on the CPU."""
    from vllm import LLM

    from sparsekv.runtime.vllm.internals import register

    given = {
        "dtype": "float32",
        "enforce_eager": True,
        "max_model_len": LONGEST,
        "max_num_batched_tokens": BUDGET,
        "max_num_seqs": 8,
        "num_gpu_blocks_override": PAGES,
        "disable_log_stats": False,
    }
    register()  # where sparsekv is not installed, but found otherwise
    llm = LLM(model, **(given | settings))
    _count_preemptions(llm)
    return llm


def gpu_engine(model: str, own: dict[str, Any], captured: bool = False, **settings: Any) -> Any:
    """An engine in bfloat16 by our backend on a GPU, which takes little memory; it has settings of ours: sparse always,
    unless asked otherwise."""
    from sparsekv.bench.vllm_engines import asking_for_ours

    given = {"dtype": "bfloat16", "gpu_memory_utilization": 0.1, "kv_cache_memory_bytes": 2 << 30}
    given |= {"disable_log_stats": True} | asking_for_ours() | (CAPTURED if captured else {})
    return make_engine(model, additional_config={"sparsekv": {"sparse": "always"} | own}, **(given | settings))


def generate(llm: Any, prompts: Sequence[Sequence[int]], new: int = NEW) -> list[Any]:
    """The engine's outputs for prompts that it gets at once: `new` tokens each, greedy."""
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0.0, max_tokens=new, ignore_eos=True, logprobs=0)
    return llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], asked, use_tqdm=False)


def preemptions(engine: Any) -> int:
    """How often a request lost its pages so far. vLLM's own metric counts for the engine that was made last."""
    return engine.llm_engine.engine_core.engine_core.scheduler.preempted


def _count_preemptions(llm: Any) -> None:
    core = getattr(llm.llm_engine.engine_core, "engine_core", None)
    if core is None:  # in a process of its own
        return
    scheduler, preempt = core.scheduler, core.scheduler._preempt_request
    scheduler.preempted = 0

    def counted(*args: Any, **kwargs: Any) -> Any:
        scheduler.preempted += 1
        return preempt(*args, **kwargs)

    scheduler._preempt_request = counted


def tokens_of(output: Any) -> list[int]:
    """The answer."""
    return list(output.outputs[0].token_ids)


def tokens_and_logprobs(output: Any) -> tuple[list[int], list[float]]:
    """The answer, and the log-probability of each of its tokens."""
    (chosen,) = output.outputs
    return tokens_of(output), [at[t].logprob for at, t in zip(chosen.logprobs, chosen.token_ids, strict=True)]


def chunks_of(lengths: Sequence[int], new: int = NEW) -> list[list[int]]:
    """Where the engine cuts prompts that it gets at once: a step spends BUDGET tokens, requests that run come first."""
    done, made, cuts = [0] * len(lengths), [0] * len(lengths), [[] for _ in lengths]
    while any(count < new for count in made):
        left = BUDGET
        for number, length in enumerate(lengths):
            if made[number] == new or not left:
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

    def __init__(self, model: Any, plan: Plan | None, **options: Any) -> None:
        self.model, self._plan, self._options = model, plan, options  # as of `apply`

    @cached_property
    def for_single_rows(self) -> Oracle:
        """What computes single rows of a prompt, which elsewhere look like a decode step."""
        plan = self._plan and self._plan.model_copy(update={"decode": None})
        return Oracle(copy.deepcopy(self.model), plan, **self._options)

    @cached_property
    def dense(self) -> Oracle:
        """The same model without the plan."""
        return Oracle(copy.deepcopy(self.model), None)

    def applied(self) -> AbstractContextManager[Any]:
        """The plan at work in the model; gives its handle, or None without a plan."""
        return nullcontext() if self._plan is None else apply(self.model, self._plan, **self._options)

    def __call__(self, prompt: Sequence[int], cuts: Sequence[int], new: int = NEW) -> Answer:
        """`new` tokens, where chunks end at `cuts` and at the end of the prompt."""
        with self.applied() as handle:
            answer = self._decode(prompt, cuts, new, handle)
            return Answer(*answer, handle and handle.stats().prefill_density)

    @torch.no_grad()
    def of(self, prompt: Sequence[int], cuts: Sequence[int], answer: Sequence[int]) -> torch.Tensor:
        """The log-probability of each token of an answer that is given."""
        found, cache = [], None
        with self.applied() as handle:
            for first, end in pairwise((0, *cuts, len(prompt))):
                out, cache = self.piece(torch.tensor([prompt[first:end]]), cache, first, handle)
            for token in answer:
                found.append(out.logits[0, -1].log_softmax(0)[token])
                out = self.model(torch.tensor([[token]]), past_key_values=cache, use_cache=True)
        return torch.stack(found)

    @torch.no_grad()
    def _decode(
        self, prompt: Sequence[int], cuts: Sequence[int], count: int, handle: Any
    ) -> tuple[list[int], list[float]]:
        cache, new, logprobs = None, [], []
        for first, end in pairwise((0, *cuts, len(prompt))):
            out, cache = self.piece(torch.tensor([prompt[first:end]]), cache, first, handle)
        for _ in range(count):
            best = out.logits[0, -1].log_softmax(0).max(0)
            new.append(int(best.indices))
            logprobs.append(float(best.values))
            out = self.model(torch.tensor([new[-1:]]), past_key_values=cache, use_cache=True)
        return new, logprobs

    def piece(self, tokens_1T: torch.Tensor, cache: Any, past: int, handle: Any) -> tuple[Any, Any]:
        """A piece of a prompt: output and cache."""
        if handle is None or not past or tokens_1T.shape[1] > 1:
            out = self.model(tokens_1T, past_key_values=cache, use_cache=True)
            return out, out.past_key_values
        with self.for_single_rows.applied() as other:
            cached = cache_of(other, list(handed_over(cache, past)))
            out = self.for_single_rows.model(tokens_1T, past_key_values=cached, use_cache=True)
            return out, cache_of(handle, list(handed_over(out.past_key_values, past + 1)))


def same(output: Any, answer: Answer) -> bool:
    """Whether the engine gave the same tokens, with the same probabilities within float32's reach."""
    tokens, logprobs = tokens_and_logprobs(output)
    return tokens == answer.tokens and logprobs == pytest.approx(answer.logprobs, abs=1e-3)


def assert_answered(engine: Any, oracle: Oracle, prompts: Sequence[Sequence[int]]) -> None:
    """Prompts that the engine gets at once have the answers of the transformers host, whose prefill leaves some out."""
    cuts = chunks_of([len(prompt) for prompt in prompts])
    for prompt, ends, output in zip(prompts, cuts, generate(engine, prompts), strict=True):
        answer, (tokens, logprobs) = oracle(prompt, ends), tokens_and_logprobs(output)
        assert tokens == answer.tokens
        assert logprobs == pytest.approx(answer.logprobs, abs=2e-3)
        assert answer.density < 0.9


def gaps(engine: Any, oracles: Sequence[Oracle], prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """How far the log-probabilities of the engine's own tokens are from those of each host, by prompt."""
    found: list[list[float]] = [[] for _ in oracles]
    cuts = chunks_of([len(prompt) for prompt in prompts])
    for prompt, ends, output in zip(prompts, cuts, generate(engine, prompts), strict=True):
        tokens, logprobs = tokens_and_logprobs(output)
        for oracle, apart in zip(oracles, found, strict=True):
            apart.append(float((oracle.of(prompt, ends, tokens) - torch.tensor(logprobs)).abs().mean()))
    return found
