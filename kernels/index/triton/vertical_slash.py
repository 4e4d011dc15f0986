"""Vertical-slash indices built by Triton kernels: what the host works out, and the launches.

Six launches (or some more, see key_passes.py), whatever the number of heads, and one copy from the host:

    stats      softmax statistics of the sampled queries            split over the keys
    lines      scores of every column and every diagonal            split over the keys (some GPUs: and the queries)
    select     the best columns, listed; the threshold of slashes   two programs a head
    crossings  the best chosen slash of every tile diagonal         split over the diagonals
    diagonals  which of them a row can afford                       a program a head
    rows       tile lists, counts and live bits                     split over the row tiles

The result is that of kernels/index/vertical_slash.py, and the same run to run. Work and memory are linear in the
length; the scores of query and key are never stored.

Shapes: as in layout.py; E tile diagonals (see choices.py), M chosen ones, L sampled queries, R key ranges of the
first pass, U units (programs' heads) of a pass, P slots (heads) of a unit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
import triton

from sparsekv.kernels.device_cache import fields_on_device
from sparsekv.kernels.index.layout import (
    FamilyHeads,
    IndexCall,
    IndexLayout,
    IndexWidths,
    LineScores,
    PreparedIndex,
    ceil_div,
    flat,
    largest,
)
from sparsekv.kernels.index.triton.choices import crossings_kernel, diagonals_kernel, rows_kernel, select_kernel
from sparsekv.kernels.index.triton.key_passes import lines_kernel, stats_kernel
from sparsekv.kernels.index.triton.sizes import (
    LARGEST_SAMPLE,
    LONGEST,
    MOST_RANGES,
    PADDING,
    KeyPass,
    Sizes,
    Strips,
    sizes_for,
    strips_for,
    takes_tensors,
)
from sparsekv.kernels.tiles import AnyChunk, TileIndex
from sparsekv.kernels.topk import blocks

_LOG2_E = math.log2(math.e)
# Scores of columns and diagonals held at once, in elements; a layer that would need more is built in groups of heads.
MOST_SCORES = 1 << 27
NO_HEAD = -1
_ALIGNED = 16  # elements of 4 bytes: where Triton's usual launch expects pieces of scratch memory, and full rows end


def takes(group: FamilyHeads, call: IndexCall) -> bool:
    sampled = max(pattern.last_q for pattern in group.unique)
    return sampled <= LARGEST_SAMPLE and call.layout.chunk.longest <= LONGEST and takes_tensors(call)


def prepare(group: FamilyHeads, call: IndexCall, sizes: Sizes | None = None) -> PreparedIndex:
    """All that the host knows about the index of these heads.

    Args:
        group: heads with VerticalSlash patterns that `takes` accepts.
        sizes: block sizes to use instead of the table's, for tuning and for tests.
    """
    sizes = sizes or sizes_for(call.layout.device)
    widths, parts = plan_build(group, call.layout, sizes, MOST_SCORES)
    return PreparedIndex(widths, partial(_fill, group, parts, call, sizes, call.known_lines(group)))


def _fill(
    group: FamilyHeads, parts: tuple[HeadsPlan, ...], call: IndexCall, sizes: Sizes, known: LineScores | None,
    into: TileIndex,
) -> None:  # fmt: skip
    """Writes all that belongs to these heads; `into` is contiguous and of all heads."""
    with torch.cuda.device_of(call.q_BHSD):
        for part in parts:
            numbers = _numbers(group, part, call.layout)
            lines = score(part, call, numbers) if known is None else _padded(known, part.heads)
            choose(part, call, sizes, numbers, lines, into)


def _numbers(group: FamilyHeads, part: HeadsPlan, layout: IndexLayout) -> Numbers:
    numbers, chunk = Numbers(*fields_on_device(layout.device, part.fields)), layout.chunk
    if not isinstance(chunk, AnyChunk):
        return numbers
    past_B, length_B = chunk.numbers
    sampled_h, columns_h, slashes_h, tiles_h = chunk.budgets[group.named][:, part.heads]
    return numbers._replace(
        past_B=past_B, length_B=length_B, sampled_Bh=sampled_h, columns_Bh=columns_h, slashes_Bh=slashes_h,
        tiles_Bh=tiles_h,
    )  # fmt: skip


class Numbers(NamedTuple):
    """Numbers of the host for the kernels, int32 on the device; not to be written to."""

    past_B: torch.Tensor
    length_B: torch.Tensor
    head_h: torch.Tensor  # which of all query heads each one is
    sampled_Bh: torch.Tensor
    columns_Bh: torch.Tensor
    slashes_Bh: torch.Tensor
    tiles_Bh: torch.Tensor
    stats_units: torch.Tensor  # [U * P] heads that a program of a pass serves; NO_HEAD where a KV head has no more
    lines_units: torch.Tensor


@dataclass(frozen=True, slots=True)
class PassPlan:
    grid: tuple[int, int, int]  # units, key ranges, batch
    range: int  # keys of a program
    options: Mapping[str, Any]  # what it is compiled for


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    heads: slice  # which of those that are built
    count: int  # h
    fields: tuple[tuple[int, ...], ...]  # Numbers, on the host
    stats: PassPlan
    lines: PassPlan
    sampled_rows: int  # of a head, rounded up to whole strips
    stride: int  # numbers of a row of scores
    entries: int  # E
    nearest: int  # M
    shape: Mapping[str, Any]  # the tile, as kernels are compiled for it


@lru_cache(maxsize=256)
def plan_build(
    group: FamilyHeads, layout: IndexLayout, sizes: Sizes, most_scores: int
) -> tuple[IndexWidths, tuple[HeadsPlan, ...]]:
    """A whole build, in groups of heads whose scores fit. Follows from patterns and layout, never from tensors."""
    columns = layout.resolve([pattern.vertical for pattern in group.patterns])
    slashes = layout.resolve([pattern.slash for pattern in group.patterns])
    tiles = layout.tile_bounds([pattern.max_tiles for pattern in group.patterns])
    by_head = [layout.chunk.sampled(pattern.last_q) for pattern in group.patterns]
    sampled = [list(row) for row in zip(*by_head, strict=True)]
    widths = IndexWidths(layout.most_tiles(layout.slash_tiles(largest(slashes), largest(tiles))), largest(columns))
    parts = blocks(len(group.heads), 2 * layout.batch * layout.chunk.longest, most_scores)
    plans = (
        _plan_heads(part, group.heads[part], _of(part, sampled, columns, slashes, tiles), layout, sizes)
        for part in parts
    )
    return widths, tuple(plans)


def _of(heads: slice, *budgets: list[list[int]]) -> list[list[list[int]]]:
    return [[row[heads] for row in rows] for rows in budgets]


def _plan_heads(
    part: slice, heads: tuple[int, ...], budgets: list[list[list[int]]], layout: IndexLayout, sizes: Sizes
) -> HeadsPlan:
    """Deals the heads out to programs. The budgets are sampled queries, columns, slashes, and tiles of any row."""
    sampled, _, slashes, tiles = map(largest, budgets)
    tile, strips = layout.tile, strips_for(max(1, sampled))
    at_once = Strips(strips.rows, min(strips.count, sizes.lines_at_once))
    first, second = sizes.stats[strips.count], sizes.lines[at_once.count]
    units = [units_of(heads, layout.group_size, _stacked(one, layout)) for one in (first, second)]
    rows = layout.chunk.past, layout.chunk.lengths
    right = tile.query // tile.key + 1  # entry of distance 0, one more than any row needs: entry 0 is never chosen
    entries = layout.key_tiles + right + 2
    return HeadsPlan(
        heads=part,
        count=len(heads),
        fields=(*rows, heads, *map(flat, (*budgets, *units))),
        stats=_pass(first, len(units[0]), strips, layout),
        lines=_pass(second, len(units[1]), at_once, layout),
        sampled_rows=strips.rows * strips.count,
        stride=ceil_div(layout.chunk.longest, PADDING) * PADDING,
        entries=entries,
        nearest=min(layout.most_diagonals(layout.slash_tiles(slashes, tiles)), entries),
        shape={"QUERY": tile.query, "KEY": tile.key, "RIGHT": right},
    )


def _pass(one: KeyPass, units: int, strips: Strips, layout: IndexLayout) -> PassPlan:
    keys = layout.chunk.longest
    span = ceil_div(max(one.least_range, ceil_div(keys, MOST_RANGES)), one.keys) * one.keys  # a multiple of a step
    options = {
        "GROUP": layout.group_size,
        "D": layout.head_dim,
        "BLOCK_D": triton.next_power_of_2(layout.head_dim),
        "SLOTS": _stacked(one, layout),
        "ROWS": strips.rows,
        "STRIPS": strips.count,
        "BLOCK_N": one.keys,
        "STAGES": one.stages,
        "WINDOWED": layout.window is not None and layout.window < keys,
        "PRECISION": "ieee",
        "num_warps": one.warps,
    }
    return PassPlan((units, ceil_div(keys, span), layout.batch), span, options)


def _stacked(one: KeyPass, layout: IndexLayout) -> int:
    """Heads of a program: never more than a KV head serves."""
    return min(one.heads, int(triton.next_power_of_2(layout.group_size)))


@lru_cache(maxsize=512)
def units_of(heads: tuple[int, ...], group_size: int, slots: int) -> tuple[tuple[int, ...], ...]:
    """Deals the heads into units of up to `slots` heads that share a KV head, those of one KV head side by side.

    A head is named by its position in `heads`; short units are filled with NO_HEAD.
    """
    members: dict[int, list[int]] = {}
    for position, head in enumerate(heads):
        members.setdefault(head // group_size, []).append(position)
    return tuple(
        tuple((own[start : start + slots] + [NO_HEAD] * slots)[:slots])
        for _, own in sorted(members.items())
        for start in range(0, len(own), slots)
    )


def score(plan: HeadsPlan, call: IndexCall, numbers: Numbers) -> LineScores:
    n, q_BHSD, k_BGKD, stats, lines = numbers, call.q_BHSD, call.k_BGKD, plan.stats, plan.lines
    ranges = plan.sampled_rows * stats.grid[1]
    sizes = (ranges, ranges, plan.stride, plan.stride)
    m_BhLR, l_BhLR, vertical, slash = _scratch(plan, call.layout, sizes, torch.float32)
    where = (n.past_B, n.length_B, n.head_h, n.sampled_Bh)
    strides = (*q_BHSD.stride()[:3], *k_BGKD.stride()[:3])
    shared = (*strides, call.scale * _LOG2_E, call.layout.window or 0, plan.count)
    stats_kernel[stats.grid](
        q_BHSD, k_BGKD, m_BhLR, l_BhLR, *where, n.stats_units, *shared, stats.range, **stats.options
    )
    for first_row in range(0, plan.sampled_rows, lines.options["ROWS"] * lines.options["STRIPS"]):
        lines_kernel[lines.grid](
            q_BHSD, k_BGKD, m_BhLR, l_BhLR, vertical, slash, *where, n.lines_units, *shared, lines.range,
            stats.grid[1], plan.stride, FIRST_ROW=first_row, ALL_ROWS=plan.sampled_rows,
            MOST_RANGES=MOST_RANGES, PADDING=PADDING, **lines.options,
        )  # fmt: skip
    shape = (call.layout.batch, plan.count, plan.stride)
    return LineScores(vertical.view(shape), slash.view(shape))


def choose(
    plan: HeadsPlan, call: IndexCall, sizes: Sizes, numbers: Numbers, lines: LineScores, into: TileIndex
) -> None:
    layout, n, h, entries = call.layout, numbers, plan.count, plan.entries
    vertical_BhS, slash_BhS = lines.vertical_BhS.view(torch.int32), lines.slash_BhS.view(torch.int32)
    _, all_heads, row_tiles, width = into.tiles_BHTW.shape
    columns, words = into.columns_BHC.shape[2], into.live_BHTN.shape[3]
    # Which slashes are chosen: a threshold, and the last offset equal to it. Then of each tile diagonal its best
    # slash, that slash's offset, and how many diagonals up to it are chosen; at last the chosen distances.
    widths = (2, entries, entries, entries, plan.nearest)
    choice_Bh2, best_BhE, offset_BhE, code_BhE, near_BhM = _scratch(plan, layout, widths, torch.int32)
    select_kernel[(h, 2, layout.batch)](
        vertical_BhS, slash_BhS, into.columns_BHC, choice_Bh2, n.length_B, n.head_h, n.columns_Bh, n.slashes_Bh, h,
        all_heads, slash_BhS.shape[2], columns,
        PADDING=PADDING, BLOCK=sizes.select_block, num_warps=sizes.select_warps,
    )  # fmt: skip
    crossings_kernel[(ceil_div(entries, sizes.crossings_block), h, layout.batch)](
        slash_BhS, choice_Bh2, best_BhE, offset_BhE, n.past_B, n.length_B, h, slash_BhS.shape[2], entries,
        BLOCK_E=sizes.crossings_block, BLOCK_X=triton.next_power_of_2(layout.tile.query + layout.tile.key - 1),
        num_warps=sizes.crossings_warps, **plan.shape,
    )  # fmt: skip
    diagonals_kernel[(h, layout.batch)](
        best_BhE, offset_BhE, code_BhE, near_BhM, n.past_B, n.length_B, n.tiles_Bh, h, entries,
        plan.nearest, BLOCK=sizes.diagonals_block, num_warps=sizes.diagonals_warps, **plan.shape,
    )  # fmt: skip
    rows_kernel[(ceil_div(row_tiles, sizes.rows_block), h, layout.batch)](
        code_BhE, near_BhM, into.columns_BHC, into.tiles_BHTW, into.counts_BHT, into.live_BHTN, n.past_B,
        n.length_B, n.head_h, layout.window or 0, h, all_heads, row_tiles, entries, plan.nearest, width,
        columns, words, WINDOWED=layout.window is not None,
        BLOCK_T=sizes.rows_block, BLOCK_W=sizes.rows_tiles, BLOCK_N=sizes.rows_words, num_warps=sizes.rows_warps,
        **plan.shape,
    )  # fmt: skip


def _scratch(
    plan: HeadsPlan, layout: IndexLayout, widths: tuple[int, ...], dtype: torch.dtype
) -> Sequence[torch.Tensor]:
    """Memory for several tensors of rows of these widths by one allocation; the kernels know their shapes."""
    pieces = [ceil_div(layout.batch * plan.count * width, _ALIGNED) * _ALIGNED for width in widths]
    return torch.empty(sum(pieces), dtype=dtype, device=layout.device).split_with_sizes(pieces)


def _padded(lines: LineScores, part: slice) -> LineScores:
    """Rows of a multiple of PADDING; the bits of UNSEEN, and of what is added, become -1 (see choices.py)."""
    missing = -lines.slash_BhS.shape[2] % PADDING
    vertical, slash = (
        torch.nn.functional.pad(x_BhS[:, part].view(torch.int32).clamp(min=-1), (0, missing), value=-1)
        for x_BhS in (lines.vertical_BhS, lines.slash_BhS)
    )
    return LineScores(vertical.view(torch.float32), slash.view(torch.float32))
