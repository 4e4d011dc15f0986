"""One tile index for a layer whose heads may each have another pattern.

Heads of one kind are built together; nothing loops over heads and nothing waits for the device: every shape follows
from budgets and lengths, which the host knows. Temporaries are bounded whatever the length (see topk.BLOCK_ELEMENTS).

Shapes: B batch, H query heads, G KV heads, S query rows of the chunk, K keys (past + chunk, or more), D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from sparsekv.kernels.index.a_shape import index_a_shape
from sparsekv.kernels.index.adaptive import index_adaptive
from sparsekv.kernels.index.block_sparse import index_block_sparse
from sparsekv.kernels.index.call import HeadIndex, IndexCall, RowTiles
from sparsekv.kernels.index.dense import index_dense
from sparsekv.kernels.index.line_scores import LineScores
from sparsekv.kernels.index.lines import score_lines
from sparsekv.kernels.index.vertical_slash import index_vertical_slash
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, Chunk, TileIndex
from sparsekv.kernels.topk import on_device
from sparsekv.plans.errors import ShapeError, UnsupportedError
from sparsekv.plans.patterns import Adaptive, AShape, BlockSparse, Dense, Pattern, TileShape, VerticalSlash

Builder = Callable[[Sequence[Any], Sequence[int], IndexCall, RowTiles], HeadIndex]

BUILDERS: Mapping[type[Pattern], Builder] = {
    Dense: index_dense,
    AShape: index_a_shape,
    VerticalSlash: index_vertical_slash,
    BlockSparse: index_block_sparse,
    Adaptive: index_adaptive,
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
) -> TileIndex:
    """Which tiles and single columns each head computes.

    Args:
        patterns: one of each query head.
        q_BHSD: queries of the chunk; any strides; rows beyond a batch row's own may hold anything.
        k_BGKD: keys from the first token on; those beyond a batch row's length may hold anything.
        chunk: where the queries lie.
        tile: query rows must be a multiple of key rows.
        scale: softmax scale.
        window: the layer's own sliding window: scores see nothing outside it, and tiles wholly outside are left out
            (of the lists; dense heads still count every causal tile).
        lines: `layer_lines` of this very call by `last_q`, for callers that build many indices of one layer.

    Raises:
        ShapeError: tensors, patterns and chunk do not fit together.
        UnsupportedError: a pattern that has no builder yet, or a tile taller in keys than in queries.
    """
    _check(patterns, q_BHSD, k_BGKD, chunk, tile, window)
    call = IndexCall(q_BHSD, k_BGKD, chunk, tile, scale, window, lines)
    rows = call.locate()
    kinds = _heads_by_kind(patterns)
    built = {
        kind: BUILDERS[kind]([patterns[head] for head in heads], heads, call, rows) for kind, heads in kinds.items()
    }
    is_dense = [isinstance(pattern, Dense) for pattern in patterns]
    merged = _merge(built, kinds, call, on_device(is_dense, call.device, torch.bool))
    return replace(merged, dense_heads=tuple(head for head, dense in enumerate(is_dense) if dense))


def layer_lines(
    q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, chunk: Chunk, *, last_q: int, scale: float, window: int | None = None
) -> LineScores:
    """Scores of every column and diagonal of every head, to be given to `build_index` as `lines`.

    Arguments as there; last_q is how many of the last queries are sampled.
    """
    heads = range(q_BHSD.shape[1])
    call = IndexCall(q_BHSD, k_BGKD, chunk, TileShape(), scale, window)
    return score_lines(heads, [last_q] * len(heads), call)


def _heads_by_kind(patterns: Sequence[Pattern]) -> dict[type, list[int]]:
    kinds: dict[type, list[int]] = {}
    for head, pattern in enumerate(patterns):
        kinds.setdefault(type(pattern), []).append(head)
    return kinds


def _merge(
    built: Mapping[type, HeadIndex], kinds: Mapping[type, list[int]], call: IndexCall, dense_H: torch.Tensor
) -> TileIndex:
    def joined(parts: list[torch.Tensor], padding: int) -> torch.Tensor:
        return _scatter_heads(parts, list(kinds.values()), padding)

    indices = [built[kind] for kind in kinds]
    return TileIndex(
        tile=call.tile,
        tiles_BHTW=joined([index.tiles_BhTW for index in indices], NO_TILE),
        counts_BHT=joined([index.counts_BhT[..., None] for index in indices], 0)[..., 0],
        columns_BHC=joined([index.columns_BhC for index in indices], NO_COLUMN),
        live_BHTN=joined([index.live_BhTN for index in indices], 0),
        dense_H=dense_H,
    )


def _scatter_heads(parts: list[torch.Tensor], heads: list[list[int]], padding: int) -> torch.Tensor:
    """Puts the heads of each part back in their places, the last dimension padded to the widest."""
    if len(parts) == 1:
        return parts[0].contiguous()
    width = max(part.shape[-1] for part in parts)
    batch, _, *middle, _ = parts[0].shape
    merged_BHXW = parts[0].new_full((batch, sum(map(len, heads)), *middle, width), padding)
    for part, own in zip(parts, heads, strict=True):
        merged_BHXW[:, on_device(own, part.device), ..., : part.shape[-1]] = part
    return merged_BHXW


def _check(
    patterns: Sequence[Pattern],
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    chunk: Chunk,
    tile: TileShape,
    window: int | None,
) -> None:
    for pattern in patterns:
        if type(pattern) not in BUILDERS:
            known = ", ".join(str(kind.model_fields["pattern"].default) for kind in BUILDERS)
            raise UnsupportedError(
                f"pattern {pattern.pattern!r} cannot be executed yet; use one of {known} for this head"
            )
    if tile.query % tile.key:
        raise UnsupportedError(
            f"a tile needs query rows that are a multiple of its key rows, found {tile.query} x {tile.key}; "
            "use 128 x 128, 128 x 64 or 64 x 64"
        )
    if window is not None and window < 1:
        raise ShapeError(f"a sliding window holds at least 1 token, found {window}")
    _check_shapes(len(patterns), q_BHSD, k_BGKD, chunk)


def _check_shapes(patterns: int, q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, chunk: Chunk) -> None:
    batch, heads, rows, size = q_BHSD.shape
    if k_BGKD.shape[0] != batch or heads % k_BGKD.shape[1] or k_BGKD.shape[3] != size:
        raise ShapeError(f"queries {tuple(q_BHSD.shape)} and keys {tuple(k_BGKD.shape)} do not fit together")
    if patterns != heads or len(chunk.past) != batch:
        raise ShapeError(
            f"need one pattern a query head and one place a batch row: {heads} heads and {batch} rows, "
            f"found {patterns} patterns and {len(chunk.past)} places"
        )
    needed = max(n - p for p, n in zip(chunk.past, chunk.lengths, strict=True))
    if rows < needed or k_BGKD.shape[2] < chunk.longest:
        raise ShapeError(
            f"the chunk needs {needed} query rows and {chunk.longest} keys, "
            f"found {rows} and {k_BGKD.shape[2]}; pass all keys from the first token on"
        )
