"""Says what `plan`, `verify` and `eval` are asked to do, in groups that commands share. What is left open is settled
for a model and a device by `settle` (settled.py).

A field says its type, bounds, default and help here and nowhere else: the command line is generated from it
(cli/commands.py). One with a `Flag` is a flag, one with a `Key` a key of `--set`; others are for programs.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar, Literal, Self, get_args

from pydantic import AfterValidator, BeforeValidator, Field, model_validator

from sparsekv.planner.flags import (
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
    each_once,
    text,
    words,
)
from sparsekv.planner.own_prompts import GivenPrompt, as_prompts
from sparsekv.plans.errors import UsageError, did_you_mean
from sparsekv.plans.patterns import PATTERNS, TileShape, fraction
from sparsekv.plans.schema import HostName, Plan
from sparsekv.plans.types import KVDtype, format_length
from sparsekv.runtime.settings import Backend, DeviceMap, Dtype

_SEARCHED = [name for name, kind in PATTERNS.items() if kind.ranges(TileShape(), 1)]
FAMILIES = tuple(name for name in _SEARCHED if PATTERNS[name].by_default)
KNOWN_FAMILIES = (*FAMILIES, *(name for name in _SEARCHED if name not in FAMILIES))  # the others when asked for
PRESET_FAMILIES = tuple(name for name, kind in PATTERNS.items() if kind.published(TileShape()))


def _known(name: str) -> str:
    if name not in KNOWN_FAMILIES:
        meant = did_you_mean(name, KNOWN_FAMILIES)
        raise ValueError(
            f"expected a pattern that is searched ({', '.join(KNOWN_FAMILIES)}), found {name!r:.40}{meant}"
        )
    return name


Family = Annotated[str, AfterValidator(_known)]
Phase = Literal["prefill", "decode"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Preset = Literal["minference"]
# Written down here, since the tasks themselves bring numpy.
Task = Literal[
    "quote_text",
    "quote_code",
    "niah_single",
    "niah_multikey",
    "kv_retrieval",
    "two_stage",
    "variable_tracking",
    "perplexity",
    "niah_multivalue",
    "niah_multiquery",
    "vt",
    "cwe",
    "fwe",
    "second_question",
]
TASKS: tuple[Task, ...] = get_args(Task)
_OF_SUITE = re.compile("niah_(single|multikey)_[123]")


def _no_task_of_suite(names: Any) -> Any:
    """Says of RULER's other tasks what to do instead."""
    for name in names if isinstance(names, tuple) else ():
        if name in ("qa_1", "qa_2"):
            raise ValueError(
                f"expected a task that is generated, found {name}, which needs a corpus of questions that is not part "
                "of sparsekv; use lm-evaluation-harness (examples/with_lm_eval.py)"
            )
        if isinstance(name, str) and _OF_SUITE.fullmatch(name):
            raise ValueError(
                f"expected one of {', '.join(TASKS)}, found {name}; `eval --suite ruler`, which runs all tasks of its "
                "own and takes no tasks, has it"
            )
    return names


DEFAULT_TASKS = TASKS[: TASKS.index("perplexity") + 1]  # what is published was measured on these
DECODE_BUDGET = fraction(0.1)
_DECODE_KL = 0.003
_DECODE_LOSS = 0.02

# The gates by default, of what a plan adds to rounding (the floor). Exact agreement is asked of whole answers and of up
# to 16 tokens of text, in which one near-tie is enough to part from dense; so it is lower than agreement on single
# tokens.
MAX_PREFILL_KL = 0.05
MAX_DECODE_KL = 0.005

PartOfAll = Annotated[float, Field(ge=0.0, le=1.0)]


class Gate(Options):
    """Holds what a plan must keep on held-out prompts, over all tasks, beside the kernels with every tile computed."""

    max_accuracy_drop: Annotated[
        float,
        Field(ge=0.0, le=100.0),
        Key("Most that answers to the tasks that dense solves may lose, of 100; 3 by default.", "POINTS"),
    ] = 3.0
    max_kl: Annotated[
        float | None,
        Field(ge=0.0),
        Key(
            f"Most mean divergence of each phase; by default {MAX_PREFILL_KL}, of decode alone {MAX_DECODE_KL}, of "
            f"both {MAX_PREFILL_KL + MAX_DECODE_KL:g}.",
            "NATS",
        ),
    ] = None
    max_decode_kl: Annotated[
        float | None,
        Field(ge=0.0),
        Key("The same for decode alone; as max_kl if that is given.", "NATS"),
    ] = None
    min_agreement: Annotated[PartOfAll, Field(description="Least share of dense's likeliest tokens.")] = 0.95
    min_exact: Annotated[PartOfAll, Field(description="Least share of dense's greedy texts kept.")] = 0.6
    max_failed: Annotated[
        PartOfAll,
        Field(description="Most prompts that break: ten times the divergence, or another sure first token."),
    ] = 0.05
    # Tasks that are answered less often than this share have no accuracy to lose.
    solved: PartOfAll = 0.5

    def kl_bound(self, phase: Literal["prefill", "decode", "both"]) -> float:
        """Most mean divergence with a phase alone, or with both, in nats."""
        decode = self.max_decode_kl if self.max_decode_kl is not None else self.max_kl
        given = decode if phase == "decode" else self.max_kl
        if given is not None:
            return given
        return {"prefill": MAX_PREFILL_KL, "decode": MAX_DECODE_KL, "both": MAX_PREFILL_KL + MAX_DECODE_KL}[phase]

    @property
    def named(self) -> dict[str, float]:
        """Each bound by the name that plans record it under."""
        kl = {f"max_kl_{phase}": self.kl_bound(phase) for phase in ("prefill", "decode", "both")}
        shares = {name: getattr(self, name) for name in ("min_agreement", "min_exact", "max_failed", "solved")}
        return kl | shares | {"max_accuracy_drop": self.max_accuracy_drop}

    @property
    def is_strict(self) -> bool:
        """Returns whether no bound is looser than its default, so that `verified` means at least what is documented."""
        own, usual = self.named, Gate().named
        looser = {name: -1.0 if name.startswith("min_") else 1.0 for name in usual if name != "solved"}
        return own["solved"] <= usual["solved"] and all(
            sign * own[name] <= sign * usual[name] for name, sign in looser.items()
        )


class Targets(Options):
    """Holds what is planned, for which host, and how sparse."""

    group: ClassVar = "What is planned"

    lengths: Annotated[
        Lengths,
        Flag(
            "Context lengths, one bucket each, such as 4k,16k,32k; by default 4k,8k on a CPU, and up to 128k on a GPU.",
            ("--lengths", "--length"),
            "LIST",
        ),
    ] = ()
    target_density: Annotated[Shares, Key("Share of the causal tiles to compute: one, or one a length.", "SHARES")] = ()
    target_speedup: Annotated[
        float | None,
        Field(gt=1.0, le=1e4, description="Instead of a density: how much faster prefill attention must become."),
    ] = None
    host: Annotated[HostName, Flag("What will run the plan, whose attention is timed.")] = "transformers"
    phases: Annotated[
        tuple[Phase, ...],
        Field(min_length=1),
        text(words),
        AfterValidator(each_once),
        Flag("Plan this phase alone.", ("--only",), reads=Phase),
    ] = PHASES
    crossover: Annotated[bool, Flag("Sparse at every length, also where dense is faster.")] = True


class Search(Options):
    """Says how prefill patterns are searched."""

    group: ClassVar = "What is planned"

    preset: Annotated[Preset | None, Flag("The search of that publication, as published.")] = None
    families: Annotated[
        tuple[Family, ...],
        text(words),
        AfterValidator(each_once),
        Field(description=f"Patterns to search, of {', '.join(KNOWN_FAMILIES)}; the first by default."),
    ] = ()
    tile: Annotated[Tile, Field(description="Rows and columns of a tile; 128, under the preset 64.")] = None
    # The ladder of densities that is profiled, as multiples of the target, so that one profile serves several targets
    # and a plan that misses its gate can be tightened; by device.
    levels: tuple[Annotated[float, Field(gt=0.0)], ...] = ()
    # How often the weights of layers are corrected by the divergence of whole plans (refine.py); once on CUDA, never on
    # the CPU, where the passes of one round take longer than profiling.
    refine_rounds: Annotated[int, Field(ge=0)] | None = None
    # Candidates are scored on every that many-th query tile (on CUDA, of runs of neighbouring ones), and on those of
    # the question; on CUDA all, of prompts longer than 32K tokens a sample of so many rows; on the CPU every fourth.
    row_stride: Annotated[int, Field(ge=1)] | None = None


class DecodeSearch(Options):
    """Says how filter layers are chosen, and how many tokens they choose."""

    group: ClassVar = "What is planned"
    filter_layers: Annotated[
        Layers, Key("These filter layers, such as 2,8,18, in place of those found at the least cost.", "LAYERS")
    ] = ()
    # Of a fraction, no more than it comes to at the longest planned length. Where budgets are tried out, any other than
    # the default is the most.
    decode_budget: Annotated[TokenBudget, Key("Tokens that filter layers choose: 2048, or a share: 10%.", "BUDGET")] = (
        DECODE_BUDGET
    )
    # The first and the last tokens that sparse layers attend to besides.
    decode_sink: Annotated[int, Field(ge=0)] = 4
    decode_recent: Annotated[int, Field(ge=1)] = 128
    decode_loss: Annotated[
        PartOfAll | None,
        Field(description="Most attention mass lost to the choice, in place of `decode_kl`: nothing is tried out."),
    ] = None
    # By the 95% upper bound of the mean, where the model is at hand or the profile has trials.
    decode_kl: Annotated[
        float | None,
        Field(ge=0.0),
        Key(f"Most divergence of decode from dense on calibration prompts; {_DECODE_KL} by default.", "NATS"),
    ] = None
    offload: Annotated[bool, Key("Permit rows of sparse layers in host memory.", "true")] = False
    retain: Annotated[
        OneShare | None,
        Field(lt=1.0),
        Flag(
            "In place of filter layers: layers keep this share of a prompt's keys and values, by attention. Lossy.",
            metavar="SHARE",
        ),
    ] = None

    @property
    def tries_decode(self) -> bool:
        """Returns whether segments are found by trying them out on the model."""
        return not self.filter_layers and self.decode_loss is None

    @property
    def loss_bound(self) -> float:
        """`decode_loss`, or its default."""
        return _DECODE_LOSS if self.decode_loss is None else self.decode_loss

    @property
    def any_budget(self) -> bool:
        """Returns whether the decode budget was left open, so that trials may choose it."""
        return self.decode_budget == DECODE_BUDGET


Seed = Annotated[int, Field(ge=0, le=(1 << 32) - 1), Key("Seed of samples and of sampling; 0 by default.", "N")]
PrefillChunk = Annotated[
    Chunk,
    Flag("Prefill in pieces of so many tokens: bounds memory, or cuts prompts as a server does.", metavar="TOKENS"),
]


Tasks = Annotated[tuple[Task, ...], BeforeValidator(_no_task_of_suite), text(words), AfterValidator(each_once)]


class Drawn(Options):
    """Says which samples are drawn, and how they are fed."""

    group: ClassVar = "Machine"
    tasks: Annotated[
        Tasks,
        Key(
            f"Tasks, of {', '.join(TASKS)}; by default the first {len(DEFAULT_TASKS)}, for `plan` quotations, plain "
            "text and what the model can answer of them.",
            "NAMES",
        ),
    ] = ()
    seed: Seed = 0
    batch: Annotated[int | None, Field(ge=1, le=MOST, description="Most samples run at once; as fits by default.")] = (
        None
    )
    prefill_chunk: PrefillChunk = None


class Gated(Options):
    """By what gate a plan is verified."""

    gate: Gate = Gate()


HELD_OUT = "Most held-out samples a task and length; by default as many as decide, within --verify-time."
VERIFY_TIME = "Seconds of drawing more samples than the first ones, unless all is decided; 90 on a CPU, 300 on a GPU."


KVPrecision = Annotated[
    KVDtype, Key("Cached keys and values in the model's precision (auto), or in 8 bits, half the bytes of 16.", "fp8")
]


class Device(Options):
    """Says where something runs."""

    group: ClassVar = "Machine"

    device: Annotated[str, Flag("cpu, cuda, cuda:1 ..., or what there is.", metavar="NAME")] = "auto"


class Precision(Options):
    """In what precision."""

    group: ClassVar = "Machine"

    dtype: Annotated[Dtype, Flag("Precision, or what fits the machine.")] = "auto"


class Kernels(Options):
    """By which kernels."""

    backend: Annotated[
        Backend, Key(f"Kernels: {', '.join(get_args(Backend))}; the fastest that can run, see `doctor`.", "NAME")
    ] = "auto"


class Hardware(Device, Precision, Kernels):
    """Where a model runs, in what precision, by which kernels."""


def check_lengths(lengths: Sequence[int], context: int) -> None:
    """Refuses lengths beyond a model's context.

    Raises:
        UsageError: one is.
    """
    if max(lengths, default=0) > context:
        raise UsageError(
            f"expected lengths within the model's context of {format_length(context)} tokens, found "
            f"{format_length(max(lengths))}; leave it out, or choose a model with a longer context"
        )


class PlanOptions(Targets, Search, DecodeSearch, Gated, Drawn, Hardware):
    """Says how to plan.

    Raises:
        UsageError: a value cannot be meant, or options leave one another unread.
    """

    group: ClassVar = "Verification"
    # The caller's own, instead of samples of tasks: half of them are set aside, to verify the plan on.
    prompts: Annotated[tuple[GivenPrompt, ...], BeforeValidator(as_prompts)] = ()
    verify_samples: Annotated[int | None, Field(ge=0, le=MOST), Key(HELD_OUT, "N")] = None
    verify_time: Annotated[float | None, Field(gt=0.0, le=1e6), Flag(VERIFY_TIME, metavar="SECONDS")] = None
    verify_lengths: Lengths = ()
    verify_seed: int | None = None  # of held-out samples; by default it follows from the plan
    verify_chosen: tuple[str, ...] = ()  # by what samples were chosen, besides tasks and a seed: none verify a plan
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
    def decode_bound(self) -> float:
        """`decode_kl`, or its default."""
        return min(_DECODE_KL, self.gate.kl_bound("decode")) if self.decode_kl is None else self.decode_kl

    @property
    def profiled_phases(self) -> tuple[Phase, ...]:
        """Returns the phases whose profile is needed: what layers keep is searched on the model itself."""
        return self.phases if self.retain is None else ("prefill",)

    @model_validator(mode="after")
    def _every_option_is_read(self) -> Self:
        if self.preset is not None or self.target_speedup is not None:
            switch = "preset" if self.preset is not None else "target_speedup"
            self.refuse(("target_density", "levels", "target_speedup"), "each is a target", switch)
        if self.filter_layers:
            bounds = ("decode_kl", "decode_loss")
            self.refuse(bounds, "layers that are given have no bound on what is lost", "filter_layers")
        if self.decode_loss is not None:
            self.refuse(("decode_kl",), "each is a bound on what is lost", "decode_loss")
        if self.host == "vllm":
            self.refuse(("offload",), "vLLM keeps all pages on the device", "host")
        if self.retain is not None:
            reads = ("decode_budget", "decode_loss", "decode_kl", "decode_sink", "decode_recent")
            self.refuse(("filter_layers", *reads, "offload"), "an evicting layer is in no segment", "retain")
        if self.retain is not None and self.phases == ("decode",):
            self.refuse(("phases",), "the decode that is planned alone is that of filter layers", "retain")
        return self

    @model_validator(mode="after")
    def _verified_lengths_are_planned(self) -> Self:
        if self.lengths and not set(self.verify_lengths) <= set(self.lengths):
            raise UsageError(
                f"expected verify_lengths among the planned lengths {self.lengths}, found {self.verify_lengths}"
            )
        return self


def lengths_to_verify(plan: Plan, asked: tuple[int, ...], context: int) -> dict[str, Any]:
    """Returns the fields of options that say at which lengths a plan is verified: its own, unless others are asked for.
    Those were chosen, and verify nothing. A plan that names none, as imported ones do, is verified at the model's
    context."""
    own = plan.planned_lengths
    is_chosen = bool(asked) and {*asked} != ({*own} or {context})
    return {"lengths": asked or own, "verify_chosen": ("--lengths",) if is_chosen else ()}
