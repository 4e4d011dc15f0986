"""Which queries and keys the index kernels take."""

from __future__ import annotations

from functools import lru_cache

import torch

from sparsekv.kernels.index.call import IndexCall
from sparsekv.kernels.index.device.sizes import LARGEST_HEAD
from sparsekv.kernels.triton_support import LONGEST_ROW_STRIDE, head_size_obstacle, interpreting


def tensor_obstacle(call: IndexCall) -> str | None:
    """Why no index can be built of these tensors here; None when one can."""
    q_BHSD, k_BGKD = call.q_BHSD, call.k_BGKD
    if not (q_BHSD.is_cuda or interpreting()):
        return f"it needs tensors on a GPU, found {q_BHSD.device}"
    if q_BHSD.is_cuda and not _ampere_or_newer(q_BHSD.device):
        return "it needs an NVIDIA GPU of compute capability 8.0 (Ampere) or newer"
    halves = (torch.float16, torch.bfloat16)
    if q_BHSD.dtype not in (halves if q_BHSD.is_cuda else (*halves, torch.float32)) or k_BGKD.dtype != q_BHSD.dtype:
        return f"it takes queries and keys in float16 or bfloat16, found {q_BHSD.dtype} and {k_BGKD.dtype}"
    if q_BHSD.stride(3) != 1 or k_BGKD.stride(3) != 1 or k_BGKD.stride(2) >= LONGEST_ROW_STRIDE:
        return f"it needs contiguous heads, and tokens less than {LONGEST_ROW_STRIDE} elements apart"
    if call.row_tiles == 0 or call.chunk.longest == 0:
        return "there is nothing to build"
    if q_BHSD.shape[3] > LARGEST_HEAD:
        return f"it takes head sizes up to {LARGEST_HEAD}, found {q_BHSD.shape[3]}"
    return head_size_obstacle(q_BHSD.shape[3])


@lru_cache
def _ampere_or_newer(device: torch.device) -> bool:
    return torch.version.hip is None and torch.cuda.get_device_capability(device)[0] >= 8
