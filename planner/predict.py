"""What a plan is predicted to cost on a device, from a profile and a device cost. Nothing is timed here."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.cost_data import DeviceCost, PatternName
from sparsekv.planner.profile_data import LengthProfile, Profile
from sparsekv.planner.tables import ABSENT, DENSE, Choice, ScoreTables
from sparsekv.plans.decode import DecodeBucket, DecodePlan
from sparsekv.plans.patterns import Dense, TileShape
from sparsekv.plans.prefill import PrefillBucket, PrefillPlan
from sparsekv.plans.records import Cost, Estimate, Prediction


def predict(profile: Profile, cost: DeviceCost, prefill: PrefillPlan | None, decode: DecodePlan | None) -> Cost:
    """Dense and sparse attention of each planned phase at every profiled length.

    Patterns of the plan that the profile did not measure (a plan edited by hand) make their length unpredictable: it
    is left out.
    """
    lengths = []
    for entry in profile.lengths:
        estimate = _of_prefill(profile, entry, prefill, cost) if prefill and entry.layers else None
        step = _of_decode(profile, entry.length, decode, cost) if decode else None
        if estimate or step:
            lengths.append(Prediction(length=entry.length, prefill=estimate, decode=step))
    return Cost(device=cost.device, backend=cost.backend, lengths=tuple(lengths))


def causal_tiles(length: int, tile: TileShape) -> int:
    """Tiles of a dense head over a whole prompt."""
    return Chunk.uniform(1, 0, length).causal_tiles(tile)


def prefill_estimate(cost: DeviceCost, tables: ScoreTables, choice: Choice, tile: TileShape) -> Estimate:
    """Attention of a whole prefill over the profiled layers, when each head follows its choice."""
    length = tables.entry.length
    causal = causal_tiles(length, tile)
    tiles_LH = tables.take(tables.tiles_LCH, choice, 1.0) * causal
    columns_LH = tables.take(tables.columns_LCH, choice, 0.0) * causal
    dense_us = sparse_us = 0.0
    for row, (tiles_H, columns_H) in enumerate(zip(tiles_LH, columns_LH, strict=True)):
        heads = int((choice[row] != ABSENT).sum())
        layer_us = cost.prefill_dense_us(heads * causal)
        dense_us += layer_us
        kinds = heads_by_pattern(tables, choice[row])
        sparse_us += (
            cost.prefill_sparse_us(float(tiles_H.sum()), float(columns_H.sum()), kinds, length) if kinds else layer_us
        )
    return Estimate(dense_us=dense_us, sparse_us=sparse_us, density=tables.density(choice))


def is_faster_at(cost: DeviceCost, tables: ScoreTables, choice: Choice, tile: TileShape, length: int) -> bool:
    """Whether the patterns chosen at the profiled length are predicted to beat dense at a shorter one.

    Token budgets compute about as many tiles in a row there: that many that the profiled density comes out.
    """
    causal, most = causal_tiles(length, tile), -(-tables.entry.length // tile.key)
    row_tiles = most * (1.0 - math.sqrt(max(0.0, 1.0 - tables.density(choice))))
    causal_T = np.arange(1, -(-length // tile.query) + 1) * tile.query / tile.key
    share = float(np.minimum(causal_T, row_tiles).sum() / causal_T.sum())
    sparse_us = dense_us = 0.0
    for choice_H in choice:
        heads = int((choice_H != ABSENT).sum())
        dense_us += cost.prefill_dense_us(heads * causal)
        sparse_us += cost.prefill_sparse_us(heads * causal * share, 0.0, heads_by_pattern(tables, choice_H), length)
    return sparse_us < dense_us


def heads_by_pattern(tables: ScoreTables, choice_H: Choice) -> dict[PatternName, int]:
    """How many heads of a layer follow each family."""
    candidates = tables.entry.candidates
    return dict(Counter(candidates[place].family for place in choice_H.tolist() if place >= 0))


def _of_prefill(profile: Profile, entry: LengthProfile, plan: PrefillPlan, cost: DeviceCost) -> Estimate | None:
    tables = ScoreTables.of(entry)
    choice = _choice_of(plan.bucket(entry.length), tables)
    return None if choice is None else prefill_estimate(cost, tables, choice, profile.tile)


def _choice_of(bucket: PrefillBucket, tables: ScoreTables) -> Choice | None:
    choice = np.where(tables.present_LH, DENSE, ABSENT)
    if bucket.dense:
        return choice
    for row, scores in enumerate(tables.entry.layers):
        heads = len(scores.patterns[0])
        for head, pattern in enumerate(bucket.patterns(scores.layer, heads)):
            if isinstance(pattern, Dense):
                continue
            measured = [tables.entry.patterns[places[head]] for places in scores.patterns]
            if pattern not in measured:
                return None
            choice[row, head] = measured.index(pattern)
    return choice


def _of_decode(profile: Profile, length: int, plan: DecodePlan, cost: DeviceCost) -> Estimate:
    layers = profile.model.layers
    bucket = plan.bucket(length)
    return Estimate(
        dense_us=layers * cost.decode_dense_us(length),
        sparse_us=step_us(bucket, cost, length, layers),
        density=_decode_share(bucket, length, layers),
    )


def step_us(bucket: DecodeBucket, cost: DeviceCost, length: int, layers: int) -> float:
    """Attention of one decode step over all layers, in microseconds."""
    sparse = sum(
        len(segment.layers) * cost.decode_sparse_us(segment.budget.resolve(length)) for segment in bucket.segments
    )
    choosing = len(bucket.segments) * cost.decode_choose_us(length)
    return sparse + choosing + (layers - len(bucket.sparse_layers)) * cost.decode_dense_us(length)


def _decode_share(bucket: DecodeBucket, length: int, layers: int) -> float:
    attended = sum(len(segment.layers) * segment.budget.resolve(length) for segment in bucket.segments)
    return (attended + (layers - len(bucket.sparse_layers)) * length) / (layers * length)
