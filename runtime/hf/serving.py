"""`transformers serve` with plans applied to the models that it loads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

from sparsekv.plans.aliases import PLAN_NAME
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hub import find_plan


@contextmanager
def planned(plan: Path | None = None) -> Iterator[None]:
    """Inside it, each model that a server of transformers loads has this plan applied, or else the one beside it.

    Raises:
        UsageError: there is no plan beside a model; the server has not started yet where it loads it first.
        UnsupportedError: continuous batching cannot follow the plan; as above.
    """
    models: Any = import_module("transformers.cli.serving.model_manager")  # what it needs is no dependency of ours

    class PlannedModels(models.ModelManager):  # type: ignore[misc]
        def _load_model(self, model_id_and_revision: str, *args: Any, **kwargs: Any) -> Any:
            model = super()._load_model(model_id_and_revision, *args, **kwargs)
            apply(model.eval(), plan or _beside(model_id_and_revision)).check_batching()
            return model

    before, models.ModelManager = models.ModelManager, PlannedModels
    try:
        yield
    finally:
        models.ModelManager = before


def _beside(model: str) -> Path:
    """The plan of a folder or a hub id, either of which may have @REVISION behind it."""
    name, _, revision = (model, "", "") if Path(model).is_dir() else model.partition("@")
    path = Path(name, PLAN_NAME) if Path(name).is_dir() else find_plan(name, revision or None)
    if path is None or not path.is_file():
        raise UsageError(f"expected a plan beside {name}, found none; name one with --plan, or plan it: sparsekv plan")
    return path
