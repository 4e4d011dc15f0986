"""Writing the newest tokens of every row to where its keys and values lie, at positions read on the device.

Shapes: B batch, G KV heads, Q new tokens, D head size.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.keys import LARGEST_FLOAT8, KeyView
from sparsekv.kernels.triton_support import overlap, overlaps_launches


def append_newest(
    keys: KeyView, k_BGQD: torch.Tensor, v_BGQD: torch.Tensor, ring: tuple[int, int] | None = None
) -> None:
    """Writes the tokens that end every row, at position `lengths_B - Q` and behind it, of keys found by `where`.

    Args:
        keys: lengths that count the new tokens already.
        k_BGQD: their keys, of the dtype of what is cached, unless that has scales; stride 1 in the last dimension.
        v_BGQD: their values, likewise.
        ring: where the positions are those of a ring, its first row and how many there are.
    """
    assert keys.where is not None, "the host writes to tensors that it knows by itself"
    batch, heads, new, size = k_BGQD.shape
    first, size_of_ring = ring or (0, 0)
    scales = (keys.lengths_B, keys.lengths_B) if keys.scales is None else (keys.scales.k_G, keys.scales.v_G)
    with torch.cuda.device_of(k_BGQD):
        append_kernel[(heads, batch, new)](
            k_BGQD, v_BGQD, keys.k, keys.v, keys.where, keys.lengths_B,
            *k_BGQD.stride()[:3], *v_BGQD.stride()[:3], first, size_of_ring, *scales,
            D=size, BLOCK_D=triton.next_power_of_2(size), MOST=0.0 if keys.scales is None else LARGEST_FLOAT8,
            num_warps=1,
            **overlap(overlaps_launches(k_BGQD.device)),
        )  # fmt: skip


@no_type_check
@triton.jit(do_not_specialize=["first", "ring"])
def append_kernel(
    new_k_ptr, new_v_ptr, k_ptr, v_ptr, where_ptr, lengths_ptr, k_stride_B, k_stride_G, k_stride_Q, v_stride_B,
    v_stride_G, v_stride_Q, first, ring, k_scale_ptr, v_scale_ptr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, MOST: tl.constexpr, OVERLAP: tl.constexpr,
):  # fmt: skip
    """Grid: (KV heads, batch, new tokens)."""
    if OVERLAP:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    head = tl.program_id(0)
    batch = tl.program_id(1).to(tl.int64)
    lanes_D = tl.arange(0, BLOCK_D)
    number = tl.program_id(2)
    at = tl.load(lengths_ptr + batch) - tl.num_programs(2) + number
    at = tl.where(ring > 0, first + at % tl.maximum(ring, 1), at)
    row = batch * tl.load(where_ptr + 7) + head * tl.load(where_ptr + 2) + at * tl.load(where_ptr + 6)
    k_D = tl.load(new_k_ptr + batch * k_stride_B + head * k_stride_G + number * k_stride_Q + lanes_D, mask=lanes_D < D)
    v_D = tl.load(new_v_ptr + batch * v_stride_B + head * v_stride_G + number * v_stride_Q + lanes_D, mask=lanes_D < D)
    if MOST > 0.0:  # as kernels.keys.in_8_bits
        k_D = tl.clamp(k_D.to(tl.float32) / tl.load(k_scale_ptr + head), -MOST, MOST).to(k_ptr.dtype.element_ty)
        v_D = tl.clamp(v_D.to(tl.float32) / tl.load(v_scale_ptr + head), -MOST, MOST).to(v_ptr.dtype.element_ty)
    tl.store(k_ptr + tl.load(where_ptr) + row * D + lanes_D, k_D, mask=lanes_D < D)
    tl.store(v_ptr + tl.load(where_ptr + 1) + row * D + lanes_D, v_D, mask=lanes_D < D)
