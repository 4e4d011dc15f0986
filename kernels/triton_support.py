"""Checks and options that the Triton kernels share: the tensors they take, and whether they run in the interpreter.

Kernels list the numbers that follow the prompt in `do_not_specialize`: a new length must not compile them again. They
are marked `no_type_check`, as Triton gives its language no types; their launchers are checked.
"""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.plans.errors import BackendError, ShapeError

SMALLEST_HEAD, LARGEST_HEAD = 16, 512
# Offsets inside a block are 32-bit numbers: 128 rows of this stride stay below 2 ** 31.
LONGEST_ROW_STRIDE = 1 << 23


@no_type_check
@triton.jit
def soft_cap(s, CAP: tl.constexpr):
    """CAP * tanh(s / CAP), whatever the base of the exponential to come, as both are in it."""
    return CAP * (2.0 * tl.sigmoid(s * (2.0 / CAP)) - 1.0)


def interpreting() -> bool:
    """Returns whether kernels run on the CPU, step by step (TRITON_INTERPRET=1 before triton was imported)."""
    return bool(triton.knobs.runtime.interpret)


def overlaps_launches(device: torch.device) -> bool:
    """Returns whether the GPU can launch a kernel while the one before it ends (programmatic dependent launch)."""
    if device.type != "cuda" or torch.version.hip is not None:
        return False
    return torch.cuda.get_device_capability(device)[0] >= 9


def overlap(on: bool) -> dict[str, bool]:
    """Options of a launch of a kernel with an OVERLAP parameter. Such a kernel waits for the one before it, in every
    program and before it reads or writes anything (`gdc_wait`): all kernels before are then complete, as each of them
    waited. What overlaps is the launch alone."""
    return {"OVERLAP": True, "launch_pdl": True} if on else {"OVERLAP": False}


def head_size_obstacle(head_dim: int) -> str | None:
    """The reason why the kernels do not take a head size; None when they do."""
    if head_dim % 8 == 0 and SMALLEST_HEAD <= head_dim <= LARGEST_HEAD:
        return None
    return f"it takes head sizes that are multiples of 8 from {SMALLEST_HEAD} to {LARGEST_HEAD}, found {head_dim}"


def check_tensors(q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor) -> None:
    obstacle = head_size_obstacle(q_BHSD.shape[-1])
    if not (q_BHSD.is_cuda or interpreting()):
        obstacle = f"it needs tensors on a GPU, found {q_BHSD.device}"
    if obstacle:
        raise BackendError(f"the triton backend cannot run this layer: {obstacle}; use backend='cpu' or run it dense")
    if max(k_BGKD.stride(2), v_BGKD.stride(2)) >= LONGEST_ROW_STRIDE:
        raise ShapeError(
            f"tokens may lie at most {LONGEST_ROW_STRIDE} elements apart, found strides {k_BGKD.stride()} and "
            f"{v_BGKD.stride()}: call .contiguous() before attention"
        )
