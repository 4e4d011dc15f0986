"""Which Hugging Face architectures this version runs, and where their attention modules are.

Each of them calls its attention through `AttentionInterface`, hands unknown keyword arguments on to it, and holds
`q_proj` and `k_proj` apart.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from sparsekv.plans.errors import UnsupportedError

SUPPORTED = ("glm", "llama", "mistral", "qwen2", "qwen3")


def check_supported(model_type: str) -> None:
    """Raises UnsupportedError for a model type that this version cannot run, naming those it can."""
    if model_type not in SUPPORTED:
        raise UnsupportedError(
            f"expected one of the supported architectures ({', '.join(SUPPORTED)}), found {model_type!r}; "
            f"choose a model of a supported architecture"
        )


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module with the decoder layers: `model` itself or what its language modelling head sits on."""
    decoder = model.base_model
    assert isinstance(decoder, PreTrainedModel)
    return decoder


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of each layer, in order; module i has `layer_idx` i."""
    layers: Any = decoder_of(model).layers
    return [layer.self_attn for layer in layers]
