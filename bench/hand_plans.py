"""Plans made by hand, at stated densities or budgets, for a model that has none."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch

from sparsekv.bench.structure import diffuse_pattern
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.plans.brief import decode_share
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, Pattern, TileShape, fraction, tokens
from sparsekv.plans.phases import (
    CHOSEN_SHARE,
    RECENT,
    SINK,
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    Eviction,
    HeadGroup,
    PrefillBucket,
    PrefillPlan,
    Segment,
    followers,
)
from sparsekv.plans.schema import Cost, LayerCounts, Plan, Prediction
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.timed_layers import HeadShares, head_shares

FAMILIES = ("vertical_slash", "a_shape")
_CROSSOVER = 8192  # up to which a plan for requests is dense
_GENERATED = 256  # the newest tokens of an answer that layers keep by it
_WHOLE, _OBSERVE = 3, 256  # layers that drop nothing, and the queries that others choose by


def hand_plan(
    info: ModelInfo,
    lengths: Sequence[int],
    densities: Sequence[float],
    tile: TileShape,
    families: Sequence[str] = FAMILIES,
) -> tuple[Plan, str]:
    """A bucket for each length, families assigned to the heads of every full-attention layer in turn; and in words.

    Budgets are such that they come to the density where attention is diffuse, as it is with random weights: the
    diagonals of vertical_slash heads are then scattered, and `max_tiles` is what binds.

    Args:
        densities: one for all lengths, or one for each.
    """
    if not info.full_layers:
        raise UsageError(f"expected layers with full attention, found none among {info.layers}; take more layers")
    if len(densities) not in (1, len(lengths)):
        raise UsageError(f"expected one density, or one for each of {len(lengths)} lengths, found {len(densities)}")
    paired = sorted(zip(lengths, tuple(densities) * len(lengths) if len(densities) == 1 else densities, strict=True))
    buckets = tuple(
        PrefillBucket(up_to=length if length < max(lengths) else None, heads=_groups(info, patterns))
        for length, share in paired
        for patterns in [[diffuse_pattern(family, length, share, tile) for family in families]]
    )
    words = f"{_sized(families, [share for _, share in paired])}, {tile.key} tiles"
    return Plan(status="unverified", model=info, prefill=PrefillPlan(tile=tile, lengths=buckets)), words


def _sized(families: Sequence[str], shares: Sequence[float]) -> str:
    in_turn = f"{' and '.join(families)}{' in turn' if len(families) > 1 else ''}"
    return f"made by hand: {in_turn}, sized for a density of {', '.join(f'{share:g}' for share in shares)}"


def _groups(info: ModelInfo, patterns: Sequence[Pattern]) -> tuple[HeadGroup, ...]:
    return tuple(
        HeadGroup(layer=layer, heads=tuple(range(number, group.heads, len(patterns))), pattern=pattern)
        for group in info.attention
        if group.kind == "full"
        for layer in group.layers
        for number, pattern in enumerate(patterns)
        if number < group.heads
    )


def dummy_plan(
    info: ModelInfo,
    lengths: Sequence[int],
    densities: Sequence[float],
    tile: TileShape,
    families: Sequence[str] = FAMILIES,
) -> tuple[Plan, str]:
    """A plan made by hand that has these densities with vLLM's dummy weights; and in words.

    Those are so small that all scores are nearly equal. The best diagonals are then neighbours, which every row sees,
    and not scattered ones: a plan sized for scattered ones would be far denser, whether prompts are cut or not.

    Args:
        densities: one for all lengths, or one for each.
    """
    each = tuple(densities) * len(lengths) if len(densities) == 1 else tuple(densities)
    sized = partial(_asked, tile=tile, families=families)
    asked = tuple(map(sized, lengths, each)) if len(each) == len(lengths) else each
    plan, _ = hand_plan(info, lengths, asked, tile, families)
    shares = [share for _, share in sorted(zip(lengths, each, strict=True))]
    return plan, f"{_sized(families, shares)} with equal scores, {tile.key} tiles"


def _asked(length: int, share: float, tile: TileShape, families: Sequence[str]) -> float:
    """The density to size patterns for so that equal scores give `share`."""
    q_BHSD, k_BGSD = _equal_scores(length, len(families))
    chunk, least, most = Chunk.uniform(1, 0, length), 0.0, share
    for _ in range(7):
        middle = (least + most) / 2
        patterns = tuple(diffuse_pattern(family, length, middle, tile) for family in families)
        index = build_index(patterns, q_BHSD, k_BGSD, chunk, tile, scale=0.25, window=None, builder="torch")
        least, most = (middle, most) if density(index, chunk) < share else (least, middle)
    return most


def _equal_scores(length: int, heads: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [1e-4 * torch.randn((1, heads, length, 16), generator=generator) for _ in range(2)]


def counted_plan(plan: Plan, lengths: Sequence[int]) -> Plan:
    """A plan of `dummy_plan` with the tiles and columns that equal scores give, as a planner counts them."""
    assert plan.prefill is not None, "plans made by hand have a prefill phase"
    tile, counted = plan.prefill.tile, []
    for length in lengths:
        groups = plan.prefill.bucket(length).heads
        patterns = tuple(dict.fromkeys(group.pattern for group in groups))
        q_BHSD, k_BGSD, chunk = *_equal_scores(length, len(patterns)), Chunk.uniform(1, 0, length)
        index = build_index(patterns, q_BHSD, k_BGSD, chunk, tile, scale=0.25, window=None, builder="torch")
        shares = dict(zip(patterns, head_shares(index, chunk), strict=True))
        by_layer: dict[int, dict[int, HeadShares]] = {}
        for group in groups:
            by_layer.setdefault(group.layer, {}).update(dict.fromkeys(group.heads, shares[group.pattern]))
        counts = tuple(
            LayerCounts(layer=layer, tiles=tiles, columns=singles)
            for layer, heads in by_layer.items()
            for tiles, singles in [zip(*(heads[head] for head in sorted(heads)), strict=True)]
        )
        counted.append(Prediction(length=length, computed=counts))
    return plan.model_copy(update={"cost": Cost(device="none", backend="triton", lengths=tuple(counted))})


def dense_up_to(plan: Plan, length: int) -> Plan:
    """A plan made by hand that is dense up to a length: where a sparse tile costs more than it saves."""
    assert plan.prefill is not None, "plans made by hand have a prefill phase"
    longer = [bucket for bucket in plan.prefill.lengths if bucket.up_to is None or bucket.up_to > length]
    lengths = (PrefillBucket(up_to=length, dense=True), *longer)
    prefill, decode = plan.prefill.model_copy(update={"lengths": lengths}), plan.decode
    if decode is not None:
        decode = decode.model_copy(update={"lengths": (DecodeBucket(up_to=length, dense=True), *decode.lengths)})
    return plan.model_copy(update={"prefill": prefill, "decode": decode})


def serve_by_hand(plan: Plan, words: str, longest: int, chosen: Budget | None, keep: int | None) -> tuple[Plan, str]:
    """A plan made by hand for prefill and its words, with other phases for requests, dense where prompts are short.

    Args:
        longest: see `decode_by_hand`, as of `chosen`; without that, decode is dense.
        keep: see `kept_by_hand`; without it, every token stays cached.
    """
    if chosen is not None:
        by_hand, filters = decode_by_hand(plan.model, longest, chosen)
        plan, words = plan.model_copy(update={"decode": by_hand.decode}), f"{words}; {filters}"
    plan, words = dense_up_to(plan, _CROSSOVER), f"{words}, dense up to {_CROSSOVER}"
    if keep is not None:
        rules, kept = kept_by_hand(plan.model, keep, _GENERATED)
        plan, words = plan.model_copy(update={"kv_cache": rules}), f"{words}; {kept}"
    return plan, words


def decode_by_hand(info: ModelInfo, longest: int, chosen: Budget | None = None) -> tuple[Plan, str]:
    """A decode plan for every length, and in words: filter layers by depth, each of which chooses for all up to the
    next.

    Args:
        longest: tokens of the longest context, of which a budget that is a share is taken.
        chosen: the budget of a filter layer; None is the planner's share.
    """
    filters, chosen = _by_depth(info.full_layers), chosen or fraction(CHOSEN_SHARE)
    if not filters:
        raise UsageError(f"expected two layers with full attention, found {len(info.full_layers)}; take another model")
    at_most = None if chosen.fraction is None else chosen.resolve(longest)
    budget = DecodeBudget(tokens=chosen.tokens, fraction=chosen.fraction, at_most=at_most)
    segments = tuple(
        Segment(filter=layer, layers=layers, budget=budget, sink=SINK, recent=RECENT)
        for layer, layers in followers(filters, info.full_layers).items()
    )
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=segments),))
    words = f"made by hand: filter layers {format_ids(filters)} choose {budget}; {SINK} sinks, {RECENT} recent"
    return Plan(status="unverified", model=info, decode=decode), words


def budget_of(info: ModelInfo, length: int, share: float) -> Budget:
    """The budget by which a step of a plan made by hand reads a share of the cached tokens at a length."""

    def read(part: float) -> float:
        plan, _ = decode_by_hand(info, length, fraction(part))
        return decode_share(plan, length).computed or 1.0

    low, high = 0.05, 0.25  # between which what is read grows evenly
    part = low + (share - read(low)) / (read(high) - read(low)) * (high - low)
    return fraction(round(min(max(part, 0.01), 1.0), 4))


def _by_depth(full: Sequence[int]) -> tuple[int, ...]:
    """Layers 2, 8 and 18 of 32, and where that is in other models: near the filter layers of published plans."""
    count = len(full)
    at = [number for number in (2, max(4, count // 4), max(6, count * 9 // 16)) if number <= count - 2]
    return tuple(full[number] for number in at or [count - 2] if number >= 0)


def kept_by_hand(info: ModelInfo, keep: int, generated: int) -> tuple[tuple[Eviction, ...], str]:
    """Rules by which all layers but the first three keep so many tokens by their score; and in words.

    Args:
        keep: tokens of a prompt, besides its first and last ones.
        generated: of an answer, the newest.
    """
    layers = tuple(layer for layer in info.full_layers if layer not in info.sharing)[_WHOLE:]
    if not layers:
        raise UsageError(
            f"expected more than {_WHOLE} layers with full attention beside keep, found {len(info.full_layers)}; "
            "take a deeper model, or a plan"
        )
    rule = Eviction(
        layers=layers, keep=tokens(keep), sink=SINK, recent=RECENT, generated=generated, score="attention_sum",
        observe=_OBSERVE, heads="max",
    )  # fmt: skip
    words = f"layers {format_ids(layers)} keep {keep} + {SINK + RECENT} tokens and {generated} of an answer"
    return (rule,), words
