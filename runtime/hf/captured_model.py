"""What captured steps have read of a model, to notice when something else takes its place.

Only modules of torch and of transformers are captured: what others read cannot be known. Modules, their classes and
forwards, hooks and tensors are compared at every step, numbers that modules hold when a cache is new or has grown.
"""

from __future__ import annotations

from itertools import chain
from operator import is_
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

from sparsekv.runtime.architecture import ARCHITECTURES
from sparsekv.runtime.hf.long_inputs import is_touched

_NUMBERS = (int, float, str, bool, type(None))
_OWN = ("_modules", "_parameters", "_buffers", "_forward_hooks", "_forward_pre_hooks")


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
        self._modules = list(decoder.modules())
        self._parts = self._look()
        self._tensors = [part for part in self._parts if isinstance(part, torch.Tensor)]
        self._addresses = self._look_where()
        self._kept = [tensor.untyped_storage() for tensor in self._tensors]
        self._numbers = self._read_numbers()

    def changed(self) -> bool:
        """Whether the model would compute something else than what was captured."""
        now = self._look()
        same = len(now) == len(self._parts) and all(map(is_, now, self._parts))
        return not same or self._look_where() != self._addresses

    def numbers_changed(self) -> bool:
        """Whether a module holds another number, text or flag."""
        return self._read_numbers() != self._numbers

    def _look(self) -> list[object]:
        """Everything that a replay does not ask for again. Hooks and a forward of the decoder itself are called as
        always."""
        parts: list[object] = [*torch_modules._global_forward_hooks.values()]
        parts += torch_modules._global_forward_pre_hooks.values()
        for number, module in enumerate(self._modules):
            own: dict[str, Any] = vars(module)
            parts += (type(module), type(module).forward)
            for kind in _OWN if number else _OWN[:3]:
                parts += own[kind].values()
            if number:
                parts.append(own.get("forward"))
        return parts

    def _look_where(self) -> list[int]:
        return list(map(torch.Tensor.data_ptr, self._tensors))

    def _read_numbers(self) -> list[Any]:
        return [[pair for pair in vars(module).items() if type(pair[1]) in _NUMBERS] for module in self._modules]
