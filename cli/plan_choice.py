"""Finds the plan of a model in a folder of plans, by the model's fingerprint."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from sparsekv.cli.output import tell
from sparsekv.cli.plan_files import tells_plan
from sparsekv.plans.aliases import PLAN_NAME, ModelSource, resolve_model
from sparsekv.plans.errors import PlanError, PlanMismatchError, UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.model import ModelInfo, differences
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan beside what it would run on.

    Attributes:
        why_not: what differs between its model and this one; empty where it is of this model. Weights are not compared.
    """

    path: Path
    plan: Plan
    why_not: str

    @property
    def facts(self) -> dict[str, object]:
        facts = {"path": str(self.path), "status": self.plan.status, "lengths": list(self.plan.planned_lengths)}
        return facts | {"fits": not self.why_not, "why_not": self.why_not}

    def told(self) -> str:
        lengths = ", ".join(map(format_length, self.plan.planned_lengths)) or "no lengths named"
        return f"{self.path} ({self.plan.status_text}, {lengths})"


def holds_plans(place: Path) -> bool:
    """True of a folder of plans to choose from: without a sparsekv.yaml, which would be its plan, and with plans of
    other names."""
    is_folder = os.path.isdir(place) and not os.path.isfile(place / PLAN_NAME)
    return is_folder and any(map(tells_plan, _files(place)))


def plans_in(folder: Path) -> list[tuple[Path, Plan]]:
    return sound_plans(filter(tells_plan, _files(folder)))


def sound_plans(paths: Iterable[Path]) -> list[tuple[Path, Plan]]:
    """The sound plans among files; of one that is not sound, why it is left out is said."""
    plans = []
    for path in paths:
        try:
            plans.append((path, load_plan(path)))
        except (PlanError, UsageError) as error:
            tell(f"left out: {error}")
    return plans


def candidates(plans: Iterable[tuple[Path, Plan]], model: ModelInfo) -> list[Candidate]:
    return [Candidate(path, plan, "; ".join(differences(plan.model, model))) for path, plan in plans]


def chosen_plan(folder: Path, model: str | None) -> Path:
    """The file of the one plan in a folder that is of a model, which is said; without a model, of the only plan."""
    plans = plans_in(folder)
    if model is None:
        if len(plans) != 1:
            raise UsageError(
                f"expected a MODEL beside the folder of plans {folder}, found none, and {len(plans)} sound plans; "
                "name the model, or one plan"
            )
        return plans[0][0]
    found = candidates(plans, described(resolve_model(model)))
    fitting = [candidate for candidate in found if not candidate.why_not]
    if len(fitting) > 1:
        listed = "\n".join(f"  {candidate.told()}" for candidate in fitting)
        raise UsageError(f"expected one plan of {model} in {folder}, found several:\n{listed}\nname one")
    if not fitting:
        models = ", ".join(dict.fromkeys(plan.model.id for _, plan in plans)) or "none that is sound"
        raise PlanMismatchError(
            f"expected a plan of {model} in {folder}, found those of {models}; name another folder, or plan the model"
        )
    tell(f"plan: {fitting[0].told()}")
    return fitting[0].path


def described(source: ModelSource) -> ModelInfo:
    """The description of a model by its config; its weights are not read."""
    from sparsekv.runtime.hf.load import load_config
    from sparsekv.runtime.model_config import describe_config

    return describe_config(load_config(source), source.path_or_id)


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
