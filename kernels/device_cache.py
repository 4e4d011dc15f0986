"""Small tensors that follow from numbers the host knows: sent to the device once and cached for the layers to come."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import lru_cache
from itertools import accumulate
from typing import Any, TypeVar, TypeVarTuple

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Key = TypeVarTuple("Key")
Made = TypeVar("Made")

_held: ContextVar[dict[object, object] | None] = ContextVar("held", default=None)


@contextmanager
def holding(results: dict[object, object]) -> Iterator[None]:
    """All results come from this dictionary, or are put there. What a graph reads has to outlast it, and cannot be sent
    while it is captured: a call of the same kind, run before it, sends it."""
    before = _held.set(results)
    try:
        yield
    finally:
        _held.reset(before)


def cached_on_device(
    most: int,
) -> Callable[[Callable[[torch.device, *Key], Made]], Callable[[torch.device, *Key], Made]]:
    """Caches the last `most` results of a function of a device and hashable values that makes tensors there. The
    tensors are shared by all callers and must not be written to. Each CUDA stream has its own: work on another stream
    would not wait for the copies and kernels that made them, nor be waited for when they are freed."""

    def decorate(make: Callable[[torch.device, *Key], Made]) -> Callable[[torch.device, *Key], Made]:
        def make_for(stream: int, device: torch.device, *key: *Key) -> Made:
            # Tensors made in inference mode could not take part in training later.
            with torch.inference_mode(False):
                return make(device, *key)

        cached: Callable[..., Made] = lru_cache(maxsize=most)(make_for)

        def get(device: torch.device, *key: *Key) -> Made:
            results: Any = _held.get()
            if results is not None:
                own = (make, device, key)
                if own not in results:
                    results[own] = make(device, *key)
                held: Made = results[own]
                return held
            stream = _stream(device)
            return make(device, *key) if stream is None else cached(stream, device, *key)

        return get

    return decorate


def _stream(device: torch.device) -> int | None:
    """The stream that orders work on the device; None where nothing may be cached."""
    # Tensors made while tracing (FakeTensorMode, torch.export) have no numbers and do not mix with tensors that have.
    if is_in_torch_dispatch_mode():
        return None
    if device.type == "cpu":
        return 0
    # What a graph captures is not computed yet, and its memory is the graph's own.
    if device.type != "cuda" or device.index is None or torch.cuda.is_current_stream_capturing():
        return None
    return int(torch._C._cuda_getCurrentRawStream(device.index))  # the stream's own object takes ten times as long


def on_device(values: object, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Host numbers, in lists or tuples, as a tensor there, cached: not to be written to. The copy does not wait for the
    device (small pageable copies are staged)."""
    return _send(device, _frozen(values), dtype)


@cached_on_device(most=512)
def _send(device: torch.device, values: object, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device="cpu").to(device, non_blocking=True)


def _frozen(values: object) -> object:
    return tuple(map(_frozen, values)) if isinstance(values, list) else values


_ALIGNED = 4  # int32 numbers of 16 bytes: every field begins where Triton's usual launch expects it


@cached_on_device(most=256)
def fields_on_device(device: torch.device, fields: tuple[tuple[int, ...], ...]) -> tuple[torch.Tensor, ...]:
    """Each field as an int32 tensor on the device, all in one copy, cached: not to be written to."""
    padded = [field + (0,) * (-len(field) % _ALIGNED) for field in fields]
    packed = torch.tensor([number for field in padded for number in field], dtype=torch.int32, device="cpu")
    packed, starts = packed.to(device, non_blocking=True), accumulate(map(len, padded), initial=0)
    return tuple(packed[start : start + len(field)] for start, field in zip(starts, fields, strict=False))
