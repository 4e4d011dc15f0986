"""A plan lowered once for a model and a rank: for every layer its patterns by length, and its role in decode.

Nothing that runs looks at a plan again. Under tensor parallelism each rank lowers the same plan to its own heads.

Shapes: B batch, H query heads, G KV heads, Q new tokens of a row, D head size.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache

import torch

from sparsekv.kernels.index.build import Same
from sparsekv.plans.model import AttentionGroup, ModelInfo
from sparsekv.plans.patterns import Dense, Pattern, TileShape
from sparsekv.plans.phases import DecodePlan, Eviction, PrefillPlan, Segment
from sparsekv.runtime.core.pays import Pays, Thresholds
from sparsekv.runtime.core.roles import DENSE, Evicting, Filter, Follower, Recurrent, Role
from sparsekv.runtime.core.segments import SegmentProgram, chooses_from
from sparsekv.runtime.core.state import DecodeState, NewCarried, Step
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.stores.store import KeySource

DEFAULT_TILE = TileShape()


@dataclass(frozen=True, slots=True)
class Rank:
    """One of `count` tensor-parallel ranks: neighbouring heads of every layer. Where there are more ranks than KV
    heads, several ranks hold the same KV head. `plan_checks.refuse` has checked that heads divide."""

    index: int = 0
    count: int = 1

    def heads(self, group: AttentionGroup) -> tuple[slice, slice]:
        queries = group.heads // self.count
        kv = max(1, group.kv_heads // self.count)
        first = self.index * group.kv_heads // self.count
        return slice(self.index * queries, (self.index + 1) * queries), slice(first, first + kv)


@dataclass(frozen=True, slots=True)
class LayerProgram:
    layer: int
    heads: int  # query heads of the rank
    kv_heads: int
    window: int | None  # the layer's own sliding window
    keys_of: int | None = None  # the layer whose keys and values it attends to, in place of its own
    tile: TileShape = DEFAULT_TILE
    bounds: tuple[int, ...] = ()  # the longest context of every prefill bucket but the last
    patterns: tuple[tuple[Pattern, ...], ...] = ((),)  # by prefill bucket, one a query head; () is dense
    role: Role = DENSE

    def patterns_at(self, length: int) -> tuple[Pattern, ...]:
        """One pattern a query head at a context of `length` tokens (past + chunk); none if all are dense."""
        return self.patterns[bisect_left(self.bounds, length)]

    @property
    def without_patterns(self) -> LayerProgram:
        """The layer without patterns: lines and tiles mean nothing over keys of which some were evicted."""
        return replace(self, bounds=(), patterns=((),))

    def for_heads(self, queries: slice, kv: slice) -> LayerProgram:
        patterns = tuple(_of_heads(Same(row), queries.start, queries.stop) for row in self.patterns)
        return replace(self, heads=queries.stop - queries.start, kv_heads=kv.stop - kv.start, patterns=patterns)


@dataclass(frozen=True)
class Program:
    rank: Rank
    layers: tuple[LayerProgram, ...]
    whole: tuple[LayerProgram, ...] = ()  # prefill of the heads of all ranks, where there are several

    @classmethod
    def of(
        cls, prefill: PrefillPlan | None, decode: DecodePlan | None, model: ModelInfo, rank: Rank | None = None,
        evicting: Mapping[int, Eviction] | None = None,
    ) -> Program:  # fmt: skip
        """Lowers the phases of a plan. A phase that is None runs dense.

        Args:
            rank: whose heads; all of them when None.
        """
        rank = rank or Rank()
        segments = _segments(decode, model, rank)
        roles = _roles(segments, evicting or {}, model, rank)
        layers = tuple(_layer(layer, roles.get(layer, DENSE), prefill, model, rank) for layer in range(model.layers))
        return cls(rank, layers, cls.of(prefill, None, model).layers if rank.count > 1 else ())

    @cached_property
    def attending(self) -> tuple[LayerProgram, ...]:
        """The layers that attend to keys and values; the others have a recurrent state."""
        return tuple(layer for layer in self.layers if layer.role.attends)

    @cached_property
    def caching(self) -> tuple[LayerProgram, ...]:
        """The attending layers with keys and values of their own."""
        return tuple(layer for layer in self.attending if layer.keys_of is None)

    @cached_property
    def readers(self) -> dict[int, tuple[int, ...]]:
        """By layer with keys and values of its own, itself and the layers that attend to these."""
        owners = [(layer.layer, layer.layer if layer.keys_of is None else layer.keys_of) for layer in self.attending]
        return {
            cached.layer: tuple(layer for layer, owner in owners if owner == cached.layer) for cached in self.caching
        }

    @cached_property
    def alike_in_decode(self) -> tuple[tuple[LayerProgram, int], ...]:
        """One of the layers that read as much in every step, and how many of them there are; none that evicts."""
        kinds: dict[object, list[LayerProgram]] = {}
        for layer in self.attending:
            if layer.role.evicts is None:
                kinds.setdefault((type(layer.role), layer.role.rows_key, layer.window), []).append(layer)
        return tuple((layers[0], len(layers)) for layers in kinds.values())

    @property
    def hint(self) -> Pays:
        """The rule until one is measured: an index over a long past for a part of a row tile does not pay."""
        return Pays(prefill=Thresholds((self.layers[0].tile.query,), (0,)))

    @property
    def dense_in_decode(self) -> Program:
        """The same model and prefill; every step attends to everything."""
        layers = (replace(layer, role=DENSE) if layer.role.is_sparse else layer for layer in self.layers)
        return replace(self, layers=tuple(layers))

    @cached_property
    def segments(self) -> tuple[SegmentProgram, ...]:
        return tuple(layer.role.filters for layer in self.layers if layer.role.filters is not None)

    @property
    def decodes_from(self) -> tuple[int, ...]:
        """The fewest tokens of a row that chooses, by bucket; more than the bucket holds where no row does. Roles of
        others choose without segments, in one bucket."""
        chosen = tuple(map(min, zip(*map(chooses_from, self.segments), strict=True)))
        return chosen or (min(layer.role.dense_up_to for layer in self.sparse) + 1,)

    @property
    def decode_bounds(self) -> tuple[int, ...]:
        return self.segments[0].bounds if self.segments else ()

    @cached_property
    def evicting(self) -> tuple[int, ...]:
        return tuple(layer.layer for layer in self.layers if layer.role.evicts is not None)

    @cached_property
    def sparse(self) -> tuple[LayerProgram, ...]:
        """The layers whose decode steps leave out cached tokens, or choose them for others."""
        return tuple(layer for layer in self.layers if layer.role.is_sparse)

    @property
    def prefilling(self) -> tuple[LayerProgram, ...]:
        """The layers with a sparse prefill at some length, of which none evicts."""
        return tuple(layer for layer in self.layers if any(layer.patterns) and layer.role.evicts is None)

    @property
    def remembers(self) -> tuple[int, ...]:
        """The layers whose steps need queries of earlier ones, and of a prompt."""
        return tuple(layer.layer for layer in self.layers if layer.role.remembers)

    @cached_property
    def carried(self) -> dict[int, NewCarried]:
        meta = torch.device("meta")
        return {at.layer: at.role.new_carried for at in self.layers if at.role.new_carried(meta) is not None}


def decode(
    layer: LayerProgram,
    q_BHQD: torch.Tensor,
    source: KeySource,
    state: DecodeState,
    *,
    scale: float,
    backend: str,
    verifies: bool = False,
    new_B: torch.Tensor | None = None,
    out_BHQD: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attention of the new tokens of every row in one layer, as its role has it.

    Args:
        q_BHQD: queries of the rank's heads; one token, but where a draft is verified.
        state: of the step: `begin` was called, and filter layers come before the layers of their segments.
        verifies: the tokens are a draft and what follows it: they attend to everything, in one pass over the keys.
        new_B: how many of the Q tokens each row has; all of them when None.
        out_BHQD: where the output goes; rows without keys are left as they are.

    Returns:
        [B, H, Q, D].
    """
    return layer.role.step(
        Step(layer.layer, layer.window, q_BHQD, source, state, scale, backend, verifies, new_B, out_BHQD)
    )


def count_step(program: Program, lengths: Sequence[int], meter: Meter) -> None:
    """Counts what one decode step attends to, at lengths with the new tokens included."""
    for layer, layers in program.alike_in_decode:
        for length, read in zip(lengths, layer.role.reads(lengths), strict=True):
            visible = length if layer.window is None else min(length, layer.window)
            meter.add_decode(layers * min(visible, read), layers * visible)


def _roles(
    segments: Iterable[tuple[Segment, SegmentProgram]], evicting: Mapping[int, Eviction], model: ModelInfo, rank: Rank
) -> dict[int, Role]:
    roles: dict[int, Role] = {layer: Evicting(rule) for layer, rule in evicting.items()}
    roles |= {layer: Recurrent() for layer in range(model.layers) if model.group_of(layer).kind == "linear"}
    for segment, lowered in segments:
        followers = {layer: Follower(lowered, _kv_map(segment, layer, model, rank)) for layer in segment.layers}
        roles |= followers | {segment.filter: Filter(lowered, followers.get(segment.filter))}
    return roles


def _layer(layer: int, role: Role, prefill: PrefillPlan | None, model: ModelInfo, rank: Rank) -> LayerProgram:
    group = model.group_of(layer)
    queries, kv = rank.heads(group)
    whole = LayerProgram(layer, group.heads, group.kv_heads, group.window, group.keys_of, role=role)
    if prefill:
        bounds = tuple(bucket.up_to for bucket in prefill.lengths if bucket.up_to is not None)
        rows = [prefill.bucket(bound) for bound in (*bounds, (bounds[-1] if bounds else 0) + 1)]
        patterns = tuple(_dense_as_none(row.patterns(layer, group.heads)) for row in rows)
        whole = replace(whole, tile=prefill.tile, bounds=bounds, patterns=patterns)
    return whole.for_heads(queries, kv)


@lru_cache(maxsize=4096)
def _of_heads(row: Same, first: int, stop: int) -> tuple[Pattern, ...]:
    """The patterns of some heads: the very same tuple at every call, as it is a key of caches."""
    return _dense_as_none(row.patterns[first:stop])


def _dense_as_none(patterns: tuple[Pattern, ...]) -> tuple[Pattern, ...]:
    return () if all(isinstance(pattern, Dense) for pattern in patterns) else patterns


def _segments(decode: DecodePlan | None, model: ModelInfo, rank: Rank) -> list[tuple[Segment, SegmentProgram]]:
    sparse = [bucket for bucket in decode.lengths if bucket.segments] if decode else []
    if decode is None or not sparse:
        return []
    bounds = tuple(bucket.up_to for bucket in decode.lengths if bucket.up_to is not None)
    lowered = []
    for position, segment in enumerate(sparse[0].segments):
        buckets = tuple(bucket.segments[position] if bucket.segments else None for bucket in decode.lengths)
        lowered.append((segment, _segment(segment, bounds, buckets, model, rank)))
    return lowered


def _segment(
    segment: Segment, bounds: tuple[int, ...], buckets: tuple[Segment | None, ...], model: ModelInfo, rank: Rank
) -> SegmentProgram:
    group = model.group_of(segment.filter)
    own_heads, (queries, kv) = segment.heads != "max", rank.heads(group)
    return SegmentProgram(
        filter=segment.filter,
        sink=segment.sink,
        recent=segment.recent,
        selector=segment.selector,
        queries=1 if segment.selector == "last" else segment.window,
        heads="per_kv_head" if own_heads else "max",
        across_ranks=rank.count > 1 and segment.scope == "global" and not own_heads,
        bounds=bounds,
        buckets=buckets,
        query_heads=queries.stop - queries.start,
        lists=kv.stop - kv.start if own_heads else 1,
    )


def _kv_map(segment: Segment, layer: int, model: ModelInfo, rank: Rank) -> tuple[int, ...] | None:
    """The layer's head map, from the rank's KV heads of the layer to its KV heads of the filter layer."""
    if isinstance(segment.heads, str):
        return None
    kv, chosen_by = (rank.heads(model.group_of(number))[1] for number in (layer, segment.filter))
    return tuple(source - chosen_by.start for source in segment.heads[layer][kv])
