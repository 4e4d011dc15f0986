"""What captured steps have read of a model, to notice when something else takes its place.

Only modules of torch and of transformers are captured: what others read cannot be known. Modules, their classes and
forwards, hooks and tensors are compared at every step, numbers that modules hold when a cache is new or has grown.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from sparsekv.runtime.hf.architecture import ARCHITECTURES
from sparsekv.runtime.hf.long_inputs import is_touched

_NUMBERS = (int, float, str, bool, type(None))


def obstacle_in(decoder: nn.Module, model_type: str) -> str:
    """Why the modules of a decoder cannot be captured; empty where they can."""
    package = ARCHITECTURES[model_type].home.rpartition(".")[0]
    homes = (f"{package}.", "transformers.activations", "torch.nn.modules.")
    for module in _inside(decoder):
        kind = type(module)
        if not f"{kind.__module__}.".startswith(homes):
            return f"the decoder has a module of {kind.__module__}.{kind.__name__}, which may change unseen"
    tensors = chain(decoder.parameters(), decoder.buffers())
    if not {type(tensor) for tensor in tensors} <= {torch.Tensor, nn.Parameter}:
        return "the decoder has tensors of a class of their own"
    touched = torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks
    if touched or any(map(is_touched, _inside(decoder))):
        return "a module of the decoder has a hook, or a forward of its own"
    return ""


def _inside(decoder: nn.Module) -> list[nn.Module]:
    return list(decoder.modules())[1:]


class CapturedModel:
    """A decoder without `obstacle_in` it, as it is now. Its tensors are kept: a replay may come too late."""

    def __init__(self, decoder: nn.Module) -> None:
        self._decoder = decoder
        self._parts, self._addresses = _parts(decoder)
        self._kept = [part.untyped_storage() for part in self._parts if isinstance(part, torch.Tensor)]
        self._numbers = _numbers(decoder)

    def changed(self) -> bool:
        """Whether the model would compute something else than what was captured."""
        parts, addresses = _parts(self._decoder)
        same = len(parts) == len(self._parts) and all(a is b for a, b in zip(parts, self._parts, strict=True))
        return not same or addresses != self._addresses

    def numbers_changed(self) -> bool:
        """Whether a module holds another number, text or flag."""
        return _numbers(self._decoder) != self._numbers


def _parts(decoder: nn.Module) -> tuple[list[object], list[int]]:
    """Everything that a replay would not ask for again, and where the tensors lie."""
    parts: list[object] = [*torch_modules._global_forward_hooks.values()]
    parts += torch_modules._global_forward_pre_hooks.values()
    addresses: list[int] = []
    for module in decoder.modules():
        own: dict[str, Any] = vars(module)
        tensors = [*own["_parameters"].values(), *own["_buffers"].values()]
        parts += (module, type(module), type(module).forward, *tensors)
        if module is not decoder:  # whose own are called as always
            parts += (own.get("forward"), *own["_forward_hooks"].values(), *own["_forward_pre_hooks"].values())
        addresses += [tensor.data_ptr() for tensor in tensors if tensor is not None]
    return parts, addresses


def _numbers(decoder: nn.Module) -> list[Any]:
    return [[pair for pair in vars(module).items() if type(pair[1]) in _NUMBERS] for module in decoder.modules()]
