"""Sparse prefill on Hopper: tiles by flash-attn-4, then single columns by a Triton pass that goes on from its result.

Heads of every pattern run in one launch over block lists. Dense heads have no list: up to LISTED_TILES key tiles a row
they get one and join that launch, beyond that (a list of every tile grows with the square of the length) they get dense
launches of their own, which overwrite the empty rows that the first launch left them.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys in memory, D head size.
"""

from __future__ import annotations

import math

import torch

from sparsekv.kernels.prefill.columns import add_columns
from sparsekv.kernels.prefill.flash.call import (
    CallPart,
    Span,
    attend_dense,
    attend_lists,
    dense_ranges,
    lower,
    spans,
    widest,
)
from sparsekv.kernels.prefill.flash.limits import device_obstacle, is_aligned, shape_obstacle
from sparsekv.kernels.tiles import AttentionOutput, Chunk, PrefillCall, TileIndex
from sparsekv.plans.errors import BackendError

# Dense heads are listed while a row has at most this many key tiles: 32K tokens of 128, lists of 8 MB for 32 heads.
# Beyond, a launch of a single head has about twice as many query tiles as an H200 has multiprocessors. A quarter of 32
# heads dense on an H200, listed against alone: 0.41 and 1.29 ms at 4K, 1.31 and 1.88 at 16K, 4.26 and 4.41 at 32K.
LISTED_TILES = 256
# Dense layers of fewer rows are left to torch, whose launches cost the host less: of a whole prompt, and of a chunk,
# where torch has a kernel of half the speed. Of whole prompts on an H200, torch's own calls are as fast at 4K, and with
# flash-attn-4 one of 0.1B took 11% less at 8K, one of 0.5B 6%, once each; the bound between them was not timed.
DENSE_ROWS, DENSE_CHUNK_ROWS = 6144, 2048


def prefill(call: PrefillCall, index: TileIndex, want_lse: bool = False) -> AttentionOutput:
    """Attention over the index's tiles and columns. Raises BackendError where flash-attn-4 does not take the
    tensors."""
    assert not call.cap, "choose_backend has refused a soft cap"
    q_BHSD = call.q_BHSD
    obstacle = device_obstacle(q_BHSD.device) or shape_obstacle(q_BHSD.dtype, q_BHSD.shape[-1], index.tile)
    if obstacle:
        raise BackendError(f"the flash backend cannot run this layer: {obstacle}; use backend='triton'")
    return run(call, index, want_lse)


def takes_dense(q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, chunk: Chunk) -> bool:
    if q_BHSD.shape[2] < (DENSE_CHUNK_ROWS if any(chunk.past) else DENSE_ROWS):
        return False
    refused = device_obstacle(q_BHSD.device) or shape_obstacle(q_BHSD.dtype, q_BHSD.shape[-1], None)
    return refused is None and all(map(is_aligned, (q_BHSD, k_BGKD, v_BGKD)))


@torch.no_grad()
def dense(call: PrefillCall) -> AttentionOutput:
    """Causal attention of all heads over every key (of the window)."""
    whole = _whole(call)
    for span in spans(call.chunk):
        _pad(whole, span)
        if span.queries:
            attend_dense(whole.at(span))
    return AttentionOutput(whole.out_BHSD, None)


@torch.no_grad()
def run(call: PrefillCall, index: TileIndex, want_lse: bool) -> AttentionOutput:
    whole = _whole(call)
    if whole.out_BHSD.numel():
        _tiles(whole, index, call.chunk)
        if index.columns_BHC.shape[2]:
            add_columns(whole.out_BHSD, whole.lse_BHS, call, index)
    return AttentionOutput(whole.out_BHSD, whole.lse_BHS if want_lse else None)


def _whole(call: PrefillCall) -> CallPart:
    reaches = call.window is not None and call.window >= call.chunk.longest  # over all: one kernel less to compile
    out_BHSD = torch.empty_like(call.q_BHSD)
    lse_BHS = torch.empty(out_BHSD.shape[:3], dtype=torch.float32, device=out_BHSD.device)
    window = None if reaches else call.window
    past_1 = None if call.chunk.is_fixed else call.chunk.on_device(out_BHSD.device)[0]
    return CallPart(call.q_BHSD, call.k_BGKD, call.v_BGKD, out_BHSD, lse_BHS, call.scale, window, past_1)


def _tiles(whole: CallPart, index: TileIndex, chunk: Chunk) -> None:
    dense = _dense_heads(index)
    heads, kv_heads = whole.q_BHSD.shape[1], whole.k_BGKD.shape[1]
    some_sparse = len(dense) < heads
    few = widest(chunk, index.tile, whole.window) <= LISTED_TILES
    listed = some_sparse and bool(dense) and (few or not chunk.is_fixed)
    lists = lower(index, chunk, window=whole.window, list_dense=listed) if some_sparse else None
    alone = [] if listed else list(dense_ranges(dense, heads // kv_heads))
    for span in spans(chunk):
        _pad(whole, span)
        if span.queries == 0:
            continue
        part = whole.at(span)
        if lists is not None:
            attend_lists(part, lists.at(span.rows, span.queries, span.length))
        for heads_alone in alone:
            attend_dense(part.of(heads_alone))


def _pad(whole: CallPart, span: Span) -> None:
    """Rows past the length, which no launch writes."""
    if span.queries < whole.q_BHSD.shape[2]:
        whole.out_BHSD[span.rows, :, span.queries :] = 0.0
        whole.lse_BHS[span.rows, :, span.queries :] = -math.inf


def _dense_heads(index: TileIndex) -> tuple[int, ...]:
    """Asks the device only where the host does not know."""
    if index.dense_heads is not None:
        return index.dense_heads
    return tuple(head for head, dense in enumerate(index.dense_H.tolist()) if dense)
