"""The subject of a call: options that several commands share; machine, model and plan by name."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self, get_args

import typer
from pydantic import Field

from sparsekv.cli.output import tell
from sparsekv.planner.flags import Flag, Names, Options, text
from sparsekv.planner.options import Hardware, KVPrecision, check_lengths
from sparsekv.plans.aliases import (
    PLAN_NAME,
    ModelSource,
    holds_model,
    is_alias,
    is_hub_id,
    names_gguf,
    resolve_model,
    without_plan,
)
from sparsekv.plans.errors import BackendError, UsageError, did_you_mean
from sparsekv.plans.files import load_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, check_model
from sparsekv.plans.types import MAX_ID, MAX_LENGTH, parse_ids
from sparsekv.runtime.settings import Settings, check_device, read_settings

if TYPE_CHECKING:
    import torch

    from sparsekv.runtime.hf.load import LoadedModel

PLACE = "A plan file, or a folder or hub repository with a sparsekv.yaml."
# Of commands with few options, which are parameters of theirs.
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
PlanPlace = Annotated[Path, typer.Argument(metavar="PLAN", help=PLACE, show_default=False)]


# --- options that several commands share ------------------------------------------------------------------------------


class Output(Options):
    as_json: Annotated[bool, Flag("Print the result as JSON on standard output.", ("--json",))] = False


class AllowMismatch(Options):
    group: ClassVar = "Model and plan"
    allow_mismatch: Annotated[bool, Flag("Go on although the plan was made for another architecture.")] = False

    def check_model(self, plan: Plan, found: ModelInfo) -> list[str]:
        return check_model(plan, found, self.allow_mismatch, self.flag_of("allow_mismatch"))


class OwnMethods(Options):
    group: ClassVar = "Model and plan"
    methods: Annotated[
        Names, Flag("Files of rules and scores of your own, such as my_rule.py, which are run.", metavar="FILES")
    ] = ()

    def register_methods(self) -> None:
        if self.methods:
            from sparsekv.kernels.methods import register_file

            for file in self.methods:
                register_file(Path(file))


class Subjects(OwnMethods):
    group: ClassVar = "Model and plan"
    target: Annotated[
        str | None,
        Flag(
            "Alias, hub id, folder or GGUF file; the plan's own model where it is left out.",
            metavar="MODEL",
            is_argument=True,
        ),
    ] = None
    plan: Annotated[
        Path | None,
        Flag(
            "The plan, or a folder or hub repository of plans with one of the model. By default the one in the model's "
            "folder or repository.",
            metavar="FILE",
        ),
    ] = None

    @property
    def subject(self) -> Subject:
        name = self.target or None
        return Subject.named(name, one_plan(self.plan, name))


OffloadMode = Literal["auto", "always", "never"]
_MODES: tuple[OffloadMode, ...] = get_args(OffloadMode)


def _offloaded(text: str) -> OffloadMode | int | tuple[int, ...]:
    if (mode := next((mode for mode in _MODES if mode == text), None)) is not None:
        return mode
    if text[:1].isalpha():
        meant = did_you_mean(text, _MODES)
        raise ValueError(f"expected {', '.join(_MODES)}, N or LAYERS, found {text!r:.40}{meant}")
    return int(text) if text.isdecimal() and len(text) <= len(str(MAX_ID)) else parse_ids(text)


NewTokens = Annotated[int, Field(ge=1, le=MAX_LENGTH), Flag("Most tokens to generate.", metavar="N")]


class PlacementFlags(Options):
    group: ClassVar = "Memory"
    offload: Annotated[
        OffloadMode | int | tuple[int, ...],
        text(_offloaded),
        Flag(
            "Layers with keys and values in host memory: of permitted ones as few as the device needs (auto), all, or "
            "none. N, or layers such as 4-7,9, need no permission; dense decode reads them back at every step. On a "
            "CPU it saves nothing.",
            metavar="auto|always|never|N|LAYERS",
        ),
    ] = "auto"
    kv_dtype: KVPrecision = "auto"

    @property
    def offload_mode(self) -> OffloadMode | None:
        """Layers in host memory by the plan's permission; None where `host_layers` has them."""
        return self.offload if isinstance(self.offload, str) else None

    @property
    def host_layers(self) -> int | tuple[int, ...] | None:
        return None if isinstance(self.offload, str) else self.offload


# --- device, model and plan -------------------------------------------------------------------------------------------


def settings_of(flags: Options) -> Settings:
    """Flags of `Hardware` over SPARSEKV_* over "auto"."""
    given = {name: getattr(flags, name) for name in Hardware.model_fields if flags.is_given(name)}
    settings = replace(read_settings(), **given)
    try:
        check_device(settings.device)
    except UsageError as error:
        if "device" not in given:
            error.add_note("the device is that of SPARSEKV_DEVICE; correct or unset it")
        raise
    return settings


def device_and_dtype(settings: Settings) -> tuple[torch.device, torch.dtype]:
    """Where to run without a model, and in what precision: bfloat16 on a GPU and float32 elsewhere by default."""
    import torch

    from sparsekv.runtime.model_config import torch_device

    hardware = torch_device(settings.device)
    default = "bfloat16" if hardware.type == "cuda" else "float32"
    precision: torch.dtype = getattr(torch, default if settings.dtype == "auto" else settings.dtype)
    return hardware, precision


def check_machine(flags: Options) -> None:
    """Refuses a device that is not there, and a backend that cannot run on it, before anything is imported that loads a
    model.
    """
    settings = settings_of(flags)
    device, backend = _device_of(flags, settings), "auto" if flags.typed("dense") else settings.backend
    if device == backend == "auto":
        return
    from sparsekv.kernels.backends import check_backend
    from sparsekv.runtime.model_config import torch_device

    try:
        check_backend(backend, torch_device(device))
    except BackendError as error:
        if not flags.is_given("backend"):
            error.add_note("the backend is that of SPARSEKV_BACKEND; correct or unset it")
        raise


def _device_of(flags: Options, settings: Settings) -> str:
    return "auto" if flags.typed("device_map") and not flags.is_given("device") else settings.device


@dataclass(frozen=True, slots=True)
class Subject:
    """A model by name, and the plan for it, if there is one."""

    model: str
    plan: Plan | None = None
    path: Path | None = None  # of the plan; None for the copy of a hub's, which is not the user's
    from_plan: bool = False  # the plan's own model, not named in the call
    no_plan: str = ""  # why there is none
    source: ModelSource | None = None  # of the model, where it was looked for

    @classmethod
    def named(cls, target: str | None, plan: Path | None = None) -> Subject:
        """The model and plan that a call names.

        Args:
            target: a model: a folder or hub repository (whose sparsekv.yaml is the plan), or an alias of one; None for
                the plan's own, that in whose folder it lies, or the one that it was made for.
            plan: where the plan is, instead; see `plan_file`.
        """
        if target is not None and os.path.isfile(target) and not names_gguf(target):
            raise UsageError(
                f"expected a model (a folder, GGUF file, hub id or alias), found the file {target}; if it is a plan, "
                f"write --plan {target}"
            )
        place, path, reason, source = plan, None, "", None
        if plan is not None:
            path = plan_file(plan)
        elif target is not None:
            source = found_source(resolve_model(target))
            place = Path(source.place)
            path, reason = _plan_of(source)
        loaded = None if path is None else load_plan(path)
        is_cached = path is not None and "snapshots" in path.parts and any(p.startswith("models--") for p in path.parts)
        own = path if place is not None and path in (place, place / PLAN_NAME) and not is_cached else None
        if target is not None:
            reason = reason or without_plan(target, f"no {PLAN_NAME} beside {target}")
            return cls(target, loaded, own, no_plan=reason, source=source)
        if loaded is None:
            raise UsageError(
                "expected a MODEL (a folder, GGUF file, hub id or alias), or --plan FILE, which names its own; found "
                "neither"
            )
        beside = own.parent if own is not None and holds_model(own.parent) else None
        return cls(str(beside or loaded.model.id), loaded, own, from_plan=True)

    def need_plan(self, otherwise: str = "") -> Plan:
        """The plan; where there is none, the error ends with `otherwise`."""
        if self.plan is None:
            raise UsageError(self.no_plan + otherwise)
        return self.plan

    def checked(self, flags: Options, lengths: Sequence[int] = ()) -> Self:
        """This subject, whose model was looked for; called before transformers is imported, which takes seconds.

        Args:
            flags: device, device_map and backend.
            lengths: of the prompts. Of a model that is no folder, only what loads it knows the context.
        """
        check_machine(flags)  # first: what is wrong with it is not the model
        with self._saying_whose_model():
            source = self.source or found_source(resolve_model(self.model))
            if not source.is_local:
                from sparsekv.runtime.hub import needs_cache

                needs_cache(source)
        context = _context_of(source)
        if context is not None:
            check_lengths(lengths, context)
        return replace(self, source=source)

    def load(
        self, flags: Options, check: Callable[[ModelInfo, str], object] | None = None, tokens: int = 0
    ) -> LoadedModel:
        """Loads the model. Flags go over SPARSEKV_* over what fits the machine.

        Args:
            flags: device, dtype, and device_map, which goes over SPARSEKV_DEVICE.
            check: called with the model's description and the type of the device before weights are downloaded or
                read, which takes minutes; raises where they are not worth it.
            tokens: of the longest prompt, where its keys and values are on the device.
        """
        settings, device_map = settings_of(flags), flags.typed("device_map")
        device = _device_of(flags, settings)
        from transformers.utils import logging

        from sparsekv.kernels.backends import choose_backend
        from sparsekv.runtime.hf.dequantise import is_dequantised, stays_packed
        from sparsekv.runtime.hf.load import load_config, load_model, torch_dtype
        from sparsekv.runtime.hf.memory import Available, ModelSize
        from sparsekv.runtime.model_config import describe_config, dtype_name, quantisation_of, torch_device

        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        target, source = torch_device(device), self.source or resolve_model(self.model)
        with self._saying_whose_model():
            config = load_config(source)
        info = describe_config(config, source.path_or_id)
        if settings.backend != "auto" and not flags.typed("dense"):
            choose_backend(target, torch_dtype(settings.dtype, config, target), info.largest_head, settings.backend)
        if check is not None:
            check(info, target.type)
        if device_map is None and not stays_packed(config) and (room := Available.here([target]).device) is not None:
            precision = torch_dtype(settings.dtype, config, target)
            ModelSize.from_config(config, precision, source.path_or_id).check_fits(room, tokens)
        with self._saying_whose_model():
            loaded = load_model(source, device=device, dtype=settings.dtype, device_map=device_map, config=config)
        if source.is_gguf or is_dequantised(quantisation_of(config)):
            tell(f"{source.path_or_id}: its quantised weights run as {dtype_name(loaded.model.dtype)}")
        return loaded

    @contextmanager
    def _saying_whose_model(self) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            if self.from_plan:
                error.add_note(f"The plan was made for {self.model}; say where that model is: MODEL --plan FILE")
            raise


def one_plan(place: Path | None, model: str | None) -> Path | None:
    """The place of a plan as it is; of a folder of plans, or of a hub repository with several, the one of a model:
    see `chosen_plan`."""
    from sparsekv.cli.plan_choice import chosen_plan, holds_plans

    if place is None or not holds_plans(folder := plans_place(place)):
        return place
    return chosen_plan(folder, model)


def plans_place(place: Path) -> Path:
    """The place as it is; of a hub repository with several plans, their folder in the local cache."""
    if not _names_repository(place) or is_alias(str(place)):
        return place
    from sparsekv.runtime.hub import download_plans

    return download_plans(ModelSource(str(place))) or place


def plan_file(place: Path) -> Path:
    """The plan file at `place`: itself, or sparsekv.yaml in the folder or hub repository that it names."""
    beside = place / PLAN_NAME
    if os.path.isfile(beside):
        return beside
    if os.path.isdir(place) or is_alias(str(place)):
        if several := sorted(place.glob(f"*.{PLAN_NAME}")):
            raise UsageError(f"{place}: expected {PLAN_NAME}, found {', '.join(one.name for one in several)}; name one")
        raise UsageError(
            f"{place}: expected a plan, found a model or folder without one; make it: sparsekv plan {place}"
        )
    if os.path.exists(place) or not _names_repository(place):
        return place  # the reader of the file says what is wrong with it
    from sparsekv.runtime.hub import download_plan

    return download_plan(ModelSource(str(place)))


def _names_repository(place: Path) -> bool:
    """True of a hub id alone: a mistyped path of a file is not looked for on the hub."""
    is_path = os.path.exists(place) or os.path.exists(place.parent) or place.suffix in (".yaml", ".yml", ".json")
    return is_hub_id(str(place)) and not is_path


def found_source(source: ModelSource) -> ModelSource:
    """A folder or file as it is; the hub is asked once for what it has."""
    if source.is_local:
        return source
    from sparsekv.runtime.hub import asked

    return asked(source)


def _context_of(source: ModelSource) -> int | None:
    """Returns the context of a model in a folder; None where only what loads it can tell, or say what is wrong with its
    config."""
    try:
        config = json.loads(Path(source.path_or_id, "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return None
    context = config.get("max_position_embeddings") if isinstance(config, dict) else None
    return context if isinstance(context, int) else None


def _plan_of(source: ModelSource) -> tuple[Path | None, str]:
    """The plan of a model's folder or hub repository; None, and why, where there is none, which may be no fault."""
    if source.is_local:
        path = Path(source.place, PLAN_NAME)
        return (path if path.is_file() else None), ""
    from sparsekv.runtime.hub import download_plan

    try:
        return download_plan(source), ""
    except UsageError as error:
        return None, str(error)
