"""Device code of the two passes over the keys that score the lines of vertical-slash heads.

The sampled queries of a head are its last ones, counted back: row 0 is the last query of the batch row. A program
serves SLOTS heads of one KV head and STRIPS strips of ROWS rows of each. The heads are stacked, so that a block of keys
is read once for all of them; the strips are tuples of tensors, as every one needs a product of its own.

The first pass gives the maximum and the sum of the softmax of every sampled query. The keys are cut into ranges, so
that a few heads fill the GPU; each leaves a partial maximum and a partial sum (flash decoding), joined by the second.

The second pass gives what each column and each diagonal gets (MInference 1.0, section 3.2). The scores are computed
again, as storing them would take last_q numbers a key and head. Let row r be r tokens before the last query. Its weight
for key j counts for column j and for diagonal c = j + r, which is offset `last - c`. Blocks of weights are upside down,
keys by rows, so that sums over the rows stay within a thread. To sum diagonals, a block is skewed: row r is read r keys
higher. The diagonals of a block then take the weights above its own diagonal from the block itself and those below from
the one before, which waits in registers. The rows of strip s lie s blocks further back, so their weights wait s steps:
the diagonals of all strips then coincide, are added, and are skewed once. No two programs of a launch add to one
number: results are the same run to run. Where so many rows do not fit in the registers, launches of some strips each
follow one another, and all but the first add to what is there.

Shapes: P slots (heads of a program), M = SLOTS * ROWS stacked rows of a strip, N keys of a step, R ranges of the first
pass, D head size padded to a power of two.
"""

# ruff: noqa: RUF005 (tuples are joined by +: the language has no unpacking)

from typing import no_type_check

import triton
import triton.language as tl

from sparsekv.kernels.triton_support import quick


@triton.jit
@no_type_check
def stacked_rows(slots_ptr, unit, SLOTS: tl.constexpr, ROWS: tl.constexpr):
    """Returns of each stacked row of the first strip which of the builder's heads it is, or -1, and its row counted
    back."""
    lane_M = tl.arange(0, SLOTS * ROWS)
    return tl.load(slots_ptr + unit * SLOTS + lane_M // ROWS), lane_M % ROWS


@triton.jit
@no_type_check
def load_strips(
    q_base, head_ptr, limits_ptr, own_M, back_M, row_M, q_stride_H, q_stride_S,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr, STRIPS: tl.constexpr,
):  # fmt: skip
    """The queries of every strip, and which of them count; the others are 0."""
    lane_D = tl.arange(0, BLOCK_D)
    known_M = tl.maximum(own_M, 0)
    limit_M = tl.where(own_M >= 0, tl.load(limits_ptr + known_M), 0)
    head_M = tl.load(head_ptr + known_M).to(tl.int64) * q_stride_H
    q = ()
    used = ()
    for strip in tl.static_range(STRIPS):
        used_M = back_M + strip * ROWS < limit_M
        at_M = head_M + (row_M - strip * ROWS).to(tl.int64) * q_stride_S
        q_MD = tl.load(
            q_base + at_M[:, None] + lane_D[None, :], mask=used_M[:, None] & (lane_D < D)[None, :], other=0.0
        )
        q = q + (q_MD,)
        used = used + (used_M,)
    return q, used


@triton.jit
@no_type_check
def load_keys(
    k_base, first_key, length, k_stride_S,
    MASKED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The keys from `first_key` on; with a mask, memory from `length` on is not read."""
    lane_N = tl.arange(0, BLOCK_N)
    lane_D = tl.arange(0, BLOCK_D)
    # The first key is one 64-bit product; the rows behind it are 32-bit offsets that stay the same.
    at_ND = k_base + k_stride_S.to(tl.int64) * first_key + (lane_N[:, None] * k_stride_S + lane_D[None, :])
    if MASKED:
        k_ND = tl.load(at_ND, mask=(first_key + lane_N < length)[:, None] & (lane_D < D)[None, :], other=0.0)
    elif BLOCK_D == D:
        k_ND = tl.load(at_ND)
    else:
        k_ND = tl.load(at_ND, mask=(lane_D < D)[None, :], other=0.0)
    return k_ND


@triton.jit
@no_type_check
def visible(i, j, window, WINDOWED: tl.constexpr):
    """Returns whether query i sees key j: causal, and within the layer's own window where it has one. Both are
    broadcast."""
    keep = j <= i
    if WINDOWED:
        keep = keep & (i - j < window)
    return keep


@triton.jit
@no_type_check
def _join_stats(m_M, l_M, s_MN, scale_log2, MASKED: tl.constexpr):
    """One step of the online softmax, in base 2. With a mask, a row may have seen no key yet: its maximum is -inf."""
    new_m_M = tl.maximum(m_M, tl.max(s_MN, 1) * scale_log2)
    base_M = new_m_M
    if MASKED:
        base_M = tl.where(new_m_M == float("-inf"), 0.0, new_m_M)
    l_M = l_M * tl.exp2(m_M - base_M) + tl.sum(tl.exp2(s_MN * scale_log2 - base_M[:, None]), 1)
    return new_m_M, l_M


@triton.jit
@no_type_check
def _stats_step(
    q, highest, total, i_M, k_base, first_key, length, k_stride_S, scale_log2, window,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """One block of keys for every strip."""
    j_N = first_key + tl.arange(0, BLOCK_N)
    k_ND = load_keys(k_base, first_key, length, k_stride_S, MASKED, D, BLOCK_D, BLOCK_N)
    next_highest = ()
    next_total = ()
    for strip in tl.static_range(STRIPS):
        s_MN = tl.dot(q[strip], tl.trans(k_ND), input_precision=PRECISION)
        if MASKED:
            keep_MN = visible((i_M - strip * ROWS)[:, None], j_N[None, :], window, WINDOWED)
            s_MN = tl.where(keep_MN, s_MN, float("-inf"))
        m_M, l_M = _join_stats(highest[strip], total[strip], s_MN, scale_log2, MASKED)
        next_highest = next_highest + (m_M,)
        next_total = next_total + (l_M,)
    return next_highest, next_total


@quick
@triton.jit(do_not_specialize=["window", "heads", "span"])
@no_type_check
def stats_kernel(
    q_ptr, k_ptr, m_ptr, l_ptr, past_ptr, length_ptr, head_ptr, limits_ptr, slots_ptr,
    q_stride_B, q_stride_H, q_stride_S, k_stride_B, k_stride_G, k_stride_S,
    scale_log2, window, heads, span,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, BLOCK_N: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (units, ranges of `span` keys, batch). Units of one KV head run side by side: they share K in cache."""
    unit = tl.program_id(0)
    part = tl.program_id(1)
    batch = tl.program_id(2)
    past = tl.load(past_ptr + batch)
    length = tl.load(length_ptr + batch)
    own_M, back_M = stacked_rows(slots_ptr, unit, SLOTS, ROWS)
    i_M = length - 1 - back_M
    q_base = q_ptr + batch.to(tl.int64) * q_stride_B
    q, used = load_strips(
        q_base, head_ptr, limits_ptr + batch * heads, own_M, back_M, i_M - past, q_stride_H, q_stride_S,
        D, BLOCK_D, ROWS, STRIPS,
    )  # fmt: skip
    kv_head = tl.load(head_ptr + tl.load(slots_ptr + unit * SLOTS)) // GROUP
    k_base = k_ptr + batch.to(tl.int64) * k_stride_B + kv_head.to(tl.int64) * k_stride_G

    begin = part * span
    end = tl.minimum(begin + span, length)
    # Up to `whole` every row sees every key.
    whole = begin
    if not WINDOWED:
        whole += tl.maximum(tl.minimum(end, length - STRIPS * ROWS + 1) - begin, 0) // BLOCK_N * BLOCK_N
    highest = ()
    total = ()
    for _ in tl.static_range(STRIPS):
        highest = highest + (tl.full([SLOTS * ROWS], float("-inf"), tl.float32),)
        total = total + (tl.zeros([SLOTS * ROWS], tl.float32),)
    for first_key in tl.range(begin, whole, BLOCK_N, num_stages=STAGES):
        highest, total = _stats_step(
            q, highest, total, i_M, k_base, first_key, length, k_stride_S, scale_log2, window,
            False, WINDOWED, D, BLOCK_D, ROWS, STRIPS, BLOCK_N, PRECISION,
        )  # fmt: skip
    for first_key in tl.range(whole, end, BLOCK_N, num_stages=1):
        highest, total = _stats_step(
            q, highest, total, i_M, k_base, first_key, length, k_stride_S, scale_log2, window,
            True, WINDOWED, D, BLOCK_D, ROWS, STRIPS, BLOCK_N, PRECISION,
        )  # fmt: skip

    at_M = ((batch * heads + tl.maximum(own_M, 0)).to(tl.int64) * (STRIPS * ROWS) + back_M) * tl.num_programs(1) + part
    for strip in tl.static_range(STRIPS):
        tl.store(m_ptr + at_M + strip * ROWS * tl.num_programs(1), highest[strip], mask=used[strip])
        tl.store(l_ptr + at_M + strip * ROWS * tl.num_programs(1), total[strip], mask=used[strip])


@triton.jit
@no_type_check
def _log_of_sum(m_ptr, l_ptr, at_M, used_M, ranges, MOST_RANGES: tl.constexpr):
    """Joins the ranges of the first pass. Rows that do not count get infinity, and so weights of 0."""
    lane_R = tl.arange(0, MOST_RANGES)
    keep_MR = used_M[:, None] & (lane_R < ranges)[None, :]
    at_MR = at_M[:, None] * ranges + lane_R[None, :]
    m_MR = tl.load(m_ptr + at_MR, mask=keep_MR, other=float("-inf"))
    l_MR = tl.load(l_ptr + at_MR, mask=keep_MR, other=0.0)
    m_M = tl.where(used_M, tl.max(m_MR, 1), 0.0)
    l_M = tl.where(used_M, tl.sum(l_MR * tl.exp2(m_MR - m_M[:, None]), 1), 1.0)
    return tl.where(used_M, m_M + tl.log2(l_M), float("inf"))


@triton.jit
@no_type_check
def _add_rows(x_NM, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    return tl.sum(tl.reshape(x_NM, (BLOCK_N, SLOTS, ROWS)), 2)


@triton.jit
@no_type_check
def _add_diagonals(p_NM, before_NM, SLOTS: tl.constexpr, ROWS: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sums of the diagonals that end in this block; `before_NM` are the weights of the block before."""
    lane_N1 = tl.arange(0, BLOCK_N)[:, None]
    row_1M = (tl.arange(0, SLOTS * ROWS) % ROWS)[None, :]
    joined_NM = tl.where(lane_N1 + row_1M < BLOCK_N, p_NM, before_NM)
    return _add_rows(tl.gather(joined_NM, (lane_N1 - row_1M) & (BLOCK_N - 1), 0), SLOTS, ROWS, BLOCK_N)


@triton.jit
@no_type_check
def _pad(plane_P, real_P, length, PADDING: tl.constexpr):
    """Scores whose bits are -1 up to the next multiple of PADDING; see choices.py."""
    at_X1 = (length + tl.arange(0, PADDING))[:, None]
    keep_XP = (at_X1 < tl.cdiv(length, PADDING) * PADDING) & real_P[None, :]
    tl.store(plane_P[None, :] + at_X1, tl.full([PADDING, 1], -1, tl.int32).to(tl.float32, bitcast=True), mask=keep_XP)


@triton.jit
@no_type_check
def _put(at, x, keep, ADD: tl.constexpr):
    """Stores, or adds to what an earlier launch stored."""
    if ADD:
        x += tl.load(at, mask=keep, other=0.0)
    tl.store(at, x, mask=keep)


@triton.jit
@no_type_check
def _lines_step(
    waiting, before_NM, q, log_sum, i_M, k_base, vertical_P, slash_P, real_P,
    first_key, begin, end, length, k_stride_S, scale_log2, window,
    MASKED: tl.constexpr, WINDOWED: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr,
    ROWS: tl.constexpr, STRIPS: tl.constexpr, BLOCK_N: tl.constexpr, FIRST_ROW: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Stores one block of columns and one of diagonals; returns what waits for the next blocks."""
    # Keys and diagonals are numbered alike: a program owns those with begin <= number < end. Diagonals are counted from
    # the first row of this launch: none that a key lies on is beyond the last offset.
    number_N = first_key + tl.arange(0, BLOCK_N)
    k_ND = load_keys(k_base, first_key, length, k_stride_S, MASKED, D, BLOCK_D, BLOCK_N)
    columns_NP = tl.zeros([BLOCK_N, SLOTS], tl.float32)
    whole_NM = before_NM
    still_waiting = ()
    for strip in tl.static_range(STRIPS):
        s_NM = tl.dot(k_ND, tl.trans(q[strip]), input_precision=PRECISION)
        p_NM = tl.exp2(s_NM * scale_log2 - log_sum[strip][None, :])
        if MASKED:
            keep_NM = visible((i_M - strip * ROWS)[None, :], number_N[:, None], window, WINDOWED)
            p_NM = tl.where(keep_NM, p_NM, 0.0)
        columns_NP += _add_rows(p_NM, SLOTS, ROWS, BLOCK_N)
        if strip < STRIPS - 1:
            p_NM += waiting[strip]
        if strip == 0:
            whole_NM = p_NM
        else:
            still_waiting = still_waiting + (p_NM,)
    diagonals_NP = _add_diagonals(whole_NM, before_NM, SLOTS, ROWS, BLOCK_N)
    keep_NP = ((number_N >= begin) & (number_N < end))[:, None] & real_P[None, :]
    _put(vertical_P[None, :] + number_N[:, None], columns_NP, keep_NP, FIRST_ROW > 0)
    if FIRST_ROW > 0:
        keep_NP = keep_NP & (number_N < length - FIRST_ROW)[:, None]
    _put(slash_P[None, :] + (length - 1 - FIRST_ROW - number_N)[:, None], diagonals_NP, keep_NP, FIRST_ROW > 0)
    return still_waiting, whole_NM


@quick
@triton.jit(do_not_specialize=["window", "heads", "span", "ranges", "keys"])
@no_type_check
def lines_kernel(
    q_ptr, k_ptr, m_ptr, l_ptr, vertical_ptr, slash_ptr, past_ptr, length_ptr, head_ptr, limits_ptr, slots_ptr,
    q_stride_B, q_stride_H, q_stride_S, k_stride_B, k_stride_G, k_stride_S,
    scale_log2, window, heads, span, ranges, keys,
    GROUP: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, SLOTS: tl.constexpr, ROWS: tl.constexpr,
    STRIPS: tl.constexpr, FIRST_ROW: tl.constexpr, ALL_ROWS: tl.constexpr, BLOCK_N: tl.constexpr,
    MOST_RANGES: tl.constexpr, PADDING: tl.constexpr, STAGES: tl.constexpr, WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid: (units, ranges of `span` keys, batch). A program owns the columns and the diagonals c of its range.

    A launch serves STRIPS strips from FIRST_ROW on, of the ALL_ROWS rows that the first pass left statistics of. The
    diagonals that begin before the range cost STRIPS steps before it.
    """
    tl.static_assert(BLOCK_N >= ROWS, "a diagonal must not span more than two blocks")
    tl.static_assert(STRIPS == 1 or BLOCK_N == ROWS, "strips must lie one block apart")
    unit = tl.program_id(0)
    batch = tl.program_id(2)
    past = tl.load(past_ptr + batch)
    length = tl.load(length_ptr + batch)
    own_M, back_M = stacked_rows(slots_ptr, unit, SLOTS, ROWS)
    back_M += FIRST_ROW
    i_M = length - 1 - back_M
    q_base = q_ptr + batch.to(tl.int64) * q_stride_B
    q, used = load_strips(
        q_base, head_ptr, limits_ptr + batch * heads, own_M, back_M, i_M - past, q_stride_H, q_stride_S,
        D, BLOCK_D, ROWS, STRIPS,
    )  # fmt: skip
    at_M = (batch * heads + tl.maximum(own_M, 0)).to(tl.int64) * ALL_ROWS + back_M
    log_sum = ()
    waiting = ()
    for strip in tl.static_range(STRIPS):
        log_sum = log_sum + (_log_of_sum(m_ptr, l_ptr, at_M + strip * ROWS, used[strip], ranges, MOST_RANGES),)
    for _ in tl.static_range(STRIPS - 1):
        waiting = waiting + (tl.zeros([BLOCK_N, SLOTS * ROWS], tl.float32),)

    slot_P = tl.load(slots_ptr + unit * SLOTS + tl.arange(0, SLOTS))
    real_P = slot_P >= 0
    plane_P = (batch * heads + tl.maximum(slot_P, 0)).to(tl.int64) * keys
    vertical_P = vertical_ptr + plane_P
    slash_P = slash_ptr + plane_P
    kv_head = tl.load(head_ptr + tl.load(slots_ptr + unit * SLOTS)) // GROUP
    k_base = k_ptr + batch.to(tl.int64) * k_stride_B + kv_head.to(tl.int64) * k_stride_G

    if (FIRST_ROW == 0) & (tl.program_id(1) == 0):
        _pad(vertical_P, real_P, length, PADDING)
        _pad(slash_P, real_P, length, PADDING)
    begin = tl.program_id(1) * span
    start = tl.maximum(begin - STRIPS * BLOCK_N, 0)
    # A range beyond the length has nothing to do, nor the steps before it.
    end = tl.where(begin < length, tl.minimum(begin + span, length), start)
    # Up to `whole` every row sees every key.
    whole = start
    if not WINDOWED:
        whole += tl.maximum(tl.minimum(end, length - FIRST_ROW - STRIPS * ROWS + 1) - start, 0) // BLOCK_N * BLOCK_N
    before_NM = tl.zeros([BLOCK_N, SLOTS * ROWS], tl.float32)
    for first_key in tl.range(start, whole, BLOCK_N, num_stages=STAGES):
        waiting, before_NM = _lines_step(
            waiting, before_NM, q, log_sum, i_M, k_base, vertical_P, slash_P, real_P,
            first_key, begin, end, length, k_stride_S, scale_log2, window,
            False, WINDOWED, D, BLOCK_D, SLOTS, ROWS, STRIPS, BLOCK_N, FIRST_ROW, PRECISION,
        )  # fmt: skip
    for first_key in tl.range(whole, end, BLOCK_N, num_stages=1):
        waiting, before_NM = _lines_step(
            waiting, before_NM, q, log_sum, i_M, k_base, vertical_P, slash_P, real_P,
            first_key, begin, end, length, k_stride_S, scale_log2, window,
            True, WINDOWED, D, BLOCK_D, SLOTS, ROWS, STRIPS, BLOCK_N, FIRST_ROW, PRECISION,
        )  # fmt: skip
