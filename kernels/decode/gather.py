"""Fetching tokens of one layer from host memory into its hot set, by a kernel that reads the pinned rows itself.

Copies that the host queues would need the host to know what to fetch. The kernel has 64 programs, or one for each list
where there are more lists: it is bounded by the link to host memory, and runs beside the layers that compute meanwhile.
It also writes the token that leaves the recent window at the next step to host memory, so that a captured step needs no
copy of the host's.

Shapes: B batch, g lists of a row, G KV heads, M listed tokens, C tokens on the host, R rows on the device, D head size,
P = 2 for key and value. In the kernel: N tokens at a time, X words of 4 bytes of a token's keys and values.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.decode.place import PlacedStep
from sparsekv.kernels.keys import HOST, HOST_TOKENS, ROWS
from sparsekv.kernels.triton_support import interpreting

_WORD = 4  # bytes
_PROGRAMS = 64
_AT_ONCE = 2  # tokens that a program reads before it writes them


def gather_missed(
    where_X: torch.Tensor,
    placed: PlacedStep,
    lengths_B: torch.Tensor,
    *,
    kv_heads: int,
    token_bytes: int,
    slots: int,
    ring: int,
    recent: int,
    programs: int | None = None,
) -> None:
    """Copies the missed tokens of one layer to their slots, and one token that is still in the ring to the host.

    Args:
        where_X: int64 [COLUMNS] on the device, as kernels/keys.py says; the addresses at ROWS and HOST are divisible
            by 16.
        lengths_B: int32, tokens of each row; token `length - recent` goes to the host.
        token_bytes: of the keys of one head of one token.
        slots: first row of the ring.
        recent: at least 2, as the newest token is not in the ring yet.
        programs: in all, where there are no more lists than that; None is what suits the device.
    """
    batch, lists = placed.misses_Bg.shape
    words, heads = token_bytes // _WORD, kv_heads // lists
    programs = programs or (1 if interpreting() else _PROGRAMS)
    with torch.cuda.device_of(lengths_B):
        gather_kernel[(max(1, programs // (batch * lists)), batch * lists)](
            where_X, placed.missed_BgM, placed.into_BgM, placed.misses_Bg, lengths_B, placed.missed_BgM.shape[2],
            slots, ring, recent, LISTS=lists, HEADS=heads, BATCH=batch, WORDS=words,
            BLOCK_X=triton.next_power_of_2(2 * heads * words), BLOCK_N=_AT_ONCE, ROWS=ROWS, HOST=HOST,
            HOST_TOKENS=HOST_TOKENS, num_warps=4,
        )  # fmt: skip


@no_type_check
@triton.jit(do_not_specialize=["most", "slots", "ring", "recent"])
def gather_kernel(
    where_ptr, missed_ptr, into_ptr, misses_ptr, lengths_ptr, most, slots, ring, recent,
    LISTS: tl.constexpr, HEADS: tl.constexpr, BATCH: tl.constexpr, WORDS: tl.constexpr, BLOCK_X: tl.constexpr,
    BLOCK_N: tl.constexpr, ROWS: tl.constexpr, HOST: tl.constexpr, HOST_TOKENS: tl.constexpr,
):  # fmt: skip
    """Grid: (programs, batch times lists)."""
    row = tl.program_id(1)
    batch = row // LISTS
    first_head = (row % LISTS) * HEADS
    capacity = tl.load(where_ptr + 2)
    rows = tl.multiple_of(tl.load(where_ptr + ROWS).to(tl.pointer_type(tl.int32)), 16)
    host = tl.multiple_of(tl.load(where_ptr + HOST).to(tl.pointer_type(tl.int32)), 16)
    GROUPS: tl.constexpr = LISTS * HEADS
    TOKEN: tl.constexpr = BATCH * 2 * GROUPS * WORDS  # words from token to token on the host
    lanes_X = tl.arange(0, BLOCK_X)
    real_X = lanes_X < 2 * HEADS * WORDS
    pair_X = lanes_X // (HEADS * WORDS)
    head_X = first_head + lanes_X // WORDS % HEADS
    of_host_X = lanes_X
    if LISTS > 1:
        of_host_X = (pair_X * GROUPS + head_X) * WORDS + lanes_X % WORDS
    of_rows_X = ((pair_X * BATCH + batch) * GROUPS + head_X).to(tl.int64) * capacity * WORDS + lanes_X % WORDS
    host += batch * (2 * GROUPS * WORDS)

    count = tl.load(misses_ptr + row)
    missed_row = missed_ptr + row.to(tl.int64) * most
    into_row = into_ptr + row.to(tl.int64) * most
    for start in range(tl.program_id(0) * BLOCK_N, count, tl.num_programs(0) * BLOCK_N):
        number_N = start + tl.arange(0, BLOCK_N)
        token_N = tl.load(missed_row + number_N, mask=number_N < count, other=0).to(tl.int64)
        slot_N = tl.load(into_row + number_N, mask=number_N < count, other=0).to(tl.int64)
        keep_NX = (number_N < count)[:, None] & real_X[None, :]
        words_NX = tl.load(host + token_N[:, None] * TOKEN + of_host_X[None, :], mask=keep_NX)
        tl.store(rows + slot_N[:, None] * WORDS + of_rows_X[None, :], words_NX, mask=keep_NX)

    leaving = tl.load(lengths_ptr + batch) - recent
    last = tl.program_id(0) == tl.num_programs(0) - 1
    if last & (leaving >= 0) & (leaving < tl.load(where_ptr + HOST_TOKENS)):
        at = (slots + leaving % ring).to(tl.int64) * WORDS
        words_X = tl.load(rows + at + of_rows_X, mask=real_X)
        tl.store(host + leaving.to(tl.int64) * TOKEN + of_host_X, words_X, mask=real_X)
