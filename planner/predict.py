"""Predicts what a plan costs, from a profile and the prices of a device. Nothing is timed here, and nothing is decided:
a host measures from where on sparse attention is faster (runtime/core/pays.py).

Shapes: L profiled layers, C slots of candidates, H heads (of the widest layer; absent heads hold nan).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.options import Family
from sparsekv.planner.prices import Floats, Prices
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.plans.model import AttentionGroup, ModelInfo
from sparsekv.plans.patterns import PATTERNS, Dense, Pattern, TileShape
from sparsekv.plans.phases import DecodePlan, PrefillBucket, PrefillPlan, Segment
from sparsekv.plans.schema import Cost, Estimate, LayerCounts, Prediction

DENSE = -1
ABSENT = -2
# Of the worst prompt in the damage of a candidate, beside the mean over prompts. More of it made plans worse on prompts
# that were not calibrated on: the damage is quadratic already, so that one failure outweighs many small errors.
WORST_WEIGHT = 0.1

Choice = npt.NDArray[np.int64]
"""[L, H]: the slot of each head's candidate, DENSE, or ABSENT where a layer has fewer heads."""

Mask = npt.NDArray[np.bool_]


@dataclass(frozen=True, slots=True, eq=False)
class ScoreTables:
    """One length: every layer, slot and head. Costs are shares of the causal tiles of a head."""

    entry: LengthProfile
    damage_LCH: Floats  # weighted by layer; the mean over the prompts, and a part of the worst
    candidate_LCH: npt.NDArray[np.int64]  # -1 of absent heads
    tiles_LCH: Floats
    columns_LCH: Floats
    density_LCH: Floats  # tiles and columns
    present_LH: npt.NDArray[np.bool_]  # heads that exist

    @classmethod
    def of(cls, entry: LengthProfile) -> ScoreTables:
        names = ("candidates", "damage", "worst", "tiles", "columns")
        candidates, mean, worst, tiles, columns = (
            _table([getattr(scores, name) for scores in entry.layers]) for name in names
        )
        weight_L11 = np.array([scores.weight for scores in entry.layers])[:, None, None]
        damage = weight_L11 * ((1.0 - WORST_WEIGHT) * mean + WORST_WEIGHT * worst)
        density = np.minimum(tiles + columns, 1.0)  # each is rounded by itself
        numbers = np.nan_to_num(candidates, nan=-1).astype(np.int64)
        return cls(entry, damage, numbers, tiles, columns, density, ~np.isnan(mean[:, 0]))

    def of_families(self, families: Collection[Family]) -> npt.NDArray[np.bool_]:
        """[L, C, H]: slots whose candidate is of one of these families."""
        own = np.array([candidate.family in families for candidate in self.entry.candidates] + [False])
        return np.asarray(own[self.candidate_LCH])

    def take(self, table_LCH: Floats, choice: Choice, dense: float) -> Floats:
        """[L, H]: the entry of each head's candidate; `dense` for dense heads, 0 for absent ones."""
        taken_LH = np.take_along_axis(table_LCH, np.maximum(choice, 0)[:, None], 1)[:, 0]
        return np.where(choice == ABSENT, 0.0, np.where(choice == DENSE, dense, taken_LH))

    def density(self, choice: Choice) -> float:
        return float(self.take(self.density_LCH, choice, 1.0).sum() / (choice != ABSENT).sum())

    def pattern(self, choice: Choice, layer: int, head: int) -> Pattern:
        candidate = int(choice[layer, head])
        if candidate == DENSE:
            return Dense()
        return self.entry.patterns[self.entry.layers[layer].patterns[candidate][head]]


def _table(rows: list[tuple[tuple[float, ...], ...]]) -> Floats:
    heads = max(len(row) for table in rows for row in table)
    table_LCH = np.full((len(rows), len(rows[0]), heads), np.nan)
    for layer, table in enumerate(rows):
        for candidate, row in enumerate(table):
            table_LCH[layer, candidate, : len(row)] = row
    return table_LCH


def predict(profile: Profile, cost: Prices, prefill: PrefillPlan | None, decode: DecodePlan | None) -> Cost:
    """Dense and sparse attention of each planned phase at every profiled length.

    Patterns that the profile did not measure (of a plan edited by hand) have no price, and are left out.
    """
    lengths = []
    for entry in profile.lengths:
        estimate: Estimate | None = None
        computed: tuple[LayerCounts, ...] = ()
        if prefill and entry.layers:
            tables = ScoreTables.of(entry)
            choice = choice_of(prefill.bucket(entry.length), tables)
            if choice is not None:
                estimate, computed = prefill_estimate(cost, tables, choice, profile), tuple(_counts(tables, choice))
        step = _of_decode(profile, entry.length, decode, cost) if decode else None
        if estimate or step:
            lengths.append(Prediction(length=entry.length, prefill=estimate, computed=computed, decode=step))
    return Cost(device=cost.device, backend=cost.backend, lengths=tuple(lengths))


def _counts(tables: ScoreTables, choice: Choice) -> Iterator[LayerCounts]:
    tiles_LH, columns_LH = tables.take(tables.tiles_LCH, choice, 1.0), tables.take(tables.columns_LCH, choice, 0.0)
    for row, scores in enumerate(tables.entry.layers):
        if (choice[row] >= 0).any():
            tiles, columns = (share_LH[row, choice[row] != ABSENT].tolist() for share_LH in (tiles_LH, columns_LH))
            yield LayerCounts(layer=scores.layer, tiles=tiles, columns=columns)


def causal_tiles(length: int, tile: TileShape, window: int | None = None) -> int:
    """Tiles of a dense head over a whole prompt, in a layer with a window of its own or without."""
    return Chunk.uniform(1, 0, length).causal_tiles(tile, window)


def layer_times(cost: Prices, tables: ScoreTables, choice: Choice) -> tuple[Floats, Floats]:
    """Attention of each profiled layer over a prompt of the profiled length, dense and by these choices, in
    microseconds: [L] each. A layer without sparse heads runs the dense kernel."""
    tokens = tables.entry.length
    dense_L = cost.dense_us(tokens) * (choice != ABSENT).sum(1) / cost.shape.heads
    shares = tables.take(tables.tiles_LCH, choice, 1.0), tables.take(tables.columns_LCH, choice, 0.0)
    sparse_L = np.where(choice == ABSENT, 0.0, cost.heads_us(*shares, tokens)).sum(1)
    for row, choice_H in enumerate(choice):
        sparse = [(int(choice_H[head]), head) for head in np.flatnonzero(choice_H >= 0).tolist()]
        chosen = (tables.entry.candidates[tables.candidate_LCH[row, slot, head]].family for slot, head in sparse)
        for family, heads in Counter(chosen).items():
            launch_us, head_us = cost.index_us(family, tokens)
            sparse_L[row] += launch_us + heads * head_us
    return dense_L, np.where((choice >= 0).any(1), sparse_L, dense_L)


def head_times(cost: Prices, tables: ScoreTables) -> Floats:
    """[L, C, H]: the time of each slot by the prices of a device, as a share of a dense head's: its tiles and columns,
    and its part of an index launch of all heads. At most 1, as hosts are dense where sparse attention is slower."""
    entry, length = tables.entry, tables.entry.length
    # Families that were profiled but not priced are not among those asked for.
    priced = {one.family for one in entry.candidates if one.family in cost.index or one.family not in PATTERNS}
    index = {name: cost.index_us(name, length) for name in priced}
    launch_C, index_C = np.array([*(index.get(one.family, (0.0, np.inf)) for one in entry.candidates), (0.0, np.inf)]).T
    index_C = index_C + launch_C / cost.shape.heads
    sparse_LCH = cost.heads_us(tables.tiles_LCH, tables.columns_LCH, length) + index_C[tables.candidate_LCH]
    return np.asarray(np.minimum(sparse_LCH / cost.heads_us(np.ones(1), np.zeros(1), length), 1.0))


def prefill_estimate(cost: Prices, tables: ScoreTables, choice: Choice, profile: Profile) -> Estimate:
    """Attention of a whole prefill over all layers, when each head follows its choice.

    Layers with a window of their own compute the same tiles and take the same time either way; they count in both.
    Layers without keys of their own take no time: only the last row of a prompt goes through them.
    """
    (dense_L, sparse_L), length, tile = layer_times(cost, tables, choice), tables.entry.length, profile.tile
    own = [group for group in profile.model.attention if group.keys_of is None]
    windowed = [
        (len(group.layers) * group.heads * causal_tiles(length, tile, group.window), group in own)
        for group in profile.model.attention
        if group.window is not None
    ]
    of_layer = cost.shape.heads * causal_tiles(length, tile)
    same_us = cost.dense_us(length) * sum(tiles for tiles, timed in windowed if timed) / of_layer
    same = sum(tiles for tiles, _ in windowed)
    timed_L = [profile.model.group_of(scores.layer) in own for scores in tables.entry.layers]
    dense = int((choice != ABSENT).sum()) * causal_tiles(length, tile)
    return Estimate(
        dense_us=float(dense_L[timed_L].sum()) + same_us,
        sparse_us=float(sparse_L[timed_L].sum()) + same_us,
        density=(tables.density(choice) * dense + same) / (dense + same),
    )


def choice_of(bucket: PrefillBucket, tables: ScoreTables) -> Choice | None:
    """The candidates of a length that a bucket has; None where it has a pattern that is none of them."""
    choice = np.where(tables.present_LH, DENSE, ABSENT)
    if bucket.dense:
        return choice
    for row, scores in enumerate(tables.entry.layers):
        heads = len(scores.patterns[0])
        for head, pattern in enumerate(bucket.patterns(scores.layer, heads)):
            if isinstance(pattern, Dense):
                continue
            measured = [tables.entry.patterns[positions[head]] for positions in scores.patterns]
            candidate = pattern.in_tokens(tables.entry.length)
            if candidate not in measured:
                return None
            choice[row, head] = measured.index(candidate)
    return choice


def _of_decode(profile: Profile, length: int, plan: DecodePlan, cost: Prices) -> Estimate:
    segments = plan.bucket(length).segments
    return Estimate(
        dense_us=dense_step_us(cost, length, profile.model),
        sparse_us=step_us(segments, cost, length, profile.model),
        density=decode_share(segments, length, profile.model),
    )


def dense_step_us(cost: Prices, length: int, model: ModelInfo, without: Collection[int] = frozenset[int]()) -> float:
    """Attention of one dense decode step over all layers but some, in microseconds."""
    dense = cost.step.dense
    return sum(
        len(set(group.layers).difference(without)) * dense.at(visible_tokens(group, length))
        for group in model.attention
        if group.kind != "linear"
    )


def visible_tokens(group: AttentionGroup, length: int) -> int:
    """The number of `length` cached tokens that a dense layer attends to: those of its own window, or all,
    or none where it has a recurrent state."""
    if group.kind == "linear":
        return 0
    return length if group.window is None else min(length, group.window)


def step_us(segments: Sequence[Segment], cost: Prices, length: int, model: ModelInfo) -> float:
    """Attention of one decode step at this length over all layers, in microseconds, with all keys on the device.

    A filter layer costs what a dense one does, and its choice on top; one that attends to its own choice costs that
    choice, in a pass over the keys, and sparse attention. The rest of a step, weights and sampling, is not
    in it.
    """
    sparse = frozenset(layer for segment in segments for layer in segment.layers)
    total, step = dense_step_us(cost, length, model, sparse), cost.step
    for segment in segments:
        sparse_us, chosen = step.dense.at(length), segment.chosen_tokens(length)
        if chosen is not None:  # else all of the context is attended to, and nothing is chosen
            sparse_us = step.sparse.at(length, (segment.sink + chosen + segment.recent) / length)
            beside = max(0.0, step.chooses.at(length) - step.dense.at(length))  # choosing, beside attention to all
            total += step.chooses_alone.at(length) if segment.filter_is_sparse else beside
        total += len(segment.layers) * sparse_us
    return total


def decode_share(segments: Sequence[Segment], length: int, model: ModelInfo) -> float:
    """Tokens read over tokens that dense reads, over all layers of one step."""
    attended = {layer: segment.read_tokens(layer, length) for segment in segments for layer in segment.layers}
    visible = {layer: visible_tokens(group, length) for layer, group in model.by_layer.items()}
    return sum((visible | attended).values()) / sum(visible.values())
