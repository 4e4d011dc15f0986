"""`sparsekv.verify_plan`: a plan on held-out prompts of a model, for programs; the command is cli/verify.py."""

from __future__ import annotations

import os
import warnings
from typing import Any

from sparsekv.planner.common_options import DEFAULT_TASKS
from sparsekv.planner.options import PlanOptions, Settled, lengths_to_verify, settle
from sparsekv.planner.plan import loaded_from
from sparsekv.planner.progress import Progress
from sparsekv.planner.verify import Verification, verify
from sparsekv.plans.errors import PlanWarning, UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.schema import Plan, check_model
from sparsekv.runtime.hf.load import LoadedModel


def verify_plan(
    model: Any,
    plan: Plan | str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Verification:
    """Runs a plan on held-out prompts beside dense, prefill, decode and both, and says whether it keeps its gates.

    Args:
        model: an alias, hub id, folder or GGUF file, a `LoadedModel`, or a Hugging Face model together with its
            tokenizer.
        plan: the plan, or the path of a plan file, which stays as it is.
        progress: where to report the stages; see `plan_model`.
        **options: fields of `PlanOptions`, of which `gate`, `lengths`, `tasks`, `verify_time`, `verify_samples`,
            `batch`, `prefill_chunk`, `device`, `dtype` and `backend` are read; the plan's own lengths by default.

    Returns:
        What was measured, and what it shows. `recorded(plan)` is the plan with that; write it with `write_plan`.

    Raises:
        PlanMismatchError: the plan is of another architecture.
        GateError: the model without the plan gives numbers that are not finite.
        SparseKVError: of the other kinds, for what cannot be verified; nothing of a dense plan can.
    """
    asked = PlanOptions(**options)
    if asked.prompts:
        raise UsageError("expected no prompts, found some; own prompts verify by `sparsekv verify --prompts FILE`")
    found = load_plan(plan) if isinstance(plan, str | os.PathLike) else plan
    if not isinstance(found, Plan):
        raise UsageError(f"expected a Plan, or the path of one, found {plan!r:.80}")
    loaded = loaded_from(model, tokenizer, asked)
    for line in check_model(found, loaded.info):
        warnings.warn(line, PlanWarning, stacklevel=2)
    evidence = found.quality.evidence if found.quality else None
    return verify(
        loaded,
        found,
        _settled(asked, found, loaded),
        progress,
        attempt=evidence.attempt if evidence else 1,  # the samples are those of that attempt
    )


def _settled(asked: PlanOptions, plan: Plan, loaded: LoadedModel) -> Settled:
    """Returns what is asked for, settled for this model."""
    context = loaded.info.context_length
    asked = asked.but(**lengths_to_verify(plan, asked.lengths, context))
    settled = settle(asked, context, loaded.model.device.type)
    return settled.but(tasks=settled.tasks or DEFAULT_TASKS)
