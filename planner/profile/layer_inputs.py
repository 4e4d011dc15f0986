"""What decoder layers are called with in a forward pass, so that one layer, or all from one on, can run again.

Shapes: B batch, S rows, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sparsekv.runtime.hf.describe import decoder_of
from sparsekv.runtime.hf.observe import run_layer


@dataclass(frozen=True, slots=True, eq=False)
class LayerInput:
    """One call of a decoder layer."""

    hidden_BSE: torch.Tensor
    args: tuple[Any, ...]
    kwargs: dict[str, Any]

    def run(self, layer: nn.Module, hidden_BSE: torch.Tensor) -> torch.Tensor:
        """The output of the layer for the same call with these hidden states: [B, S, E]."""
        out = run_layer(layer, hidden_BSE, *self.args, **self.kwargs)
        found: torch.Tensor = out[0] if isinstance(out, tuple) else out
        return found


@contextmanager
def captured_inputs(model: PreTrainedModel) -> Iterator[dict[int, LayerInput]]:
    """Notes, in the first forward pass inside the `with`, what each layer is called with."""
    inputs: dict[int, LayerInput] = {}
    layers: Any = decoder_of(model).layers
    seen: set[int] = set()

    def note(number: int) -> Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if number not in seen:
                seen.add(number)
                named = dict(kwargs)
                hidden, rest = (args[0], args[1:]) if args else (named.pop("hidden_states"), ())
                inputs[number] = LayerInput(hidden, rest, named)

        return hook

    hooks = [layer.register_forward_pre_hook(note(i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
