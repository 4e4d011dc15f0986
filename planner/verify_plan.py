"""`sparsekv.verify_plan`: a plan on held-out prompts of a model, for programs; the command is cli/verify.py."""

from __future__ import annotations

import os
import warnings
from typing import Any

from sparsekv.planner.options import PlanOptions, lengths_to_verify, settle
from sparsekv.planner.plan import loaded_from
from sparsekv.planner.progress import Progress
from sparsekv.planner.verify import Verification, VerifyRun, verify
from sparsekv.plans.errors import PlanWarning, UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.schema import Plan, check_model


def verify_plan(
    model: Any,
    plan: Plan | str | os.PathLike[str],
    tokenizer: Any = None,
    *,
    progress: Progress | None = None,
    **options: Any,
) -> Verification:
    """Tests a plan on held-out prompts beside dense, both phases together.

    Args:
        model: an alias, hub id, folder or GGUF file, a `LoadedModel`, or a Hugging Face model together with its
            tokenizer.
        plan: the plan, or the path of a plan file, which stays as it is.
        progress: where to report the stages; see `plan_model`.
        **options: fields of `PlanOptions`, of which `verify`, `lengths`, `verify_tasks`, `batch`, `prefill_chunk`,
            `device`, `dtype` and `backend` are read; the plan's own lengths by default.

    Returns:
        The result; `recorded(plan)` is the plan with it; write that with `write_plan`.

    Raises:
        PlanMismatchError: the plan is of another architecture.
        GateError: the model without the plan gives numbers that are not finite.
        SparseKVError: of the other kinds, for what cannot be verified; nothing of a dense plan can.
    """
    asked = PlanOptions(**options)
    if asked.verify == "none":
        raise UsageError("expected verify='small' or 'full', found 'none': nothing would be verified")
    if asked.prompts:
        raise UsageError("expected no prompts, found some; own prompts verify by `sparsekv verify --prompts FILE`")
    found = load_plan(plan) if isinstance(plan, str | os.PathLike) else plan
    if not isinstance(found, Plan):
        raise UsageError(f"expected a Plan, or the path of one, found {plan!r:.80}")
    loaded = loaded_from(model, tokenizer, asked)
    for line in check_model(found, loaded.info):
        warnings.warn(line, PlanWarning, stacklevel=2)
    asked = asked.but(**lengths_to_verify(found, asked.lengths, loaded.info.context_length))
    settled = settle(asked, loaded.info.context_length, loaded.model.device.type)
    run = VerifyRun.after(found, "full" if asked.verify == "full" else "small")
    return verify(loaded, found, settled, run, progress)
