"""Vertical-slash indices built by Triton kernels: the launches, nothing else.

Six launches (or some more, see lines.py), whatever the number of heads, and one copy from the host:

    stats      softmax statistics of the sampled queries            split over the keys
    lines      scores of every column and every diagonal            split over the keys (some GPUs: and the queries)
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

import torch

from sparsekv.kernels.index.layout import IndexCall, IndexWidths, LineScores, take_heads
from sparsekv.kernels.index.triton.key_passes import lines_kernel, stats_kernel
from sparsekv.kernels.index.triton.line_plan import BuildPlan, HeadsPlan, plan_build
from sparsekv.kernels.index.triton.numbers import Numbers, send
from sparsekv.kernels.index.triton.selection import select_kernel
from sparsekv.kernels.index.triton.sizes import (
    LARGEST_SAMPLE,
    LONGEST,
    MOST_RUNS,
    PADDING,
    Sizes,
    sizes_for,
    tensor_obstacle,
)
from sparsekv.kernels.index.triton.slash_tiles import crossings_kernel, diagonals_kernel, rows_kernel
from sparsekv.kernels.tiles import TileIndex
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
    sizes = sizes or sizes_for(call.device)
    plan = plan_build(patterns, heads, call.layout, sizes, MOST_SCORES)
    return VerticalSlashBuild(plan, call, sizes, _known_lines(patterns, heads, call))


@dataclass(frozen=True, slots=True)
class VerticalSlashBuild:
    """An index that is to be built."""

    plan: BuildPlan
    call: IndexCall
    sizes: Sizes
    known: LineScores | None  # scores of columns and diagonals, where the caller has them

    @property
    def widths(self) -> IndexWidths:
        """How wide the index is."""
        return self.plan.widths

    def fill(self, into: TileIndex) -> None:
        """Launches everything that builds it, straight into the tensors of the whole layer.

        Args:
            into: contiguous, of all heads, at least as wide as `widths`; all that belongs to these heads is written.
        """
        with torch.cuda.device_of(self.call.q_BHSD):
            for part in self.plan.parts:
                launches = Launches(part, self.call, self.sizes, send(self.call.device, part.fields))
                lines = launches.score() if self.known is None else _padded(self.known, part.heads)
                launches.choose(lines, into)


@dataclass(frozen=True, slots=True)
class Launches:
    """The launches for some heads."""

    plan: HeadsPlan
    call: IndexCall
    sizes: Sizes
    numbers: Numbers

    def score(self) -> LineScores:
        """The two passes over the keys."""
        call, plan, n = self.call, self.plan, self.numbers
        q_BHSD, k_BGKD, stats, lines = call.q_BHSD, call.k_BGKD, plan.stats, plan.lines
        m_BhLR, l_BhLR, vertical, slash = self._scratch(plan.score_pieces, torch.float32)
        where = (n.past_B, n.length_B, n.head_h, n.sampled_Bh)
        strides = (*q_BHSD.stride()[:3], *k_BGKD.stride()[:3])
        numbers = (*strides, call.scale * _LOG2_E, call.window or 0, plan.count)
        stats_kernel[stats.grid](
            q_BHSD, k_BGKD, m_BhLR, l_BhLR, *where, n.stats_units, *numbers, stats.run, **stats.options
        )
        for first_row in plan.lines_rows:
            lines_kernel[lines.grid](
                q_BHSD, k_BGKD, m_BhLR, l_BhLR, vertical, slash, *where, n.lines_units, *numbers, lines.run,
                stats.runs, plan.stride, FIRST_ROW=first_row, ALL_ROWS=plan.sampled_rows,
                MOST_RUNS=MOST_RUNS, PADDING=PADDING, **lines.options,
            )  # fmt: skip
        shape = (call.batch, plan.count, plan.stride)
        return LineScores(vertical.view(shape), slash.view(shape))

    def choose(self, lines: LineScores, into: TileIndex) -> None:
        """Lists columns and tiles by these scores."""
        slash_BhS = lines.slash_BhS.view(torch.int32)
        choice_Bh2, best_BhE, offset_BhE, code_BhE, near_BhM = self._scratch(self.plan.choice_pieces, torch.int32)
        self._select(lines.vertical_BhS.view(torch.int32), slash_BhS, choice_Bh2, into)
        self._choose_diagonals(slash_BhS, choice_Bh2, (best_BhE, offset_BhE, code_BhE), near_BhM)
        self._list_rows(code_BhE, near_BhM, into)

    def _select(
        self, vertical_BhS: torch.Tensor, slash_BhS: torch.Tensor, choice_Bh2: torch.Tensor, into: TileIndex
    ) -> None:
        """Lists the best columns; `choice` is which slashes are: a threshold, and the last offset equal to it."""
        h, n, columns_BHC = self.plan.count, self.numbers, into.columns_BHC
        select_kernel[(h, 2, self.call.batch)](
            vertical_BhS, slash_BhS, columns_BHC, choice_Bh2, n.length_B, n.head_h, n.columns_Bh, n.slashes_Bh, h,
            columns_BHC.shape[1], slash_BhS.shape[2], columns_BHC.shape[2],
            PADDING=PADDING, BLOCK=self.sizes.select_block, num_warps=self.sizes.select_warps,
        )  # fmt: skip

    def _choose_diagonals(
        self,
        slash_BhS: torch.Tensor,
        choice_Bh2: torch.Tensor,
        scratch_BhE: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        near_BhM: torch.Tensor,
    ) -> None:
        """The chosen tile diagonals of each head: how many up to each (the last scratch), and their distances."""
        plan, n, sizes = self.plan, self.numbers, self.sizes
        best_BhE, offset_BhE, code_BhE = scratch_BhE
        crossings_kernel[plan.crossings_grid](
            slash_BhS, choice_Bh2, best_BhE, offset_BhE, n.past_B, n.length_B, plan.count, slash_BhS.shape[2],
            plan.entries,
            BLOCK_E=sizes.crossings_block, BLOCK_X=plan.crossings_lanes, num_warps=sizes.crossings_warps, **plan.shape,
        )  # fmt: skip
        diagonals_kernel[(plan.count, self.call.batch)](
            best_BhE, offset_BhE, code_BhE, near_BhM, n.past_B, n.length_B, n.tiles_Bh, plan.count, plan.entries,
            plan.nearest, BLOCK=sizes.diagonals_block, num_warps=sizes.diagonals_warps, **plan.shape,
        )  # fmt: skip

    def _list_rows(self, code_BhE: torch.Tensor, near_BhM: torch.Tensor, into: TileIndex) -> None:
        """Writes lists, counts and live bits."""
        plan, n, sizes = self.plan, self.numbers, self.sizes
        _, all_heads, row_tiles, width = into.tiles_BHTW.shape
        rows_kernel[plan.rows_grid](
            code_BhE, near_BhM, into.columns_BHC, into.tiles_BHTW, into.counts_BHT, into.live_BHTN, n.past_B,
            n.length_B, n.head_h, self.call.window or 0, plan.count, all_heads, row_tiles, plan.entries, plan.nearest,
            width, into.columns_BHC.shape[2], into.live_BHTN.shape[3], WINDOWED=plan.windowed,
            BLOCK_T=sizes.rows_block, BLOCK_W=sizes.rows_tiles, BLOCK_N=sizes.rows_words, num_warps=sizes.rows_warps,
            **plan.shape,
        )  # fmt: skip

    def _scratch(self, pieces: tuple[int, ...], dtype: torch.dtype) -> Sequence[torch.Tensor]:
        """Memory for several tensors by one allocation; the kernels know their shapes."""
        return torch.empty(sum(pieces), dtype=dtype, device=self.call.device).split_with_sizes(pieces)


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
