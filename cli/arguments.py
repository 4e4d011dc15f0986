"""What a call asks for: options that several commands share, the values that their texts mean, model and plan by name.

Whatever turns a text into a value raises UsageError where it means nothing; `flag` is what the message names.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar

import typer
from pydantic import Field

from sparsekv.planner.flags import Flag, Options
from sparsekv.planner.options import Hardware
from sparsekv.plans.aliases import PLAN_NAME, is_hub_id, resolve_model, without_plan
from sparsekv.plans.errors import UsageError
from sparsekv.plans.types import LEAST_CHUNK, MAX_ID, MAX_LENGTH

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedConfig

    from sparsekv.plans.model import ModelInfo
    from sparsekv.plans.patterns import Budget, TileShape
    from sparsekv.plans.schema import Plan
    from sparsekv.runtime.hf.load import LoadedModel
    from sparsekv.runtime.settings import DeviceMap, Settings

Value = TypeVar("Value")

MOST = 1 << 20  # of whatever is counted: more is a slip of the hand

# Flags are named after their parameters. A second name is what other commands call the same thing.
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on standard output.")]
HELD_OUT = "Held-out samples a task and length; by default 1 on a CPU, as many as prove a plan on a GPU."
PLACE = "A plan file, or a folder or hub repository with a sparsekv.yaml."
PlanArgument = Annotated[Path, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]
PlanPlace = Annotated[Path, typer.Argument(metavar="PLAN", help=PLACE, show_default=False)]
Target = Annotated[
    str | None, typer.Argument(metavar="MODEL", help="A model; sparsekv.yaml in its folder or repository is its plan.")
]
PlanFile = Annotated[
    Path | None, typer.Option(metavar="FILE", help="The plan; by default that in the model's folder or repository.")
]
Model = Annotated[
    str | None,
    typer.Option("--model", "-m", metavar="NAME", help="Alias, hub id or folder; the plan's own model by default."),
]
Device = Annotated[str | None, typer.Option(metavar="NAME", help="cpu, cuda, cuda:1 ...; chosen by default.")]
Dtype = Annotated[
    Literal["auto", "bfloat16", "float16", "float32"] | None, typer.Option(help="Precision; chosen by default.")
]
Backend = Annotated[
    Literal["auto", "flash", "triton", "cpu", "reference"] | None,
    typer.Option(help="Kernel backend; chosen by default, see `doctor`."),
]
AllowMismatch = Annotated[
    bool, typer.Option("--allow-mismatch", help="Go on although the plan was made for another architecture.")
]
Seed = Annotated[int, typer.Option(min=0, max=(1 << 32) - 1, metavar="N", help="Seed of samples and of sampling.")]
# Written down here, since the tasks themselves bring numpy.
TASKS = "quote_text, quote_code, niah_single, niah_multikey, kv_retrieval, two_stage, variable_tracking, perplexity"
Tasks = Annotated[
    str | None, typer.Option(metavar="NAMES", help=f"Tasks, separated by commas; by default all of {TASKS}.")
]
Tile = Annotated[Literal["64", "128"] | None, typer.Option(help="Rows and columns of a tile.")]
Batch = Annotated[
    int | None, typer.Option(min=1, max=MOST, metavar="N", help="Most samples run at once; as fits by default.")
]
Repeats = Annotated[int, typer.Option(min=1, max=MOST, metavar="N", help="How often each is timed; medians are shown.")]
HandDensity = Annotated[
    str | None,
    typer.Option(
        "--density", "--densities", metavar="LIST", help="Without a plan, of one made by hand: one, or one a length."
    ),
]
MaxAccuracyDrop = Annotated[
    float | None,
    typer.Option(
        min=0.0, max=100.0, metavar="POINTS", help="Most that answers to solved tasks may lose; 1 by default."
    ),
]
MaxKl = Annotated[
    float | None,
    typer.Option(
        min=0.0,
        metavar="NATS",
        help="Most mean divergence of each phase; by default 0.05, of decode alone 0.005, of both 0.055.",
    ),
]
MaxDecodeKl = Annotated[
    float | None, typer.Option(min=0.0, metavar="NATS", help="The same for decode alone; as --max-kl if that is given.")
]
MinAgreement = Annotated[
    float | None,
    typer.Option(
        "--min-agreement",
        min=0.0,
        max=1.0,
        metavar="SHARE",
        help="Least share of dense's likeliest tokens; 0.95 by default.",
    ),
]
MinExact = Annotated[
    float | None,
    typer.Option(min=0.0, max=1.0, metavar="SHARE", help="Least share of dense's greedy texts kept; 0.6 by default."),
]


def _chunk(text: str) -> int:
    """Tokens such as 8192 or 8k."""
    (tokens,) = lengths_from(text, "--prefill-chunk") if "," not in text else (0,)
    if not LEAST_CHUNK <= tokens <= MAX_LENGTH:
        raise UsageError(f"--prefill-chunk: expected one number from {LEAST_CHUNK} tokens on, found {text!r:.40}")
    return tokens


Chunk = Annotated[
    int | None,
    typer.Option(
        "--prefill-chunk",
        parser=_chunk,
        metavar="TOKENS",
        help="Prefill in pieces of so many tokens: bounds memory, or cuts prompts as a server does.",
    ),
]


OffloadMode = Annotated[
    Literal["auto", "always", "never"] | None,
    typer.Option(
        help="Which of the layers that the plan permits have their keys and values in host memory: as few as it takes "
        "for the device to hold the rest (auto, the default), all, or none."
    ),
]
HostLayers = Annotated[
    str | None,
    typer.Option(
        metavar="N|LAYERS",
        help="In place of --offload: N layers, or layers such as 4-7,9, whatever the plan permits. Dense decode reads "
        "them back at every step.",
    ),
]
MaxNewTokens = Annotated[int, typer.Option(min=1, max=MAX_LENGTH, metavar="N", help="Most tokens to generate.")]


# --- options that several commands share ------------------------------------------------------------------------------


class Output(Options):
    """How a result is printed."""

    as_json: Annotated[bool, Flag("Print the result as JSON on standard output.", ("--json",))] = False


class Subjects(Options):
    """A model, and a plan for it."""

    target: Annotated[
        str | None,
        Flag("A model; sparsekv.yaml in its folder or repository is its plan.", metavar="MODEL", is_argument=True),
    ] = None
    plan: Annotated[
        Path | None, Flag("The plan; by default that in the model's folder or repository.", metavar="FILE")
    ] = None
    model: Annotated[
        str | None,
        Flag("Alias, hub id or folder; the plan's own model by default.", ("--model", "-m"), "NAME"),
    ] = None
    allow_mismatch: Annotated[bool, Flag("Go on although the plan was made for another architecture.")] = False

    @property
    def subject(self) -> Subject:
        """Model and plan; see `Subject.named`."""
        return Subject.named(self.target, self.plan, self.model)


NewTokens = Annotated[int, Field(ge=1, le=MAX_LENGTH), Flag("Most tokens to generate.", metavar="N")]


class Placement(Options):
    """Where keys and values of a run are."""

    offload: Annotated[
        Literal["auto", "always", "never"] | None,
        Flag(
            "Which of the layers that the plan permits have their keys and values in host memory: as few as it takes "
            "for the device to hold the rest (auto, the default), all, or none."
        ),
    ] = None
    kv_host_layers: Annotated[
        str | None,
        Flag(
            "In place of --offload: N layers, or layers such as 4-7,9, whatever the plan permits. Dense decode reads "
            "them back at every step.",
            metavar="N|LAYERS",
        ),
    ] = None

    @property
    def placing(self) -> Placing:
        """What they ask for; see `Placing.named`."""
        return Placing.named(self.offload, self.kv_host_layers)


def given(context: typer.Context) -> dict[str, Any]:
    """The options that were typed, by name; not those left at their defaults."""
    sources = ((name, context.get_parameter_source(name)) for name in context.params)
    return {name: context.params[name] for name, source in sources if source and source.name == "COMMANDLINE"}


# --- values -----------------------------------------------------------------------------------------------------------


def names_from(text: str, flag: str) -> tuple[str, ...]:
    """Names separated by commas, each once."""
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",")))
    if "" in names:
        raise UsageError(f"{flag}: expected names separated by commas, found {text!r:.40}")
    return names


def tasks_from(text: str, flag: str) -> tuple[str, ...]:
    """Names of tasks."""
    from sparsekv.planner.tasks import TASKS

    names = names_from(text, flag)
    unknown = [name for name in names if name not in TASKS]
    if unknown:
        raise UsageError(f"{flag}: expected tasks of {', '.join(TASKS)}, found {unknown[0]!r:.40}")
    return names


def lengths_from(text: str, flag: str) -> tuple[int, ...]:
    """Lengths such as 4k,16k, in the order given: densities may pair up with them."""
    from sparsekv.plans.types import parse_length

    lengths = tuple(_parsed(parse_length, part, flag) for part in text.split(","))
    if len(set(lengths)) < len(lengths):
        raise UsageError(f"{flag}: expected each length once, found {text!r:.40}")
    return lengths


def counts_from(text: str, flag: str) -> tuple[int, ...]:
    """Whole numbers from 1 on, such as 1,4, each once and in the order given."""
    numbers = tuple(int(part) if part.isascii() and part.isdigit() else 0 for part in names_from(text, flag))
    if not all(1 <= number <= MOST for number in numbers):
        raise UsageError(f"{flag}: expected whole numbers from 1 to {MOST}, such as 1,4, found {text!r:.40}")
    return tuple(dict.fromkeys(numbers))


def layers_from(text: str, flag: str) -> tuple[int, ...]:
    """Layers such as 2,8-9."""
    from sparsekv.plans.types import parse_ids

    return _parsed(parse_ids, text, flag)


def bytes_from(text: str, flag: str) -> int:
    """An amount of memory such as 80GiB or 128 GB."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not (count := int(float(found[1]) * _UNITS[found[2].lower()])):
        raise UsageError(f"{flag}: expected an amount of memory, such as 80GiB or 128GB, found {text!r:.40}")
    return count


_SIZE = re.compile(r"([0-9]{1,9}(?:\.[0-9]{1,9})?) ?([kmgt]i?b)", re.ASCII | re.IGNORECASE)
_UNITS = {f"{unit}b": 1000**power for power, unit in enumerate("kmgt", start=1)}
_UNITS |= {f"{unit}ib": 1024**power for power, unit in enumerate("kmgt", start=1)}


def shares_from(text: str, flag: str) -> tuple[float, ...]:
    """Shares such as 0.3 or 30%, separated by commas."""
    shares = tuple(_share(part) for part in text.split(","))
    if 0.0 in shares:
        part = text.split(",")[shares.index(0.0)]
        raise UsageError(f"{flag}: expected a share above 0 and up to 1, such as 0.3 or 30%, found {part!r:.40}")
    return shares


def budget_from(text: str, flag: str) -> Budget:
    """A number of tokens (2048, 2k) or a share of the context (10%, 0.1)."""
    from sparsekv.plans.patterns import fraction, tokens
    from sparsekv.plans.types import parse_length

    share = _share(text)
    try:
        return tokens(parse_length(text))
    except UsageError:
        if share:
            return fraction(share)
    raise UsageError(f"{flag}: expected tokens, such as 2048 or 2k, or a share up to 100%, found {text!r:.40}")


def tile_from(side: str | None) -> TileShape:
    """A square tile, of 128 by default."""
    from sparsekv.plans.patterns import TileShape

    return TileShape.model_validate({"query": int(side), "key": int(side)} if side else {})


def _parsed(parse: Callable[[str], Value], text: str, flag: str) -> Value:
    try:
        return parse(text)
    except (ValueError, UsageError) as error:
        raise UsageError(f"{flag}: {error}") from error


def _share(text: str) -> float:
    """A share above 0 and up to 1; 0.0 where the text is none."""
    number, percent = text.strip().removesuffix("%"), text.strip().endswith("%")
    try:
        share = float(number) / (100 if percent else 1)
    except ValueError:
        return 0.0
    return share if 0.0 < share <= 1.0 else 0.0


@dataclass(frozen=True, slots=True)
class Placing:
    """Which layers have their keys and values in host memory: by the plan's permission, or as named."""

    mode: Literal["auto", "always", "never"] | None
    host_layers: int | tuple[int, ...] | None = None
    by_default: bool = False

    @classmethod
    def named(cls, offload: Literal["auto", "always", "never"] | None, host_layers: str | None) -> Placing:
        """What --offload and --kv-host-layers ask for; auto where neither is given.

        Raises:
            UsageError: both are given, or the layers are none.
        """
        flag = "--kv-host-layers"
        if host_layers is None:
            return cls(offload or "auto", by_default=offload is None)
        if offload is not None:
            raise UsageError(f"expected --offload or {flag}, found both; {flag} alone says which layers go")
        is_count = host_layers.isdecimal() and len(host_layers) <= len(str(MAX_ID))
        return cls(None, int(host_layers) if is_count else layers_from(host_layers, flag))


# --- device, model and plan -------------------------------------------------------------------------------------------


def settings(device: str | None = None, dtype: str | None = None, backend: str | None = None) -> Settings:
    """Flags over SPARSEKV_* over "auto".

    Raises:
        UsageError: one of them cannot be meant, on any machine.
    """
    from sparsekv.runtime.settings import check_device, read_settings

    flags: dict[str, Any] = {"device": device, "dtype": dtype, "backend": backend}
    found = replace(read_settings(), **{name: flag for name, flag in flags.items() if flag is not None})
    try:
        check_device(found.device)
    except UsageError as error:
        if device is None:
            error.add_note("the device is that of SPARSEKV_DEVICE; correct or unset it")
        raise
    return found


def settings_of(flags: Hardware) -> Settings:
    """The same, of flags that were typed."""
    return settings(**{name: getattr(flags, name) for name in Hardware.model_fields if flags.is_given(name)})


def device_and_dtype(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Where to run without a model, and in what precision: bfloat16 on a GPU and float32 elsewhere by default."""
    asked = settings(device, dtype)
    import torch

    from sparsekv.runtime.hf.load import torch_device

    hardware = torch_device(asked.device)
    default = "bfloat16" if hardware.type == "cuda" else "float32"
    precision: torch.dtype = getattr(torch, default if asked.dtype == "auto" else asked.dtype)
    return hardware, precision


@dataclass(frozen=True, slots=True)
class Subject:
    """A model by name, and the plan for it, if there is one."""

    model: str
    plan: Plan | None = None
    path: Path | None = (
        None  # of the plan; None for that of a hub repository, whose copy in the cache is not the user's
    )
    from_plan: bool = False  # the plan's own model, not named in the call
    no_plan: str = ""  # why there is none

    @classmethod
    def named(cls, target: str | None, plan: Path | None, model: str | None) -> Subject:
        """What a call names.

        Args:
            target: a model: a folder or hub repository (whose sparsekv.yaml is the plan), or an alias of one.
            plan: where the plan is, instead; see `plan_file`.
            model: the model, instead of the target or the plan's own.

        Raises:
            UsageError: nothing was named, or a file in place of a model, or the plan cannot be read.
            PlanError: it is no plan.
        """
        from sparsekv.plans.files import load_plan

        if target is not None and os.path.isfile(target):
            raise UsageError(
                f"expected a model (a folder, hub id or alias), found the file {target}; if it is a plan, write "
                f"--plan {target}"
            )
        place, path, reason = plan, None, ""
        if plan is not None:
            path = plan_file(plan)
        elif target is not None:
            place = Path(resolve_model(target).path_or_id)
            path, reason = _plan_of(place)
        found = None if path is None else load_plan(path)
        own = path if place is not None and path in (place, place / PLAN_NAME) else None
        name = target if model is None else model
        if name is not None:
            return cls(name, found, own, no_plan=reason or without_plan(name, f"no {PLAN_NAME} beside {name}"))
        if found is None:
            raise UsageError(
                "expected a MODEL (a folder, hub id or alias), or --plan FILE, which names its own; found neither"
            )
        return cls(found.model.id, found, own, from_plan=True)

    def need_plan(self) -> Plan:
        """The plan.

        Raises:
            UsageError: there is none.
        """
        if self.plan is None:
            raise UsageError(self.no_plan)
        return self.plan

    def load(
        self,
        device: str | None,
        dtype: str | None,
        check: Callable[[ModelInfo, str], object] | None = None,
        device_map: DeviceMap | None = None,
    ) -> LoadedModel:
        """Loads the model. Flags go over SPARSEKV_* over what fits the machine.

        Args:
            device_map: see `load_model`; over SPARSEKV_DEVICE.
            check: called with the model's description and the type of the device before weights are downloaded or
                read, which takes minutes; raises where they are not worth it.

        Raises:
            UsageError: there is no such model, or a setting is none of those allowed.
        """
        asked = settings("auto" if device is None and device_map is not None else device, dtype)
        from transformers.utils import logging

        from sparsekv.runtime.hf.load import load_config, load_model, torch_device
        from sparsekv.runtime.model_config import describe_config

        if not sys.stderr.isatty():
            logging.disable_progress_bar()
        target = torch_device(asked.device)  # what is wrong with it is not the model
        if check is not None:
            with self._saying_whose_model():
                config = load_config(self.model)
            check(describe_config(config, resolve_model(self.model).path_or_id), target.type)
        with self._saying_whose_model():
            return load_model(self.model, device=asked.device, dtype=asked.dtype, device_map=device_map)

    def config_and_prompt_tokens(self, text: str, chat: bool) -> tuple[PreTrainedConfig, int]:
        """The model's config and how many tokens a prompt has, without its weights.

        Raises:
            UsageError: there is no such model.
            PromptError: see `encode_prompt`.
        """
        from sparsekv.runtime.hf.generate import encode_prompt
        from sparsekv.runtime.hf.load import load_config, load_tokenizer

        with self._saying_whose_model():
            config, tokenizer = load_config(self.model), load_tokenizer(self.model)
        return config, len(encode_prompt(tokenizer, text, chat=chat))

    @contextmanager
    def _saying_whose_model(self) -> Iterator[None]:
        try:
            yield
        except UsageError as error:
            if self.from_plan:
                error.add_note(f"The plan was made for {self.model}; say where that model is with --model MODEL")
            raise


def plan_file(place: Path) -> Path:
    """The plan file at `place`: itself, or sparsekv.yaml in the folder or hub repository (ORGANISATION/NAME) it names.

    Raises:
        UsageError: it names a folder without a plan, or a hub repository whose plan cannot be had.
    """
    beside = place / PLAN_NAME
    if os.path.isfile(beside):
        return beside
    if os.path.isdir(place):
        raise UsageError(
            f"expected a plan file, or a folder with {PLAN_NAME} in it, found the folder {place} without one; name the "
            f"plan's file, or make the plan of a model in it: sparsekv plan {place} -o {beside}"
        )
    if not _names_repository(place):
        return place  # the reader of the file says what is wrong with it
    from sparsekv.runtime.hub import download_plan

    return download_plan(str(place))


def _names_repository(place: Path) -> bool:
    """Whether it can only be meant as a hub id: a mistyped path of a file is not looked for on the hub."""
    is_path = os.path.exists(place) or os.path.exists(place.parent) or place.suffix in (".yaml", ".yml", ".json")
    return is_hub_id(str(place)) and not is_path


def _plan_of(model: Path) -> tuple[Path | None, str]:
    """The plan of a model's folder or hub repository; None, and why, where there is none, which may be no fault."""
    if model.is_dir():
        path = model / PLAN_NAME
        return (path if path.is_file() else None), ""
    from sparsekv.runtime.hub import download_plan

    try:
        return download_plan(str(model)), ""
    except UsageError as error:
        return None, str(error)
