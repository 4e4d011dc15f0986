"""One tile index for a layer whose heads may each have another pattern.

Heads of one kind are built together; nothing loops over heads and nothing waits for the device: every shape follows
from budgets and lengths, which the host knows. Temporaries are bounded whatever the length (see topk.BLOCK_ELEMENTS).

Shapes: as in layout.py; K keys (past + chunk, or more).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from typing import Any, Literal

import torch

from sparsekv.kernels.device_cache import cached_on_device, on_device
from sparsekv.kernels.index.a_shape import index_a_shape
from sparsekv.kernels.index.block_sparse import index_block_sparse
from sparsekv.kernels.index.layout import (
    FamilyHeads,
    HeadIndex,
    IndexCall,
    IndexLayout,
    IndexWidths,
    LineScores,
    PreparedIndex,
    ceil_div,
    empty_tiles,
    spread,
)
from sparsekv.kernels.index.registered import index_registered
from sparsekv.kernels.index.vertical_slash import index_vertical_slash, score_lines
from sparsekv.kernels.keys import PLAIN, Softmax
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, WORD, Chunk, TileIndex, check_chunk, check_heads, has_triton
from sparsekv.plans.errors import BackendError, ShapeError, UnsupportedError
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, Pattern, Registered, TileShape, VerticalSlash

BuilderName = Literal["auto", "torch", "triton"]


@dataclass(frozen=True, slots=True)
class IndexBuilder:
    """The builders of the heads of one pattern. `triton` names a module that does the same on a GPU, imported when
    first used: its `takes(group, call)` says whether it builds these heads; its `prepare(group, call)` returns a
    PreparedIndex or a HeadIndex."""

    torch: Callable[[FamilyHeads, IndexCall], HeadIndex]
    triton: str | None = None


def index_dense(group: FamilyHeads, call: IndexCall) -> HeadIndex:
    """Counts of every causal tile; kernels need no list for dense heads."""
    dense_rows = _cached_rows if call.layout.chunk.is_fixed else _dense_rows
    tiles_B1TW, counts_B1T = dense_rows(call.layout.device, call.layout)
    return HeadIndex.of_tiles(group.heads, spread(tiles_B1TW, group.own), spread(counts_B1T, group.own))


def _dense_rows(device: torch.device, layout: IndexLayout) -> tuple[torch.Tensor, torch.Tensor]:
    tiles_B1TW, _ = empty_tiles(layout, 1, 1)  # never read; kernels need not handle a width of 0
    return tiles_B1TW, (layout.locate().end_BT + 1).to(torch.int32)[:, None]


_cached_rows = cached_on_device(most=4)(_dense_rows)


BUILDERS: Mapping[type[Pattern], IndexBuilder] = {
    Dense: IndexBuilder(index_dense),
    AShape: IndexBuilder(index_a_shape),
    VerticalSlash: IndexBuilder(index_vertical_slash, "sparsekv.kernels.index.triton.vertical_slash"),
    BlockSparse: IndexBuilder(index_block_sparse, "sparsekv.kernels.index.triton.block_sparse"),
    Registered: IndexBuilder(index_registered),
}


def build_index(
    patterns: Sequence[Pattern],
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    chunk: Chunk,
    tile: TileShape,
    *,
    scale: float,
    window: int | None = None,
    lines: Mapping[int, LineScores] | None = None,
    builder: BuilderName = "auto",
    softmax: Softmax = PLAIN,
    layer: int = 0,
) -> TileIndex:
    """The tiles and single columns that each head computes.

    Args:
        patterns: one of each query head.
        q_BHSD: queries of the chunk; any strides; rows beyond a batch row's own may hold anything.
        k_BGKD: keys from the first token on; those beyond a batch row's length may hold anything.
        tile: query rows must be a multiple of key rows.
        window: the layer's own sliding window: scores see nothing outside it, and tiles wholly outside are left out
            (of the lists; dense heads still count every causal tile).
        lines: `layer_lines` of this very call by `last_q`, for callers that build many indices of one layer.
        builder: "torch" anywhere; "triton" for the patterns that it builds on this GPU, torch for the others; "auto"
            chooses. All give the same index, up to the rounding of scores that are nearly equal.
        softmax: the layer's; its soft cap is of the scores of single keys: pooled ones (block sparse) have none. Torch
            builds under one. Sinks are for rules from outside.
        layer: number of the layer, which rules from outside are told.

    Returns:
        An index of its own, but for dense_H, which is shared by layers with the same dense heads and must not be
        written to.

    Raises:
        ShapeError: tensors, patterns and chunk do not fit together.
        UnsupportedError: a pattern that has no builder yet, or a tile taller in keys than in queries.
    """
    groups = groups_of(tuple(patterns))
    _check(groups, len(patterns), q_BHSD, k_BGKD, chunk, tile, window)
    call = IndexCall.of(q_BHSD, k_BGKD, chunk, tile, scale, window, lines, softmax, layer)
    on_gpu = not softmax.cap and (builder == "triton" or (builder == "auto" and builds_by_triton(q_BHSD.device)))
    dense = next((group.heads for group in groups if group.kind is Dense), ())
    parts = [_build_part(group, call, on_gpu) for group in groups]
    if len(parts) == 1 and isinstance(only := parts[0], HeadIndex):
        return TileIndex(
            tile,
            only.tiles_BhTW.contiguous(),
            only.counts_BhT.contiguous(),
            only.columns_BhC.contiguous(),
            only.live_BhTN.contiguous(),
            _mark_dense(call.layout.device, dense, call.layout.heads),
            dense,
        )
    index = empty_index([part.widths for part in parts], call.layout, dense)
    for part in parts:
        part.fill(index)
    return index


def layer_lines(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    chunk: Chunk,
    *,
    last_q: int,
    scale: float,
    window: int | None = None,
    softmax: Softmax = PLAIN,
) -> LineScores:
    """Scores of every column and diagonal of every head, to be given to `build_index` as `lines`. Arguments as there;
    last_q is how many of the last queries are sampled."""
    heads = range(q_BHSD.shape[1])
    call = IndexCall.of(q_BHSD, k_BGKD, chunk, TileShape(), scale, window, softmax=softmax)
    return score_lines(heads, [last_q] * len(heads), call)


class Same:
    """Patterns of a layer as a key by identity: patterns take 3 us each to compare."""

    __slots__ = ("patterns",)

    def __init__(self, patterns: tuple[Pattern, ...]) -> None:
        self.patterns = patterns

    def __hash__(self) -> int:
        return id(self.patterns)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and self.patterns is other.patterns


def groups_of(patterns: tuple[Pattern, ...]) -> tuple[FamilyHeads, ...]:
    """The heads of each kind of a layer."""
    return _groups(Same(patterns))


@lru_cache(maxsize=512)
def _groups(layer: Same) -> tuple[FamilyHeads, ...]:
    return group_heads(layer.patterns)


@lru_cache(maxsize=512)
def group_heads(patterns: tuple[Pattern, ...]) -> tuple[FamilyHeads, ...]:
    """The heads of each kind, in the order of their first heads. Equal layers share one tuple."""
    kinds: dict[type[Pattern], list[int]] = {}
    for head, pattern in enumerate(patterns):
        kinds.setdefault(type(pattern), []).append(head)
    return tuple(FamilyHeads.of([patterns[head] for head in heads], heads) for heads in kinds.values())


def empty_index(widths: Sequence[IndexWidths], layout: IndexLayout, dense: tuple[int, ...]) -> TileIndex:
    """An index of the whole layer, as wide as the widest part; blank where parts may be narrower than their rows."""
    blank = len(widths) > 1
    columns = max(part.columns for part in widths)
    rows = (layout.batch, layout.heads, layout.row_tiles)

    def room(padding: int, *shape: int) -> torch.Tensor:
        if blank:
            return torch.full(shape, padding, dtype=torch.int32, device=layout.device)
        return torch.empty(shape, dtype=torch.int32, device=layout.device)

    return TileIndex(
        tile=layout.tile,
        tiles_BHTW=room(NO_TILE, *rows, max(part.tiles for part in widths)),
        counts_BHT=room(0, *rows),
        columns_BHC=room(NO_COLUMN, *rows[:2], columns),
        live_BHTN=room(0, *rows, ceil_div(columns, WORD)),
        dense_H=_mark_dense(layout.device, dense, layout.heads),
        dense_heads=dense,
    )


@cached_on_device(most=64)
def _mark_dense(device: torch.device, dense: tuple[int, ...], heads: int) -> torch.Tensor:
    return on_device([head in dense for head in range(heads)], device, torch.bool)


def _build_part(group: FamilyHeads, call: IndexCall, on_gpu: bool) -> HeadIndex | PreparedIndex:
    builder = BUILDERS[group.kind]
    if on_gpu and builder.triton:
        module: Any = import_module(builder.triton)
        if module.takes(group, call):
            prepared: HeadIndex | PreparedIndex = module.prepare(group, call)
            return prepared
    if group.kind is not Dense and not call.layout.chunk.is_fixed:
        raise BackendError("expected heads whose index Triton builds in a captured call, which torch would build once")
    return builder.torch(group, call)


def builds_by_triton(device: torch.device) -> bool:
    """Returns whether "auto" means the Triton builders there: on NVIDIA GPUs, the only ones that they were run on."""
    return device.type == "cuda" and torch.version.hip is None and has_triton()


def _check(
    groups: Sequence[FamilyHeads],
    patterns: int,
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    chunk: Chunk,
    tile: TileShape,
    window: int | None,
) -> None:
    for group in groups:
        if group.kind not in BUILDERS:
            known = ", ".join(str(kind.model_fields["pattern"].default) for kind in BUILDERS)
            raise UnsupportedError(
                f"pattern {group.patterns[0].pattern!r} cannot be executed yet; use one of {known} for this head"
            )
    if tile.query % tile.key:
        raise UnsupportedError(
            f"a tile needs query rows that are a multiple of its key rows, found {tile.query} x {tile.key}; "
            "use 128 x 128, 128 x 64 or 64 x 64"
        )
    check_heads(q_BHSD, k_BGKD, k_BGKD)
    check_chunk(q_BHSD, k_BGKD, chunk, window)
    if patterns != q_BHSD.shape[1]:
        raise ShapeError(f"need one pattern a query head: {q_BHSD.shape[1]} heads, found {patterns} patterns")
