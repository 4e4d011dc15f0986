"""What `plan` is asked to do. Every field has a default; `settled` fills the ones that depend on model and device.

Every pattern computes the diagonal tile, the one before it, and the first key tile (design, section 4). At 1K tokens
that is most of the triangle, at 128K next to nothing; it follows from lengths and tiles alone, so that a density
without room for them is refused before anything runs (`check_targets`).

Names are those of the flags; most fields of `PlanOptions` are called the same. Options that leave one another unread
are refused together (conflicts.py).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral, Real
from typing import Annotated, Literal, get_args

import numpy as np
from pydantic import AfterValidator

from sparsekv.planner.conflicts import check_used
from sparsekv.planner.tasks import QUOTE_TASKS
from sparsekv.planner.tasks import TASKS as KNOWN_TASKS
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import PATTERNS, Budget, TileShape, fraction
from sparsekv.plans.schema import HostName
from sparsekv.plans.types import LEAST_CHUNK, format_length
from sparsekv.runtime.settings import DeviceMap

_SEARCHED = [name for name, kind in PATTERNS.items() if kind.ranges(TileShape(), 1)]
FAMILIES = tuple(name for name in _SEARCHED if PATTERNS[name].by_default)
KNOWN_FAMILIES = (*FAMILIES, *(name for name in _SEARCHED if name not in FAMILIES))  # the others when asked for
PRESET_FAMILIES = tuple(name for name, kind in PATTERNS.items() if kind.published(TileShape()))


def _known(name: str) -> str:
    if name not in KNOWN_FAMILIES:
        raise ValueError(f"expected a pattern that is searched ({', '.join(KNOWN_FAMILIES)}), found {name!r:.40}")
    return name


Family = Annotated[str, AfterValidator(_known)]
Phase = Literal["prefill", "decode"]
Preset = Literal["minference"]
PRESETS: tuple[Preset, ...] = get_args(Preset)

# Densities are rounded; one that is the target but for rounding is the target.
ROUNDING = 1e-4
PHASES: tuple[Phase, ...] = ("prefill", "decode")
HOSTS: tuple[HostName, ...] = get_args(HostName)
TASKS = tuple(KNOWN_TASKS)

# Density by length, between which density_for interpolates in log length. Attention grows sparser with length.
_DENSITIES = ((1024, 0.80), (4096, 0.44), (16384, 0.29), (32768, 0.21), (131072, 0.12), (1048576, 0.06))
# Heads end between a fraction of the mean and several times as much. On a CPU each level takes half a minute.
_LEVELS = {
    "cpu": (0.4, 0.7, 1.1, 1.8),
    "cuda": (0.125, 0.17, 0.22, 0.3, 0.4, 0.54, 0.73, 1.0, 1.3, 1.7, 2.2, 2.9),
}
_ROUNDS = {"cuda": 1}  # of refinement
# Up to the last, or up to the model's own context where that is shorter. On a CPU 32K tokens take hours to profile.
_LENGTHS = {"cpu": (4096, 8192), "cuda": (4096, 16384, 32768, 131072)}
# Calibration samples a length where the tasks are found out; of long prompts fewer. One of 128K tokens takes an 8B
# model a minute on an H200.
_SAMPLES = {"cpu": 3, "cuda": 8}
_LONG, _LONG_SAMPLES = 65536, 5
_SCORED_ROWS = 32768  # of longer prompts a sample of about so many
DECODE_BUDGET = fraction(0.1)
_DECODE_KL = 0.003
_DECODE_LOSS = 0.02
_APART = 0.75  # of the longest length: what lies closer to it is left out

# The gates by default. Exact agreement is asked of whole answers and of up to 16 tokens of text, in which one near-tie
# is enough to part from dense; so it is lower than agreement on single tokens.
MAX_PREFILL_KL = 0.05
MAX_DECODE_KL = 0.005
MIN_AGREEMENT = 0.95
MIN_EXACT = 0.6
# Fewer samples at a length, all tasks together, prove too little for a plan to be called verified.
FEWEST_SAMPLES = 50
_FEWEST_TASKS = len(QUOTE_TASKS) + 1  # with plain text: what any model is verified on, see `with_tasks`


@dataclass(frozen=True, slots=True)
class Gate:
    """What a plan must keep on held-out prompts, over all tasks.

    Attributes:
        max_kl: most mean divergence of next-token distributions from dense, in nats, for each phase; None for
            `MAX_PREFILL_KL` with prefill, `MAX_DECODE_KL` with decode and their sum with both.
        max_decode_kl: the same for decode alone; None for `max_kl`.
        min_agreement: least share of positions at which the likeliest token is dense's.
        min_exact: least share of samples of which the plan picks every token of dense's own greedy continuation.
        max_accuracy_drop: most points (of 100) that answers to the tasks that dense solves may lose against dense.
        solved: tasks that dense answers less often than this share have no accuracy to lose.
    """

    max_accuracy_drop: float = 1.0
    max_kl: float | None = None
    max_decode_kl: float | None = None
    min_agreement: float = MIN_AGREEMENT
    min_exact: float = MIN_EXACT
    solved: float = 0.5

    def kl_bound(self, phase: Literal["prefill", "decode", "both"]) -> float:
        """Most mean divergence with a phase alone, or with both, in nats."""
        decode = self.max_decode_kl if self.max_decode_kl is not None else self.max_kl
        given = decode if phase == "decode" else self.max_kl
        if given is not None:
            return given
        return {"prefill": MAX_PREFILL_KL, "decode": MAX_DECODE_KL, "both": MAX_PREFILL_KL + MAX_DECODE_KL}[phase]


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """How to plan.

    Attributes:
        lengths: context lengths to profile, one bucket each; empty for defaults by device and context.
        target_density: share of the causal tiles to compute, over all heads and layers: one for all lengths, or one
            a length; empty for defaults by length.
        target_speedup: instead of a density: how much faster than dense the attention of a prefill must become.
        host: the program that will run the plan, whose prefill is timed: "transformers" or "vllm", for which decode is
            not planned (`for_host`).
        phases: which phases get a plan; the others run dense.
        crossover: whether lengths at which dense is measured to be faster go dense.
        preset: "minference" for the search of MInference 1.0 as published.
        families: pattern families of the search; empty for vertical_slash, or for those of the preset.
        tile: tile shape; None for 64 x 64 under the preset, else 128 x 128, which kernels compute fastest.
        backend: prefill backend, or "auto".
        levels: the ladder of densities that is profiled, as multiples of the target, so that one profile serves
            several targets and a plan that misses its gate can be tightened; empty by device.
        refine_rounds: how often the weights of layers are corrected by the divergence of whole plans (refine.py); None:
            once on CUDA, never on the CPU, where the passes of one round take longer than profiling.
        row_stride: candidates are scored on every that many-th query tile (on CUDA, of runs of neighbouring ones), and
            on those of the question; None: on CUDA all, of prompts longer than 32K tokens a sample of so many rows; on
            the CPU every fourth.
        prompts: the caller's own calibration texts, instead of task samples.
        tasks: tasks for calibration and verification; empty: quotations, the retrieval tasks that the model is found
            to solve, and plain text (`with_tasks`).
        samples: calibration samples a length; None: as many as show all the given tasks, or on CUDA eight, five of more
            than 64K tokens; at most three on the CPU.
        gate: what verification asks for.
        verify_samples: held-out samples a task and length; None: on CUDA as many as verification needs over all
            tasks, one on the CPU; 0 leaves the plan unverified.
        verify_lengths: lengths to verify at; empty for every planned length.
        decode_budget: tokens that a filter layer chooses for the layers of its segment; of a fraction, no more than it
            comes to at the longest planned length. Where budgets are tried out, any other than the default is the most.
        decode_sink, decode_recent: the first and the last tokens that those layers attend to besides.
        decode_kl: most mean divergence of decode steps from dense on calibration prompts, in nats, by the 95% upper
            bound of the mean; where the model is at hand or the profile has trials. None: 0.003, or
            what the gate asks of decode where that is less.
        decode_loss: instead of `decode_kl`, most attention mass lost to token selection, as a share of all layers
            weighted by importance: nothing is tried out on the model. None: 0.02, where nothing can be.
        filter_layers: these layers choose, instead of those found at the least cost.
        offload: whether the layers of segments keep their rows in host memory.
        batch: most prompts evaluated at once; None: as many as surely fit at a length, one on a CPU.
        prefill_chunk: most tokens of a prompt given to the model at once in verification, and in what is timed of vLLM;
            None is all, or what a server of vLLM computes in a step.
        seed: of calibration and verification samples.
        device, dtype: where and in what precision a model that is named, not given, is loaded; "auto" decides.
        device_map: how such a model is spread over the devices of this machine, instead of `device`: "auto",
            "balanced", "balanced_low_0" or "sequential", as transformers names them.
        density_is_default: set by `settled`: nobody asked for `target_density`, which gives way to what the tiles that
            every pattern computes take of the prompts at hand.
        samples_are_default: set by `settled`: nobody asked for `samples`, of which long prompts get fewer.
        is_settled: set by `settled`: defaults are filled in, and a field no longer tells what was asked for.
    """

    lengths: tuple[int, ...] = ()
    target_density: tuple[float, ...] = ()
    target_speedup: float | None = None
    host: HostName = "transformers"
    phases: tuple[Phase, ...] = PHASES
    crossover: bool = True
    preset: Preset | None = None
    families: tuple[Family, ...] = ()
    tile: TileShape | None = None
    backend: str = "auto"
    levels: tuple[float, ...] = ()
    row_stride: int | None = None
    refine_rounds: int | None = None
    prompts: tuple[str, ...] = ()
    tasks: tuple[str, ...] = ()
    samples: int | None = None
    gate: Gate = field(default_factory=Gate)
    verify_samples: int | None = None
    verify_lengths: tuple[int, ...] = ()
    decode_budget: Budget = DECODE_BUDGET
    decode_sink: int = 4
    decode_recent: int = 128
    decode_kl: float | None = None
    decode_loss: float | None = None
    filter_layers: tuple[int, ...] = ()
    offload: bool = False
    batch: int | None = None
    prefill_chunk: int | None = None
    seed: int = 0
    device: str = "auto"
    dtype: str = "auto"
    device_map: DeviceMap | None = None
    density_is_default: bool = False
    samples_are_default: bool = False
    is_settled: bool = False

    def __post_init__(self) -> None:
        _check(self)
        # A phase or a verification that is left out contradicts nothing here: programs build their options in parts.
        check_used(asked(self))

    @property
    def tile_shape(self) -> TileShape:
        """The tile shape, 64 x 64 under the preset unless another one is asked for."""
        return self.tile or (TileShape(query=64, key=64) if self.preset == "minference" else TileShape())

    @property
    def decode_bound(self) -> float:
        """`decode_kl`, or its default."""
        return min(_DECODE_KL, self.gate.kl_bound("decode")) if self.decode_kl is None else self.decode_kl

    @property
    def loss_bound(self) -> float:
        """`decode_loss`, or its default."""
        return _DECODE_LOSS if self.decode_loss is None else self.decode_loss

    @property
    def tries_decode(self) -> bool:
        """Whether decode segments are tried out on the model, where it is at hand."""
        return not self.filter_layers and self.decode_loss is None

    @property
    def any_budget(self) -> bool:
        """Whether the decode budget was left open, so that trials may choose it."""
        return self.decode_budget == DECODE_BUDGET

    def samples_at(self, length: int) -> int:
        """Calibration samples of a length, of settled options."""
        samples = self.samples or 1
        return min(samples, _LONG_SAMPLES) if self.samples_are_default and length > _LONG else samples

    def row_stride_at(self, length: int) -> int:
        """`row_stride`, or its default on CUDA at a length."""
        return self.row_stride or max(1, round(length / _SCORED_ROWS))

    def settled(self, context_length: int, device_type: str) -> PlanOptions:
        """These options with every default filled in.

        Raises:
            UsageError: a length is beyond the model's context, or lengths and densities do not pair up.
        """
        on_gpu = device_type == "cuda"
        lengths = tuple(sorted(set(self.lengths))) or _default_lengths(context_length, device_type)
        if lengths[-1] > context_length:
            raise UsageError(
                f"expected lengths within the model's context of {format_length(context_length)} tokens, "
                f"found {format_length(lengths[-1])}; leave it out, or plan a model with a longer context"
            )
        preset = self.preset == "minference"
        if not self.families:
            families = PRESET_FAMILIES if preset else FAMILIES
            return replace(self, families=families).settled(context_length, device_type)
        tasks = ("kv_retrieval",) if preset and not self.tasks else self.tasks
        every = len(tasks) or _SAMPLES["cuda"]
        samples = 1 if preset else every if on_gpu else min(_SAMPLES["cpu"], every)
        return replace(
            self,
            lengths=lengths,
            target_density=() if preset else self._densities(lengths),
            tile=self.tile_shape,
            levels=(1.0,) if preset else self.levels or _LEVELS["cuda" if on_gpu else "cpu"],
            row_stride=self.row_stride or (4 if not on_gpu else 1 if preset else None),
            refine_rounds=_ROUNDS.get(device_type, 0) if self.refine_rounds is None else self.refine_rounds,
            tasks=tasks,
            samples=self.samples or len(self.prompts) or samples,
            verify_samples=self.held_out(tasks, device_type),
            verify_lengths=self.verify_lengths or lengths,
            density_is_default=self.density_is_default or not (self.target_density or preset),
            samples_are_default=self.samples_are_default or not (self.samples or self.prompts or self.tasks or preset),
            is_settled=True,
        )

    def held_out(self, tasks: Sequence[str], device_type: str) -> int:
        """Held-out samples of each of these tasks at a length: as asked for, or on a GPU as many as verification needs
        over all tasks, on a CPU one. No tasks are those that any model is verified on."""
        if self.verify_samples is not None:
            return self.verify_samples
        return math.ceil(FEWEST_SAMPLES / (len(tasks) or _FEWEST_TASKS)) if device_type == "cuda" else 1

    def _densities(self, lengths: tuple[int, ...]) -> tuple[float, ...]:
        given = self.target_density
        if not given:
            return tuple(max(density_for(length), self._least_density(length)) for length in lengths)
        if len(given) == 1:
            return given * len(lengths)
        if len(given) != len(lengths):
            raise UsageError(
                f"expected one target density, or one for each of the {len(lengths)} lengths, found {len(given)}"
            )
        if not self.lengths:
            return given
        order = sorted(range(len(given)), key=lambda position: self.lengths[position])
        return tuple(given[position] for position in order)

    def _least_density(self, length: int) -> float:
        """What the sparsest family computes at least; at a few hundred tokens that is nearly everything."""
        return min(mandatory_density(length, self.tile_shape, family) for family in self.families)


def density_for(length: int) -> float:
    """The default target density at a length: interpolated in log length, flat outside the known range."""
    lengths, densities = np.log(_DENSITIES).T
    return round(math.exp(np.interp(math.log(length), lengths, densities)), 4)


def mandatory_density(length: int, tile: TileShape, family: Family) -> float:
    """The least share of the causal tiles of a prompt of `length` tokens that a head of a family computes."""
    from sparsekv.kernels.tiles import Chunk  # here, since it brings torch: options are read before that is imported

    least, starts = PATTERNS[family].least_tiles, range(0, length, tile.query)
    rows = (least(first, min(first + tile.query, length) - 1, tile) for first in starts)
    return sum(rows) / Chunk.uniform(1, 0, length).causal_tiles(tile)


def check_targets(
    prompts: Mapping[int, Sequence[int]], targets: Sequence[float], tile: TileShape, families: Collection[Family]
) -> None:
    """Refuses a target density that no pattern of these families can reach.

    Args:
        prompts: for each length to be planned, ascending, how many tokens its prompts have.
        targets: the target density of each length; empty where there is none.

    Raises:
        UsageError: naming the length, and the least density there.
    """
    if not targets:
        return
    for (length, tokens), target in zip(prompts.items(), targets, strict=True):
        means = [sum(mandatory_density(n, tile, family) for n in tokens) / len(tokens) for family in families]
        if min(means) > target * (1.0 + ROUNDING):
            raise too_low(target, length, min(means))


def too_low(target: float, length: int, least: float) -> UsageError:
    """The error for a target density below what mandatory tiles alone take, `least`."""
    share = math.ceil(least * 1e3) / 1e3
    return UsageError(
        f"expected a target density that leaves room for the tiles every pattern computes (the first, the diagonal, "
        f"the one before), found {target:g} at {length} tokens, where they take up to {share:g}; raise it, or plan "
        "longer contexts or smaller tiles"
    )


def _default_lengths(context_length: int, device_type: str) -> tuple[int, ...]:
    usual = _LENGTHS.get(device_type, _LENGTHS["cpu"])
    longest = min(context_length, usual[-1])
    return (*(length for length in usual if length <= _APART * longest), longest)


def lengths_up_to(context_length: int, planned: Sequence[int]) -> tuple[int, ...]:
    """The lengths that plan a context to its end: those planned, the usual ones beyond them, and its own."""
    usual = (length for length in _LENGTHS["cuda"] if planned[-1] < length <= _APART * context_length)
    return (*planned, *usual, context_length)


# Options that hold several values, the type of each, and an example.
_SEVERAL: tuple[tuple[tuple[str, ...], type, str], ...] = (
    (("lengths", "verify_lengths"), Integral, "(4096, 16384)"),
    (("filter_layers",), Integral, "(2, 8)"),
    (("target_density", "levels"), Real, "(0.3, 0.2)"),
    (("prompts",), str, '("a text", "another text")'),
    (("tasks",), str, '("niah_single", "kv_retrieval")'),
)


def _check(options: PlanOptions) -> None:
    def expect(holds: bool, what: str, found: object) -> None:
        if not holds:
            raise UsageError(f"expected {what}, found {_told(found)}")

    for names, kind, example in _SEVERAL:
        for name in names:
            given = getattr(options, name)
            several = isinstance(given, tuple | list) and all(isinstance(one, kind) for one in given)
            expect(several, f"{name} as a tuple such as {example}", given)
    expect(all(length > 0 for length in options.lengths), "positive lengths", options.lengths)
    expect(len(set(options.lengths)) == len(options.lengths), "each length once", options.lengths)
    shares = all(0.0 < density <= 1.0 for density in options.target_density)
    expect(shares, "target densities in (0, 1]", options.target_density)
    unknown = sorted(set(options.tasks) - set(KNOWN_TASKS))
    expect(not unknown, f"tasks of {', '.join(sorted(KNOWN_TASKS))}", unknown)
    speedup = options.target_speedup
    expect(speedup is None or 1.0 < speedup < math.inf, "a target speedup above 1", speedup)
    expect(bool(options.phases) and set(options.phases) <= set(PHASES), f"phases of {_told(PHASES)}", options.phases)
    expect(options.host in HOSTS, f"a host of {_told(HOSTS)}", options.host)
    known = PRESET_FAMILIES if options.preset else KNOWN_FAMILIES  # the published search has no other
    expect(set(options.families) <= set(known), f"families of {_told(known)}", options.families)
    expect(all(level > 0 for level in options.levels), "positive levels", options.levels)
    expect((options.refine_rounds or 0) >= 0, "zero or more rounds of refinement", options.refine_rounds)
    expect(options.row_stride is None or options.row_stride >= 1, "a row stride of 1 or more", options.row_stride)
    expect(options.samples is None or options.samples >= 1, "at least one calibration sample", options.samples)
    expect((options.verify_samples or 0) >= 0, "zero or more verification samples", options.verify_samples)
    expect(
        set(options.verify_lengths) <= set(options.lengths) or not options.lengths,
        "verification lengths among the planned lengths",
        options.verify_lengths,
    )
    gate = options.gate
    expect(0.0 <= gate.max_accuracy_drop <= 100.0, "an accuracy drop of 0 to 100 points", gate.max_accuracy_drop)
    for bound in (gate.max_kl, gate.max_decode_kl):
        expect(bound is None or 0.0 <= bound < math.inf, "a largest divergence of zero or more nats", bound)
    for share in (gate.min_agreement, gate.min_exact):
        expect(0.0 <= share <= 1.0, "a least agreement, a share, of 0 to 1", share)
    expect(options.decode_sink >= 0, "zero or more sink tokens", options.decode_sink)
    expect(options.decode_recent >= 1, "at least one recent token", options.decode_recent)
    expect(options.preset in (None, *PRESETS), f"a preset of {_told(PRESETS)}", options.preset)
    expect(options.decode_budget.tokens != 0, "a decode budget of one token or more", options.decode_budget)
    expect(options.batch is None or options.batch >= 1, "a batch of one or more", options.batch)
    chunk = options.prefill_chunk
    expect(chunk is None or chunk >= LEAST_CHUNK, f"a prefill chunk of at least {LEAST_CHUNK} tokens", chunk)
    expect(options.seed >= 0, "a seed of zero or more", options.seed)
    for name in ("tasks", "families", "verify_lengths"):
        given = getattr(options, name)
        expect(len(set(given)) == len(given), f"each of the {name.replace('_', ' ')} once", given)
    expect(0.0 <= options.loss_bound <= 1.0, "a decode loss, a share, of 0 to 1", options.decode_loss)
    expect(0.0 <= options.decode_bound < math.inf, "a decode divergence of zero or more nats", options.decode_kl)


def _told(found: object) -> str:
    return ", ".join(map(str, found)) or "none" if isinstance(found, tuple | list) else repr(found)


def asked(options: PlanOptions) -> dict[str, object]:
    """The fields that differ from their defaults, as far as that tells what was asked for."""
    if options.is_settled:
        return {}
    unread = ("phases", "gate", *(["verify_samples"] if options.verify_samples == 0 else []))
    values = {field.name: getattr(options, field.name) for field in fields(options) if field.name not in unread}
    return {name: value for name, value in values.items() if value != getattr(_DEFAULTS, name)}


_DEFAULTS = PlanOptions(is_settled=True)
