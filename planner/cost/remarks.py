"""What to change about a plan that is denser, or slower, than was asked for: a line each, from its own predictions."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from sparsekv.planner.cost.device_cost import DeviceCost
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.settled import Settled, lengths_up_to
from sparsekv.planner.targets import ROUNDING
from sparsekv.plans.phases import DecodePlan, PrefillPlan
from sparsekv.plans.schema import Estimate, Plan
from sparsekv.plans.types import format_length


def plan_remarks(plan: Plan, options: Settled, profile: Profile, cost: DeviceCost) -> tuple[str, ...]:
    """A line for each thing to change about a plan; `options` are those it was compiled with, settled."""
    assert plan.cost is not None, "compiled just now"
    lines: list[str] = []
    if cost.host == "vllm":
        lines.append(f"timed in steps of {cost.chunk} tokens: serve it with --max-num-batched-tokens {cost.chunk}")
    if plan.prefill:
        found = {entry.length: entry.prefill for entry in plan.cost.lengths if entry.prefill}
        lines += _of_prefill(plan.prefill, found, options, profile)
    if plan.decode:
        steps = {entry.length: entry.decode for entry in plan.cost.lengths if entry.decode}
        lines += _of_decode(plan.decode, steps, options, profile)
        if plan.decode.offload and cost.decode_host is None:
            lines.append(
                "decode is not predicted: the device cost has no prices of rows in host memory; leave --cost out"
            )
    longest, context = profile.lengths[-1].length, profile.model.context_length
    if longest < context:
        lengths = ",".join(map(format_length, lengths_up_to(context, [entry.length for entry in profile.lengths])))
        lines.append(f"contexts above {format_length(longest)} were not profiled; --lengths {lengths} plans them")
    return tuple(lines)


def _of_prefill(prefill: PrefillPlan, found: dict[int, Estimate], options: Settled, profile: Profile) -> Iterator[str]:
    entries = [entry for entry in profile.lengths if entry.layers]
    dense = [entry.length for entry in entries if prefill.bucket(entry.length).dense]
    if lost := [length for length in dense if length not in options.dense_at("prefill")]:
        yield f"prefill at {_listed(lost)} runs dense, predicted to be faster; plan longer --lengths or --no-crossover"
    speedup = options.target_speedup
    targets: Sequence[float] = options.target_density or [entry.densities[-1] for entry in entries]
    for entry, target in zip(entries, targets if speedup is None else [math.inf] * len(entries), strict=True):
        if entry.length in dense or entry.length not in found:
            continue
        at, estimate = format_length(entry.length), found[entry.length]
        if options.crossover and estimate.density > target * (1.0 + ROUNDING):
            yield (
                f"prefill at {at} computes {estimate.density:.3f} of the tiles, not {target:g}: some heads are "
                "predicted to be faster dense; --no-crossover makes them sparse"
            )
        if speedup is not None and (gain := estimate.dense_us / max(estimate.sparse_us, 1e-9)) < speedup:
            yield f"prefill at {at} gains {gain:.2f}x, not {speedup:g}x: the sparsest that was profiled"


def _of_decode(decode: DecodePlan, steps: dict[int, Estimate], options: Settled, profile: Profile) -> Iterator[str]:
    lengths = [entry.length for entry in profile.lengths if entry.reuse]
    missed = options.dense_at("decode")
    if dense := [length for length in lengths if decode.bucket(length).dense and length not in missed]:
        bound = "--decode-loss" if options.decode_loss is not None else "--decode-kl"
        yield (
            f"decode at {_listed(dense)} runs dense: nothing within {bound} is predicted to be faster; raise it or "
            "--decode-budget, or --no-crossover"
        )
    if options.offload and decode.offload is None and decode.sparse_layers:
        yield "nothing is offloaded: every sparse layer chooses for itself, and so reads all keys in each step"
    slower = [length for length, step in steps.items() if step.sparse_us > step.dense_us]
    if slower and decode.offload:
        yield f"decode at {_listed(slower)} is slower than dense on the device; leave --offload out where rows fit"


def _listed(lengths: Sequence[int]) -> str:
    return ", ".join(map(format_length, lengths))
