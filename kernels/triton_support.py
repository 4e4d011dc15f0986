"""Checks and options that the Triton kernels share: the tensors they take, and whether they run in the interpreter.

Kernels list the numbers that follow the prompt in `do_not_specialize`: a new length must not compile them again. They
are marked `no_type_check`, as Triton gives its language no types; their launchers are checked.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from sparsekv.plans.errors import BackendError, ShapeError

# Numbers and tables of rows, which are parts of others and so begin anywhere, or stand for what is not there. Kernels
# read them one by one, or from an offset that the device alone knows: to compile for their alignment gains nothing.
UNALIGNED = [
    *("lengths_ptr", "length_ptr", "starts_ptr", "counts_ptr", "new_ptr", "owners_ptr", "where_ptr", "table_ptr"),
    *("chosen_ptr", "logits_ptr", "scores_ptr", "sinks_ptr", "k_scale_ptr", "v_scale_ptr", "q_scale_ptr"),
]
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


class QuickKernel:
    """A kernel, launched as ever: `kernel[grid](*args, **options)`, the numbers to compile for as options. Triton's own
    search for the compiled kernel takes two thirds of the program's time for a launch, and a sparse layer of a prompt
    has ten; here it is found by a key of our own, of all that Triton 3.6 to 3.9 compile these kernels for: dtypes,
    alignment of tensors, integers that are 1, multiples of 16 or longer than 32 bits, and every option."""

    def __init__(self, kernel: Any) -> None:
        constant = [param.is_constexpr for param in kernel.params]
        assert constant == sorted(constant), "numbers to compile for come last"
        assert not any(param.is_constexpr and param.has_default for param in kernel.params), "and each is given"
        self.kernel, self._compiled = kernel, dict[Any, Any]()
        self._constants = [param.name for param in kernel.params if param.is_constexpr]

    def __getitem__(self, grid: tuple[int, int] | tuple[int, int, int]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        key = (torch.cuda.current_device(), *map(_kind, args), *options.items())
        compiled = self._compiled.get(key)
        if compiled is None:
            self._compiled[key] = self.kernel[grid](*args, **options)
        else:
            compiled[(*grid, 1)[:3]](*args, *(options[name] for name in self._constants))


def _kind(arg: Any) -> Any:
    if isinstance(arg, torch.Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if type(arg) is int:
        return arg == 1, arg % 16 == 0, -(1 << 31) <= arg < 1 << 31
    return (arg.base.dtype, tuple(arg.block_shape)) if isinstance(arg, TensorDescriptor) else type(arg)


def quick(kernel: Any) -> Any:
    """Decorates a kernel of NVIDIA GPUs that a layer of a prompt launches; the interpreter's stay as they are."""
    return kernel if interpreting() or torch.version.hip is not None else QuickKernel(kernel)


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
