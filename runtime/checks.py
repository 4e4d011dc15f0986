"""Whether a plan can run on a model, asked before anything does."""

from __future__ import annotations

import warnings

from sparsekv.plans.errors import PlanWarning, UnsupportedError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, check_model, unsupported


def check_plan(plan: Plan, found: ModelInfo, allow_mismatch: bool = False) -> None:
    """Refuses a plan that would run wrongly, and warns (`PlanWarning`) of one whose quality was measured elsewhere.

    Raises:
        PlanMismatchError: `found` is of another architecture and `allow_mismatch` is off, or lacks layers or heads.
        UnsupportedError: the plan has a field that this version does not execute.
    """
    for line in check_model(plan, found, allow_mismatch):
        warnings.warn(line, PlanWarning, stacklevel=3)
    refused = [*unsupported(plan), *_sliding_filters(plan, found)]
    if refused:
        listed = "\n".join(f"  {line}" for line in refused)
        raise UnsupportedError(
            f"expected a plan that this version executes in full, found:\n{listed}\nMake a plan without it."
        )


def check_target(plan: Plan, device: str, backend: str, dtype: str) -> None:
    """Warns (`PlanWarning`) where cost and crossover of a plan were measured elsewhere: the plan runs, and right, but
    whether sparse is faster here nobody has measured.

    Args:
        plan: the plan; one without targets (an import) claims nothing.
        device: where it is going to run, by its name.
        backend: of its kernels.
        dtype: of the model.
    """
    measured = [
        f"{target.device} ({target.backend}, {target.dtype}{_devices(target.count)})" for target in plan.targets
    ]
    here = f"{device} ({backend}, {dtype})"
    if measured and here not in measured:
        warnings.warn(
            f"cost and crossover of this plan were measured on {', '.join(measured)}, not on {here}: sparse may be "
            "slower than dense here. `sparsekv plan MODEL --profile FILE -o PLAN` recompiles it for this device",
            PlanWarning,
            stacklevel=3,
        )


def _devices(count: int) -> str:
    return "" if count == 1 else f", {count} devices"


def _sliding_filters(plan: Plan, found: ModelInfo) -> list[str]:
    """A layer that sees only its window cannot choose among all tokens."""
    segments = [segment for bucket in (plan.decode.lengths if plan.decode else ()) for segment in bucket.segments]
    filters = sorted({segment.filter for segment in segments})
    sliding = [layer for layer in filters if found.group_of(layer).kind != "full"]
    return [f"decode: layer {layer} is {found.group_of(layer).kind} and cannot be a filter layer" for layer in sliding]
