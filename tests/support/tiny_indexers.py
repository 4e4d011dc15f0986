"""Tiny models with an indexer in every layer, in which groups of layers choose the same tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from tiny_models import VOCABULARY
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

KINDS = ("deepseek_v32", "glm_moe_dsa")
TOPK = 16
PLANTED = "FSSFFS"
_SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 32,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_shared_experts": 1,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": TOPK,
    "index_head_dim": 16,
    "index_n_heads": 16,  # of few, all may score 0, and equal scores are chosen from by chance
    "first_k_dense_replace": 1,
    "max_position_embeddings": 2048,
    "bos_token_id": None,
    "eos_token_id": None,
}


@torch.no_grad()
def planted_model(kind: str, pattern: str = PLANTED, **options: Any) -> PreTrainedModel:
    """Layers from an F up to the next choose alike, and layers of two such groups by chance: indexers read one half of
    the hidden states, which is the tokens' embedding, and layers write the other half."""
    config = AutoConfig.for_model(kind, num_hidden_layers=len(pattern), **_SIZES | options)
    random = torch.Generator().manual_seed(0)
    model: Any = AutoModelForCausalLM.from_config(config).eval()
    half = config.hidden_size // 2
    for weight in model.parameters():
        if weight.dim() > 1:
            weight.normal_(0, weight.shape[-1] ** -0.5, generator=random)
    model.model.embed_tokens.weight.normal_(generator=random)[:, half:] = 0
    for layer, first in enumerate(_firsts(pattern)):
        attention, source = (model.model.layers[number].self_attn for number in (layer, first))
        for reads in (attention.indexer.wk, attention.indexer.weights_proj, attention.q_a_proj):
            reads.weight[:, half:] = 0
        attention.indexer.load_state_dict(source.indexer.state_dict())
        attention.q_a_proj.load_state_dict(source.q_a_proj.state_dict())
        for name, weight in model.model.layers[layer].named_parameters():
            if "o_proj" in name or "down_proj" in name:
                weight[..., :half, :] = 0
    return model


def _firsts(pattern: str) -> Sequence[int]:
    return [pattern.rindex("F", 0, layer + 1) for layer in range(len(pattern))]
