"""How many prompts of a length are run at once: as many as device memory surely holds."""

from __future__ import annotations

from typing import Any

import torch
from transformers import PreTrainedModel

from sparsekv.runtime.describe import attention_groups

# A step of decoding takes the host as long for one prompt as for many; beyond this, little is left to gain.
_MOST = 64
# The rest is for what is not counted here: indices, logits, what the allocator cannot use.
_SHARE_OF_FREE = 0.4


def prompts_at_once(model: PreTrainedModel, length: int) -> int:
    """Prompts of `length` tokens that run together; one on a CPU, where a single one keeps all cores busy."""
    if model.device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(model.device)
    free += torch.cuda.memory_reserved(model.device) - torch.cuda.memory_allocated(model.device)
    return max(1, min(_MOST, int(_SHARE_OF_FREE * free) // (length * bytes_per_token(model))))


def bytes_per_token(model: PreTrainedModel) -> int:
    """Keys and values of all layers, and what the widest layer holds while an unmodified model computes it."""
    config: Any = model.config
    cached = sum(2 * len(group.layers) * group.kv_heads * group.head_dim for group in attention_groups(config))
    # Two hidden states, queries, the output of attention; then the MLP: what is gated, its gate, their product.
    held = 2 * config.hidden_size + 2 * config.num_attention_heads * attention_groups(config)[0].head_dim
    widest: int = held + 3 * config.intermediate_size
    return (cached + widest) * torch.empty((), dtype=model.dtype).element_size()
