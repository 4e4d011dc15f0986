"""Vertical-slash indices built by Triton kernels: the launches, nothing else.

Six launches, whatever the number of heads, and one copy from the host:

    stats      softmax statistics of the sampled queries            split over the keys
    lines      scores of every column and every diagonal            split over the keys
    select     the best columns, listed; the threshold of slashes   two programs a head
    crossings  the best chosen slash of every tile diagonal         split over the diagonals
    diagonals  which of them a row can afford                       a program a head
    rows       tile lists, counts and live bits                     split over the row tiles

The result is that of kernels/index/vertical_slash.py, and the same run to run. Work and memory are linear in the
length; the scores of query and key are never kept.

Shapes: as in call.py; E tile diagonals (see crossings.py), M chosen ones, L sampled queries, R runs of the first pass.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton

from sparsekv.kernels.index.call import IndexCall, IndexWidths, ceil_div, take_heads
from sparsekv.kernels.index.device.crossings import crossings_kernel
from sparsekv.kernels.index.device.diagonals import diagonals_kernel
from sparsekv.kernels.index.device.limits import tensor_obstacle
from sparsekv.kernels.index.device.lines import lines_kernel
from sparsekv.kernels.index.device.numbers import Budgets, Numbers, budgets_of, largest, send, units_of
from sparsekv.kernels.index.device.rows import rows_kernel
from sparsekv.kernels.index.device.select import select_kernel
from sparsekv.kernels.index.device.sizes import (
    LARGEST_SAMPLE,
    LONGEST,
    MOST_RUNS,
    PADDING,
    Pass,
    Sizes,
    Strips,
    sizes_for,
    strips_for,
)
from sparsekv.kernels.index.device.stats import stats_kernel
from sparsekv.kernels.index.line_scores import LineScores
from sparsekv.kernels.tiles import TileIndex
from sparsekv.kernels.topk import blocks
from sparsekv.kernels.triton_support import interpreting
from sparsekv.plans.patterns import VerticalSlash

_LOG2_E = math.log2(math.e)
# Scores of columns and diagonals held at once, in elements; a layer that would need more is built in groups of heads.
MOST_SCORES = 1 << 27


def obstacle(patterns: Sequence[VerticalSlash], call: IndexCall) -> str | None:
    """Why the index of these heads cannot be built here; None when it can."""
    sampled = max(pattern.last_q for pattern in patterns)
    if sampled > LARGEST_SAMPLE:
        return f"it samples at most {LARGEST_SAMPLE} queries, found last_q {sampled}"
    if call.chunk.longest > LONGEST:
        return f"it takes up to {LONGEST:,} tokens, found {call.chunk.longest:,}"
    return tensor_obstacle(call)


def prepare(
    patterns: Sequence[VerticalSlash], heads: Sequence[int], call: IndexCall, sizes: Sizes | None = None
) -> VerticalSlashBuild:
    """All that the host knows about the index of these heads.

    Args:
        patterns: one of each of `heads`; `obstacle` has found nothing against them.
        heads: query heads, any of the layer's.
        call: the layer's queries and keys.
        sizes: block sizes to use instead of the table's, for tuning and for tests.
    """
    known = _known_lines(patterns, heads, call)
    return VerticalSlashBuild(tuple(heads), budgets_of(patterns, call), call, sizes or sizes_for(call.device), known)


@dataclass(frozen=True, slots=True)
class VerticalSlashBuild:
    """An index that is to be built."""

    heads: tuple[int, ...]
    budgets: Budgets
    call: IndexCall
    sizes: Sizes
    known: LineScores | None  # scores of columns and diagonals, where the caller has them

    @property
    def widths(self) -> IndexWidths:
        """How wide the index is."""
        return IndexWidths(self.call.most_tiles(_row_bound(self.budgets, self.call)), largest(self.budgets.columns))

    def fill(self, into: TileIndex) -> None:
        """Launches everything that builds it, straight into the tensors of the whole layer.

        Args:
            into: contiguous, of all heads, at least as wide as `widths`; all that belongs to these heads is written.
        """
        call = self.call
        with torch.cuda.device_of(call.q_BHSD):
            for part in blocks(len(self.heads), 2 * call.batch * call.chunk.longest, MOST_SCORES):
                launches = _Launches.plan(self.heads[part], self.budgets.part(part), call, self.sizes)
                lines = launches.score() if self.known is None else _padded(self.known, part)
                choice_Bh2 = launches.select(lines, into)
                launches.list_rows(*launches.choose_diagonals(lines, choice_Bh2), into)


@dataclass(frozen=True, slots=True)
class _Launches:
    """The launches for some heads."""

    heads: tuple[int, ...]
    budgets: Budgets
    call: IndexCall
    sizes: Sizes
    strips: Strips
    numbers: Numbers

    @classmethod
    def plan(cls, heads: tuple[int, ...], budgets: Budgets, call: IndexCall, sizes: Sizes) -> _Launches:
        """Deals the heads out to programs and sends the numbers."""
        strips = strips_for(max(1, largest(budgets.sampled)))
        stats, lines = sizes.stats[strips.count], sizes.lines[strips.count]
        dealt = [units_of(heads, call.group_size, _stacked(one, call)) for one in (stats, lines)]
        return cls(heads, budgets, call, sizes, strips, send(heads, budgets, dealt[0], dealt[1], call))

    def score(self) -> LineScores:
        """The two passes over the keys."""
        call, h, keys = self.call, len(self.heads), self.call.chunk.longest
        stride = ceil_div(keys, PADDING) * PADDING
        stats, lines = self.sizes.stats[self.strips.count], self.sizes.lines[self.strips.count]
        n = self.numbers
        strides = (*call.q_BHSD.stride()[:3], *call.k_BGKD.stride()[:3])
        numbers = (*strides, call.scale * _LOG2_E, call.window or 0, h)
        where = (n.past_B, n.length_B, n.head_h, n.sampled_Bh)
        run, runs = _runs(keys, stats)
        m_BhLR = self._empty(h, self.strips.rows * self.strips.count, runs, dtype=torch.float32)
        l_BhLR = torch.empty_like(m_BhLR)
        stats_kernel[(len(n.stats_UP), runs, call.batch)](
            call.q_BHSD, call.k_BGKD, m_BhLR, l_BhLR, *where, n.stats_UP, *numbers, run, **self._options(stats),
        )  # fmt: skip
        vertical_BhS = self._empty(h, stride, dtype=torch.float32)
        slash_BhS = torch.empty_like(vertical_BhS)
        run, parts = _runs(keys, lines)
        lines_kernel[(len(n.lines_UP), parts, call.batch)](
            call.q_BHSD, call.k_BGKD, m_BhLR, l_BhLR, vertical_BhS, slash_BhS, *where, n.lines_UP, *numbers, run, runs,
            stride, MOST_RUNS=MOST_RUNS, PADDING=PADDING, **self._options(lines),
        )  # fmt: skip
        return LineScores(vertical_BhS, slash_BhS)

    def select(self, lines: LineScores, into: TileIndex) -> torch.Tensor:
        """Lists the best columns; returns which slashes are the best: a threshold, and the last offset equal to it."""
        h, n = len(self.heads), self.numbers
        choice_Bh2 = self._empty(h, 2)
        select_kernel[(h, 2, self.call.batch)](
            lines.vertical_BhS.view(torch.int32), lines.slash_BhS.view(torch.int32), into.columns_BHC, choice_Bh2,
            n.length_B, n.head_h, n.columns_Bh, n.slashes_Bh, h, into.columns_BHC.shape[1], lines.slash_BhS.shape[2],
            into.columns_BHC.shape[2],
            PADDING=PADDING, BLOCK=self.sizes.select_block, num_warps=self.sizes.select_warps,
        )  # fmt: skip
        return choice_Bh2

    def choose_diagonals(self, lines: LineScores, choice_Bh2: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The chosen tile diagonals of each head: how many up to each, and their distances in order."""
        h, n, sizes, tile = len(self.heads), self.numbers, self.sizes, self.call.tile
        shape: dict[str, Any] = {"QUERY": tile.query, "KEY": tile.key, "RIGHT": self._right}
        entries = self._entries
        best_BhE = self._empty(h, entries)
        offset_BhE, code_BhE = torch.empty_like(best_BhE), torch.empty_like(best_BhE)
        crossings_kernel[(ceil_div(entries, sizes.crossings_block), h, self.call.batch)](
            lines.slash_BhS.view(torch.int32), choice_Bh2, best_BhE, offset_BhE, n.past_B, n.length_B, h,
            lines.slash_BhS.shape[2], entries,
            BLOCK_E=sizes.crossings_block, BLOCK_X=triton.next_power_of_2(tile.query + tile.key - 1),
            num_warps=sizes.crossings_warps, **shape,
        )  # fmt: skip
        near_BhM = self._empty(h, min(_row_bound(self.budgets, self.call), entries))
        diagonals_kernel[(h, self.call.batch)](
            best_BhE, offset_BhE, code_BhE, near_BhM, n.past_B, n.length_B, n.tiles_Bh, h, entries, near_BhM.shape[2],
            BLOCK=sizes.diagonals_block, num_warps=sizes.diagonals_warps, **shape,
        )  # fmt: skip
        return code_BhE, near_BhM

    def list_rows(self, code_BhE: torch.Tensor, near_BhM: torch.Tensor, into: TileIndex) -> None:
        """Writes lists, counts and live bits."""
        h, n, sizes, tile = len(self.heads), self.numbers, self.sizes, self.call.tile
        _, all_heads, row_tiles, width = into.tiles_BHTW.shape
        rows_kernel[(ceil_div(row_tiles, sizes.rows_block), h, self.call.batch)](
            code_BhE, near_BhM, into.columns_BHC, into.tiles_BHTW, into.counts_BHT, into.live_BHTN, n.past_B,
            n.length_B, n.head_h, self.call.window or 0, h, all_heads, row_tiles, self._entries, near_BhM.shape[2],
            width, into.columns_BHC.shape[2], into.live_BHTN.shape[3],
            QUERY=tile.query, KEY=tile.key, RIGHT=self._right, WINDOWED=self.call.window is not None,
            BLOCK_T=sizes.rows_block, BLOCK_W=sizes.rows_tiles, BLOCK_N=sizes.rows_words, num_warps=sizes.rows_warps,
        )  # fmt: skip

    @property
    def _right(self) -> int:
        """Entry of distance 0; one more than any row needs: the first entry is never chosen."""
        return self.call.tile.query // self.call.tile.key + 1

    @property
    def _entries(self) -> int:
        return self.call.key_tiles + self._right + 2

    def _empty(self, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty((self.call.batch, *shape), dtype=dtype, device=self.call.device)

    def _options(self, one: Pass) -> dict[str, Any]:
        """What a pass over the keys is compiled for."""
        call, head_dim = self.call, self.call.q_BHSD.shape[3]
        return {
            "GROUP": call.group_size,
            "D": head_dim,
            "BLOCK_D": triton.next_power_of_2(head_dim),
            "SLOTS": _stacked(one, call),
            "ROWS": self.strips.rows,
            "STRIPS": self.strips.count,
            "BLOCK_N": one.keys,
            "STAGES": one.stages,
            "WINDOWED": call.window is not None and call.window < call.chunk.longest,
            "PRECISION": "ieee",
            "UPCAST": interpreting() and call.q_BHSD.dtype == torch.bfloat16,
            "num_warps": one.warps,
        }


def _stacked(one: Pass, call: IndexCall) -> int:
    """Heads of a program: never more than a KV head serves."""
    return min(one.heads, int(triton.next_power_of_2(call.group_size)))


def _runs(keys: int, one: Pass) -> tuple[int, int]:
    """Keys of a run, a multiple of a step, and how many runs there are."""
    run = ceil_div(max(one.least_run, ceil_div(keys, MOST_RUNS)), one.keys) * one.keys
    return run, ceil_div(keys, run)


def _row_bound(budgets: Budgets, call: IndexCall) -> int:
    """The most tiles that a row can have."""
    crossed = call.tile.query // call.tile.key + 1
    return min(largest(budgets.tiles), crossed * largest(budgets.slashes) + max(map(call.mandatory_tiles, call.phases)))


def _known_lines(patterns: Sequence[VerticalSlash], heads: Sequence[int], call: IndexCall) -> LineScores | None:
    """The scores of these heads where the caller has them already."""
    sampled = {pattern.last_q for pattern in patterns}
    known = call.lines.get(sampled.pop()) if call.lines and len(sampled) == 1 else None
    if known is None:
        return None
    return LineScores(take_heads(known.vertical_BhS, heads), take_heads(known.slash_BhS, heads))


def _padded(lines: LineScores, part: slice) -> LineScores:
    """Rows of a multiple of PADDING; the bits of UNSEEN, and of what is added, become -1 (see ranking.py)."""
    missing = -lines.slash_BhS.shape[2] % PADDING
    vertical, slash = (
        torch.nn.functional.pad(x_BhS[:, part].view(torch.int32).clamp(min=-1), (0, missing), value=-1)
        for x_BhS in (lines.vertical_BhS, lines.slash_BhS)
    )
    return LineScores(vertical.view(torch.float32), slash.view(torch.float32))
