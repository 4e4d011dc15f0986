"""Copies a request's pages side by side on a GPU, for kernels that take contiguous keys, and some rows of them back.

Shapes: N pages in memory, G KV heads, S tokens of a page, D head size, P pages of a request, K tokens of a request,
R rows; g is 1 or G.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.triton_support import UNALIGNED, quick

Pair = tuple[torch.Tensor, torch.Tensor]
_AT_ONCE = 128  # tokens of a page, or of several small ones
_SMALL = 16  # tokens of a page: the smallest that a program copies alone
_ROWS = 32  # of a program that moves some
_TILE = 128  # keys of a tile at most


def copy_pages(
    pages: Pair, table_P: torch.Tensor, into: Pair, scales: Pair | None = None, length_1: torch.Tensor | None = None
) -> None:
    """Copies the pages of one request in order, keys and values in one launch. Nothing asks the device.

    Args:
        pages: keys and values, [N, G, S, D] each, of any strides but 1 in the last dimension.
        into: [G, K, D] each, contiguous; the last page may have more tokens.
        scales: float32 [G] each: what is copied is multiplied by them.
        length_1: int32 on the device: so many tokens alone are copied, and zeros behind them as far as a tile reaches.
    """
    k_NGSD, v_NGSD = pages
    _, heads, tokens, size = k_NGSD.shape
    at_once = min(_AT_ONCE, triton.next_power_of_2(tokens))
    grid = len(table_P), heads, triton.cdiv(tokens, at_once)
    if several := tokens < _SMALL:  # a program for each would have nothing to do
        at_once, grid = _AT_ONCE, (triton.cdiv(len(table_P) * tokens, _AT_ONCE), heads, 1)
    if not len(table_P):
        return
    with torch.cuda.device_of(k_NGSD):
        _copy_kernel[grid](
            k_NGSD, v_NGSD, table_P, *into, *k_NGSD.stride()[:3], *v_NGSD.stride()[:3], into[0].shape[1], tokens, size,
            *(scales or (table_P, table_P)), table_P if length_1 is None else length_1, len(table_P),
            BLOCK_S=at_once, BLOCK_D=triton.next_power_of_2(size), SCALED=scales is not None,
            COUNTED=length_1 is not None, TILE=_TILE, SEVERAL=several,
        )  # fmt: skip


@quick
@triton.jit(do_not_specialize=["length", "entries"], do_not_specialize_on_alignment=UNALIGNED)
@no_type_check
def _copy_kernel(
    k_ptr, v_ptr, table_ptr, k_out_ptr, v_out_ptr, k_stride_N, k_stride_G, k_stride_S,
    v_stride_N, v_stride_G, v_stride_S, length, tokens, size, k_scale_ptr, v_scale_ptr, length_ptr, entries,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr, SCALED: tl.constexpr, COUNTED: tl.constexpr, TILE: tl.constexpr,
    SEVERAL: tl.constexpr,
):  # fmt: skip
    """Grid: (pages of the request, KV heads, parts of a page); if SEVERAL, (tokens of the request, KV heads, 1)."""
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    real, end = length, length
    if COUNTED:
        real = tl.load(length_ptr)
        end = tl.minimum(length, real + TILE)
        if number * (BLOCK_S if SEVERAL else tokens) >= end:
            return
    lanes_S, lanes_D = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    if SEVERAL:
        token = number * BLOCK_S + lanes_S
        owned = token < entries * tokens
        page = tl.load(table_ptr + token // tokens, mask=owned, other=0).to(tl.int64)
        lanes_S = token % tokens
    else:
        token = number * tokens + lanes_S
        owned = lanes_S < tokens
        page = tl.load(table_ptr + number).to(tl.int64)
    inside = owned & (token < real) & (lanes_D < size)
    written = owned & (token < end) & (lanes_D < size)
    out = (head * length + token) * size + lanes_D
    k = tl.load(k_ptr + page * k_stride_N + head * k_stride_G + lanes_S * k_stride_S + lanes_D, mask=inside, other=0.0)
    v = tl.load(v_ptr + page * v_stride_N + head * v_stride_G + lanes_S * v_stride_S + lanes_D, mask=inside, other=0.0)
    if SCALED:
        k = k.to(tl.float32) * tl.load(k_scale_ptr + head)
        v = v.to(tl.float32) * tl.load(v_scale_ptr + head)
    tl.store(k_out_ptr + out, k.to(k_out_ptr.dtype.element_ty), mask=written)
    tl.store(v_out_ptr + out, v.to(v_out_ptr.dtype.element_ty), mask=written)


def move_rows(keys: Pair, rows_gR: torch.Tensor, pages: Pair, table_P: torch.Tensor, last: int) -> None:
    """Copies rows of a request to its first places, in one launch. Nothing asks the device.

    Args:
        keys: keys and values, [G, K, D] each, contiguous.
        rows_gR: int64: which of them, for each KV head or for all.
        last: so many of the rows, the last ones, go to the request's last places instead.
    """
    k_NGSD, v_NGSD = pages
    (heads, length, size), (lists, count) = keys[0].shape, rows_gR.shape
    with torch.cuda.device_of(k_NGSD):
        _move_kernel[(triton.cdiv(count, _ROWS), heads)](
            *keys, rows_gR, k_NGSD, v_NGSD, table_P, *k_NGSD.stride()[:3], *v_NGSD.stride()[:3],
            rows_gR.stride(0) if lists > 1 else 0, length, count, count - last, k_NGSD.shape[2], size,
            BLOCK_R=_ROWS, BLOCK_D=triton.next_power_of_2(size),
        )  # fmt: skip


@triton.jit(do_not_specialize=["row_stride", "length", "count", "first"], do_not_specialize_on_alignment=UNALIGNED)
@no_type_check
def _move_kernel(
    k_in_ptr, v_in_ptr, rows_ptr, k_ptr, v_ptr, table_ptr, k_stride_N, k_stride_G, k_stride_S,
    v_stride_N, v_stride_G, v_stride_S, row_stride, length, count, first, tokens, size,
    BLOCK_R: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (blocks of rows, KV heads)."""
    lanes_R, lanes_D = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_D)[None, :]
    head, real_R = tl.program_id(1).to(tl.int64), lanes_R < count
    row_R = tl.load(rows_ptr + head * row_stride + lanes_R, mask=real_R, other=0)
    place_R = tl.where(lanes_R < first, lanes_R, lanes_R + length - count)
    page_R = tl.load(table_ptr + place_R // tokens, mask=real_R, other=0).to(tl.int64)
    inside, at_R = real_R[:, None] & (lanes_D < size), (place_R % tokens).to(tl.int64)
    source = ((head * length + row_R) * size)[:, None] + lanes_D
    k = tl.load(k_in_ptr + source, mask=inside)
    v = tl.load(v_in_ptr + source, mask=inside)
    tl.store(k_ptr + (page_R * k_stride_N + head * k_stride_G + at_R * k_stride_S)[:, None] + lanes_D, k, mask=inside)
    tl.store(v_ptr + (page_R * v_stride_N + head * v_stride_G + at_R * v_stride_S)[:, None] + lanes_D, v, mask=inside)
