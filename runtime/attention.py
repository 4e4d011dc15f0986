"""The attention function that Hugging Face models call by name, and its mask function.

Both names are registered when something is attached to a model, and do nothing to models that do not ask for them.
The engine and the cache arrive as a keyword argument, which a hook on each attention module adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.engine import Engine, LayerCall

NAME = "sparsekv"
CONTEXT = "sparsekv_context"


@dataclass(frozen=True, slots=True)
class Context:
    """What a hook hands to the attention function of one layer."""

    engine: Engine
    cache: Cache | None


def register() -> None:
    """Makes the attention and its mask known to transformers by the name `sparsekv`."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask at all: kernels work from positions. Without this, chunked prefill would see no mask and no past."""
    return None


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as `AttentionInterface` wants it: q [B, H, S, D], new k and v [B, G, S, D], output [B, S, H, D].

    Raises:
        UsageError: the model shares its config with one that a plan was applied to.
        UnsupportedError: a mask was handed in.
    """
    context: Context | None = kwargs.get(CONTEXT)
    if context is None:
        raise UsageError(
            "expected a model that sparsekv was applied to, found another one that shares its config object; "
            "load the two models separately (or give one a copy.deepcopy of the config)"
        )
    if attention_mask is not None:
        raise UnsupportedError(
            f"expected no prepared attention mask, found one of shape {tuple(attention_mask.shape)}; "
            f"custom masks are not supported, pass none"
        )
    layer: Any = module.layer_idx
    call = LayerCall(layer, query, key, value, context.cache, scaling, sliding_window)
    if torch.is_grad_enabled():
        out_BHSD = _ForwardOnly.apply(context.engine, call, query)  # type: ignore[no-untyped-call]
    else:
        out_BHSD = context.engine.attend(call)
    return out_BHSD.transpose(1, 2).contiguous(), None


class _ForwardOnly(torch.autograd.Function):
    """Runs the engine outside autograd, and says so when someone asks for gradients."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, call: LayerCall, q_BHSD: torch.Tensor) -> torch.Tensor:
        return engine.attend(call)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise UnsupportedError("sparsekv attention has no gradients; close the handle before training")
