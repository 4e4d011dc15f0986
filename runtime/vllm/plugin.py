"""The entry point `vllm.general_plugins`: vLLM calls it in each of its processes, before it knows any configuration."""

from __future__ import annotations

import warnings

from sparsekv.plans.errors import PlanWarning


def register() -> None:
    """Makes the backend known to vLLM. A release without the names we use is left as it is, with a warning."""
    try:
        from sparsekv.runtime.vllm.internals import register as register_backend

        register_backend()
    except Exception as error:  # of a release that is unlike what was seen: every process of vLLM calls this
        message = f"sparsekv found vLLM unlike what it knows ({type(error).__name__}: {error}): it runs without plans"
        warnings.warn(message, PlanWarning, stacklevel=2)
