"""Watching a dense forward pass from inside its attention: what the planner profiles with.

Shapes: B batch, H query heads, G KV heads, S queries of the call, K keys so far, D head size, E hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from copy import copy
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sparsekv.kernels.keys import PLAIN, Softmax
from sparsekv.kernels.tiles import Chunk
from sparsekv.runtime.hf.attach import attach
from sparsekv.runtime.hf.attention import NAME, Engine, LayerCall
from sparsekv.runtime.hf.describe import decoder_of


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """The inputs of one layer's attention in one forward pass."""

    layer: int
    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    v_BGKD: torch.Tensor
    chunk: Chunk
    scale: float
    window: int | None  # the layer's own sliding window
    softmax: Softmax = PLAIN


_SHARED = "shared_kv_states"  # what transformers' layers call it
Observer = Callable[[AttentionCall], torch.Tensor | None]
"""Sees a call; what it returns, [B, H, S, D], replaces the dense output. None leaves it."""


@contextmanager
def capture_attention(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Runs `observer` in every layer of every forward pass of `model` inside the `with`. The layers compute dense
    causal attention, with no mask in memory, unless the observer returns another output. The model is restored at the
    end, exceptions or not; caches made inside cannot be used afterwards."""
    undo = attach(model, _Watched(observer))
    try:
        yield
    finally:
        undo()


class _Watched(Engine):
    differentiable = True  # where an observer gives the output; the kernels of dense attention have no gradients

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def attend(self, call: LayerCall) -> torch.Tensor:
        chunk = call.chunk
        k_BGKD, v_BGKD = call.keys(chunk).contiguous(chunk.longest)
        seen = AttentionCall(call.layer, call.q_BHSD, k_BGKD, v_BGKD, chunk, call.scale, call.window, call.softmax)
        replaced = self._observer(seen)
        return super().attend(call) if replaced is None else replaced


@dataclass(frozen=True, slots=True, eq=False)
class ObservedInput:
    """One call of a decoder layer, so that it, or all layers from it on, can run again."""

    hidden_BSE: torch.Tensor
    rest: tuple[Any, ...]  # behind it
    kwargs: dict[str, Any]

    @property
    def shared(self) -> Any:
        """A copy of the keys and values of earlier layers that the layer is handed, by kind, if any."""
        return copy(self.kwargs.get(_SHARED))

    def run(self, layer: nn.Module, hidden_BSE: torch.Tensor, shared: Any = None) -> torch.Tensor:
        """[B, S, E]: the output of the layer for the same call with these hidden states. It may write to `shared`."""
        given = self.shared if shared is None else shared
        kwargs = self.kwargs if given is None else self.kwargs | {_SHARED: given}
        attention: Any = next((module for module in layer.modules() if NAME in vars(module)), None)
        with nullcontext() if attention is None else vars(attention)[NAME].alone(attention.layer_idx):
            return output_of(layer(hidden_BSE, *self.rest, **kwargs))


def output_of(output: torch.Tensor | tuple[torch.Tensor, Any]) -> torch.Tensor:
    """The hidden states of what a decoder layer returns: Bamba's return attention weights beside them."""
    return output[0] if isinstance(output, tuple) else output


@contextmanager
def captured_inputs(model: PreTrainedModel) -> Iterator[dict[int, ObservedInput]]:
    """Notes, in the first forward pass inside the `with`, what each layer is called with."""
    inputs: dict[int, ObservedInput] = {}
    layers: Any = decoder_of(model).layers
    seen: set[int] = set()

    def note(number: int, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if number not in seen:
            seen.add(number)
            hidden_BSE, *rest = args
            later = {_SHARED: copy(kwargs[_SHARED])} if kwargs.get(_SHARED) is not None else {}
            inputs[number] = ObservedInput(
                hidden_BSE, tuple(rest), kwargs | later
            )  # the layer writes to what is shared

    hooks = [layer.register_forward_pre_hook(partial(note, i), with_kwargs=True) for i, layer in enumerate(layers)]
    try:
        yield inputs
    finally:
        for hook in hooks:
            hook.remove()
