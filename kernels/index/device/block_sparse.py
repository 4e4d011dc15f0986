"""Block-sparse indices built by Triton kernels: the launches, nothing else.

    pool       mean queries of every row tile, and mean keys of every key tile     two launches
    products   scores of a block of row tiles
    choose     the best tiles of these rows, listed

The last two repeat for blocks of row tiles, whose scores take bounded memory: once up to 128K tokens of 32 heads with
128 x 128 tiles. The result is that of kernels/index/block_sparse.py, and the same run to run.

Shapes: as in call.py; R row tiles of one block, M key tiles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import triton

from sparsekv.kernels.index.call import IndexCall, IndexWidths, Layout, ceil_div
from sparsekv.kernels.index.device.choose import choose_kernel
from sparsekv.kernels.index.device.limits import tensor_obstacle
from sparsekv.kernels.index.device.numbers import Fields, flat, largest, send_fields
from sparsekv.kernels.index.device.pool import pool_kernel
from sparsekv.kernels.index.device.products import products_kernel
from sparsekv.kernels.index.device.sizes import Sizes, sizes_for
from sparsekv.kernels.index.heads import Same
from sparsekv.kernels.tiles import TileIndex
from sparsekv.kernels.topk import blocks
from sparsekv.kernels.triton_support import interpreting
from sparsekv.plans.patterns import BlockSparse

# Scores of row tiles by key tiles held at once, in elements.
MOST_SCORES = 1 << 26


def obstacle(patterns: Sequence[BlockSparse], call: IndexCall) -> str | None:
    """Why the index of these heads cannot be built here; None when it can."""
    return tensor_obstacle(call)


def prepare(
    patterns: Sequence[BlockSparse], heads: Sequence[int], call: IndexCall, sizes: Sizes | None = None
) -> BlockSparseBuild:
    """All that the host knows about the index of these heads; arguments as in vertical_slash.py."""
    return BlockSparseBuild(
        _plan(Same(tuple(patterns)), tuple(heads), call.layout), call, sizes or sizes_for(call.device)
    )


@dataclass(frozen=True, slots=True)
class _Plan:
    """What follows from patterns and places, never from tensors."""

    heads: int  # h
    widths: IndexWidths
    fields: Fields  # past, length, zero, head, KV head, tiles a row


@lru_cache(maxsize=256)
def _plan(patterns: Same, heads: tuple[int, ...], layout: Layout) -> _Plan:
    keep = layout.tile_bounds([pattern.keep for pattern in patterns.objects])
    places = (layout.chunk.past, layout.chunk.lengths, (0,) * layout.batch)
    fields = (*places, heads, tuple(range(layout.kv_heads)), flat(keep))
    return _Plan(len(heads), IndexWidths(layout.most_tiles(largest(keep)), 0), fields)


@dataclass(frozen=True, slots=True)
class BlockSparseBuild:
    """An index that is to be built."""

    plan: _Plan
    call: IndexCall
    sizes: Sizes

    @property
    def widths(self) -> IndexWidths:
        """How wide the index is."""
        return self.plan.widths

    def fill(self, into: TileIndex) -> None:
        """Launches everything that builds it, straight into the tensors of the whole layer.

        Args:
            into: contiguous, of all heads, at least as wide as `widths`; tiles and counts of these heads are written.
        """
        call, h = self.call, self.plan.heads
        with torch.cuda.device_of(call.q_BHSD):
            past_B, length_B, zero_B, head_h, kv_head_G, keep_Bh = send_fields(call.device, self.plan.fields)
            q_BhTD = self._pool(call.q_BHSD, past_B, length_B, head_h, call.row_tiles, call.tile.query)
            k_BGMD = self._pool(call.k_BGKD, zero_B, length_B, kv_head_G, call.key_tiles, call.tile.key)
            for part in blocks(call.row_tiles, call.batch * h * call.key_tiles, MOST_SCORES):
                self._list_rows(part, q_BhTD, k_BGMD, (past_B, length_B, head_h), keep_Bh, into)

    def _pool(
        self,
        x_BHSD: torch.Tensor,
        first_B: torch.Tensor,
        length_B: torch.Tensor,
        head_h: torch.Tensor,
        tiles: int,
        size: int,
    ) -> torch.Tensor:
        """Mean rows of each tile of these heads, float32 [B, h, tiles, D]."""
        batch, _, _, head_dim = x_BHSD.shape
        mean_BhTD = torch.empty((batch, len(head_h), tiles, head_dim), dtype=torch.float32, device=x_BHSD.device)
        pool_kernel[(tiles, len(head_h), batch)](
            x_BHSD, mean_BhTD, first_B, length_B, head_h, *x_BHSD.stride()[:3], tiles,
            TILE=size, D=head_dim, BLOCK_D=triton.next_power_of_2(head_dim), num_warps=self.sizes.pool_warps,
        )  # fmt: skip
        return mean_BhTD

    def _list_rows(
        self,
        part: slice,
        q_BhTD: torch.Tensor,
        k_BGMD: torch.Tensor,
        where: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        keep_Bh: torch.Tensor,
        into: TileIndex,
    ) -> None:
        """Scores and lists a block of row tiles."""
        call, sizes, h, rows = self.call, self.sizes, self.plan.heads, part.stop - part.start
        shape: dict[str, Any] = {"QUERY": call.tile.query, "KEY": call.tile.key, "WINDOWED": call.window is not None}
        order_BhRM = torch.empty((call.batch, h, rows, call.key_tiles), dtype=torch.int32, device=call.device)
        reach = (call.row_tiles, call.key_tiles, part.start, part.stop)
        products_kernel[(ceil_div(rows, sizes.products_block), h, call.batch)](
            q_BhTD, k_BGMD, order_BhRM, *where, call.scale, call.window or 0, h, k_BGMD.shape[1], *reach,
            GROUP=call.group_size, D=q_BhTD.shape[3], BLOCK_D=sizes.products_numbers, BLOCK_T=sizes.products_block,
            BLOCK_M=sizes.products_block,
            PRECISION="ieee" if interpreting() else "tf32x3", num_warps=sizes.products_warps, **shape,
        )  # fmt: skip
        choose_kernel[(ceil_div(rows, sizes.choose_block), h, call.batch)](
            order_BhRM, into.tiles_BHTW, into.counts_BHT, *where, keep_Bh, call.window or 0, h,
            into.tiles_BHTW.shape[1], *reach, into.tiles_BHTW.shape[3],
            BLOCK_T=sizes.choose_block, BLOCK_M=sizes.choose_tiles, num_warps=sizes.choose_warps, **shape,
        )  # fmt: skip
