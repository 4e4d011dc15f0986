"""What to know about a plan besides its figures: where it is denser than asked for and why, what was not predicted."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np

from sparsekv.kernels.decode.slots import MOST_SLOTS
from sparsekv.planner.allocate import allocate
from sparsekv.planner.cost.crossover import first_paying, pays
from sparsekv.planner.cost.device_cost import DeviceCost
from sparsekv.planner.cost.predict import (
    DENSE,
    ScoreTables,
    at_usual_density,
    choice_of,
    dense_step_us,
    layer_times,
    prefill_estimate,
    step_us,
)
from sparsekv.planner.filter_layers import choose_filter_layers, takes_trials
from sparsekv.planner.options import ROUNDING, PlanOptions, density_for, lengths_up_to
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import Budget
from sparsekv.plans.phases import DecodeBudget, DecodePlan, Offload, PrefillPlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.stores.bank import Reads, allocated_slots

_HOURS_ON_A_CPU = 32768


def plan_remarks(plan: Plan, options: PlanOptions, profile: Profile, cost: DeviceCost) -> tuple[str, ...]:
    """A line for each thing to know about a plan; `options` are those it was compiled with."""
    lines: list[str] = []
    if plan.prefill:
        lines += crossover_remarks(profile, cost, plan.prefill, options)
        lines += no_sparse_prefill_remarks(profile, cost, plan.prefill, options)
    if cost.host == "vllm":
        lines.append(
            f"measured for vLLM in steps of {cost.chunk} tokens (max_num_batched_tokens); the plan has no decode "
            "phase: decode runs dense there yet"
        )
    if plan.decode:
        lines += dense_decode_remarks(profile, cost, plan.decode, options)
        lines += no_sparse_decode_remarks(profile, cost, plan.decode, options)
        lines += sparse_decode_remarks(profile, cost, plan.decode)
        lines += offload_remarks(profile, cost, plan.decode, options)
        lines += unpriced_remarks(profile, cost, options)
    return (*lines, *extrapolation_remarks(plan, profile, cost))


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
        for entry, target in zip(entries, targets, strict=True):
            default = options.density_is_default and target == density_for(entry.length)
            lines.append(_denser(entry, prefill, target, f"the {'default ' if default else ''}target", device))
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
    found = prefill_estimate(cost, tables, choice, profile)
    speedup = found.dense_us / max(found.sparse_us, 1e-9)
    if speedup >= target:
        return None
    return (
        f"prefill attention at {format_length(entry.length)} is predicted to be {speedup:.2f} times as fast as dense, "
        f"less than the {target:g} that was asked for: that is the lowest density profiled there"
    )


def _denser(entry: LengthProfile, prefill: PrefillPlan, target: float, named: str, device: str) -> str | None:
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
        f"prefill at {at} is predicted to compute {density:.3f} of the tiles, more than {named} of {target:g}: dense "
        f"is predicted to be faster for {_counted(int(np.sum(whole_L)), heads, len(choice))} {device}; the others keep "
        "to the target, --no-crossover holds all heads to it"
    )


def _counted(layers: int, heads: int, of: int) -> str:
    parts = [f"{layers} of {of} layers"] if layers else []
    parts += [f"{heads} {'other ' if layers else ''}{'head' if heads == 1 else 'heads'}"] if heads else []
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
    if takes_trials(profile, options):
        why = (
            f"none of the filter layers tried is known to stay within {options.decode_bound:g} nats of dense there; "
            "change --decode-kl or --decode-budget"
        )
    elif options.filter_rule == "dp":
        why = (
            f"no choice of fewer tokens than all is known to lose at most {options.loss_bound:g} of the attention "
            "there; change --decode-loss or --decode-budget"
        )
    lines += [f"decode at {_listed(lossy)} runs dense, {budget}: {why}"]
    return tuple(line for line, lengths in zip(lines, (slower, lossy), strict=True) if lengths)


def no_sparse_decode_remarks(
    profile: Profile, cost: DeviceCost, decode: DecodePlan, options: PlanOptions
) -> tuple[str, ...]:
    """Of decode that is dense at every length because that is faster: from which length on it would gain.

    Args:
        profile: what the plan was compiled from.
        cost: of the device that it was compiled for.
        options: settled, of the plan.
    """
    longest = profile.lengths[-1].length
    if decode.sparse_layers or not options.crossover:
        return ()
    segments = choose_filter_layers(profile, cost, replace(options, crossover=False)).bucket(longest).segments
    if not segments:  # no choice is good enough, however long it takes
        return ()

    def pays_at(length: int) -> bool:
        grown = tuple(_grown(segment, options.decode_budget, length) for segment in segments)
        step = step_us(grown, cost, length, profile.model)
        return step is not None and pays(step, dense_step_us(cost, length, profile.model))

    return (_would_gain("decode", first_paying(pays_at, longest), profile, cost),)


def _grown(segment: Segment, budget: Budget, length: int) -> Segment:
    """The segment as a plan for this length would have it."""
    at_most = None if budget.fraction is None else budget.resolve(length)
    grown = DecodeBudget(tokens=budget.tokens, fraction=budget.fraction, at_most=at_most)
    return segment.model_copy(update={"budget": grown})


def no_sparse_prefill_remarks(
    profile: Profile, cost: DeviceCost, prefill: PrefillPlan, options: PlanOptions
) -> tuple[str, ...]:
    """Of a prefill that is dense at every length: from which length on it would gain.

    Args:
        profile: what the plan was compiled from.
        cost: of the device that it was compiled for.
        options: settled, of the plan.
    """
    entry = profile.lengths[-1]
    if not options.crossover or not all(prefill.bucket(one.length).dense for one in profile.lengths):
        return ()
    tables = ScoreTables.of(entry)
    try:
        anyway = choice_of(allocate(profile, cost, replace(options, crossover=False)).bucket(entry.length), tables)
    except UsageError:  # where nothing is to be dense, no candidates come to the target
        return ()
    assert anyway is not None, "allocated from this very profile"

    def pays_at(length: int) -> bool:
        times = layer_times(cost, at_usual_density(tables, length), anyway, profile.tile)
        return pays(float(times.sparse_us.sum()), float(times.dense_us.sum()))

    return (_would_gain("prefill", first_paying(pays_at, entry.length), profile, cost),)


def _would_gain(phase: str, found: int | None, profile: Profile, cost: DeviceCost) -> str:
    """Why a phase is dense at every length, and what would not be."""
    context, planned = profile.model.context_length, [entry.length for entry in profile.lengths]
    dense = f"dense {phase} is faster up to {planned[-1]} tokens on {cost.device}: sparse {phase}"
    if found is None:
        return f"{dense} is not predicted to gain at any length"
    gain = f"{dense} would gain from about {found} tokens, by extrapolation"
    if found > context:
        return f"{gain}; this model's context ends at {context}: plan a model with a longer one"
    return f"{gain}; --lengths {','.join(map(format_length, (*planned, *_from(found, context))))} plans that"


def _from(found: int, context: int) -> tuple[int, ...]:
    """A length well above `found`, where the gain is: a power of two, or the end of a context that has few more."""
    power = 1 << (found + found // 2 - 1).bit_length()
    return (power,) if 2 * power <= context else (context,)


def sparse_decode_remarks(profile: Profile, cost: DeviceCost, decode: DecodePlan) -> tuple[str, ...]:
    """From which length on decode is sparse, and what that is predicted to gain."""
    ratios = []
    for entry in profile.lengths:
        segments, dense_us = decode.bucket(entry.length).segments, dense_step_us(cost, entry.length, profile.model)
        step = step_us(segments, cost, entry.length, profile.model, decode.offload) if segments else None
        if step is not None:
            ratios.append(f"{dense_us / max(step, 1e-9):.2f}x at {format_length(entry.length)}")
    if not ratios:
        return ()
    first = next(position for position, bucket in enumerate(decode.lengths) if bucket.segments)
    start = f"from {decode.lengths[first - 1].up_to or 0} cached tokens on" if first else "at every length"
    return (
        f"decode is sparse {start}: predicted speedup of attention in a step {', '.join(ratios)} on {cost.device}; the "
        "rest of a step (weights, sampling) takes as long as before and is not in these ratios",
    )


def extrapolation_remarks(plan: Plan, profile: Profile, cost: DeviceCost) -> tuple[str, ...]:
    """What holds for contexts longer than any that was profiled, where the model has them, and how to plan these."""
    longest, context = profile.lengths[-1].length, profile.model.context_length
    if longest >= context:
        return ()
    phases = [phase for phase in (plan.prefill, plan.decode) if phase]
    dense = all(phase.bucket(context).dense for phase in phases)
    what = "run dense" if dense else f"run by what was found at {format_length(longest)}, extrapolated and not verified"
    lengths = ",".join(map(format_length, lengths_up_to(context, [entry.length for entry in profile.lengths])))
    slow = ", which takes a CPU hours" if cost.backend == "cpu" and context >= _HOURS_ON_A_CPU else ""
    return (
        f"contexts above {format_length(longest)}, up to the model's {format_length(context)}, were not profiled and "
        f"{what}; --lengths {lengths} plans them{slow}",
    )


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(format_length, lengths))


def unpriced_remarks(profile: Profile, cost: DeviceCost, options: PlanOptions) -> tuple[str, ...]:
    """Of filter layers that were tried over their own choice, where the device cost has no price of that."""
    trials = [trial for entry in profile.lengths for trial in entry.trials] if takes_trials(profile, options) else []
    tried = any(segment.filter_is_sparse for trial in trials for segment in trial.segments)
    if cost.decode_choose_alone is not None or not tried:
        return ()
    return (
        "filter layers that attend to their own choice were tried, but the device cost has no price of that: decode "
        "with them is not predicted, and not planned but with --no-crossover; measure again (leave --cost out)",
    )


def offload_remarks(profile: Profile, cost: DeviceCost, decode: DecodePlan, options: PlanOptions) -> tuple[str, ...]:
    """What of decode with rows in host memory was not planned, or could not be predicted, and why."""
    if decode.offload is None:
        if options.offload and decode.sparse_layers:
            return ("nothing is offloaded: every sparse layer chooses for itself, and so reads all keys in each step",)
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
        if step is None and cost.decode_choose_alone is None and any(one.filter_is_sparse for one in bucket.segments):
            continue  # told of by `unpriced_remarks`
        if step is None:
            yield (
                f"decode at {at} is not predicted: layers whose rows are in host memory run dense there and read all "
                "of them back in every step"
            )
        elif step > dense_us:
            yield (
                f"decode at {at} is predicted to take {step / max(dense_us, 1e-9):.2f} times as long as dense with all "
                "rows on the device: chosen rows come from host memory; leave --offload out where they fit (attention "
                "alone: captured steps on a GPU fetch rows while the rest of the layers computes as well; `bench "
                "decode --offload` times whole tokens)"
            )
        if step is not None and cost.backend in ("flash", "triton"):  # on a GPU, where captured steps were timed
            yield from _not_captured(bucket.segments, offload, entry.length)


def _not_captured(segments: Sequence[Segment], offload: Offload, length: int) -> Iterator[str]:
    """Why steps at a length run as single launches (`obstacle` in runtime/hf/graph_stores.py), where they do."""
    for segment in segments:
        if segment.chosen_tokens(length) is None or not set(offload.layers).intersection(segment.layers):
            continue
        slots = allocated_slots(offload.hot, Reads((segment.budget,), segment.sink, segment.recent), length)
        if slots > MOST_SLOTS:
            reason = (
                f"{slots} slots a layer for chosen rows, of {MOST_SLOTS} that these may have; lower --decode-budget"
            )
        elif segment.recent < 2:
            reason = "1 recent token, of 2 that these need; raise decode_recent"
        elif segment.window > 1:
            reason = f"a selector that looks at older queries ({segment.selector}); leave decode_selectors out"
        else:
            continue
        yield (
            f"decode at {format_length(length)} is predicted as captured steps, and runs as single launches, which "
            f"take longer: {reason}"
        )
        return
