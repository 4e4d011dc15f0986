"""Reads what the engine of a `vllm.LLM` computed by a plan."""

from __future__ import annotations

from typing import Any

from sparsekv.plans.errors import UsageError
from sparsekv.runtime.paged.metrics import Counters, ServingStats


def serving_stats(llm: Any) -> ServingStats:
    """The counts of a `vllm.LLM`'s engine that runs a plan.

    With the engine in another process (the default of vLLM), set VLLM_ALLOW_INSECURE_SERIALIZATION=1: vLLM sends the
    function that reads them there.

    Raises:
        UsageError: the engine runs no plan.
    """
    found: list[ServingStats | None] = llm.apply_model(_read)
    if found[0] is None:
        raise UsageError(
            "expected an engine that runs a plan, found one without; give it a plan, or a model with one, and on a GPU "
            'attention_config={"backend": "FLASH_ATTN"} where vLLM chose another'
        )
    return found[0]


def reset_stats(llm: Any) -> None:
    """Starts counting anew in a `vllm.LLM`'s engine. See `serving_stats`."""
    llm.apply_model(_reset)


def serving_backend(llm: Any) -> str | None:
    """The kernels that prefill in a `vllm.LLM`'s engine; None where it runs no plan. See `serving_stats`."""
    found: list[str | None] = llm.apply_model(_backend)
    return found[0]


def plan_host(model: Any) -> Any:
    """The plan that the attention layers of a model share."""
    hosts = (getattr(getattr(module, "impl", None), "plan_host", None) for module in model.modules())
    return next((host for host in hosts if host is not None), None)


def _counters(model: Any) -> Counters | None:
    host = plan_host(model)
    return None if host is None else host.counters


def _backend(model: Any) -> str | None:
    host = plan_host(model)
    return None if host is None else host.backend


def _read(model: Any) -> ServingStats | None:
    counters = _counters(model)
    return None if counters is None else counters.read()


def _reset(model: Any) -> None:
    counters = _counters(model)
    if counters is not None:
        counters.reset()
