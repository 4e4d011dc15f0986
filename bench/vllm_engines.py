"""Engines of vLLM for benches, whose tensor-parallel ranks may be compared."""

from __future__ import annotations

from typing import Any

from sparsekv.plans.errors import BackendError

COMPARING = "sparsekv.bench.comparing_worker.ComparingWorker"
"""The worker of an engine whose ranks are compared: `--worker-cls`."""


def make_engine(model: str, **settings: Any) -> Any:
    """An engine for offline use in this process, as `vllm.LLM` makes it, that knows our backend: also where sparsekv is
    not installed, but found otherwise."""
    from vllm import LLM

    from sparsekv.runtime.vllm.internals import register

    register()
    return LLM(model, **settings)


def asking_for_ours() -> dict[str, Any]:
    """The settings of an engine that attends by our backend."""
    from sparsekv.runtime.vllm.devices import OnCuda, platform

    return {"attention_config": {"backend": platform.backend.name}} if platform is OnCuda else {}


def greedy(tokens: int) -> Any:
    """Answers of exactly so many tokens, the most likely each, as numbers."""
    from vllm import SamplingParams

    return SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False)


def forget_prompts(llm: Any) -> None:
    """Empties the prefix cache: what is timed next finds nothing there."""
    if not llm.reset_prefix_cache():
        raise BackendError("expected an engine whose prefix cache can be emptied, found requests that still hold pages")
