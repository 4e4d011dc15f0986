"""What the host works out for a vertical-slash build, kept: it follows from patterns and places, never from tensors.

Shapes: B batch, h heads that are built, E tile diagonals (see crossings.py), M chosen ones, R runs of the first pass.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from sparsekv.kernels.index.build import Same
from sparsekv.kernels.index.layout import IndexWidths, Layout, ceil_div
from sparsekv.kernels.index.triton.numbers import Budgets, Fields, budgets_of, fields_of, largest, units_of
from sparsekv.kernels.index.triton.sizes import MOST_RUNS, PADDING, Pass, Sizes, Strips, strips_for
from sparsekv.kernels.topk import blocks
from sparsekv.kernels.triton_support import interpreting
from sparsekv.plans.patterns import VerticalSlash

_ALIGNED = 16  # elements of 4 bytes: where Triton's usual launch expects pieces of scratch memory, and full rows end


@dataclass(frozen=True, slots=True)
class PassPlan:
    """One pass over the keys."""

    grid: tuple[int, int, int]
    run: int  # keys of a program
    options: Mapping[str, Any]  # what it is compiled for

    @property
    def runs(self) -> int:
        """How many programs share the keys."""
        return self.grid[1]


@dataclass(frozen=True, slots=True)
class HeadsPlan:
    """The launches for some heads."""

    heads: slice  # which of those that are built
    count: int  # h
    fields: Fields  # see Numbers
    stats: PassPlan
    lines: PassPlan
    sampled_rows: int  # of a head, rounded up to whole strips
    lines_rows: tuple[int, ...]  # the first row of each launch of the second pass
    stride: int  # numbers of a row of scores
    entries: int  # E
    nearest: int  # M
    right: int  # entry of distance 0; one more than any row needs: the first entry is never chosen
    shape: Mapping[str, Any]  # the tile, as kernels are compiled for it
    crossings_grid: tuple[int, int, int]
    crossings_lanes: int
    rows_grid: tuple[int, int, int]
    windowed: bool
    score_pieces: tuple[int, ...]  # elements of scratch memory: maxima, sums, columns, diagonals
    choice_pieces: tuple[int, ...]  # choices, best, offsets, codes, nearest


@dataclass(frozen=True, slots=True)
class BuildPlan:
    """A whole build, in groups of heads whose scores fit."""

    widths: IndexWidths
    parts: tuple[HeadsPlan, ...]


def plan_build(
    patterns: Sequence[VerticalSlash], heads: Sequence[int], layout: Layout, sizes: Sizes, most_scores: int
) -> BuildPlan:
    """The plan for these heads; the same plan for the same patterns.

    Args:
        patterns: one of each of `heads`.
        heads: query heads, any of the layer's.
        layout: the call, without its tensors.
        sizes: how the kernels cut their work.
        most_scores: elements that scores of columns and diagonals may have at once.
    """
    return _plan(Same(tuple(patterns)), tuple(heads), layout, sizes, most_scores)


@lru_cache(maxsize=256)
def _plan(patterns: Same, heads: tuple[int, ...], layout: Layout, sizes: Sizes, most_scores: int) -> BuildPlan:
    budgets = budgets_of(patterns.objects, layout)
    widths = IndexWidths(layout.most_tiles(_row_bound(budgets, layout)), largest(budgets.columns))
    parts = blocks(len(heads), 2 * layout.batch * layout.chunk.longest, most_scores)
    return BuildPlan(widths, tuple(plan_heads(part, heads[part], budgets.part(part), layout, sizes) for part in parts))


def plan_heads(part: slice, heads: tuple[int, ...], budgets: Budgets, layout: Layout, sizes: Sizes) -> HeadsPlan:
    """Deals the heads out to programs."""
    h, tile, strips = len(heads), layout.tile, strips_for(max(1, largest(budgets.sampled)))
    at_once = Strips(strips.rows, min(strips.count, sizes.lines_at_once))
    first, second = sizes.stats[strips.count], sizes.lines[at_once.count]
    stats_units, lines_units = (units_of(heads, layout.group_size, _stacked(one, layout)) for one in (first, second))
    stats, lines = _pass(first, len(stats_units), strips, layout), _pass(second, len(lines_units), at_once, layout)
    right = tile.query // tile.key + 1
    entries = layout.key_tiles + right + 2
    nearest = min(_row_bound(budgets, layout), entries)
    stride = ceil_div(layout.chunk.longest, PADDING) * PADDING
    sampled_rows = strips.rows * strips.count
    runs = sampled_rows * stats.runs
    return HeadsPlan(
        heads=part,
        count=h,
        fields=fields_of(heads, budgets, stats_units, lines_units, layout),
        stats=stats,
        lines=lines,
        sampled_rows=sampled_rows,
        lines_rows=tuple(range(0, sampled_rows, at_once.rows * at_once.count)),
        stride=stride,
        entries=entries,
        nearest=nearest,
        right=right,
        shape={"QUERY": tile.query, "KEY": tile.key, "RIGHT": right},
        crossings_grid=(ceil_div(entries, sizes.crossings_block), h, layout.batch),
        crossings_lanes=int(triton.next_power_of_2(tile.query + tile.key - 1)),
        rows_grid=(ceil_div(layout.row_tiles, sizes.rows_block), h, layout.batch),
        windowed=layout.window is not None,
        score_pieces=_pieces(layout.batch * h, (runs, runs, stride, stride)),
        choice_pieces=_pieces(layout.batch * h, (2, entries, entries, entries, nearest)),
    )


def _pieces(rows: int, widths: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(ceil_div(rows * width, _ALIGNED) * _ALIGNED for width in widths)


def _pass(one: Pass, units: int, strips: Strips, layout: Layout) -> PassPlan:
    keys = layout.chunk.longest
    run = ceil_div(max(one.least_run, ceil_div(keys, MOST_RUNS)), one.keys) * one.keys  # a multiple of a step
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
        "UPCAST": interpreting() and layout.dtype == torch.bfloat16,
        "num_warps": one.warps,
    }
    return PassPlan((units, ceil_div(keys, run), layout.batch), run, options)


def _stacked(one: Pass, layout: Layout) -> int:
    """Heads of a program: never more than a KV head serves."""
    return min(one.heads, int(triton.next_power_of_2(layout.group_size)))


def _row_bound(budgets: Budgets, layout: Layout) -> int:
    """The most tiles that a row can have."""
    crossed = layout.tile.query // layout.tile.key + 1
    mandatory = max(map(layout.mandatory_tiles, layout.phases))
    return min(largest(budgets.tiles), crossed * largest(budgets.slashes) + mandatory)
