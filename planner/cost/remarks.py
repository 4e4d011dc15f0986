"""What to know about a plan besides its figures: where it is denser than asked for and why, what was not predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sparsekv.planner.cost.device_cost import DeviceCost
from sparsekv.planner.cost.predict import DENSE, ScoreTables, choice_of, dense_step_us, prefill_estimate, step_us
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.options import ROUNDING, PlanOptions
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.plans.phases import DecodePlan, Offload, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length


def plan_remarks(plan: Plan, options: PlanOptions, profile: Profile, cost: DeviceCost) -> tuple[str, ...]:
    """A line for each thing to know about a plan; `options` are those it was compiled with."""
    prefill = crossover_remarks(profile, cost, plan.prefill, options) if plan.prefill else ()
    if plan.decode is None:
        return prefill
    return (
        *prefill,
        *dense_decode_remarks(profile, cost, plan.decode, options),
        *offload_remarks(profile, cost, plan.decode),
    )


def crossover_remarks(
    profile: Profile, cost: DeviceCost, prefill: PrefillPlan, options: PlanOptions
) -> tuple[str, ...]:
    """A line for each profiled length at which the plan is denser, or less fast, than its target.

    Args:
        profile: what the plan was compiled from.
        cost: of the device that it was compiled for.
        options: settled, of the plan.
    """
    entries = [entry for entry in profile.lengths if entry.layers]
    lines: list[str | None] = []
    if options.crossover:
        targets: tuple[float, ...] = options.target_density or tuple(entry.densities[-1] for entry in entries)
        if options.target_speedup is not None:
            targets = (math.inf,) * len(entries)
        device = f"on {cost.device} ({cost.backend}, {cost.dtype})"
        lines += [_denser(entry, prefill, target, device) for entry, target in zip(entries, targets, strict=True)]
    if options.target_speedup is not None:
        lines += [_slower(profile, entry, cost, prefill, options.target_speedup) for entry in entries]
    return tuple(filter(None, lines))


def _slower(
    profile: Profile, entry: LengthProfile, cost: DeviceCost, prefill: PrefillPlan, target: float
) -> str | None:
    """Of a length, but the longest, at which no density that was profiled comes to the target speedup."""
    bucket, tables = prefill.bucket(entry.length), ScoreTables.of(entry)
    choice = choice_of(bucket, tables)
    if bucket.dense or choice is None:
        return None
    found = prefill_estimate(cost, tables, choice, profile.tile)
    speedup = found.dense_us / max(found.sparse_us, 1e-9)
    if speedup >= target:
        return None
    return (
        f"prefill attention at {format_length(entry.length)} is predicted to be {speedup:.2f} times as fast as dense, "
        f"less than the {target:g} that was asked for: that is the lowest density profiled there"
    )


def _denser(entry: LengthProfile, prefill: PrefillPlan, target: float, device: str) -> str | None:
    bucket, at = prefill.bucket(entry.length), format_length(entry.length)
    if bucket.dense:
        return (
            f"prefill at {at} runs dense: sparse attention is not predicted to be faster there {device}; "
            "--no-crossover keeps it sparse"
        )
    tables = ScoreTables.of(entry)
    choice = choice_of(bucket, tables)
    assert choice is not None, "allocated from this very profile"
    density = tables.density(choice)
    if density <= target * (1.0 + ROUNDING):
        return None
    whole_L = ~(choice >= 0).any(1)
    heads = int((choice[~whole_L] == DENSE).sum())
    return (
        f"prefill at {at} computes {density:.3f} of the tiles, more than the target of {target:g}: dense is predicted "
        f"to be faster for {_counted(int(np.sum(whole_L)), heads, len(choice))} {device}; the others keep to the "
        "target, --no-crossover holds all heads to it"
    )


def _counted(layers: int, heads: int, of: int) -> str:
    parts = [f"{layers} of {of} layers"] if layers else []
    parts += [f"{heads} {'other ' if layers else ''}heads"] if heads else []
    return " and ".join(parts)


def dense_decode_remarks(
    profile: Profile, cost: DeviceCost, decode: DecodePlan, options: PlanOptions
) -> tuple[str, ...]:
    """A line for each reason why decode does not use its budget at a profiled length, with the lengths.

    Args:
        profile: what the plan was compiled from.
        cost: of the device that it was compiled for.
        options: settled, of the plan.
    """
    dense = [entry.length for entry in profile.lengths if entry.reuse and decode.bucket(entry.length).dense]
    if not dense:
        return ()
    anyway = choose_filter_layers(profile, cost, replace(options, crossover=False))
    slower = [length for length in dense if not anyway.bucket(length).dense]
    lossy = [length for length in dense if length not in slower]
    budget = f"its budget ({options.decode_budget}) is not used"
    lines = [
        f"decode at {_listed(slower)} runs dense, {budget}: it is not predicted to be faster there on {cost.device} "
        f"({cost.backend}, {cost.dtype}); --no-crossover keeps it sparse"
    ]
    why = f"the {options.filter_rule} rule found no layers that could share a choice"
    if options.filter_rule == "dp":
        why = (
            f"no choice of fewer tokens than all is known to lose at most {options.decode_loss:g} of the attention "
            "there; change --decode-loss or --decode-budget"
        )
    lines += [f"decode at {_listed(lossy)} runs dense, {budget}: {why}"]
    return tuple(line for line, lengths in zip(lines, (slower, lossy), strict=True) if lengths)


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(format_length, lengths))


def offload_remarks(profile: Profile, cost: DeviceCost, decode: DecodePlan) -> tuple[str, ...]:
    """What of decode with rows in host memory could not be predicted, and why."""
    if decode.offload is None:
        return ()
    if cost.decode_host is None:
        return (
            "decode is not predicted: the device cost has no prices of rows in host memory; measure again with "
            "--offload (leave --cost out)",
        )
    return tuple(_read_back(profile, cost, decode, decode.offload))


def _read_back(profile: Profile, cost: DeviceCost, decode: DecodePlan, offload: Offload) -> Iterator[str]:
    for entry in profile.lengths:
        bucket, at = decode.bucket(entry.length), format_length(entry.length)
        step = step_us(bucket.segments, cost, entry.length, profile.model, offload)
        dense_us = dense_step_us(cost, entry.length, profile.model)
        if step is None:
            yield (
                f"decode at {at} is not predicted: layers whose rows are in host memory run dense there and read all "
                "of them back in every step"
            )
        elif step > dense_us:
            yield (
                f"decode at {at} is predicted to take {step / max(dense_us, 1e-9):.2f} times as long as dense with all "
                "rows on the device: chosen rows come from host memory; leave --offload out where they fit"
            )
