"""The entry point `vllm.general_plugins`: vLLM calls it in each of its processes, before it knows any configuration."""

from __future__ import annotations

import warnings

from sparsekv.plans.errors import PlanWarning


def register() -> None:
    """Makes the backend known to vLLM. A release without the names we use is left as it is, with a warning."""
    try:
        from sparsekv.runtime.vllm.internals import register as register_backend
    except ImportError as error:
        message = f"this release of vLLM lacks what sparsekv uses of it ({error}): it runs without plans"
        warnings.warn(message, PlanWarning, stacklevel=2)
        return
    register_backend()
