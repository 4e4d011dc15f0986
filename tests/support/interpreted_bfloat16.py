"""bfloat16 in Triton's interpreter, which multiplies its bits as if they were integers and rounds towards zero."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

_product, _cast = InterpreterBuilder.create_dot, InterpreterBuilder.cast_impl


def widen_bfloat16() -> None:
    """From here on it is multiplied in float32, and rounded to the nearest."""
    InterpreterBuilder.create_dot = _create_dot
    InterpreterBuilder.cast_impl = _cast_impl


def _create_dot(self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, *rest: Any) -> TensorHandle:
    return _product(self, *(_cast(self, x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b)), *rest)


def _cast_impl(self: InterpreterBuilder, source: TensorHandle, kind: tl.dtype) -> TensorHandle:
    if source.dtype.scalar != tl.float32 or kind.scalar != tl.bfloat16:
        return _cast(self, source, kind)
    rounded = torch.from_numpy(np.ascontiguousarray(source.data)).bfloat16().view(torch.int16)
    return TensorHandle(rounded.numpy().view(np.uint16), tl.bfloat16)
