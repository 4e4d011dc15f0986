"""Finds the plan of a model in a folder of plans, by the model's fingerprint."""

from __future__ import annotations

import os
from pathlib import Path

from sparsekv.cli.output import tell
from sparsekv.cli.plan_files import tells_plan
from sparsekv.plans.aliases import PLAN_NAME, ModelSource, resolve_model
from sparsekv.plans.errors import PlanError, PlanMismatchError, UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.model import ModelInfo, differences
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length


def holds_plans(place: Path) -> bool:
    """True of a folder of plans to choose from: without a sparsekv.yaml, which would be its plan, and with plans of
    other names."""
    is_folder = os.path.isdir(place) and not os.path.isfile(place / PLAN_NAME)
    return is_folder and any(map(tells_plan, _files(place)))


def _sound_plans(folder: Path) -> list[tuple[Path, Plan]]:
    """The sound plans of a folder; of one that is not sound, why it is left out is said."""
    plans = []
    for path in filter(tells_plan, _files(folder)):
        try:
            plans.append((path, load_plan(path)))
        except (PlanError, UsageError) as error:
            tell(f"left out: {error}")
    return plans


def chosen_plan(folder: Path, model: str | None) -> Path:
    """The file of the one plan in a folder that is of a model, which is said; without a model, of the only plan."""
    plans = _sound_plans(folder)
    if model is None:
        if len(plans) != 1:
            raise UsageError(
                f"expected a MODEL beside the folder of plans {folder}, found none, and {len(plans)} sound plans; "
                "name the model, or one plan"
            )
        return plans[0][0]
    own = described(resolve_model(model))
    fitting = {path: plan for path, plan in plans if not differences(plan.model, own)}  # weights are not compared
    if len(fitting) > 1:
        listed = "\n".join(f"  {_told(*one)}" for one in fitting.items())
        raise UsageError(f"expected one plan of {model} in {folder}, found several:\n{listed}\nname one")
    if not fitting:
        models = ", ".join(dict.fromkeys(plan.model.id for _, plan in plans)) or "none that is sound"
        raise PlanMismatchError(
            f"expected a plan of {model} in {folder}, found those of {models}; name another folder, or plan the model"
        )
    ((path, plan),) = fitting.items()
    tell(f"plan: {_told(path, plan)}")
    return path


def _told(path: Path, plan: Plan) -> str:
    lengths = ", ".join(map(format_length, plan.planned_lengths)) or "no lengths named"
    return f"{path} ({plan.status_text}, {lengths})"


def described(source: ModelSource) -> ModelInfo:
    """The description of a model by its config; its weights are not read."""
    from sparsekv.runtime.hf.load import load_config
    from sparsekv.runtime.model_config import describe_config

    return describe_config(load_config(source), source.path_or_id)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
