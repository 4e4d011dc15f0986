"""Small tensors that follow from numbers the host knows: sent to the device once, and kept for the layers to come."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar, TypeVarTuple

import torch
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

Key = TypeVarTuple("Key")
Made = TypeVar("Made")


def kept_on_device(
    most: int,
) -> Callable[[Callable[[torch.device, *Key], Made]], Callable[[torch.device, *Key], Made]]:
    """Keeps the last `most` results of a function of a device and hashable values that makes tensors there.

    Nobody may write to what it returns: every later call of the same values is given it. Each CUDA stream has its own:
    work on another stream would not wait for the copies and kernels that made it, nor be waited for when it is freed.
    """

    def keep(make: Callable[[torch.device, *Key], Made]) -> Callable[[torch.device, *Key], Made]:
        def make_for(stream: int, device: torch.device, *key: *Key) -> Made:
            # What inference mode makes could not take part in training later.
            with torch.inference_mode(False):
                return make(device, *key)

        kept: Callable[..., Made] = lru_cache(maxsize=most)(make_for)

        def get(device: torch.device, *key: *Key) -> Made:
            stream = _stream(device)
            return make(device, *key) if stream is None else kept(stream, device, *key)

        return get

    return keep


def _stream(device: torch.device) -> int | None:
    """Names the stream that orders work on the device; None where nothing may be kept."""
    # What tracing makes (FakeTensorMode, torch.export) has no numbers, and does not mix with tensors that have.
    if is_in_torch_dispatch_mode():
        return None
    if device.type == "cpu":
        return 0
    # What a graph captures is not computed yet, and its memory is the graph's own.
    if device.type != "cuda" or device.index is None or torch.cuda.is_current_stream_capturing():
        return None
    return torch.cuda.current_stream(device).cuda_stream


def on_device(values: object, device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Host numbers as a tensor there, not to be written to: the same numbers are sent once (see kept_on_device).

    The copy does not wait for the device (small pageable copies are staged).
    """
    return _sent(device, _frozen(values), dtype)


@kept_on_device(most=512)
def _sent(device: torch.device, values: object, dtype: torch.dtype) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _frozen(values: object) -> object:
    return tuple(map(_frozen, values)) if isinstance(values, list | tuple) else values
