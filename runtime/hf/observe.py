"""Watching a dense forward pass from inside its attention: what the planner profiles with.

Shapes: B batch, H query heads, G KV heads, S queries of the call, K keys so far, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sparsekv.kernels.tiles import Chunk
from sparsekv.runtime.hf.attach import attach
from sparsekv.runtime.hf.attention import NAME, DenseEngine, LayerCall


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """What one layer attends with in one forward pass."""

    layer: int
    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    v_BGKD: torch.Tensor
    chunk: Chunk
    scale: float
    window: int | None  # the layer's own sliding window


Observer = Callable[[AttentionCall], torch.Tensor | None]
"""Sees a call; what it returns, [B, H, S, D], replaces the dense output. None leaves it."""


@contextmanager
def capture_attention(model: PreTrainedModel, observer: Observer) -> Iterator[None]:
    """Runs `observer` in every layer of every forward pass of `model` inside the `with`.

    The layers compute dense causal attention, with no mask in memory, unless the observer returns another output.
    The model is restored at the end, exceptions or not; caches made inside cannot be used afterwards.

    Raises:
        UsageError, UnsupportedError: the model cannot be attached to, see `attach.check_attachable`.
    """
    undo = attach(model, _Watched(observer))
    try:
        yield
    finally:
        undo()


def run_layer(layer: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """What a decoder layer returns, called by itself and without a cache, as its model's observer has it."""
    attention: Any = next((module for module in layer.modules() if NAME in vars(module)), None)
    if attention is None:  # nobody observes
        return layer(*args, **kwargs)
    with vars(attention)[NAME].alone(attention.layer_idx):
        return layer(*args, **kwargs)


class _Watched(DenseEngine):
    differentiable = True  # where an observer gives the output; the kernels of dense attention have no gradients

    def __init__(self, observer: Observer) -> None:
        super().__init__()
        self._observer = observer

    def attend(self, call: LayerCall) -> torch.Tensor:
        chunk = call.chunk
        k_BGKD, v_BGKD = call.keys(chunk).contiguous(chunk.longest)
        seen = AttentionCall(call.layer, call.q_BHSD, k_BGKD, v_BGKD, chunk, call.scale, call.window)
        replaced = self._observer(seen)
        return super().attend(call) if replaced is None else replaced
