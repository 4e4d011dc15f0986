"""Says what `--additional-config '{"sparsekv": {...}}'` may hold, and where the plan of an engine is."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictBool, StrictInt, StrictStr, ValidationError, model_validator

from sparsekv.plans.aliases import PLAN_NAME, is_hub_id
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.hub import find_plan

KEY = "sparsekv"


class EngineOptions(BaseModel):
    """The settings of an engine.

    `plan` is a plan file or a folder with a sparsekv.yaml; without it, the sparsekv.yaml beside the model is taken
    where there is one. `backend` names the kernels of sparse attention. `decode` is whether decode follows the plan
    too. `allow_untested` runs on releases and devices of vLLM that this version was not tested on, `allow_mismatch`
    takes a plan of another architecture as far as its layers and heads fit. `dense` leaves everything to vLLM, whatever
    plan lies beside the model. `require` ends an engine that cannot run its plan, which else runs dense and says why;
    by default it holds where the plan or our backend was asked for by name, and true also ends one that has no plan.
    `exact` has the plan draft what dense attention verifies (docs/exact.md): true prefills dense
    too, "decode" by the plan; `draft` is how many tokens a draft has, the plan's prices say otherwise.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    plan: StrictStr | None = None
    backend: Literal["auto", "flash", "triton", "cpu"] = "auto"
    allow_untested: StrictBool = False
    allow_mismatch: StrictBool = False
    dense: StrictBool = False
    decode: StrictBool = True
    require: StrictBool | None = None
    exact: StrictBool | Literal["decode"] = False
    draft: Annotated[StrictInt, Field(ge=1, le=16)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> EngineOptions:
        if self.exact and not self.decode:
            raise ValueError('expected "exact" with the decode of the plan, which drafts, found "decode": false')
        if self.draft is not None and not self.exact:
            raise ValueError('expected "draft" beside "exact", found it alone')
        return self

    def requires(self, by_name: bool) -> bool:
        """Returns whether an engine that cannot run its plan ends; `by_name`: what would run it was asked for by
        name."""
        return bool(self.exact) or (by_name if self.require is None else self.require)


def read_options(additional_config: Any) -> EngineOptions:
    """The options in vLLM's additional config; the defaults where it has none of ours.

    Raises:
        UsageError: an option is unknown or of another type.
    """
    given = additional_config.get(KEY) if isinstance(additional_config, dict) else None
    try:
        return EngineOptions.model_validate({} if given is None else given)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where = ".".join((KEY, *map(str, first["loc"])))
        known = ", ".join(EngineOptions.model_fields)
        raise UsageError(
            f"expected {KEY} in --additional-config to be an object of {known}; found at {where}: {first['msg']}; "
            "correct or remove it"
        ) from None


def plan_path(options: EngineOptions, model: str, revision: str | None) -> Path | None:
    """Returns where the plan of an engine is; None where none is required and none lies beside the model.

    Args:
        options: of the engine.
        model: the folder or hub id that the engine loads.
        revision: of the hub repository.

    Raises:
        UsageError: a plan was asked for, and is not there.
    """
    if options.dense:
        return None
    if options.plan is None:
        found = _beside(model, revision)
        if found is None and options.require:
            raise UsageError(
                f'expected a {PLAN_NAME} beside {model}, as "require" in --additional-config asks, found none (of a '
                'hub model: none was cached, and none came from the hub); put one there, name it by "plan", or remove '
                '"require"'
            )
        return found
    asked = Path(options.plan).expanduser()
    path = asked / PLAN_NAME if asked.is_dir() else asked
    if not path.is_file():
        raise UsageError(
            f"expected a plan at {path}, as --additional-config asks, found no such file; correct the path, or remove "
            f'"plan" to use the {PLAN_NAME} beside the model'
        )
    return path


def _beside(model: str, revision: str | None) -> Path | None:
    folder = Path(model).expanduser()
    if folder.is_dir():
        path = folder / PLAN_NAME
        return path if path.is_file() else None
    return find_plan(model, revision) if is_hub_id(model) else None
