"""Decode attention in Triton: split over the attended tokens, then merged (flash decoding).

A program of the first kernel reads one split of the tokens of one row and KV head and serves all of its query heads,
so every key is read once. A second kernel merges the splits by their log-sum-exp. Where scores are asked for, the first
kernel also writes its logits and another one turns them into one score a token. Lengths, counts and lists are read on
the device; grids follow from the batch, the heads and the capacity of the keys alone, so that launches can be captured
in a CUDA graph and replayed while contexts grow.

Shapes: B batch, H query heads, G KV heads, D head size, P splits, g score lists (1 or G), T scored tokens of all rows.
In the kernels: R query heads of a KV head (padded to 16 or more for the product), N tokens of a step.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.decode.selection import Scoring, Selection
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.tiles import AttentionOutput
from sparsekv.kernels.triton_support import UNALIGNED, overlap, overlaps_launches, soft_cap

_LOG2_E = 1.4426950408889634
_MOST_SPLITS = 128  # what one program of the merge holds at once
_MERGED_VALUES = 256  # numbers of an output that one program of the merge holds of each split
_SCORED_AT_ONCE = 128  # tokens of one program of the score kernel


@dataclass(frozen=True, slots=True)
class DecodeLaunch:
    """The cut and compilation of the first kernel; the answer does not depend on it beyond rounding."""

    splits: int
    block_n: int
    warps: int
    stages: int
    overlap: bool = False  # a kernel is launched while the one before it ends


def decode(
    q_BHQD: torch.Tensor,
    keys: KeyView,
    selection: Selection | None,
    *,
    scale: float,
    window: int | None = None,
    scoring: Scoring | None = None,
    out: torch.Tensor | None = None,
    new_B: torch.Tensor | None = None,
    launch: DecodeLaunch | None = None,
) -> AttentionOutput:
    """The newest tokens of each batch row; arguments as in `decode_attention`, and a launch in place of the best for
    the GPU. Several queries of a head are as so many heads that end earlier: each key is read once for all of them."""
    new = q_BHQD.shape[2]
    rows_BR1D = q_BHQD if new == 1 else q_BHQD.flatten(1, 2).unsqueeze(2)
    out_BR1D, scores_gT = _run(rows_BR1D, keys, selection, scale, window, scoring, launch, out, new=new, new_B=new_B)
    return AttentionOutput(out_BR1D.view_as(q_BHQD), None, scores_gT)


def score(q_BHQD: torch.Tensor, keys: KeyView, scoring: Scoring, *, scale: float) -> torch.Tensor:
    """The scores alone, float32 [g, T]; arguments as in `decode_scores`."""
    _, scores_gT = _run(q_BHQD, keys, None, scale, None, scoring, None, None, attends=False)
    assert scores_gT is not None
    return scores_gT


def _run(
    q_BHQD: torch.Tensor, keys: KeyView, selection: Selection | None, scale: float, window: int | None,
    scoring: Scoring | None, launch: DecodeLaunch | None, out: torch.Tensor | None, attends: bool = True,
    new: int = 1, new_B: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:  # fmt: skip
    """Output and scores. Where it does not attend, the output is not written and no value is read."""
    B, H, _, D = q_BHQD.shape
    G, device = keys.kv_heads, q_BHQD.device
    requests = keys.requests if selection is None else None  # those that follow a choice have each their own
    queries, batch = (new, B) if requests is None else (requests.most, len(requests.starts_X) - 1)
    rows = max(16, triton.next_power_of_2(H // G * (1 if requests is None else queries)))
    scales, dtype = keys.scales, q_BHQD.dtype if keys.scales is None else keys.scales.dtype
    launch = launch or launch_for(device, batch * G, dtype, D, rows)
    counts_B = keys.lengths_B if new_B is None else new_B
    part_BHPD = torch.empty((B, H, launch.splits, D if attends else 0), dtype=torch.float32, device=device)
    part_lse_BHP = torch.empty((B, H, launch.splits), dtype=torch.float32, device=device)
    out_BHQD = torch.empty_like(q_BHQD, dtype=dtype) if out is None else out
    lse_BHQ = torch.empty((B, H, 1), dtype=torch.float32, device=device)
    logits_HT, scores_gT = (None, None) if scoring is None else _score_memory(scoring, H, device)
    sinks_H = keys.lengths_B if keys.softmax.sinks_H is None else keys.softmax.sinks_H
    block_d, overlapping = triton.next_power_of_2(D), overlap(launch.overlap)
    with torch.cuda.device_of(q_BHQD):
        decode_kernel[(launch.splits, G, batch)](
            q_BHQD, keys.k, keys.v, part_BHPD, part_lse_BHP, keys.lengths_B,
            *_table_of(keys), *_lists_of(selection, keys.lengths_B), *_logits_of(scoring, logits_HT, keys.lengths_B),
            *q_BHQD.stride()[:2], *keys.k.stride()[:3], *keys.v.stride()[:3],
            scale * _LOG2_E, window or 0, G, counts_B if requests is None else requests.starts_X, *_scales_of(keys),
            GROUP=H // G, ROWS=rows, D=D, BLOCK_D=block_d, QUERIES=queries,
            COUNTED=new_B is not None, SHARED=requests is not None, OWNED=keys.requests is not None,
            BLOCK_N=launch.block_n, PAGE=keys.page, INDIRECT=keys.where is not None, SPARSE=selection is not None,
            SCORED=scoring is not None, ATTENDS=attends, STAGES=launch.stages, PRECISION="ieee",
            CAP=keys.softmax.cap * _LOG2_E, SCALED=scales is not None,
            Q_SCALED=scales is not None and scales.q_G is not None,
            num_warps=launch.warps, **overlapping,
        )  # fmt: skip
        merge_kernel[(H, B, triton.cdiv(D, _MERGED_VALUES))](
            part_BHPD, part_lse_BHP, out_BHQD, lse_BHQ, keys.lengths_B, sinks_H, *out_BHQD.stride()[:2], H,
            launch.splits,
            D=D, BLOCK_D=min(block_d, _MERGED_VALUES), BLOCK_P=triton.next_power_of_2(launch.splits),
            WANT_LSE=scoring is not None, ATTENDS=attends, SKIPS=out is not None,
            SINKS=keys.softmax.sinks_H is not None, QUERIES=new,
            num_warps=4 if D <= 128 else 8, **overlapping,
        )  # fmt: skip
    if scoring is not None and logits_HT is not None and scores_gT is not None:
        _score(logits_HT, lse_BHQ, keys, scoring, scores_gT, overlapping)
    return out_BHQD, scores_gT


def _score_memory(scoring: Scoring, heads: int, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """For logits [H, T] and scores [g, T], float32."""
    shape_XT = (heads + scoring.lists, scoring.tokens)
    if scoring.scratch is None:
        memory_XT = torch.empty(shape_XT, dtype=torch.float32, device=device)
    else:
        memory_XT = scoring.scratch[: math.prod(shape_XT)].view(shape_XT)
    return memory_XT[:heads], memory_XT[heads:]


def _score(
    logits_HT: torch.Tensor, lse_BHQ: torch.Tensor, keys: KeyView, scoring: Scoring, scores_gT: torch.Tensor,
    overlapping: dict[str, bool],
) -> None:  # fmt: skip
    heads, tokens = logits_HT.shape
    blocks = triton.cdiv(min(keys.capacity, tokens), _SCORED_AT_ONCE)
    with torch.cuda.device_of(logits_HT):
        score_kernel[(blocks, scoring.lists, keys.batch)](
            logits_HT, lse_BHQ, scores_gT, scoring.starts_B, keys.lengths_B, tokens, heads,
            HEADS=heads // scoring.lists, BLOCK_H=triton.next_power_of_2(heads // scoring.lists),
            BLOCK_N=_SCORED_AT_ONCE, num_warps=4, **overlapping,
        )  # fmt: skip


def _table_of(keys: KeyView) -> tuple[torch.Tensor, torch.Tensor, int, torch.Tensor]:
    """Where the keys are, the block table with its stride, and whose entry of it each row reads."""
    unused, table_BP = keys.lengths_B, keys.table_BP
    where = unused if keys.where is None else keys.where
    owners_B = unused if keys.requests is None else keys.requests.of_row_B
    return (where, unused, 0, owners_B) if table_BP is None else (where, table_BP, table_BP.stride(0), owners_B)


def _scales_of(keys: KeyView) -> tuple[torch.Tensor, ...]:
    scales, unused = keys.scales, keys.lengths_B
    return (unused,) * 3 if scales is None else (scales.k_G, scales.v_G, unused if scales.q_G is None else scales.q_G)


def _lists_of(selection: Selection | None, unused: torch.Tensor) -> tuple[Any, ...]:
    if selection is None:
        return unused, unused, 0, 0, 0, 0
    chosen = selection.chosen_BgN
    across = chosen.stride(1) if chosen.shape[1] > 1 else 0
    return chosen, selection.counts_B, chosen.stride(0), across, selection.sink, selection.recent


def _logits_of(scoring: Scoring | None, logits_HT: torch.Tensor | None, unused: torch.Tensor) -> tuple[Any, ...]:
    """Logits, where each row's begin, stride of the heads."""
    if scoring is None or logits_HT is None:
        return unused, unused, 0
    return logits_HT, scoring.starts_B, logits_HT.stride(0)


def launch_for(device: torch.device, rows: int, dtype: torch.dtype, size: int, queries: int = 16) -> DecodeLaunch:
    """Returns what suits the GPU; `rows` are pairs of a batch row and a KV head, `size` is that of a head, `queries`
    how many a program has.

    Four programs are resident on a multiprocessor of an H200: one more would be a wave of its own. Over all tokens or
    selected ones, with scores or without, at every capacity the launch is the same, and so is rounding: tokens depend
    on no more than what is attended to.
    """
    splits = max(1, min(_MOST_SPLITS, 4 * _multiprocessors(device) // rows))
    if dtype == torch.float32:
        return DecodeLaunch(splits, 32, 4, 1, overlap=overlaps_launches(device))
    # larger heads spill on two warps, and so do more rows
    warps = min(8, max(2 if size <= 128 else 4, queries // 16))
    # of heads above 256, 64 tokens in two stages would leave no room for a second program beside this one
    return DecodeLaunch(splits, 64 if size <= 256 else 32, warps, 2, overlap=overlaps_launches(device))


def _multiprocessors(device: torch.device) -> int:
    return 2 if device.type != "cuda" else torch.cuda.get_device_properties(device).multi_processor_count


@no_type_check
@triton.jit
def _add_tokens(
    m_R, l_R, acc_RD, q_RD, token_N, keep_N, k_base, v_base, k_step, v_step, table_row, k_page, v_page,
    logits_ptr, logits_at_R1, scored, real_R, scale_log2, at_R, window,
    D: tl.constexpr, BLOCK_D: tl.constexpr, PAGE: tl.constexpr, SCORED: tl.constexpr, ATTENDS: tl.constexpr,
    PRECISION: tl.constexpr, CAP: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """The running maximum, sum and output with the tokens of one step added. If CAUSAL, row R is at position `at_R`."""
    lanes_D = tl.arange(0, BLOCK_D)
    keep_ND = keep_N[:, None] & (lanes_D < D)[None, :]
    if PAGE == 0:
        at_N1 = token_N.to(tl.int64)[:, None]
        k_at = k_base + at_N1 * k_step
        v_at = v_base + at_N1 * v_step
    else:
        page_N = tl.load(table_row + token_N // PAGE, mask=keep_N, other=0).to(tl.int64)
        slot_N = (token_N % PAGE).to(tl.int64)
        k_at = k_base + (page_N * k_page + slot_N * k_step)[:, None]
        v_at = v_base + (page_N * v_page + slot_N * v_step)[:, None]
    k_ND = tl.load(k_at + lanes_D[None, :], mask=keep_ND, other=0.0)
    k_ND = k_ND.to(q_RD.dtype)  # exact of numbers in 8 bits, whose scale is that of the product
    if ATTENDS:
        v_ND = tl.load(v_at + lanes_D[None, :], mask=keep_ND, other=0.0).to(q_RD.dtype)
    s_RN = tl.dot(q_RD, tl.trans(k_ND), input_precision=PRECISION) * scale_log2
    if CAP > 0.0:
        s_RN = soft_cap(s_RN, CAP)
    if SCORED:
        written_RN = scored & real_R[:, None] & keep_N[None, :]
        if CAUSAL:
            written_RN = written_RN & (token_N[None, :] <= at_R[:, None])
        tl.store(logits_ptr + (logits_at_R1 + token_N[None, :]), s_RN, mask=written_RN)
    s_RN = tl.where(keep_N[None, :], s_RN, float("-inf"))
    if CAUSAL:
        behind_RN = at_R[:, None] - token_N[None, :]
        s_RN = tl.where((behind_RN >= 0) & ((window == 0) | (behind_RN < window)), s_RN, float("-inf"))
    new_m_R = tl.maximum(m_R, tl.max(s_RN, 1))
    base_R = tl.where(new_m_R == float("-inf"), 0.0, new_m_R)
    p_RN = tl.exp2(s_RN - base_R[:, None])
    decay_R = tl.exp2(m_R - base_R)
    l_R = l_R * decay_R + tl.sum(p_RN, 1)
    if ATTENDS:
        acc_RD = tl.dot(p_RN.to(v_ND.dtype), v_ND, acc_RD * decay_R[:, None], input_precision=PRECISION)
    return new_m_R, l_R, acc_RD


# Numbers that may change from step to step are not specialised on: no step may compile the kernel again.
@no_type_check
@triton.jit(
    do_not_specialize=["table_stride", "sink", "recent", "window", "kv_heads", "logits_stride_H"],
    do_not_specialize_on_alignment=UNALIGNED,
)
def decode_kernel(
    q_ptr, k_ptr, v_ptr, part_ptr, part_lse_ptr, lengths_ptr, where_ptr, table_ptr, table_stride, owners_ptr,
    chosen_ptr, counts_ptr, chosen_stride_B, chosen_stride_G, sink, recent,
    logits_ptr, starts_ptr, logits_stride_H,
    q_stride_B, q_stride_H, k_stride_B, k_stride_G, k_stride_S, v_stride_B, v_stride_G, v_stride_S,
    scale_log2, window, kv_heads, new_ptr, k_scale_ptr, v_scale_ptr, q_scale_ptr,
    GROUP: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
    QUERIES: tl.constexpr, COUNTED: tl.constexpr, SHARED: tl.constexpr, OWNED: tl.constexpr,
    PAGE: tl.constexpr, INDIRECT: tl.constexpr, SPARSE: tl.constexpr, SCORED: tl.constexpr, ATTENDS: tl.constexpr,
    STAGES: tl.constexpr, PRECISION: tl.constexpr, CAP: tl.constexpr, SCALED: tl.constexpr, Q_SCALED: tl.constexpr,
    OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (splits, KV heads, batch). The tokens of a row are numbered: sinks, chosen, recent; or all of them. Of the
    rows of a product each query head has QUERIES, one a new token. If SHARED, `batch` is a request and each new token a
    batch row, from `new_ptr` on, with a length and logits of its own. If OWNED, tables are of requests.

    A split without tokens stores only its log-sum-exp.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    kv_head = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    owner = batch
    row_R = tl.arange(0, ROWS)
    lanes_D = tl.arange(0, BLOCK_D)
    lanes_N = tl.arange(0, BLOCK_N)
    if SHARED:
        head_R = kv_head * GROUP + row_R // QUERIES
        batch_R = tl.load(new_ptr + owner).to(tl.int64) + row_R % QUERIES
        real_R = (row_R < GROUP * QUERIES) & (batch_R < tl.load(new_ptr + owner + 1))
        q_at_R = batch_R * q_stride_B + head_R.to(tl.int64) * q_stride_H
    else:
        if OWNED:
            owner = tl.load(owners_ptr + batch)
        head_R = kv_head * GROUP + row_R
        batch_R = batch
        real_R = row_R < GROUP
        q_at_R = batch * q_stride_B + head_R.to(tl.int64) * q_stride_H
    real_RD = real_R[:, None] & (lanes_D < D)[None, :]
    q_RD = tl.load(q_ptr + q_at_R[:, None] + lanes_D[None, :], mask=real_RD, other=0.0)
    if SCALED:
        scale_log2 *= tl.load(k_scale_ptr + kv_head)
    if Q_SCALED:
        q_RD = q_RD.to(tl.bfloat16)
        scale_log2 *= tl.load(q_scale_ptr + kv_head)
    if INDIRECT:
        # wherever the host has put it for this step: elements from these tensors, and strides in units of D
        row = (batch * tl.load(where_ptr + 7) + kv_head * tl.load(where_ptr + 2)) * D
        k_base = k_ptr + tl.multiple_of(tl.load(where_ptr), 16) + row
        v_base = v_ptr + tl.multiple_of(tl.load(where_ptr + 1), 16) + row
        k_step = tl.load(where_ptr + 6) * D
        v_step = k_step
    else:
        k_base = k_ptr + kv_head.to(tl.int64) * k_stride_G
        v_base = v_ptr + kv_head.to(tl.int64) * v_stride_G
        k_step = k_stride_S
        v_step = v_stride_S
        if PAGE == 0:
            k_base += batch * k_stride_B
            v_base += batch * v_stride_B
    table_row = table_ptr + owner * table_stride

    new = QUERIES
    if COUNTED:
        new = tl.load(new_ptr + batch)
    if SHARED:
        length_R = tl.load(lengths_ptr + batch_R, mask=real_R, other=0)
        length = tl.max(length_R, 0)
        at_R = length_R - 1  # -1 sees nothing
    else:
        length = tl.load(lengths_ptr + batch)
        at_R = tl.where(row_R % QUERIES < new, length - new + row_R % QUERIES, -1)
    first = tl.where(window > 0, tl.maximum(length - new + 1 - window, 0), 0)
    total = length - first
    if COUNTED:
        total = tl.where(new > 0, total, 0)
    count = -1
    chosen_row = chosen_ptr
    if SPARSE:
        count = tl.load(counts_ptr + batch)
        total = tl.where(count < 0, total, sink + count + recent)
        chosen_row = chosen_ptr + batch * chosen_stride_B + kv_head.to(tl.int64) * chosen_stride_G
    began = -1
    if SCORED:
        began = tl.load(starts_ptr + batch_R, mask=real_R, other=-1)[:, None] if SHARED else tl.load(starts_ptr + batch)
    scored = began >= 0
    logits_at_R1 = began + (head_R * logits_stride_H)[:, None]  # 32 bits: the scratch is bounded

    m_R = tl.full([ROWS], float("-inf"), tl.float32)
    l_R = tl.zeros([ROWS], tl.float32)
    acc_RD = tl.zeros([ROWS, BLOCK_D], tl.float32)
    splits = tl.num_programs(0)
    span = tl.cdiv(tl.cdiv(total, BLOCK_N), splits) * BLOCK_N
    begin = tl.program_id(0) * span
    end = tl.minimum(begin + span, total)
    everything = end
    if SPARSE:
        everything = tl.where(count < 0, end, begin)
    for start in tl.range(begin, everything, BLOCK_N, num_stages=STAGES):
        token_N = first + start + lanes_N
        keep_N = start + lanes_N < end
        m_R, l_R, acc_RD = _add_tokens(
            m_R, l_R, acc_RD, q_RD, token_N, keep_N, k_base, v_base, k_step, v_step, table_row, k_stride_B, v_stride_B,
            logits_ptr, logits_at_R1, scored, real_R, scale_log2, at_R, window,
            D, BLOCK_D, PAGE, SCORED, ATTENDS, PRECISION, CAP, QUERIES > 1,
        )  # fmt: skip
    if SPARSE:
        for start in tl.range(tl.where(count < 0, end, begin), end, BLOCK_N, num_stages=STAGES):
            number_N = start + lanes_N
            listed_N = (number_N >= sink) & (number_N < sink + count)
            chosen_N = tl.load(chosen_row + number_N - sink, mask=listed_N & (number_N < end), other=-1)
            recent_N = length - recent + number_N - sink - count
            token_N = tl.where(number_N < sink, number_N, tl.where(listed_N, chosen_N, recent_N))
            keep_N = (number_N < end) & (token_N >= first)
            m_R, l_R, acc_RD = _add_tokens(
                m_R, l_R, acc_RD, q_RD, token_N, keep_N, k_base, v_base, k_step, v_step, table_row, k_stride_B,
                v_stride_B, logits_ptr, logits_at_R1, scored, real_R, scale_log2, at_R, window,
                D, BLOCK_D, PAGE, SCORED, ATTENDS, PRECISION, CAP, False,
            )  # fmt: skip

    seen_R = l_R > 0.0
    l_R = tl.where(seen_R, l_R, 1.0)
    lse_R = tl.where(seen_R, m_R + tl.log2(l_R), float("-inf"))
    part_R = (batch_R * kv_heads * GROUP + head_R) * splits + tl.program_id(0)
    part_at_RD = part_ptr + part_R[:, None] * D + lanes_D[None, :]
    tl.store(part_lse_ptr + part_R, lse_R, mask=real_R)
    if ATTENDS:
        if SCALED:
            acc_RD *= tl.load(v_scale_ptr + kv_head)
        tl.store(part_at_RD, acc_RD / l_R[:, None], mask=real_RD & seen_R[:, None])


@no_type_check
@triton.jit(do_not_specialize=["splits", "heads"], do_not_specialize_on_alignment=UNALIGNED)
def merge_kernel(
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, lengths_ptr, sinks_ptr, out_stride_B, out_stride_H, heads, splits,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_P: tl.constexpr, WANT_LSE: tl.constexpr, ATTENDS: tl.constexpr,
    SKIPS: tl.constexpr, SINKS: tl.constexpr, QUERIES: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (query heads, batch, parts of a head). Merges the splits of a head: each weighs by the exponential of its
    log-sum-exp, and so does a sink, which has no output.

    With SKIPS the output of rows without tokens is not written.
    """
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    batch = tl.program_id(1)
    part = (batch * heads + head).to(tl.int64) * splits
    lanes_P = tl.arange(0, BLOCK_P)
    lanes_D = tl.program_id(2) * BLOCK_D + tl.arange(0, BLOCK_D)
    lse_P = tl.load(part_lse_ptr + part + lanes_P, mask=lanes_P < splits, other=float("-inf"))
    m = tl.max(lse_P, 0)
    if SINKS:
        sink = tl.load(sinks_ptr + head // QUERIES).to(tl.float32) * 1.4426950408889634
        m = tl.maximum(m, sink)
    base = tl.where(m == float("-inf"), 0.0, m)
    weight_P = tl.exp2(lse_P - base)
    total = tl.sum(weight_P, 0)
    if SINKS:
        total += tl.exp2(sink - base)
    if ATTENDS:
        keep_PD = (lanes_P < splits)[:, None] & (lanes_D < D)[None, :]
        part_PD = tl.load(part_ptr + (part + lanes_P)[:, None] * D + lanes_D[None, :], mask=keep_PD, other=0.0)
        part_PD = tl.where((weight_P > 0.0)[:, None], part_PD, 0.0)  # those without weight were not written
        out_D = tl.sum(part_PD * weight_P[:, None], 0) / tl.where(total > 0.0, total, 1.0)
        out_at = out_ptr + batch.to(tl.int64) * out_stride_B + head.to(tl.int64) * out_stride_H + lanes_D
        written_D = lanes_D < D
        if SKIPS:
            written_D = written_D & (tl.load(lengths_ptr + batch) > 0)
        tl.store(out_at, out_D.to(out_ptr.dtype.element_ty), mask=written_D)
    if WANT_LSE:
        lse = tl.where(total > 0.0, base + tl.log2(tl.where(total > 0.0, total, 1.0)), float("-inf"))
        tl.store(lse_ptr + batch * heads + head, lse * 0.6931471805599453)


@no_type_check
@triton.jit(do_not_specialize=["tokens", "heads"], do_not_specialize_on_alignment=UNALIGNED)
def score_kernel(
    logits_ptr, lse_ptr, scores_ptr, starts_ptr, lengths_ptr, tokens, heads,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_N: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of tokens, lists, batch). The largest attention weight that any head of a list gives a token."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    batch = tl.program_id(2)
    block = tl.program_id(0) * BLOCK_N
    length = tl.load(lengths_ptr + batch)
    began = tl.load(starts_ptr + batch)
    if (began >= 0) & (block < length):
        token_N = block + tl.arange(0, BLOCK_N)
        at_N = began.to(tl.int64) + token_N
        lanes_H = tl.arange(0, BLOCK_H)
        head_H = tl.program_id(1) * HEADS + lanes_H
        lse_H = tl.load(lse_ptr + batch * heads + head_H, mask=lanes_H < HEADS, other=0.0) * 1.4426950408889634
        keep_HN = (lanes_H < HEADS)[:, None] & (token_N < length)[None, :]
        logit_at = logits_ptr + head_H.to(tl.int64)[:, None] * tokens + at_N[None, :]
        logit_HN = tl.load(logit_at, mask=keep_HN, other=float("-inf"))
        best_N = tl.max(tl.exp2(logit_HN - lse_H[:, None]), 0)
        tl.store(scores_ptr + tl.program_id(1).to(tl.int64) * tokens + at_N, best_N, mask=token_N < length)
