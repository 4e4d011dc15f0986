"""What every prefill backend may rely on, checked once before a kernel starts. No check asks the device."""

from __future__ import annotations

import math

import torch

from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.plans.errors import ShapeError


def check_qkv(q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, scale: float) -> None:
    """Query, key and value tensors fit together, and their head dimension is contiguous.

    Raises:
        ShapeError: they do not; the message says which and how to fix it.
    """
    named = {"q": q_BHSD, "k": k_BGKD, "v": v_BGKD}
    for name, tensor in named.items():
        if tensor.dim() != 4:
            raise ShapeError(f"{name} must be [batch, heads, tokens, head size], found shape {tuple(tensor.shape)}")
        if tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
            raise ShapeError(
                f"{name} must have stride 1 in its last dimension, found strides {tensor.stride()}: "
                "call .contiguous() before attention"
            )
    if k_BGKD.shape != v_BGKD.shape:
        raise ShapeError(f"k and v must have one shape, found {tuple(k_BGKD.shape)} and {tuple(v_BGKD.shape)}")
    B, H, _, D = q_BHSD.shape
    if k_BGKD.shape[0] != B or k_BGKD.shape[3] != D:
        raise ShapeError(
            f"q and k must share batch and head size, found {tuple(q_BHSD.shape)} and {tuple(k_BGKD.shape)}"
        )
    if H % k_BGKD.shape[1]:
        raise ShapeError(f"query heads must be a multiple of KV heads, found {H} and {k_BGKD.shape[1]}")
    if len({(t.dtype, t.device) for t in named.values()}) != 1:
        found = ", ".join(f"{name} {t.dtype} on {t.device}" for name, t in named.items())
        raise ShapeError(f"q, k and v must have one dtype and one device, found {found}")
    if not (scale > 0 and math.isfinite(scale)):
        raise ShapeError(f"scale must be positive and finite, usually 1 / sqrt(head size), found {scale}")


def check_chunk(q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, chunk: Chunk, window: int | None) -> None:
    """The chunk's rows are rows of q, and its keys lie in k.

    Raises:
        ShapeError: they do not, or the window is not positive.
    """
    if len(chunk.past) != q_BHSD.shape[0]:
        raise ShapeError(f"the chunk describes {len(chunk.past)} batch rows, q has {q_BHSD.shape[0]}")
    rows = max(n - p for p, n in zip(chunk.past, chunk.lengths, strict=True))
    if rows > q_BHSD.shape[2]:
        raise ShapeError(f"the chunk describes {rows} query rows, q has {q_BHSD.shape[2]}")
    if chunk.longest > k_BGKD.shape[2]:
        raise ShapeError(f"the chunk's longest row has {chunk.longest} keys, k holds {k_BGKD.shape[2]}")
    if window is not None and window < 1:
        raise ShapeError(f"a sliding window is at least 1 token, found {window}")


def check_index(q_BHSD: torch.Tensor, index: TileIndex, chunk: Chunk) -> None:
    """The index was built for these heads and these rows.

    Raises:
        ShapeError: it was not.
    """
    B, H, S, _ = q_BHSD.shape
    T = chunk.query_tiles(index.tile, S)
    C = index.columns_BHC.shape[-1]
    expected = {
        "tiles": (index.tiles_BHTW, (B, H, T, index.tiles_BHTW.shape[-1])),
        "counts": (index.counts_BHT, (B, H, T)),
        "columns": (index.columns_BHC, (B, H, C)),
        "live": (index.live_BHTN, (B, H, T, -(-C // 32))),
        "dense": (index.dense_H, (H,)),
    }
    for name, (tensor, shape) in expected.items():
        dtype = torch.bool if name == "dense" else torch.int32
        if tuple(tensor.shape) != shape or tensor.dtype != dtype or tensor.device != q_BHSD.device:
            raise ShapeError(
                f"the index's {name} must be {dtype} {shape} on {q_BHSD.device}, "
                f"found {tensor.dtype} {tuple(tensor.shape)} on {tensor.device}: build it for this chunk"
            )
