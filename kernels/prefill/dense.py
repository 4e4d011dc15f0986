"""Dense causal attention by torch's fastest kernel: the dense layers of a plan, and the peer of every sparse number.

torch's causal flag means the same as ours only when the queries are the whole sequence. Elsewhere the lower-right
variant of the flash kernel is used where there is one, and else blocks of rows with a mask of bounded size; an S x K
mask of the whole call is never made. K and V may be physically longer than the lengths, and are never repeated in
memory for grouped-query attention.

Shapes: B batch, H query heads, G KV heads, N query heads of a KV head, S query rows, K keys, D head size;
R and J rows and keys of a block.
"""

from __future__ import annotations

from functools import lru_cache

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.tiles import AttentionOutput, Chunk
from sparsekv.kernels.topk import blocks
from sparsekv.plans.errors import ShapeError

# Elements and rows of a block's mask.
MASK_ELEMENTS = 1 << 24
MOST_ROWS = 512
# cuDNN is the fastest on Hopper and newer, but prepares a plan for every new shape: only long rows repay that.
CUDNN_ROWS = 16384
_FASTEST_FIRST = [
    SDPBackend.CUDNN_ATTENTION,
    SDPBackend.FLASH_ATTENTION,
    SDPBackend.EFFICIENT_ATTENTION,
    SDPBackend.MATH,
]


@torch.no_grad()
def dense_attention(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    chunk: Chunk,
    *,
    scale: float,
    window: int | None = None,
) -> AttentionOutput:
    """As `prefill_attention` over every key (of the window), without log-sum-exp. Checks only that k holds the chunk's
    keys: more would take time. Raises ShapeError."""
    if chunk.longest > k_BGKD.shape[2]:
        raise ShapeError(f"the chunk's longest row has {chunk.longest} keys, k holds {k_BGKD.shape[2]}")
    past, length = chunk.past[0], chunk.lengths[0]
    same = len(set(chunk.past)) == 1 and len(set(chunk.lengths)) == 1
    if same and length - past == q_BHSD.shape[2]:
        return AttentionOutput(attend_last_rows(q_BHSD, k_BGKD, v_BGKD, length, scale, window), None)
    out_BHSD = torch.zeros_like(q_BHSD)
    for b, (past, length) in enumerate(zip(chunk.past, chunk.lengths, strict=True)):
        row, rows = slice(b, b + 1), slice(0, length - past)
        new_1HSD = q_BHSD[row, :, rows]
        out_BHSD[row, :, rows] = attend_last_rows(new_1HSD, k_BGKD[row], v_BGKD[row], length, scale, window)
    return AttentionOutput(out_BHSD, None)


def attend_newest(
    q_BH1D: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, *, scale: float, window: int | None = None
) -> torch.Tensor:
    """A step of dense decode: one query in each batch row, which sees every key (of the window). Output as q. Nothing
    is checked: a step is short, and the host is what it waits for."""
    first = 0 if window is None else max(0, k_BGKD.shape[2] - window)
    return _plain(q_BH1D, k_BGKD[:, :, first:], v_BGKD[:, :, first:], scale)


def attend_last_rows(
    q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, K: int, scale: float, window: int | None
) -> torch.Tensor:
    """Batch rows of one past and length: S real rows that end at key K. Nothing is checked."""
    S = q_BHSD.shape[2]
    if k_BGKD.shape[2] > K:
        k_BGKD, v_BGKD = k_BGKD[:, :, :K], v_BGKD[:, :, :K]
    if window is not None and window >= K:
        window = None
    if S == 0:
        return torch.empty_like(q_BHSD)
    if S == 1:
        return attend_newest(q_BHSD, k_BGKD, v_BGKD, scale=scale, window=window)
    if window is None and S == K:
        return _whole_prompt(q_BHSD, k_BGKD, v_BGKD, scale)
    if window is None and _flash_runs(q_BHSD):
        bias = causal_lower_right(S, K)
        return scaled_dot_product_attention(
            q_BHSD, k_BGKD, v_BGKD, attn_mask=bias, scale=scale, enable_gqa=q_BHSD.shape[1] != k_BGKD.shape[1]
        )
    return _row_blocks(q_BHSD, k_BGKD, v_BGKD, scale, window)


def _flash_runs(q_BHSD: torch.Tensor) -> bool:
    """Torch has its flash kernel here; elsewhere lower-right causal would cost an S x K mask."""
    return (
        q_BHSD.is_cuda
        and torch.version.hip is None
        and _capability(q_BHSD.device) >= (8, 0)
        and q_BHSD.dtype in (torch.float16, torch.bfloat16)
        and q_BHSD.shape[-1] <= 256
        and torch.backends.cuda.flash_sdp_enabled()
    )


@lru_cache
def _capability(device: torch.device) -> tuple[int, int]:
    return torch.cuda.get_device_capability(device)


def _whole_prompt(q_BHSD: torch.Tensor, k_BHSD: torch.Tensor, v_BHSD: torch.Tensor, scale: float) -> torch.Tensor:
    """Queries and keys are the same tokens, so torch's own causal flag means what it should."""
    if q_BHSD.shape[2] < CUDNN_ROWS or not _flash_runs(q_BHSD) or _capability(q_BHSD.device) < (9, 0):
        return _plain(q_BHSD, k_BHSD, v_BHSD, scale, is_causal=True)
    with sdpa_kernel(_FASTEST_FIRST, set_priority=True):
        return _plain(q_BHSD, k_BHSD, v_BHSD, scale, is_causal=True)


def _row_blocks(
    q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, scale: float, window: int | None
) -> torch.Tensor:
    """Blocks of rows over the keys that any of them sees, each with its own small mask."""
    S, K = q_BHSD.shape[2], k_BGKD.shape[2]
    # Few rows a block: every block computes a triangle that nobody sees.
    rows = max(16, min(MOST_ROWS, MASK_ELEMENTS // (window or K)))
    out_BHSD = torch.empty_like(q_BHSD)
    for part in blocks(S, 1, rows):
        begin, end = K - S + part.start, K - S + part.stop
        keys = slice(0 if window is None else max(0, begin + 1 - window), end)
        i_S1 = torch.arange(begin, end, device=q_BHSD.device)[:, None]
        j_K = torch.arange(keys.start, end, device=q_BHSD.device)
        mask_SK = j_K <= i_S1
        if window is not None:
            mask_SK &= i_S1 - j_K < window
        q_BHRD, k_BGJD, v_BGJD = q_BHSD[:, :, part], k_BGKD[:, :, keys], v_BGKD[:, :, keys]
        out_BHSD[:, :, part] = _grouped(q_BHRD, k_BGJD, v_BGJD, scale, mask_SK=mask_SK)
    return out_BHSD


def _plain(
    q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, scale: float, *, is_causal: bool = False
) -> torch.Tensor:
    """Without a mask; the kernels for GPUs know grouped heads themselves."""
    if not _flash_runs(q_BHSD):
        return _grouped(q_BHSD, k_BGKD, v_BGKD, scale, is_causal=is_causal)
    grouped = q_BHSD.shape[1] != k_BGKD.shape[1]
    return scaled_dot_product_attention(q_BHSD, k_BGKD, v_BGKD, is_causal=is_causal, scale=scale, enable_gqa=grouped)


def _grouped(
    q_BHSD: torch.Tensor,
    k_BGKD: torch.Tensor,
    v_BGKD: torch.Tensor,
    scale: float,
    *,
    is_causal: bool = False,
    mask_SK: torch.Tensor | None = None,
) -> torch.Tensor:
    """For kernels that do not know grouped heads: KV heads become the batch, each of them expanded N times."""
    B, H, S, _ = q_BHSD.shape
    G = k_BGKD.shape[1]
    if H == G:
        return scaled_dot_product_attention(q_BHSD, k_BGKD, v_BGKD, mask_SK, is_causal=is_causal, scale=scale)
    if S == 1 and mask_SK is None:  # one row sees every key: the heads of a group are rows of one head
        q_BGND = q_BHSD.reshape(B, G, H // G, -1)
        return scaled_dot_product_attention(q_BGND, k_BGKD, v_BGKD, scale=scale).reshape_as(q_BHSD)
    out_BHSD = torch.empty_like(q_BHSD)
    for b in range(B):
        q_GNSD = q_BHSD[b].unflatten(0, (G, H // G))
        k_GNKD, v_GNKD = (x[b].unsqueeze(1).expand(-1, H // G, -1, -1) for x in (k_BGKD, v_BGKD))
        out_GNSD = scaled_dot_product_attention(q_GNSD, k_GNKD, v_GNKD, mask_SK, is_causal=is_causal, scale=scale)
        out_BHSD[b] = out_GNSD.flatten(0, 1)
    return out_BHSD
