"""Options with every default filled in that depends on the model, the device, and the tasks that the model solves.

Every pattern computes the diagonal tile, the one before it, and the first key tile (design, section 4). At 1K tokens
that is most of the triangle, at 128K next to nothing; it follows from lengths and tiles alone, so that a target density
without room for them is refused before anything runs (`check_targets`).
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.options import FAMILIES, PRESET_FAMILIES, Family, Phase, PlanOptions, check_lengths
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import PATTERNS, TileShape
from sparsekv.plans.schema import HURT_BY_EVICTION

# Densities are rounded; one that is the target but for rounding is the target.
ROUNDING = 1e-4
# Density by length, between which density_for interpolates in log length. Attention grows sparser with length.
_DENSITIES = ((1024, 0.80), (4096, 0.44), (16384, 0.29), (32768, 0.21), (131072, 0.12), (1048576, 0.06))


def density_for(length: int) -> float:
    """The default target density at a length: interpolated in log length, flat outside the known range."""
    lengths, densities = np.log(_DENSITIES).T
    return round(math.exp(np.interp(math.log(length), lengths, densities)), 4)


def mandatory_density(length: int, tile: TileShape, family: Family) -> float:
    """The least share of the causal tiles of a prompt of `length` tokens that a head of a family computes."""
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


# Heads end between a fraction of the mean and several times as much. On a CPU each level takes half a minute.
_LEVELS = {
    "cpu": (0.4, 0.7, 1.1, 1.8),
    "cuda": (0.125, 0.17, 0.22, 0.3, 0.4, 0.54, 0.73, 1.0, 1.3, 1.7, 2.2, 2.9),
}
_ROUNDS = {"cuda": 1}  # of refinement
# Up to the last, or up to the model's own context where that is shorter. On a CPU 32K tokens take hours to profile.
_LENGTHS = {"cpu": (4096, 8192), "cuda": (4096, 16384, 32768, 131072)}
_APART = 0.75  # of the longest length: what lies closer to it is left out
# Calibration samples a length where the tasks are found out; of long prompts fewer. One of 128K tokens takes an 8B
# model a minute on an H200.
_SAMPLES = {"cpu": 3, "cuda": 8}
_LONG, _LONG_SAMPLES = 65536, 5
_SCORED_ROWS = 32768  # of longer prompts a sample of about so many
_VERIFY_TIME = {"cpu": 90.0, "cuda": 300.0}


class Settled(PlanOptions):
    """Options that leave nothing open, made by `settle` alone.

    Attributes:
        density_is_default: nobody asked for `target_density`, which gives way to what the tiles that every pattern
            computes take of the prompts at hand.
        samples_are_default: nobody asked for `calibration_samples`, of which long prompts get fewer.
        dense: the profiled lengths at which a phase is dense, since every sparser plan missed its gate.
    """

    tile: TileShape
    refine_rounds: int
    calibration_samples: int
    verify_time: float
    density_is_default: bool
    samples_are_default: bool
    dense: Mapping[Phase, tuple[int, ...]] = {}

    def but(self, **changes: Any) -> Settled:
        """These options, some of them others, which are not checked again."""
        return self.model_copy(update=changes)

    def dense_at(self, phase: Phase) -> tuple[int, ...]:
        """The lengths at which a phase is dense whatever else is asked for."""
        return self.dense.get(phase, ())

    def samples_at(self, length: int) -> int:
        """Calibration samples of a length."""
        samples = self.calibration_samples
        return min(samples, _LONG_SAMPLES) if self.samples_are_default and length > _LONG else samples

    def verified_tasks(self, *, evicts: bool) -> tuple[str, ...]:
        """The tasks that a plan is verified on: where its layers evict tokens, also those that show that, unless tasks
        were asked for."""
        shows = () if "--set tasks" in self.verify_chosen or not evicts else HURT_BY_EVICTION
        return (*self.tasks, *(task for task in shows if task not in self.tasks))

    def row_stride_at(self, length: int) -> int:
        """`row_stride`, or its default on CUDA at a length."""
        return self.row_stride or max(1, round(length / _SCORED_ROWS))


def settle(options: PlanOptions, context_length: int, device_type: str) -> Settled:
    """Options with every default filled in.

    Raises:
        UsageError: a length is beyond the model's context, or lengths and densities do not pair up.
    """
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
        "target_density": () if preset else _densities(options, lengths, tile, families),
        "families": families,
        "tile": tile,
        "levels": (1.0,) if preset else options.levels or _LEVELS["cuda" if on_gpu else "cpu"],
        "row_stride": options.row_stride or (4 if not on_gpu else 1 if preset else None),
        "refine_rounds": _ROUNDS.get(device_type, 0) if options.refine_rounds is None else options.refine_rounds,
        "tasks": tasks,
        "calibration_samples": options.calibration_samples or len(options.prompts) or samples,
        "verify_time": _time(options, device_type),
        "verify_lengths": options.verify_lengths or lengths,
        "verify_chosen": tuple(_chosen(options)),
        "density_is_default": not (options.target_density or preset),
        "samples_are_default": not (options.calibration_samples or options.prompts or options.tasks or preset),
    }
    return Settled.model_construct(**{name: getattr(options, name) for name in PlanOptions.model_fields} | filled)


def _chosen(options: PlanOptions) -> Iterator[str]:
    """By what held-out samples were chosen: whoever tries others could go on until some pass."""
    yield from options.verify_chosen
    yield from ("--set tasks",) if options.tasks else ()
    yield from () if options.verify_seed is None else ("--set seed",)


def _time(options: PlanOptions, device_type: str) -> float:
    """Seconds; no limit where a number of samples was asked for alone."""
    if options.verify_time is None and options.verify_samples:
        return math.inf
    return options.verify_time or _VERIFY_TIME.get(device_type, _VERIFY_TIME["cpu"])


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
    options: PlanOptions, lengths: tuple[int, ...], tile: TileShape, families: Sequence[Family]
) -> tuple[float, ...]:
    """One a length."""
    given = options.target_density
    if not given:
        least = (min(mandatory_density(length, tile, family) for family in families) for length in lengths)
        return tuple(max(density_for(length), floor) for length, floor in zip(lengths, least, strict=True))
    if len(given) == 1:
        return given * len(lengths)
    if len(given) != len(lengths):
        raise UsageError(
            f"expected one target density, or one for each of the {len(lengths)} lengths, found {len(given)}"
        )
    paired = sorted(zip(options.lengths or lengths, given, strict=True))
    return tuple(density for _, density in paired)
