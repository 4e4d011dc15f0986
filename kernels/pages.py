"""Copies a request's pages side by side on a GPU, for kernels that take contiguous keys.

Shapes: N pages in memory, G KV heads, S tokens of a page, D head size, P pages of a request, K tokens of a request.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

Pair = tuple[torch.Tensor, torch.Tensor]
_AT_ONCE = 128  # tokens of a page


def copy_pages(pages: Pair, table_P: torch.Tensor, into: Pair) -> None:
    """Copies the pages of one request in order, keys and values in one launch. Nothing asks the device.

    Args:
        pages: keys and values, [N, G, S, D] each, of any strides but 1 in the last dimension.
        table_P: int32: which pages.
        into: [G, K, D] each, contiguous; the last page may have more tokens.
    """
    k_NGSD, v_NGSD = pages
    _, heads, tokens, size = k_NGSD.shape
    at_once = min(_AT_ONCE, triton.next_power_of_2(tokens))
    if not len(table_P):
        return
    with torch.cuda.device_of(k_NGSD):
        _copy_kernel[(len(table_P), heads, triton.cdiv(tokens, at_once))](
            k_NGSD, v_NGSD, table_P, *into, *k_NGSD.stride()[:3], *v_NGSD.stride()[:3], into[0].shape[1], tokens, size,
            BLOCK_S=at_once, BLOCK_D=triton.next_power_of_2(size),
        )  # fmt: skip


@triton.jit
@no_type_check
def _copy_kernel(
    k_ptr, v_ptr, table_ptr, k_out_ptr, v_out_ptr, k_stride_N, k_stride_G, k_stride_S,
    v_stride_N, v_stride_G, v_stride_S, length, tokens, size,
    BLOCK_S: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Grid: (pages of the request, KV heads, parts of a page)."""
    number, head = tl.program_id(0).to(tl.int64), tl.program_id(1).to(tl.int64)
    page = tl.load(table_ptr + number).to(tl.int64)
    lanes_S, lanes_D = tl.program_id(2) * BLOCK_S + tl.arange(0, BLOCK_S)[:, None], tl.arange(0, BLOCK_D)[None, :]
    token = number * tokens + lanes_S
    inside = (lanes_S < tokens) & (token < length) & (lanes_D < size)
    out = (head * length + token) * size + lanes_D
    k = tl.load(k_ptr + page * k_stride_N + head * k_stride_G + lanes_S * k_stride_S + lanes_D, mask=inside)
    v = tl.load(v_ptr + page * v_stride_N + head * v_stride_G + lanes_S * v_stride_S + lanes_D, mask=inside)
    tl.store(k_out_ptr + out, k, mask=inside)
    tl.store(v_out_ptr + out, v, mask=inside)
