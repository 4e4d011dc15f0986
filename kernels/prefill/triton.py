"""Sparse prefill on any GPU that Triton serves: the tiles and the single columns of one query block in one pass.

A program computes BLOCK_M rows of one query head. It walks the row's listed key tiles (all causal ones for a dense
head) in blocks of BLOCK_N keys, first those that need no mask, then those on the diagonal or on the window's edge, and
then gathers the live single columns BLOCK_C at a time, all in one online softmax (FlashAttention-2, algorithm 1).

Nothing is masked for the length: a visible key has j <= i, and a row that counts has i < length. Loads that could
touch memory past the length are masked, because whatever lies there could be a NaN.

Above a head size of MOST_VALUES, a row block is computed by several programs: each scores whole keys and adds up its
part of the values. The scores are computed as often, which costs half as much again; the accumulator of whole values
would spill, or leave 64 rows to a block, too few to hide the loads of keys.

Block sizes are chosen by GPU generation and head size so that registers hold (on Hopper, head size 256 spills a few)
and shared memory fits: on Hopper 160 KiB at head size 128 and 224 KiB at 512, under 99 KiB elsewhere.
tests/support/kernel_resources.py shows both for GPUs that are not at hand.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys in memory; in kernels M rows of a block, N keys of a
step, D head size padded to a power of two.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.tiles import AttentionOutput, PrefillCall, TileIndex
from sparsekv.kernels.triton_support import check_tensors, soft_cap
from sparsekv.plans.patterns import TileShape

LOG2_E = 1.4426950408889634
MOST_VALUES = 256  # numbers of a value in one program: the accumulator of more would not fit in the registers


@dataclass(frozen=True, slots=True)
class PrefillLaunch:
    """The kernel's cut of the work: rows and keys of a step, columns gathered at once, warps, pipeline depths."""

    block_m: int
    block_n: int
    block_c: int
    warps: int
    stages: int
    column_stages: int


# The largest padded head size that a row is for, and its launch; ascending.
_HOPPER = (
    (128, PrefillLaunch(128, 128, 64, 8, 2, 3)),
    (256, PrefillLaunch(128, 64, 32, 8, 2, 3)),
    (512, PrefillLaunch(128, 32, 32, 8, 2, 2)),
)
_AMPERE = (
    (128, PrefillLaunch(64, 64, 32, 4, 2, 2)),
    (256, PrefillLaunch(32, 32, 32, 4, 2, 2)),
    (512, PrefillLaunch(32, 32, 32, 4, 1, 1)),
)
_ROCM = (
    (128, PrefillLaunch(64, 32, 32, 4, 1, 1)),
    (256, PrefillLaunch(32, 32, 32, 4, 1, 1)),
    (512, PrefillLaunch(32, 16, 32, 4, 1, 1)),
)
# Without tensor cores every product is unrolled into registers; this only has to be right.
_FLOAT32 = (
    (128, PrefillLaunch(32, 32, 32, 4, 1, 1)),
    (256, PrefillLaunch(16, 32, 32, 4, 1, 1)),
    (512, PrefillLaunch(16, 16, 32, 4, 1, 1)),
)


def launch_for(device: torch.device, dtype: torch.dtype, block_d: int, tile: TileShape) -> PrefillLaunch:
    """The launch for this GPU, dtype and padded head size; its blocks divide the tile."""
    rows = _FLOAT32 if dtype == torch.float32 else _rows_of(device)
    launch = next(launch for limit, launch in rows if block_d <= limit)
    return fit(launch, tile)


def fit(launch: PrefillLaunch, tile: TileShape) -> PrefillLaunch:
    """Cuts the blocks to the tile: a kernel may subdivide tiles, never join them."""
    block_m = min(launch.block_m, tile.query)
    warps = min(launch.warps, 4) if block_m <= 64 else launch.warps  # a warp group multiplies 64 rows
    return replace(launch, block_m=block_m, block_n=min(launch.block_n, tile.key), warps=warps)


def _rows_of(device: torch.device) -> tuple[tuple[int, PrefillLaunch], ...]:
    if device.type != "cuda":
        return _AMPERE  # the interpreter: any block size will do
    if torch.version.hip is not None:
        return _ROCM
    return launch_table(torch.cuda.get_device_capability(device)[0])


def launch_table(major: int) -> tuple[tuple[int, PrefillLaunch], ...]:
    """The launches for NVIDIA GPUs of this major compute capability, by the largest padded head size."""
    # 9 and 10 are the data centre parts; 12 has the shared memory of 8.6.
    return _HOPPER if major in (9, 10) else _AMPERE


def prefill(call: PrefillCall, index: TileIndex, want_lse: bool = False) -> AttentionOutput:
    """Attention over the index's tiles and columns, all heads in one launch.

    Raises:
        BackendError: the tensors are not on a GPU, or head size or dtype is not supported.
        ShapeError: a stride is too long for 32-bit offsets inside a block.
    """
    q_BHSD, k_BGKD, v_BGKD, chunk, window = call.q_BHSD, call.k_BGKD, call.v_BGKD, call.chunk, call.window
    check_tensors(q_BHSD, k_BGKD, v_BGKD)
    B, H, S, D = q_BHSD.shape
    G = k_BGKD.shape[1]
    out_BHSD = torch.empty_like(q_BHSD)
    lse_BHS = torch.empty((B, H, S), dtype=torch.float32, device=q_BHSD.device) if want_lse else None
    if out_BHSD.numel() == 0:
        return AttentionOutput(out_BHSD, lse_BHS)
    block_d = triton.next_power_of_2(D)
    parts = triton.cdiv(D, MOST_VALUES)
    tile = index.tile
    blocks = launch_for(q_BHSD.device, q_BHSD.dtype, block_d, tile)
    past_B, lengths_B = chunk.on_device(q_BHSD.device)
    grid = (parts * H // G * triton.cdiv(S, blocks.block_m), G, B)
    with torch.cuda.device_of(q_BHSD):
        prefill_kernel[grid](
            q_BHSD, k_BGKD, v_BGKD, out_BHSD, lse_BHS if lse_BHS is not None else out_BHSD,
            index.tiles_BHTW.contiguous(), index.counts_BHT.contiguous(), index.columns_BHC.contiguous(),
            index.live_BHTN.contiguous(), index.dense_H.contiguous(), past_B, lengths_B,
            *q_BHSD.stride()[:3], *k_BGKD.stride()[:3], *v_BGKD.stride()[:3], *out_BHSD.stride()[:3],
            call.scale * LOG2_E, window or 0, G, S, index.counts_BHT.shape[2], index.tiles_BHTW.shape[3],
            index.columns_BHC.shape[2], index.live_BHTN.shape[3],
            GROUP=H // G, D=D, BLOCK_D=block_d, PARTS=parts, TILE_M=tile.query, TILE_N=tile.key,
            BLOCK_M=blocks.block_m, BLOCK_N=blocks.block_n, BLOCK_C=blocks.block_c, STAGES=blocks.stages,
            COLUMN_STAGES=blocks.column_stages, HAS_COLUMNS=index.columns_BHC.shape[2] > 0,
            WINDOWED=window is not None and window < chunk.longest, WANT_LSE=want_lse,
            PRECISION="ieee", CAP=call.cap * LOG2_E, num_warps=blocks.warps,
        )  # fmt: skip
    return AttentionOutput(out_BHSD, lse_BHS)


def dense(call: PrefillCall) -> AttentionOutput:
    """Causal attention over every key, of the window where there is one."""
    (B, H, S, _), tile = call.q_BHSD.shape, TileShape()
    nothing = call.q_BHSD.new_empty((B, H, call.chunk.query_tiles(tile, S), 0), dtype=torch.int32)
    dense_H = torch.ones(H, dtype=torch.bool, device=nothing.device)
    index = TileIndex(tile, nothing, nothing.sum(3, dtype=torch.int32), nothing[:, :, 0], nothing, dense_H)
    return prefill(call, index)


@triton.jit
@no_type_check
def _count_entries_below(list_ptr, count, first, second, third, fourth, SCAN: tl.constexpr):
    """Returns how many of the `count` ascending entries lie below each of four bounds; one load for lists up to
    SCAN."""
    below_first = 0
    below_second = 0
    below_third = 0
    below_fourth = 0
    lanes = tl.arange(0, SCAN)
    for start in range(0, count, SCAN):
        entry = tl.load(list_ptr + start + lanes, mask=start + lanes < count, other=2147483647)
        below_first += tl.sum((entry < first).to(tl.int32))
        below_second += tl.sum((entry < second).to(tl.int32))
        below_third += tl.sum((entry < third).to(tl.int32))
        below_fourth += tl.sum((entry < fourth).to(tl.int32))
    return below_first, below_second, below_third, below_fourth


@triton.jit
@no_type_check
def _live_words(live_ptr, words, SCAN: tl.constexpr):
    """The first word that is not zero, and one past the last; (2 ** 30, 0) when all are zero."""
    first = 1 << 30
    last = 0
    lanes = tl.arange(0, SCAN)
    for start in range(0, words, SCAN):
        at = start + lanes
        word = tl.load(live_ptr + at, mask=at < words, other=0)
        first = tl.minimum(first, tl.min(tl.where(word != 0, at, 1 << 30)))
        last = tl.maximum(last, tl.max(tl.where(word != 0, at + 1, 0)))
    return first, last


@triton.jit
@no_type_check
def _tile_at(list_ptr, position, end, dense):
    """Entry `position` of the row's list; a dense head has no list, its tiles are 0, 1, 2, ..."""
    listed = tl.load(list_ptr + position, mask=(position < end) & (dense == 0), other=0)
    return tl.where(dense != 0, position, listed)


@triton.jit
@no_type_check
def _rows(base_ptr, at, stride, lanes_D, keep, MASKED: tl.constexpr, D: tl.constexpr):
    """Rows number `at` from `base_ptr` on; masked-out rows read nothing and are 0."""
    at_ND = base_ptr + at[:, None] * stride + lanes_D[None, :]
    if MASKED:
        rows_ND = tl.load(at_ND, mask=keep[:, None] & (lanes_D < D)[None, :], other=0.0)
    elif lanes_D.shape[0] == D or lanes_D.shape[0] * 2 == D:
        rows_ND = tl.load(at_ND)
    else:
        rows_ND = tl.load(at_ND, mask=(lanes_D < D)[None, :], other=0.0)
    return rows_ND


@triton.jit
@no_type_check
def _attend(
    acc_MD, m_M, l_M, q_MD, k_ND, v_ND, keep_MN, scale_log2, MASKED: tl.constexpr, PRECISION: tl.constexpr,
    CAP: tl.constexpr,
):  # fmt: skip
    """One step of the online softmax, in base 2. With a mask, a row may have seen no key yet: its maximum is -inf."""
    s_MN = tl.dot(q_MD, tl.trans(k_ND), input_precision=PRECISION)
    if CAP > 0.0:
        s_MN = soft_cap(s_MN * scale_log2, CAP)
        scale_log2 = 1.0
    if MASKED:
        s_MN = tl.where(keep_MN, s_MN, float("-inf"))
    new_m_M = tl.maximum(m_M, tl.max(s_MN, 1) * scale_log2)
    base_M = new_m_M
    if MASKED:
        base_M = tl.where(new_m_M == float("-inf"), 0.0, new_m_M)
    p_MN = tl.exp2(s_MN * scale_log2 - base_M[:, None])
    decay_M = tl.exp2(m_M - base_M)
    l_M = l_M * decay_M + tl.sum(p_MN, 1)
    acc_MD = acc_MD * decay_M[:, None]
    acc_MD = tl.dot(p_MN.to(v_ND.dtype), v_ND, acc_MD, input_precision=PRECISION)
    return acc_MD, new_m_M, l_M


@triton.jit
@no_type_check
def _visible(row_M, key_N, window, WINDOWED: tl.constexpr):
    """Causal, and within the layer's own window where it has one."""
    keep_MN = key_N[None, :] <= row_M[:, None]
    if WINDOWED:
        keep_MN = keep_MN & (row_M[:, None] - key_N[None, :] < window)
    return keep_MN


@triton.jit(do_not_specialize=["window", "kv_heads", "queries", "query_tiles", "listed", "columns", "words"])
@no_type_check
def prefill_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr,
    tiles_ptr, counts_ptr, columns_ptr, live_ptr, dense_ptr, past_ptr, lengths_ptr,
    q_stride_B, q_stride_H, q_stride_S, k_stride_B, k_stride_G, k_stride_S,
    v_stride_B, v_stride_G, v_stride_S, out_stride_B, out_stride_H, out_stride_S,
    scale_log2, window, kv_heads, queries, query_tiles, listed, columns, words,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, PARTS: tl.constexpr, TILE_M: tl.constexpr,
    TILE_N: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_C: tl.constexpr, STAGES: tl.constexpr,
    COLUMN_STAGES: tl.constexpr, HAS_COLUMNS: tl.constexpr, WINDOWED: tl.constexpr, WANT_LSE: tl.constexpr,
    PRECISION: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Grid: (PARTS * GROUP * row blocks, KV heads, batch). The query heads of a KV head run side by side: they share K
    and V in cache. The last rows come first: they are the longest, and nothing long is left for the end of the launch.
    """
    BLOCK_V: tl.constexpr = BLOCK_D // PARTS
    block = (tl.num_programs(0) - 1 - tl.program_id(0)) // (GROUP * PARTS)
    kv_head = tl.program_id(1)
    head = kv_head * GROUP + tl.program_id(0) // PARTS % GROUP
    part = tl.program_id(0) % PARTS
    batch = tl.program_id(2)
    batch_head = batch * kv_heads * GROUP + head

    past = tl.load(past_ptr + batch)
    length = tl.load(lengths_ptr + batch)
    row_M = block * BLOCK_M + tl.arange(0, BLOCK_M)  # in the chunk
    i_M = past + row_M  # in the sequence
    real_M = (row_M < queries) & (i_M < length)
    first_row = past + block * BLOCK_M
    last_row = tl.minimum(first_row + BLOCK_M, length) - 1
    is_real = first_row < length

    lanes_D = tl.arange(0, BLOCK_D)
    lanes_V = part * BLOCK_V + tl.arange(0, BLOCK_V)
    lanes_N = tl.arange(0, BLOCK_N)
    q_base = q_ptr + batch.to(tl.int64) * q_stride_B + head.to(tl.int64) * q_stride_H
    k_base = k_ptr + batch.to(tl.int64) * k_stride_B + kv_head.to(tl.int64) * k_stride_G
    v_base = v_ptr + batch.to(tl.int64) * v_stride_B + kv_head.to(tl.int64) * v_stride_G
    q_MD = _rows(q_base, row_M.to(tl.int64), q_stride_S, lanes_D, real_M, True, D)

    # Tiles below `whole_stop` lie under the diagonal in every row; from `stop` on no row sees anything. A window hides
    # the tiles below `start` and cuts through those below `whole_start`.
    whole_stop = (first_row + 1) // TILE_N
    stop = tl.where(is_real, last_row // TILE_N + 1, 0)
    start = 0
    whole_start = 0
    if WINDOWED:
        start = tl.maximum(first_row - window + 1, 0) // TILE_N
        whole_start = (tl.maximum(last_row - window + 1, 0) + TILE_N - 1) // TILE_N
    dense = tl.load(dense_ptr + head).to(tl.int32)
    row_of_index = batch_head.to(tl.int64) * query_tiles + block * BLOCK_M // TILE_M
    list_ptr = tiles_ptr + row_of_index * listed
    if dense == 0:
        count = tl.where(is_real, tl.load(counts_ptr + row_of_index), 0)
        start, whole_start, whole_stop, stop = _count_entries_below(
            list_ptr, count, start, whole_start, whole_stop, stop, 1024
        )
    whole_stop = tl.minimum(tl.maximum(whole_stop, whole_start), stop)
    whole_start = tl.minimum(whole_start, whole_stop)

    m_M = tl.full([BLOCK_M], float("-inf"), tl.float32)
    l_M = tl.zeros([BLOCK_M], tl.float32)
    acc_MD = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    SPLIT: tl.constexpr = TILE_N // BLOCK_N
    everything_N = lanes_N >= 0

    # The first key of a step is one 64-bit product; the rows within it are 32-bit offsets that stay the same.
    # Each step already asks for the next tile's number, so that its latency hides behind the products.
    tile = _tile_at(list_ptr, whole_start, stop, dense)
    for step in tl.range(whole_start * SPLIT, whole_stop * SPLIT, num_stages=STAGES):
        first_key = (tile * TILE_N + (step % SPLIT) * BLOCK_N).to(tl.int64)
        tile = _tile_at(list_ptr, (step + 1) // SPLIT, stop, dense)
        k_ND = _rows(k_base + first_key * k_stride_S, lanes_N, k_stride_S, lanes_D, everything_N, False, D)
        v_ND = _rows(v_base + first_key * v_stride_S, lanes_N, v_stride_S, lanes_V, everything_N, False, D)
        acc_MD, m_M, l_M = _attend(acc_MD, m_M, l_M, q_MD, k_ND, v_ND, everything_N, scale_log2, False, PRECISION, CAP)

    # The tiles on the window's edge, [start, whole_start), and those on the diagonal, [whole_stop, stop).
    edge = whole_start - start
    for step in tl.range(0, (edge + stop - whole_stop) * SPLIT, num_stages=1):
        position = step // SPLIT
        position = tl.where(position < edge, start + position, whole_stop + position - edge)
        first_key = _tile_at(list_ptr, position, stop, dense) * TILE_N + (step % SPLIT) * BLOCK_N
        j_N = first_key + lanes_N
        k_ND = _rows(k_base, j_N.to(tl.int64), k_stride_S, lanes_D, j_N < length, True, D)
        v_ND = _rows(v_base, j_N.to(tl.int64), v_stride_S, lanes_V, j_N < length, True, D)
        keep_MN = _visible(i_M, j_N, window, WINDOWED)
        acc_MD, m_M, l_M = _attend(acc_MD, m_M, l_M, q_MD, k_ND, v_ND, keep_MN, scale_log2, True, PRECISION, CAP)

    if HAS_COLUMNS:
        # Columns ascend, so those not yet causal and those next to the diagonal are dead words at the end: the range
        # skips them. A branch on each word would cost more than it saves, it keeps the loop from being pipelined.
        live_row = live_ptr + row_of_index * words
        column_row = columns_ptr + batch_head.to(tl.int64) * columns
        first_word, last_word = _live_words(live_row, tl.where(is_real & (dense == 0), words, 0), 128)
        lanes_C = tl.arange(0, BLOCK_C)
        WORDS: tl.constexpr = BLOCK_C // 32
        for step in tl.range(first_word // WORDS, (last_word + WORDS - 1) // WORDS, num_stages=COLUMN_STAGES):
            slot_C = step * BLOCK_C + lanes_C
            word_C = tl.load(live_row + slot_C // 32, mask=slot_C < columns, other=0)
            j_C = tl.load(column_row + slot_C, mask=slot_C < columns, other=-1)
            live_C = ((word_C >> (slot_C % 32)) & 1 != 0) & (j_C >= 0) & (j_C < length)
            k_CD = _rows(k_base, j_C.to(tl.int64), k_stride_S, lanes_D, live_C, True, D)
            v_CD = _rows(v_base, j_C.to(tl.int64), v_stride_S, lanes_V, live_C, True, D)
            keep_MC = _visible(i_M, j_C, window, WINDOWED) & live_C[None, :]
            acc_MD, m_M, l_M = _attend(acc_MD, m_M, l_M, q_MD, k_CD, v_CD, keep_MC, scale_log2, True, PRECISION, CAP)

    seen_M = real_M & (l_M > 0.0)
    l_M = tl.where(seen_M, l_M, 1.0)
    out_MD = tl.where(seen_M[:, None], acc_MD / l_M[:, None], 0.0)
    out_base = out_ptr + batch.to(tl.int64) * out_stride_B + head.to(tl.int64) * out_stride_H
    out_at = out_base + row_M.to(tl.int64)[:, None] * out_stride_S + lanes_V[None, :]
    tl.store(out_at, out_MD.to(out_ptr.dtype.element_ty), mask=(row_M < queries)[:, None] & (lanes_V < D)[None, :])
    if WANT_LSE:
        lse_M = tl.where(seen_M, (m_M + tl.log2(l_M)) * 0.6931471805599453, float("-inf"))
        tl.store(lse_ptr + batch_head.to(tl.int64) * queries + row_M, lse_M, mask=(row_M < queries) & (part == 0))
