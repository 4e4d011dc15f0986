"""sparsekv: compile a long-context language model into a sparsity plan, and run it.

The three calls below import torch only when they are used.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing: the command line looks after signals before anything is imported
if TYPE_CHECKING:
    from typing import Any

    from sparsekv.planner.plan import plan_model as plan_model
    from sparsekv.plans.files import load_plan as load_plan
    from sparsekv.runtime.hf.apply import apply as apply

__version__ = "0.1.0"
__all__ = ["__version__", "apply", "load_plan", "plan_model"]

_HOMES = {
    "apply": "sparsekv.runtime.hf.apply",
    "load_plan": "sparsekv.plans.files",
    "plan_model": "sparsekv.planner.plan",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sparsekv' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
