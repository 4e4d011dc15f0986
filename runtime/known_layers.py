"""Which decoder layers are those whose forward `long_layers` follows, untouched by anybody."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules

_OURS = "sparsekv.runtime.attach"
_ASLEEP = "transformers.utils.output_capturing"  # hooks that stay behind once hidden states were asked for
_SLIDING: dict[str, Callable[[Any], int | None]] = {
    "mistral": lambda attention: getattr(attention.config, "sliding_window", None),
    "qwen2": lambda attention: attention.sliding_window,
    "qwen3": lambda attention: attention.sliding_window,
}
_KINDS = frozenset({"glm", "llama", *_SLIDING})
_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def is_known(layer: nn.Module, model_type: str) -> bool:
    """Whether the layer and all its parts but the projections are transformers' own classes of a known kind."""
    parts = [layer, *(getattr(layer, name, None) for name in _PARTS)]
    return model_type in _KINDS and all(_is_from(part, model_type) for part in parts) and "forward" not in vars(layer)


def is_known_norm(norm: nn.Module, model_type: str) -> bool:
    """Whether this is the final norm of a known kind: one that works row by row."""
    return _is_from(norm, model_type) and type(norm).__name__.endswith("RMSNorm") and "forward" not in vars(norm)


def _is_from(part: object, model_type: str) -> bool:
    return type(part).__module__ == f"transformers.models.{model_type}.modeling_{model_type}"


def is_untouched(layer: nn.Module) -> bool:
    """Whether nobody hooked anything inside the layer, where work in pieces would show, or replaced its attention."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return False
    inside = [module for module in layer.modules() if module is not layer]
    attention: Any = layer.self_attn
    return "forward" not in vars(attention) and not any(
        is_watched(module._forward_hooks) or is_watched(module._forward_pre_hooks) for module in inside
    )


def is_watched(hooks: dict[int, Callable[..., Any]]) -> bool:
    """Whether any of a module's hooks is somebody else's."""
    return any(getattr(hook, "__module__", None) not in (_OURS, _ASLEEP) for hook in hooks.values())


def rotary_of(attention: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The rotary function that the attention's own forward would call now."""
    found: Callable[..., tuple[torch.Tensor, torch.Tensor]] = sys.modules[
        type(attention).__module__
    ].apply_rotary_pos_emb
    return found


def window_of(attention: nn.Module, model_type: str) -> int | None:
    """The sliding window that the attention's own forward would hand on."""
    return _SLIDING[model_type](attention) if model_type in _SLIDING else None
