"""Chooses the plan that fits a model here among several: by the model's fingerprint, status, length and device."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
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

_STATUS = ("verified", "unverified", "imported")


@dataclass(frozen=True, slots=True)
class Candidate:
    """A plan beside what it would run on.

    Attributes:
        why_not: what differs between its model and this one; empty where it is of this model. Weights are not compared.
        is_here: it was measured on this device.
    """

    path: Path
    plan: Plan
    why_not: str
    is_here: bool

    @property
    def devices(self) -> tuple[str, ...]:
        return tuple(dict.fromkeys(target.device for target in self.plan.targets))

    def order(self, length: int | None) -> tuple[int, ...]:
        """Returns the key that it is sorted by, the best first: its status, and how well it reaches a length (where
        none is known, how far); of equal plans the one of this device."""
        reach = max(self.plan.planned_lengths, default=0)
        far = (0, -reach) if length is None else (int(reach < length), abs(reach - length))
        return (_STATUS.index(self.plan.status), *far, int(not self.is_here))

    @property
    def fit(self) -> str:
        return f"does not fit, of another model: {self.why_not}" if self.why_not else "fits"

    @property
    def facts(self) -> dict[str, object]:
        facts = {"path": str(self.path), "status": self.plan.status, "devices": list(self.devices)}
        return facts | {"lengths": list(self.plan.planned_lengths), "fits": not self.why_not, "why_not": self.why_not}

    def told(self) -> str:
        lengths = ", ".join(map(format_length, self.plan.planned_lengths)) or "no lengths named"
        return f"{self.path} ({self.plan.status_text}, {', '.join(self.devices) or 'no device named'}, {lengths})"


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


def candidates(plans: Iterable[tuple[Path, Plan]], model: ModelInfo, device: str) -> list[Candidate]:
    return [
        Candidate(
            path, plan, "; ".join(differences(plan.model, model)), device in {target.device for target in plan.targets}
        )
        for path, plan in plans
    ]


def best_of(plans: Sequence[Candidate], length: int | None = None) -> Candidate | None:
    """The one that fits best; None where none is of the model, or two fit alike."""
    fitting = sorted((plan for plan in plans if not plan.why_not), key=lambda plan: plan.order(length))
    is_tie = len(fitting) > 1 and fitting[0].order(length) == fitting[1].order(length)
    return None if is_tie or not fitting else fitting[0]


def chosen_plan(folder: Path, model: str | None, device: str, length: int | None = None) -> Path:
    """The file of the plan in a folder that fits a model best, which is said; without a model, of the only plan."""
    plans = plans_in(folder)
    if model is None:
        if len(plans) != 1:
            raise UsageError(
                f"expected a MODEL beside the folder of plans {folder}, found none, and {len(plans)} sound plans; "
                "name the model, or one plan"
            )
        return plans[0][0]
    fitted = candidates(plans, described(resolve_model(model)), device_called(device))
    best = best_of(fitted, length)
    if best is None:
        raise _no_choice(folder, model, [candidate for candidate in fitted if not candidate.why_not], fitted)
    tell(f"plan: {best.told()}")
    return best.path


def _no_choice(
    folder: Path, model: str, fitting: Sequence[Candidate], others: Sequence[Candidate]
) -> PlanMismatchError | UsageError:
    if fitting:
        listed = "\n".join(f"  {candidate.told()}" for candidate in fitting)
        return UsageError(
            f"expected one plan in {folder} that fits {model} best, found several alike:\n{listed}\nname one"
        )
    models = ", ".join(dict.fromkeys(candidate.plan.model.id for candidate in others)) or "none that is sound"
    return PlanMismatchError(
        f"expected a plan of {model} in {folder}, found those of {models}; name another folder, or plan the model"
    )


def described(source: ModelSource) -> ModelInfo:
    """The description of a model by its config; its weights are not read."""
    from sparsekv.runtime.hf.load import load_config
    from sparsekv.runtime.model_config import describe_config

    return describe_config(load_config(source), source.path_or_id)


def device_called(device: str) -> str:
    from sparsekv.runtime.model_config import device_name, torch_device

    return device_name(torch_device(device))


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in (".yaml", ".yml") and path.is_file())
