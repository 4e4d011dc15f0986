"""Checks whether a host may run a plan on a model, before anything runs: refusals and warnings, among them of other
work on the cores of a CPU, which slows it down by more than its share."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache

import torch

from sparsekv.kernels.methods import EvictionScore, Method, PrefillRule, registry
from sparsekv.plans.errors import PlanWarning, UnsupportedError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.phases import Segment
from sparsekv.plans.schema import Plan, check_model, cut_text, unsupported
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.program import Rank
from sparsekv.runtime.settings import threads_spin


@dataclass(frozen=True, slots=True)
class Host:
    """The abilities of a host, as far as hosts differ."""

    name: str = "transformers"
    older_queries: bool = True  # filter layers may choose by more than the newest query
    windows: bool = True  # layers with a sliding window may prefill sparse
    evicts: bool = True
    mixed_caches: bool = True  # they may beside layers whose caches have another shape
    indexers: bool = False  # a model's own, which a plan has some layers share
    drafts: bool = False  # decode drafts only, and the output is that of dense attention (exact output)
    is_engine: bool = False  # methods from outside run where they say so
    ranks: int = 1  # of tensor parallelism: each has some heads of every layer
    obstacles: tuple[str, ...] = ()  # a sentence for each of its own settings that stands in the way of the plan
    way_out: str = "Make a plan without it."


def check_plan(
    plan: Plan, found: ModelInfo, allow_mismatch: bool = False, option: str = "", host: Host | None = None
) -> None:
    """Refuses a plan that would run wrongly, and warns (`PlanWarning`) of one whose quality was measured elsewhere."""
    for line in check_model(plan, found, allow_mismatch, option):
        warnings.warn(line, PlanWarning, stacklevel=3)
    refuse(plan, found, host or Host())


def refuse(plan: Plan, model: ModelInfo, host: Host) -> None:
    """Raises UnsupportedError with a sentence for everything in a plan that a host cannot run on a model."""
    refused = [*unsupported(plan), *_beyond(plan, model, host), *_across_ranks(plan, model, host.ranks)]
    refused += [*_from_outside(plan, host), *host.obstacles]
    if refused:
        listed = "\n".join(f"  {line}" for line in refused)
        raise UnsupportedError(f"expected a plan that {host.name} executes in full, found:\n{listed}\n{host.way_out}")


def _beyond(plan: Plan, model: ModelInfo, host: Host) -> Iterator[str]:
    shapes = {(group.kv_heads, group.head_dim) for group in model.attention}
    linear = [layer for group in model.attention if group.kind == "linear" for layer in group.layers]
    sliding = {layer for group in model.attention if group.kind == "sliding" for layer in group.layers}
    sparse = {group.layer for bucket in (plan.prefill.lengths if plan.prefill else ()) for group in bucket.heads}
    segments = segments_of(plan)
    looking_back = {segment.filter for segment in segments if segment.selector != "last" and segment.window > 1}
    evicting = format_ids(plan.evicting)
    sentences = {
        f"filter layers {format_ids(sorted(looking_back))} that choose by more than the newest query, which "
        f"{host.name} does not keep: plan with the selector `last`": looking_back and not host.older_queries,
        f"prefill patterns in layers with a sliding window ({format_ids(sorted(sliding & sparse))}), behind which "
        f"{host.name} frees the keys: leave these dense": sliding & sparse and not host.windows,
        f"layers {evicting} that evict tokens, which {host.name} cannot: plan without `kv_cache`": plan.evicting
        and not host.evicts,
        f"layers {evicting} that evict tokens beside caches of another shape: plan without `kv_cache`": plan.evicting
        and (len(shapes) > 1 or linear)
        and not host.mixed_caches,
        f"index_sharing, a setting of the model that {host.name} has itself: give it the line that `sparsekv export "
        "--to index-topk` prints, and no plan": plan.index_sharing and not host.indexers,
        "exact output by a plan whose decode is dense, which drafts nothing: plan decode with a larger --loss and "
        "--no-verify, as drafts are checked": host.drafts and not segments,
        f"exact output where layers {evicting} evict tokens: plan without `kv_cache`": host.drafts and plan.evicting,
        f"exact output by layers with a recurrent state ({format_ids(linear)}), from which drafts cannot be taken "
        "back": host.drafts and linear,
    }
    return (sentence for sentence, holds in sentences.items() if holds)


def _from_outside(plan: Plan, host: Host) -> Iterator[str]:
    scores = {rule.score or "" for rule in plan.evicting.values() if not rule.is_built_in}
    named: dict[type[Method], frozenset[str] | set[str]] = {EvictionScore: scores}
    named[PrefillRule] = plan.prefill.rules if plan.prefill else frozenset()
    or_file = "" if host.is_engine else ", or name its file (--methods FILE)"
    for kind, name in ((kind, name) for kind, names in named.items() for name in sorted(names)):
        method, what = registry().get(name), f"the {kind.__name__} {name}"
        if not isinstance(method, kind):
            yield f"{what}, which nobody registered here: install its package{or_file}"
        elif isinstance(method, EvictionScore) and (method.needs_statistics or method.shares_budget):
            yield f"{what}, of which `sparsekv compare` alone has the statistics or the masks: use another score"
        elif host.is_engine and not method.engines:
            yield f"{what}, which does not say that it runs in engines (`engines = True`)"


def _across_ranks(plan: Plan, model: ModelInfo, ranks: int) -> Iterator[str]:
    """Each rank checks the heads of all ranks: one that refused alone would leave the others waiting for it."""
    for group in model.attention:
        if group.heads % ranks or max(group.kv_heads, ranks) % min(group.kv_heads, ranks):
            yield f"{ranks} ranks for {group.heads} query and {group.kv_heads} KV heads: use a number that divides both"
            return
    fewest, fewer = min(group.kv_heads for group in model.attention), "use fewer ranks, or `heads: max`"
    if plan.evicting and ranks > fewest:
        evicting = format_ids(plan.evicting)
        yield f"{ranks} ranks that share {fewest} KV heads, where layers {evicting} evict tokens: use {fewest} or fewer"
    for segment in {str(segment): segment for segment in segments_of(plan)}.values():
        kv_heads = model.group_of(segment.filter).kv_heads
        if segment.heads != "max" and segment.scope == "global" and ranks > kv_heads:
            yield f"{ranks} ranks for segment {segment}, whose {kv_heads} KV heads choose by themselves: {fewer}"
        elif any(_crosses(segment, model, Rank(rank, ranks)) for rank in range(ranks)):
            yield f"{ranks} ranks for segment {segment}, in whose head maps one takes the choice of another: {fewer}"


def _crosses(segment: Segment, model: ModelInfo, rank: Rank) -> bool:
    """True where a KV head of a layer on this rank takes the choice of a KV head on another."""
    maps = {} if isinstance(segment.heads, str) else segment.heads
    own = rank.heads(model.group_of(segment.filter))[1]
    taken = (source for layer, sources in maps.items() for source in sources[rank.heads(model.group_of(layer))[1]])
    return any(not own.start <= source < own.stop for source in taken)


def segments_of(plan: Plan) -> list[Segment]:
    return [segment for bucket in (plan.decode.lengths if plan.decode else ()) for segment in bucket.segments]


def check_stored(plan: Plan, dtype: str, float8: bool = False) -> None:
    """Warns (`PlanWarning`) where the quality of a plan was measured with keys and values in another precision."""
    stored = {target.kv_dtype or target.dtype for target in plan.targets}
    if stored and (here := "fp8" if float8 else dtype) not in stored and "fp8" in (here, *stored):
        warnings.warn(
            f"quality of this plan was measured with keys and values in {' and '.join(sorted(stored))}, not in {here}: "
            f"answers may differ from it; plan with --set kv_dtype={'fp8' if float8 else 'auto'} for these",
            PlanWarning,
            stacklevel=3,
        )


def check_cut(plan: Plan, chunk: int | None, tokens: int) -> None:
    """Warns (`PlanWarning`), of each cut once, where a plan was verified on prompts that were cut in another way than
    into chunks of so many tokens; None is a whole prompt."""
    if plan.status != "verified" or plan.quality is None or plan.prefill is None:
        return
    length = min(tokens, max((measured.length for measured in plan.quality.lengths), default=tokens))
    known, here = (cut if cut and cut < length else None for cut in (plan.quality.step, chunk))
    if known != here and not plan.prefill.bucket(length).dense:
        again = f"`sparsekv verify --plan PLAN --write --prefill-chunk {here or plan.model.context_length}` does"
        alike = f", or cut them at {known}" if known else ""
        warnings.warn(
            f"this plan was verified with prompts {cut_text(known)}, and here they run {cut_text(here)}: nothing is "
            f"proven of that; {again}{alike}",
            PlanWarning,
            stacklevel=1,  # one place for all callers, so that nobody is told twice
        )


_BESIDE = 0.5  # above the cores, that our own threads alone may fill


def _is_overloaded(device: torch.device) -> bool:
    """True of a CPU whose load of the last minute is above its cores."""
    with suppress(OSError):  # it is not told everywhere
        return device.type == "cpu" and os.getloadavg()[0] > (os.cpu_count() or 1) + _BESIDE
    return False


def warn_of_spinning(device: torch.device) -> None:
    """Warns (`PlanWarning`), once in a process, where threads that wait keep cores from those that they wait for. For
    the calls of the Python API, in which torch is loaded before ours: the command line sets the policy first."""
    if torch.get_num_threads() > 1 and threads_spin() and _is_overloaded(device):
        _warn_of_spinning()


@cache
def _warn_of_spinning() -> None:
    warnings.warn(
        "this machine has more to do than it has cores, and torch was loaded with threads that spin while they wait: "
        "every step takes many times as long. Set OMP_WAIT_POLICY=passive before Python starts",
        PlanWarning,
        stacklevel=4,  # the caller of apply or plan_model
    )
