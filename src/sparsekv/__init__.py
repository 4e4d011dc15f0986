"""sparsekv: compile a long-context language model into a sparsity plan, and run it.

What a program uses is named here, and each name is imported when it is used: torch as late as that.
"""

from __future__ import annotations

TYPE_CHECKING = False  # not from typing: the command line looks after signals before anything is imported
if TYPE_CHECKING:
    from typing import Any

    from sparsekv.planner.plan import plan_model as plan_model
    from sparsekv.planner.verify import verify_plan as verify_plan
    from sparsekv.plans.errors import SparseKVError as SparseKVError
    from sparsekv.plans.files import load_plan as load_plan
    from sparsekv.plans.files import write_plan as write_plan
    from sparsekv.plans.schema import Plan as Plan
    from sparsekv.runtime.hf.apply import apply as apply
    from sparsekv.runtime.hf.load import load_model as load_model

__version__ = "0.2.0"
__all__ = [
    "Plan",
    "SparseKVError",
    "__version__",
    "apply",
    "load_model",
    "load_plan",
    "plan_model",
    "verify_plan",
    "write_plan",
]

_HOMES = {
    "Plan": "sparsekv.plans.schema",
    "SparseKVError": "sparsekv.plans.errors",
    "apply": "sparsekv.runtime.hf.apply",
    "load_model": "sparsekv.runtime.hf.load",
    "load_plan": "sparsekv.plans.files",
    "plan_model": "sparsekv.planner.plan",
    "verify_plan": "sparsekv.planner.verify",
    "write_plan": "sparsekv.plans.files",
}


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'sparsekv' has no attribute {name!r}; it has {', '.join(__all__)}")
    from importlib import import_module

    return getattr(import_module(_HOMES[name]), name)
