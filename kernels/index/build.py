"""One tile index for a layer whose heads may each have another pattern.

Heads of one kind are built together; nothing loops over heads and nothing waits for the device: every shape follows
from budgets and lengths, which the host knows. Temporaries are bounded whatever the length (see topk.BLOCK_ELEMENTS).

Shapes: B batch, H query heads, G KV heads, S query rows of the chunk, K keys (past + chunk, or more), D head size.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal, Protocol, cast

import torch

from sparsekv.kernels.device_cache import kept_on_device, on_device
from sparsekv.kernels.index.a_shape import index_a_shape
from sparsekv.kernels.index.adaptive import index_adaptive
from sparsekv.kernels.index.block_sparse import index_block_sparse
from sparsekv.kernels.index.layout import (
    HeadIndex,
    IndexCall,
    IndexWidths,
    Layout,
    LineScores,
    RowTiles,
    ceil_div,
    empty_tiles,
    spread,
    without_columns,
)
from sparsekv.kernels.index.line_scores import score_lines
from sparsekv.kernels.index.vertical_slash import index_vertical_slash
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, WORD, Chunk, TileIndex
from sparsekv.plans.errors import BackendError, ShapeError, UnsupportedError
from sparsekv.plans.patterns import Adaptive, AShape, BlockSparse, Dense, Pattern, TileShape, VerticalSlash

BuilderName = Literal["auto", "torch", "triton"]
_TRITON_BUILDERS: Mapping[type[Pattern], str] = {
    VerticalSlash: "sparsekv.kernels.index.triton.vertical_slash",
    BlockSparse: "sparsekv.kernels.index.triton.block_sparse",
}


class PreparedIndex(Protocol):
    """The index of some heads, of which the host knows the size."""

    @property
    def widths(self) -> IndexWidths:
        """How wide it is."""
        ...

    def fill(self, into: TileIndex) -> None:
        """Builds it straight into the tensors of the whole layer."""


class TritonBuilder(Protocol):
    """A module that builds the heads of one kind on a GPU."""

    def obstacle(self, patterns: Sequence[Any], call: IndexCall) -> str | None:
        """Why it cannot build these heads; None when it can."""

    def prepare(self, patterns: Sequence[Any], heads: Sequence[int], call: IndexCall) -> PreparedIndex:
        """All that the host has to do."""
        ...


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
        builder: "torch" anywhere; "triton" for the kinds of pattern that it builds on this GPU, torch for the others;
            "auto" chooses. All give the same index, up to the rounding of scores that are nearly equal.

    Returns:
        An index of its own, but for dense_H, which all layers with the same dense heads share: nobody may write to it.

    Raises:
        BackendError: "triton" was asked for where Triton does not run.
        ShapeError: tensors, patterns and chunk do not fit together.
        UnsupportedError: a pattern that has no builder yet, or a tile taller in keys than in queries.
    """
    groups = by_kind(patterns)
    _check(groups, q_BHSD, k_BGKD, chunk, tile, window)
    call = IndexCall(q_BHSD, k_BGKD, chunk, tile, scale, window, lines, _by_triton(builder, q_BHSD.device))
    on_gpu = _prepare_triton(groups, call) if call.by_triton else {}
    by_torch = [group for group in groups if group.kind not in on_gpu]
    built = _build_by_torch(by_torch, call)
    dense = next((group.heads for group in groups if group.kind is Dense), ())
    if len(built) == len(groups) == 1:
        return index_of(built[0], call, dense)
    index = room_for([*map(widths_of, built), *(part.widths for part in on_gpu.values())], call, dense)
    for group, part in zip(by_torch, built, strict=True):
        place(part, group.heads, index)
    for prepared in on_gpu.values():
        prepared.fill(index)
    return index


def layer_lines(
    q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, chunk: Chunk, *, last_q: int, scale: float, window: int | None = None
) -> LineScores:
    """Scores of every column and diagonal of every head, to be given to `build_index` as `lines`.

    Arguments as there; last_q is how many of the last queries are sampled.
    """
    heads = range(q_BHSD.shape[1])
    call = IndexCall(q_BHSD, k_BGKD, chunk, TileShape(), scale, window)
    return score_lines(heads, [last_q] * len(heads), call)


def _build_by_torch(groups: Sequence[HeadGroup], call: IndexCall) -> list[HeadIndex]:
    if not groups:
        return []
    rows = call.locate()
    return [BUILDERS[group.kind](group.patterns, group.heads, call, rows) for group in groups]


def _prepare_triton(groups: Sequence[HeadGroup], call: IndexCall) -> dict[type[Pattern], PreparedIndex]:
    """What Triton builds."""
    found: dict[type[Pattern], PreparedIndex] = {}
    for group in [group for group in groups if group.kind in _TRITON_BUILDERS]:
        module = _triton_builder(group.kind)
        if module.obstacle(group.patterns, call) is None:
            found[group.kind] = module.prepare(group.patterns, group.heads, call)
    return found


@lru_cache
def _triton_builder(kind: type[Pattern]) -> TritonBuilder:
    return cast(TritonBuilder, import_module(_TRITON_BUILDERS[kind]))


def builds_by_triton(device: torch.device) -> bool:
    """Whether "auto" means the Triton builders there: on NVIDIA GPUs, the only ones that they were run on."""
    return device.type == "cuda" and torch.version.hip is None and _has_triton()


@lru_cache(maxsize=1)
def _has_triton() -> bool:
    return find_spec("triton") is not None


def _by_triton(builder: BuilderName, device: torch.device) -> bool:
    """The interpreter only ever serves tests, which ask for it by name."""
    if builder == "triton":
        _check_triton(device)
    return builder == "triton" or (builder == "auto" and builds_by_triton(device))


def _check_triton(device: torch.device) -> None:
    from sparsekv.kernels.triton_support import interpreting

    if device.type != "cuda" and not interpreting():
        raise BackendError(f"the triton builders need tensors on a GPU, found {device}: use builder='torch'")


def _check(
    groups: Sequence[HeadGroup],
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
    if window is not None and window < 1:
        raise ShapeError(f"a sliding window holds at least 1 token, found {window}")
    _check_shapes(sum(len(group.heads) for group in groups), q_BHSD, k_BGKD, chunk)


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


# Heads that compute every causal tile: only the counts are filled; kernels need no list for them.


def index_dense(patterns: Sequence[Dense], heads: Sequence[int], call: IndexCall, rows: RowTiles) -> HeadIndex:
    """Counts of every causal tile."""
    return spread(_build(call.device, call.layout), [0] * len(heads))


@kept_on_device(most=4)
def _build(device: torch.device, layout: Layout) -> HeadIndex:
    tiles_B1TW, _ = empty_tiles(layout, 1, 1)  # never read; kernels need not handle a width of 0
    return without_columns(layout, tiles_B1TW, (layout.locate().end_BT + 1).to(torch.int32)[:, None])


Builder = Callable[[Sequence[Any], Sequence[int], IndexCall, RowTiles], HeadIndex]

BUILDERS: Mapping[type[Pattern], Builder] = {
    Dense: index_dense,
    AShape: index_a_shape,
    VerticalSlash: index_vertical_slash,
    BlockSparse: index_block_sparse,
    Adaptive: index_adaptive,
}


# Putting the heads of several patterns together into one index.
#
# Shapes as in call.py.


def widths_of(index: HeadIndex) -> IndexWidths:
    """How wide it is."""
    return IndexWidths(index.tiles_BhTW.shape[3], index.columns_BhC.shape[2])


def index_of(only: HeadIndex, call: IndexCall, dense: tuple[int, ...]) -> TileIndex:
    """Heads of a single kind: nothing to move."""
    return TileIndex(
        tile=call.tile,
        tiles_BHTW=only.tiles_BhTW.contiguous(),
        counts_BHT=only.counts_BhT.contiguous(),
        columns_BHC=only.columns_BhC.contiguous(),
        live_BHTN=only.live_BhTN.contiguous(),
        dense_H=_mark_dense(call.device, dense, call.heads),
        dense_heads=dense,
    )


def room_for(widths: Sequence[IndexWidths], call: IndexCall, dense: tuple[int, ...]) -> TileIndex:
    """An index of the whole layer, as wide as the widest part; blank where parts may be narrower than their rows."""
    blank = len(widths) > 1
    columns = max(one.columns for one in widths)
    rows = (call.batch, call.q_BHSD.shape[1], call.row_tiles)

    def room(padding: int, *shape: int) -> torch.Tensor:
        if blank:
            return torch.full(shape, padding, dtype=torch.int32, device=call.device)
        return torch.empty(shape, dtype=torch.int32, device=call.device)

    return TileIndex(
        tile=call.tile,
        tiles_BHTW=room(NO_TILE, *rows, max(one.tiles for one in widths)),
        counts_BHT=room(0, *rows),
        columns_BHC=room(NO_COLUMN, *rows[:2], columns),
        live_BHTN=room(0, *rows, ceil_div(columns, WORD)),
        dense_H=_mark_dense(call.device, dense, call.heads),
        dense_heads=dense,
    )


@kept_on_device(most=64)
def _mark_dense(device: torch.device, dense: tuple[int, ...], heads: int) -> torch.Tensor:
    return on_device([head in dense for head in range(heads)], device, torch.bool)


def place(part: HeadIndex, heads: tuple[int, ...], into: TileIndex) -> None:
    """Puts the heads of a part in their places; evenly spaced ones without a list of them, which copies faster."""
    step = heads[1] - heads[0] if len(heads) > 1 else 1
    even = heads == tuple(range(heads[0], heads[-1] + 1, step))
    own = slice(heads[0], heads[-1] + 1, step) if even else on_device(heads, into.tiles_BHTW.device)
    into.counts_BHT[:, own] = part.counts_BhT
    for whole, piece in (
        (into.tiles_BHTW, part.tiles_BhTW),
        (into.columns_BHC, part.columns_BhC),
        (into.live_BHTN, part.live_BhTN),
    ):
        if piece.shape[-1]:
            whole[:, own, ..., : piece.shape[-1]] = piece


# The heads of a layer by the kind of their pattern, known again at the next call.
#
# What the host works out for a layer follows from its patterns, and every layer and every prompt brings the same few
# again. Patterns are compared by identity, which takes a tenth of the time of comparing what is in them.

_DENSE = Dense()


class Same:
    """Objects in order, equal to nothing but the same objects; for keys of what is kept."""

    __slots__ = ("objects",)

    def __init__(self, objects: tuple[Any, ...]) -> None:
        self.objects = objects

    def __hash__(self) -> int:
        return hash(tuple(map(id, self.objects)))

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, Same)
            and len(self.objects) == len(other.objects)
            and all(map(operator.is_, self.objects, other.objects))
        )


@dataclass(frozen=True, slots=True)
class HeadGroup:
    """The heads of one kind."""

    kind: type[Pattern]
    heads: tuple[int, ...]
    patterns: tuple[Pattern, ...]


def by_kind(patterns: Sequence[Pattern]) -> tuple[HeadGroup, ...]:
    """The heads of each kind, in the order of their first heads.

    Equal layers are given the very same patterns, whoever made those that they brought.
    """
    # Plans make the patterns of dense heads anew for every call.
    return _of_same(Same(tuple([_DENSE if type(pattern) is Dense else pattern for pattern in patterns])))


@lru_cache(maxsize=512)
def _of_same(patterns: Same) -> tuple[HeadGroup, ...]:
    return _of_equal(patterns.objects)


@lru_cache(maxsize=512)
def _of_equal(patterns: tuple[Pattern, ...]) -> tuple[HeadGroup, ...]:
    kinds: dict[type[Pattern], list[int]] = {}
    for head, pattern in enumerate(patterns):
        kinds.setdefault(type(pattern), []).append(head)
    return tuple(
        HeadGroup(kind, tuple(heads), tuple(patterns[head] for head in heads)) for kind, heads in kinds.items()
    )
