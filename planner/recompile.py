"""A plan from a profile and a device cost alone: for another budget, or for a GPU that is elsewhere.

Neither the weights of the model nor its device are needed. What the model is can be told from its config, and is
checked against the profile; which weights it holds cannot, so that the plan carries the fingerprint of the weights that
were profiled, and applying it to others warns.
"""

from __future__ import annotations

import time
from pathlib import Path

from sparsekv.planner.compile import check_cost, compile_once, remarks
from sparsekv.planner.cost_data import DeviceCost
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.plan_result import PlanResult
from sparsekv.planner.profile_data import Profile
from sparsekv.planner.profile_file import check_architecture, write_cost, write_profile
from sparsekv.planner.tighten import for_profile
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.hf.describe import describe_config
from sparsekv.runtime.hf.load import load_config

_NO_WEIGHTS = "the weights of {name} were not read: the plan is for those that were profiled, and warns on others"
_NO_CONFIG = "{name} cannot be reached and was not checked: the plan is for the model of that name that was profiled"


def compile_files(
    name: str,
    options: PlanOptions,
    measured: Profile,
    cost: DeviceCost,
    *,
    profile_out: Path | None = None,
    cost_out: Path | None = None,
) -> PlanResult:
    """Compiles a plan and leaves it unverified: verifying would run the model.

    Args:
        name: the model: an alias, hub id or folder.
        options: what to plan, with `verify_samples` 0.
        measured: the profile.
        cost: of the device that the plan is for.
        profile_out, cost_out: where to write the two again.

    Raises:
        PlanMismatchError: the profile is of another architecture.
        UsageError, GateError: the profile does not reach what was asked for, or there is no such model.
    """
    started = time.monotonic()
    if options.verify_samples != 0:
        raise UsageError("expected no verification without the model's weights, found some; leave it out, or load it")
    told = _checked(name, measured)
    asked, kept = for_profile(options, measured)
    settled = asked.settled(measured.model.context_length, "cpu" if cost.backend == "cpu" else "cuda")
    check_cost(cost, measured)
    plan = compile_once(measured.model, settled, kept, cost)
    if profile_out is not None:
        write_profile(measured, profile_out)
    if cost_out is not None:
        write_cost(cost, cost_out)
    return PlanResult(plan, time.monotonic() - started, 0, (*remarks(plan, settled, kept, cost), told))


def _checked(name: str, measured: Profile) -> str:
    """Compares the model of that name with the profile's, as far as can be told; a remark on how far that is."""
    source = resolve_model(name)
    try:
        config = load_config(source)
    except UsageError:
        if source.path_or_id != measured.model.id:
            raise
        return _NO_CONFIG.format(name=name)
    check_architecture(measured, describe_config(config, source.path_or_id))
    return _NO_WEIGHTS.format(name=name)
