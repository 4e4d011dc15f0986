"""Which plan and which model a call means."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.plans.aliases import PLAN_NAME, resolve_model
from sparsekv.plans.errors import UsageError
from sparsekv.plans.schema import Plan

if TYPE_CHECKING:
    from sparsekv.runtime.hf.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Subject:
    """A model by name, and the plan for it, if there is one."""

    model: str
    plan: Plan | None
    path: Path | None  # of the plan
    from_plan: bool  # the plan's own model, not named in the call


def subject_of(target: str | None, plan: Path | None, model: str | None) -> Subject:
    """What a call names.

    Args:
        target: a model: a folder (whose sparsekv.yaml is the plan), an alias or a hub id.
        plan: the plan, instead of the folder's own.
        model: the model, instead of the target or the plan's own.

    Raises:
        UsageError: nothing was named, or the plan cannot be read.
        PlanError: it is no plan.
    """
    from sparsekv.plans.files import load_plan

    path = plan or _plan_beside(target)
    found = None if path is None else load_plan(path)
    name = target if model is None else model
    if name is not None:
        return Subject(name, found, path, from_plan=False)
    if found is None:
        raise UsageError(f"expected a model folder that holds {PLAN_NAME}, or --plan FILE; found neither")
    return Subject(found.model.id, found, path, from_plan=True)


def need_plan(subject: Subject) -> Plan:
    """The subject's plan.

    Raises:
        UsageError: it has none.
    """
    if subject.plan is None:
        raise UsageError(
            f"expected a plan, found no {PLAN_NAME} beside {subject.model}; name one with --plan FILE, "
            f"or make it: sparsekv plan {subject.model} -o {PLAN_NAME}"
        )
    return subject.plan


def load(subject: Subject, device: str | None, dtype: str | None) -> LoadedModel:
    """Loads the subject's model. Flags go over SPARSEKV_* over what fits the machine.

    Raises:
        UsageError: there is no such model, or a setting is none of those allowed.
    """
    from sparsekv.runtime.hf.load import load_model
    from sparsekv.runtime.settings import read_settings

    _quiet_unless_watched()
    settings = read_settings()
    try:
        return load_model(subject.model, device=_first(device, settings.device), dtype=_first(dtype, settings.dtype))
    except UsageError as error:
        if subject.from_plan:
            error.add_note(f"The plan was made for {subject.model}; say where that model is with --model MODEL")
        raise


def _first(flag: str | None, setting: str) -> str:
    return setting if flag is None else flag


def _quiet_unless_watched() -> None:
    """Progress bars of transformers are for terminals."""
    if not sys.stderr.isatty():
        from transformers.utils import logging

        logging.disable_progress_bar()


def backend_named(flag: str | None) -> str:
    """The kernel backend that is asked for: the flag, SPARSEKV_BACKEND, or "auto"."""
    from sparsekv.runtime.settings import read_settings

    return flag or read_settings().backend


def _plan_beside(target: str | None) -> Path | None:
    if target is None:
        return None
    path = Path(resolve_model(target).path_or_id) / PLAN_NAME
    return path if path.is_file() else None
