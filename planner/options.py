"""Options that commands share (samples, the caller's own prompts, the machine) and those of `plan`, with their defaults
for a model and a device (`settle`).

A field says its type, bounds, default and help where it is declared and nowhere else: the command line is generated
from it (cli/commands.py). One with a `Flag` is a flag, one with a `Key` a key of `--set`; others are for programs.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Annotated, Any, ClassVar, Literal, TypedDict, get_args

from pydantic import AfterValidator, BeforeValidator, Field

from sparsekv.planner.flags import (
    LENGTHS,
    MOST,
    Chunk,
    Flag,
    Key,
    Layers,
    Lengths,
    OneShare,
    Options,
    Shares,
    Tile,
    TokenBudget,
    Unread,
    each_once,
    one_of,
    text,
    words,
)
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import PATTERNS, Budget, MethodName, TileShape, fraction, mandatory_density
from sparsekv.plans.phases import CHOSEN_SHARE
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import KVDtype, format_length
from sparsekv.runtime.settings import Backend, DeviceMap, Dtype

Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
# Written down here, since the tasks themselves bring numpy.
TASKS = (
    *("quote_text", "quote_code", "niah_single", "niah_multikey", "kv_retrieval", "two_stage", "variable_tracking"),
    *("perplexity", "niah_multivalue", "niah_multiquery", "second_question", "turns"),
)


# --- samples and prompts ----------------------------------------------------------------------------------------------

Seed = Annotated[int, Field(ge=0, le=(1 << 32) - 1), Key("Seed of samples and of sampling; 0 by default.", "N")]
PrefillChunk = Annotated[
    Chunk,
    Flag(
        "Prefill in pieces of so many tokens, as a server with such steps does; a plan is made, tested and run in 16k.",
        metavar="TOKENS",
    ),
]


Tasks = Annotated[tuple[Annotated[str, one_of(TASKS)], ...], text(words), AfterValidator(each_once)]


class Drawn(Options):
    group: ClassVar = "Machine"
    seed: Seed = 0
    batch: Annotated[int | None, Field(ge=1, le=MOST, description="Most samples run at once; as fits by default.")] = (
        None
    )
    prefill_chunk: PrefillChunk = None


class TaskSamples(Drawn):
    group: ClassVar = "Machine"
    tasks: Annotated[
        Tasks,
        Key(
            f"Tasks: {', '.join(TASKS)}. `plan` takes by default quotations, text, and the retrieval that the model "
            "can answer.",
            "NAMES",
        ),
    ] = ()


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt, the answer that follows it as it is (with its leading space, if any), and what it counts as. Without an
    answer its last tokens stand in for one.

    Attributes:
        source: the file and line, for messages, such as "prompts.jsonl, line 3".
    """

    prompt: str
    answer: str = ""
    task: str = "prompts"
    source: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        return self.prompt + self.answer

    @property
    def digest(self) -> bytes:
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()


def as_prompts(given: Any) -> Any:
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        return given  # which is refused by its type
    return tuple(GivenPrompt(one) if isinstance(one, str) else one for one in given)


def set_aside(prompts: Iterable[GivenPrompt]) -> tuple[tuple[GivenPrompt, ...], tuple[GivenPrompt, ...]]:
    """Prompts to calibrate on, and as many to verify on, which the search never sees: none of a single one.

    Both follow from the texts alone, and so does their order: equal ones count once, and nobody chooses a part by
    ordering a file.
    """
    found = sorted({one.digest: one for one in prompts}.values(), key=lambda one: one.digest)
    half = (len(found) + 1) // 2
    return tuple(found[:half]), tuple(found[half:])


def digest_of_prompts(prompts: Iterable[GivenPrompt]) -> str:
    parts = json.dumps(sorted(one.digest.hex() for one in prompts))
    return f"sha256:{hashlib.sha256(parts.encode()).hexdigest()}"


# --- machine ----------------------------------------------------------------------------------------------------------

KVPrecision = Annotated[
    KVDtype, Key("Cached keys and values in the model's precision (auto), or in 8 bits, half the bytes of 16.", "fp8")
]


class Device(Options):
    group: ClassVar = "Machine"

    device: Annotated[str, Flag("cpu, cuda, cuda:1 ..., or what there is.", metavar="NAME")] = "auto"


class Hardware(Device):
    """Where a model runs, in what precision, by which kernels."""

    dtype: Annotated[Dtype, Flag("Precision, or what fits the machine.")] = "auto"
    backend: Annotated[
        Backend, Key(f"Kernels: {', '.join(get_args(Backend))}; the fastest that can run, see `doctor`.", "NAME")
    ] = "auto"


def check_lengths(lengths: Sequence[int], context: int) -> None:
    if max(lengths, default=0) > context:
        raise UsageError(
            f"expected lengths within the model's context of {format_length(context)} tokens, found "
            f"{format_length(max(lengths))}; leave it out, or choose a model with a longer context"
        )


# --- what is planned --------------------------------------------------------------------------------------------------

_SEARCHED = [name for name, kind in PATTERNS.items() if kind.ranges(TileShape(), 1)]
FAMILIES = tuple(name for name in _SEARCHED if PATTERNS[name].by_default)
KNOWN_FAMILIES = (*FAMILIES, *(name for name in _SEARCHED if name not in FAMILIES))  # the others when asked for
PRESET_FAMILIES = tuple(name for name, kind in PATTERNS.items() if kind.published(TileShape()))

Family = MethodName  # of patterns, or the name of a prefill rule from outside
Preset = Literal["minference"]
DECODE_BUDGET = fraction(CHOSEN_SHARE)
LOSS = 0.01  # nats, half of fixed_test.MEAN_NATS: the search leaves room


class Targets(Options):
    group: ClassVar = "What is planned"

    lengths: Annotated[
        Lengths,
        Flag(
            "Context lengths, one bucket each, such as 4k,16k,32k; by default 4k,8k on a CPU, and up to 128k on a GPU.",
            *LENGTHS,
        ),
    ] = ()
    loss: Annotated[
        float,
        Field(ge=0.0, allow_inf_nan=False),
        Flag(
            f"Divergence from dense that a plan may have, both phases together; {LOSS:g} by default, half of the "
            "test's bound.",
            metavar="NATS",
        ),
    ] = LOSS
    target_density: Annotated[
        Shares,
        Key("Share of the causal tiles to compute in place of a loss, one or one a length: for experiments.", "SHARES"),
    ] = ()
    phases: Annotated[
        tuple[Phase, ...],
        Field(min_length=1),
        text(words),
        AfterValidator(each_once),
        Flag("Plan this phase alone.", ("--only",), reads=Phase),
    ] = PHASES


class Search(Options):
    group: ClassVar = "What is planned"

    preset: Annotated[Preset | None, Flag("The search of that publication, as published.")] = None
    families: Annotated[
        tuple[Family, ...],
        text(words),
        AfterValidator(each_once),
        Flag(
            f"Patterns to search, of {', '.join(KNOWN_FAMILIES)}, and prefill rules of your own by name; the first by "
            "default.",
            metavar="NAMES",
        ),
    ] = ()
    tile: Annotated[Tile, Field(description="Rows and columns of a tile; 128, under the preset 64.")] = None
    # The ladder of densities that is profiled, as multiples of the target or the usual density of a length, so that one
    # profile serves several losses; by device.
    levels: tuple[Annotated[float, Field(gt=0.0)], ...] = ()
    # How often the weights of layers are corrected by the divergence of whole plans (refine.py); once on CUDA, never on
    # the CPU, where the passes of one round take longer than profiling.
    refine_rounds: Annotated[int, Field(ge=0)] | None = None
    # Candidates are scored on every that many-th query tile (on CUDA, of runs of neighbouring ones), and on those of
    # the question; on CUDA all, of prompts longer than 32K tokens a sample of so many rows; on the CPU every fourth.
    row_stride: Annotated[int, Field(ge=1)] | None = None


class DecodeSearch(Options):
    group: ClassVar = "What is planned"
    filter_layers: Annotated[
        Layers, Key("These filter layers, such as 2,8,18, in place of those found at the least cost.", "LAYERS")
    ] = ()
    # Of a fraction, no more than it comes to at the longest planned length. Where budgets are tried out, any other than
    # the default is the most.
    decode_budget: Annotated[TokenBudget, Key("Share that filter layers choose: 10%, or tokens.", "BUDGET")] = (
        DECODE_BUDGET
    )
    offload: Annotated[bool, Key("Permit rows of sparse layers in host memory.", "true")] = False
    retain: Annotated[
        OneShare | None,
        Field(lt=1.0),
        Flag(
            "In place of filter layers: layers keep this share of a prompt's keys and values, by attention. Lossy.",
            metavar="SHARE",
        ),
    ] = None
    score: Annotated[
        MethodName | None,
        Flag("With --retain: by an eviction score of your own in place of attention.", metavar="NAME"),
    ] = None
    few_groups: Annotated[
        bool, Key("With `retain`, one share for all layers that evict, in few groups of block tables for vLLM.", "true")
    ] = False

    @property
    def any_budget(self) -> bool:
        """The decode budget was left open, so that trials may choose it."""
        return self.decode_budget == DECODE_BUDGET


VerifySize = Literal["small", "full", "none"]


class PlanOptions(Targets, Search, DecodeSearch, TaskSamples, Hardware):
    """Says how to plan."""

    group: ClassVar = "Verification"
    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("target_density", "levels"), "each is a target", ("preset",)),
        Unread(("filter_layers", "decode_budget", "offload"), "an evicting layer is in no segment", ("retain",)),
        Unread(("few_groups", "score"), "no layer evicts", without=("retain",)),
        Unread(("retain",), "the decode that is planned alone is that of filter layers", (("phases", ("decode",)),)),
    )
    # The caller's own, instead of samples of tasks: half of them are set aside, to verify the plan on.
    prompts: Annotated[tuple[GivenPrompt, ...], BeforeValidator(as_prompts)] = ()
    verify: Annotated[
        VerifySize,
        Flag("Prompts of the test: small excludes 5 points over all and 40 in a task, full 3 and 25, none is no test."),
    ] = "small"
    # Tasks, seed, and options by which prompts were chosen: none verify a plan.
    verify_tasks: tuple[str, ...] = ()
    verify_seed: int | None = None
    verify_chosen: tuple[str, ...] = ()
    calibration_samples: Annotated[
        int | None,
        Field(ge=1, le=MOST),
        Key("Samples a length; by default 3 on a CPU, 8 on a GPU, 5 of more than 64k.", "N"),
    ] = None
    kv_dtype: KVPrecision = "auto"
    device_map: Annotated[
        DeviceMap | None, Key("Spread a model that is too large for one device over all, by accelerate.", "auto")
    ] = None

    @property
    def profiled_phases(self) -> tuple[Phase, ...]:
        """Returns the phases whose profile is needed: what layers keep is searched on the model itself."""
        return self.phases if self.retain is None else ("prefill",)


class PlanArguments(TypedDict, total=False):
    """The options of `PlanOptions` as programs give them: a value, or the text of its flag."""

    lengths: str | Sequence[int]
    loss: float
    target_density: str | Sequence[float]
    phases: str | Sequence[Phase]
    preset: Preset | None
    families: str | Sequence[str]
    tile: str | TileShape | None
    filter_layers: str | Sequence[int]
    decode_budget: str | Budget
    offload: bool
    retain: str | float | None
    score: str | None
    few_groups: bool
    tasks: str | Sequence[str]
    seed: int
    batch: int | None
    prefill_chunk: str | int | None
    device: str
    dtype: Dtype
    backend: Backend
    prompts: Sequence[str | GivenPrompt]
    verify: VerifySize
    verify_tasks: Sequence[str]
    calibration_samples: int | None
    kv_dtype: KVDtype
    device_map: DeviceMap | None


def lengths_to_verify(plan: Plan, asked: tuple[int, ...], context: int) -> dict[str, Any]:
    """Returns the fields of options that say at which lengths a plan is verified: its own, unless others are asked for.
    Those were chosen, and verify nothing. A plan that names none, as imported ones do, is verified at the model's
    context."""
    own = plan.planned_lengths
    is_chosen = bool(asked) and {*asked} != ({*own} or {context})
    return {"lengths": asked or own, "verify_chosen": ("--lengths",) if is_chosen else ()}


# --- defaults of a model and a device ---------------------------------------------------------------------------------

# Density by length, between which density_for interpolates in log length. Attention grows sparser with length.
_DENSITIES = ((1024, 0.80), (4096, 0.44), (16384, 0.29), (32768, 0.21), (131072, 0.12), (1048576, 0.06))


def density_for(length: int) -> float:
    """The usual density of a length, around which candidates are profiled: interpolated in log length, flat outside the
    known range."""
    length = min(max(length, _DENSITIES[0][0]), _DENSITIES[-1][0])
    (low, dense), (high, sparse) = next(pair for pair in pairwise(_DENSITIES) if length <= pair[1][0])
    share = math.log(length / low) / math.log(high / low)
    return round(math.exp(math.log(dense) + share * math.log(sparse / dense)), 4)


_ROUNDED = 1.0001  # a density that is the least but for rounding is the least
# Heads end between a fraction of the mean and several times as much. On a CPU each level takes half a minute.
_LEVELS = {"cpu": (0.4, 0.7, 1.1, 1.8), "cuda": (0.125, 0.17, 0.22, 0.3, 0.4, 0.54, 0.73, 1.0, 1.3, 1.7, 2.2, 2.9)}
_ROUNDS = {"cuda": 1}  # of refinement
# Up to the last, or up to the model's own context where that is shorter. On a CPU 32K tokens take hours to profile.
_LENGTHS = {"cpu": (4096, 8192), "cuda": (4096, 16384, 32768, 131072)}
_APART = 0.75  # of the longest length: what lies closer to it is left out
# Calibration samples a length where the tasks are found out; of long prompts fewer. One of 128K tokens takes an 8B
# model a minute on an H200.
_SAMPLES = {"cpu": 3, "cuda": 8}
_LONG, _LONG_SAMPLES = 65536, 5
_SCORED_ROWS = 32768  # of longer prompts a sample of about so many


class Settled(PlanOptions):
    """Options that leave nothing open, made by `settle` alone.

    Attributes:
        samples_are_default: nobody asked for `calibration_samples`, of which long prompts get fewer.
        missed: by length, how many plans missed their test there; each one made the next denser.
        dense: the lengths that are dense, since every sparser plan missed its test.
    """

    tile: TileShape
    refine_rounds: int
    calibration_samples: int
    samples_are_default: bool
    missed: Mapping[int, int] = {}
    dense: tuple[int, ...] = ()

    def but(self, **changes: Any) -> Settled:
        """These options, some of them others, which are not checked again."""
        return self.model_copy(update=changes)

    @property
    def phase_loss(self) -> float:
        """Returns the part of the loss that each planned phase has."""
        return self.loss / len(self.phases)

    def missed_at(self, length: int) -> int:
        return self.missed.get(length, 0)

    def denser(self, lengths: Collection[int]) -> Settled:
        """Options of the next denser plan at these lengths: of each phase for half of what it lost before."""
        return self.but(missed={**self.missed, **{length: self.missed_at(length) + 1 for length in lengths}})

    def dense_at(self, lengths: Collection[int]) -> Settled:
        return self.but(dense=tuple(sorted({*self.dense, *lengths})))

    def target_at(self, length: int) -> float | None:
        """The density asked for at a length; None where the loss gives it."""
        return self.target_density[self.lengths.index(length)] if self.target_density else None

    def samples_at(self, length: int) -> int:
        samples = self.calibration_samples
        return min(samples, _LONG_SAMPLES) if self.samples_are_default and length > _LONG else samples

    def row_stride_at(self, length: int) -> int:
        return self.row_stride or max(1, round(length / _SCORED_ROWS))


def settle(options: PlanOptions, context_length: int, device_type: str) -> Settled:
    """Options with every default filled in."""
    on_gpu, preset = device_type == "cuda", options.preset is not None
    lengths = _lengths(options, context_length, device_type)
    tile = options.tile or (TileShape(query=64, key=64) if preset else TileShape())
    families = options.families or (PRESET_FAMILIES if preset else FAMILIES)
    tasks = ("kv_retrieval",) if preset and not options.tasks else options.tasks
    every = len(tasks) or _SAMPLES["cuda"]
    samples = 1 if preset else every if on_gpu else min(_SAMPLES["cpu"], every)
    filled: dict[str, Any] = {
        "phases": options.profiled_phases,
        "lengths": lengths,
        "target_density": _densities(options, lengths, tile, families),
        "families": families,
        "tile": tile,
        "levels": (1.0,) if preset else options.levels or _LEVELS["cuda" if on_gpu else "cpu"],
        "row_stride": options.row_stride or (4 if not on_gpu else 1 if preset else None),
        "refine_rounds": _ROUNDS.get(device_type, 0) if options.refine_rounds is None else options.refine_rounds,
        "tasks": tasks,
        "calibration_samples": options.calibration_samples or len(options.prompts) or samples,
        "verify_chosen": tuple(_chosen(options)),
        "samples_are_default": not (options.calibration_samples or options.prompts or options.tasks or preset),
    }
    return Settled.model_construct(**{name: getattr(options, name) for name in PlanOptions.model_fields} | filled)


def _chosen(options: PlanOptions) -> Iterator[str]:
    """By what held-out samples were chosen: whoever tries others could go on until some pass."""
    yield from options.verify_chosen
    yield from ("--set tasks",) if options.verify_tasks else ()
    yield from () if options.verify_seed is None else ("--set seed",)


def lengths_up_to(context_length: int, planned: Sequence[int]) -> tuple[int, ...]:
    """The lengths that plan a context to its end: those planned, the usual ones beyond them, and its own."""
    usual = (length for length in _LENGTHS["cuda"] if planned[-1] < length <= _APART * context_length)
    return (*planned, *usual, context_length)


def _lengths(options: PlanOptions, context_length: int, device_type: str) -> tuple[int, ...]:
    if not options.lengths:
        usual = _LENGTHS.get(device_type, _LENGTHS["cpu"])
        longest = min(context_length, usual[-1])
        return (*(length for length in usual if length <= _APART * longest), longest)
    check_lengths(options.lengths, context_length)
    return tuple(sorted(options.lengths))


def _densities(
    options: PlanOptions, lengths: tuple[int, ...], tile: TileShape, families: Collection[str]
) -> tuple[float, ...]:
    given = options.target_density
    each = given * len(lengths) if len(given) == 1 else given
    if len(each) not in (0, len(lengths)):
        raise UsageError(
            f"expected one target density, or one for each of the {len(lengths)} lengths, found {len(given)}"
        )
    paired = sorted(zip(options.lengths or lengths, each, strict=False))
    for length, density in paired:
        least = min(mandatory_density(length, tile, family) for family in families)
        if least > density * _ROUNDED:
            raise UsageError(
                f"expected a target density above {least:.3g}, the share of the tiles that every pattern computes at "
                f"{length} tokens, found {density:g}; raise it, or plan longer contexts or smaller tiles"
            )
    return tuple(density for _, density in paired)
