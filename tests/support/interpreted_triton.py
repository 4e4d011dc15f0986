"""Triton's interpreter as tests need it: bfloat16 is computed right, and what takes longest is not done again.

It multiplies the bits of bfloat16 as if they were integers and rounds towards zero; numbers of 8 bits that round up to
the next power of two become half of it. Most of its time goes to remapping
Triton's language at every launch and every call of a device function, to checking integers for overflow by a dozen
operations of its own, and to broadcasting tensors of equal shapes.
"""

from __future__ import annotations

import math
from functools import cache
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton._utils import validate_block_shape
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_product, _cast, _convert, _broadcast = (
    InterpreterBuilder.create_dot,
    InterpreterBuilder.cast_impl,
    InterpreterBuilder.create_fp_to_fp,
    TritonSemantic.broadcast_impl_value,
)
_np_dtype, _remap = cache(interpreter._get_np_dtype), interpreter._patch_lang


def prepare_interpreter() -> None:
    """From here on bfloat16 is multiplied in float32 and rounded to the nearest, and the language stays remapped."""
    InterpreterBuilder.create_dot = _create_dot
    InterpreterBuilder.cast_impl = _cast_impl
    InterpreterBuilder.create_fp_to_fp = _convert_impl
    InterpreterBuilder.create_masked_load = _masked(InterpreterBuilder.create_masked_load, 1)
    InterpreterBuilder.create_masked_store = _masked(InterpreterBuilder.create_masked_store, 2)
    interpreter._get_np_dtype = _np_dtype_of
    interpreter._patch_lang = _remapped
    TritonSemantic.binary_op_sanitize_overflow_impl = _check_overflow
    TritonSemantic.broadcast_impl_value = _broadcast_impl
    tl.tensor.__init__ = _make_tensor
    tl.block_type.__init__ = _make_block_type


def _create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    return _product(self, *(_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest)


def _cast_impl(self: InterpreterBuilder, source: TensorHandle, kind: tl.dtype) -> TensorHandle:
    if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
        return _cast(self, source, kind)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
    return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)


def _convert_impl(self: InterpreterBuilder, source: TensorHandle, kind: tl.dtype, rounding: Any) -> TensorHandle:
    if source.dtype.scalar != tl.float32 or kind.scalar != tl.float8e4nv:
        return _convert(self, source, kind, rounding)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).to(torch.float8_e4m3fn).view(torch.uint8)
    return TensorHandle(rounded.numpy(), kind.scalar)


def _masked(access: Any, position: int) -> Any:
    """The interpreter keeps what it compares in the type of what is compared, and 3.9 takes no other mask than bool."""

    def accessed(self: InterpreterBuilder, *args: Any, **named: Any) -> Any:
        mask = TensorHandle(np.asarray(args[position].data).astype(np.bool_), tl.int1)  # a descriptor's is an array
        return access(self, *args[:position], mask, *args[position + 1 :], **named)

    return accessed


def _np_dtype_of(kind: tl.dtype) -> np.dtype:
    return np.dtype(np.uint64) if isinstance(kind.scalar, tl.pointer_type) else _np_dtype(kind.scalar)


def _remapped(kernel: Any) -> interpreter._LangPatchScope:
    """Nothing to undo at the end of a launch."""
    _remap_once()
    return interpreter._LangPatchScope()


@cache
def _remap_once() -> None:
    _remap(SimpleNamespace(__globals__={"tl": tl, "core": tl.core}))  # what kernels see, and Triton's own functions


def _check_overflow(self: TritonSemantic, a: tl.tensor, b: tl.tensor, operation: Any) -> None:
    """As the interpreter does, at the level of numpy."""
    bits, (x, y) = a.type.scalar.int_bitwidth, (one.handle.data.astype(np.int64) for one in (a, b))
    if bits < 64 and x.size and y.size:
        found = {"add": np.add, "sub": np.subtract, "mul": np.multiply}[operation.__name__](x, y)
        kind = a.type.scalar
        assert kind.get_int_min_value() <= found.min(), f"int{bits} overflow"
        assert found.max() <= kind.get_int_max_value(), f"int{bits} overflow"


def _broadcast_impl(self: TritonSemantic, a: tl.tensor, b: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    are_equal = a.type.is_block() and b.type.is_block() and [*a.type.shape] == [*b.type.shape]
    return (a, b) if are_equal else _broadcast(self, a, b)


@cache
def _block(*sizes: int) -> tuple[tl.tuple, int]:
    return tl.tuple(sizes), validate_block_shape(sizes)


def _make_block_type(self: tl.block_type, element_ty: tl.dtype, shape: Any) -> None:
    self.shape, self.numel = _block(*(size.value if isinstance(size, tl.constexpr) else size for size in shape))
    self.element_ty, self.name = element_ty, "block"


@cache
def _shape(*sizes: int) -> tuple[tl.constexpr, tl.tuple]:
    return tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])


def _make_tensor(self: tl.tensor, handle: TensorHandle, type: tl.dtype) -> None:
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = _shape(*(type.shape if type.is_block() else ()))
