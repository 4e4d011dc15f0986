"""How many prompts evaluation runs together: as many as surely fit the memory of the device."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from sparsekv.runtime.model_config import attention_groups

# Tokens that are fed of a text that is no answer: each is a decode step of every mode. No answer of a task is longer.
MOST_TEXT = 64
# A step of decoding takes the host as long for one prompt as for many; beyond this, little is left to gain.
_MOST = 64
# Of all prompts together, however much there is: an 8B model with two of 32K tokens stays within 40 GB.
_MOST_BYTES = 20 << 30
# Of what the weights leave. The rest is for what is not counted here: indices, what the allocator cannot use.
_SHARE = 0.4
_SCORED = MOST_TEXT + 1  # rows that are scored, and the one after
# Tensors as large as the float32 scores that are alive at once: both models', their logarithms, what divides them.
_SCORES = 8


def prompts_at_once(model: PreTrainedModel, length: int) -> int:
    """Prompts of `length` tokens that run together, a power of two; one on a CPU, where one keeps all cores busy."""
    if model.device.type != "cuda":
        return 1
    total: int = torch.cuda.get_device_properties(model.device).total_memory
    here = (weight for weight in model.parameters() if weight.device == model.device)  # others may be elsewhere
    left = total - sum(weight.numel() * weight.element_size() for weight in here)
    fitting = min(int(_SHARE * left), _MOST_BYTES) // (length * bytes_per_token(model) + bytes_to_score(model))
    return 1 << (max(1, min(_MOST, fitting)).bit_length() - 1)


def bytes_per_token(model: PreTrainedModel) -> int:
    """Keys and values of all layers, and beside them the larger of a copy, as another text is fed, and what the widest
    layer holds while an unmodified model computes it."""
    config: Any = model.config
    cached = sum(2 * len(group.layers) * group.kv_heads * group.head_dim for group in attention_groups(config))
    # Two hidden states, queries, the output of attention; then the MLP: what is gated, its gate, their product.
    held = 2 * config.hidden_size + 2 * config.num_attention_heads * attention_groups(config)[0].head_dim
    widest: int = held + 3 * config.intermediate_size
    return (cached + max(cached, widest)) * torch.empty((), dtype=model.dtype).element_size()


def bytes_to_score(model: PreTrainedModel) -> int:
    """The scores of the vocabulary for the tokens of one answer, as often as evaluation holds them."""
    config: Any = model.config
    vocabulary: int = config.vocab_size
    return _SCORES * 4 * _SCORED * vocabulary
