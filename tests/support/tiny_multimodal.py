"""Small random multimodal models: a decoder of text behind a vision tower of one layer."""

from __future__ import annotations

from typing import Any

import torch
from tiny_models import tiny_model
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedConfig, PreTrainedModel

_PATCHES = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2, "patch_size": 4}
_QWEN = _PATCHES | {"out_hidden_size": 64, "num_position_embeddings": 16, "deepstack_visual_indexes": [0]}
_TOWER = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
_TOWER |= {"image_size": 28, "patch_size": 14, "head_dim": 16}
_GEMMA4 = _TOWER | {"num_key_value_heads": 2, "position_embedding_size": 64}
_SHARED = {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1, "use_bidirectional_attention": "vision"}
_AXES = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [8, 4, 4], "mrope_interleaved": True}
_IMAGE = {"image_token_id": 120}
_IDS = {"image_token_id": 120, "video_token_id": 121, "vision_start_token_id": 122, "vision_end_token_id": 123}

KINDS: dict[
    str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]
] = {  # of a multimodal model: the model type of the decoder inside, what is special to it, and the tower
    # transformers scales logits in the decoder's own class alone: answers are the same, probabilities are not
    "cohere2_vision": ("cohere2_moe", {"logit_scale": 1.0}, _TOWER | {"model_type": "siglip_vision_model"}, _IMAGE),
    "gemma3": ("gemma3_text", {}, _TOWER, {"image_token_id": 120, "mm_tokens_per_image": 4}),
    "gemma4": (
        "gemma4_text",
        _SHARED,
        _GEMMA4,
        {"image_token_id": 120, "video_token_id": 121, "audio_token_id": 122},
    ),
    "mistral3": ("ministral3", {}, _TOWER | {"model_type": "pixtral"}, {"image_token_index": 120}),
    "qwen3_5": ("qwen3_5_text", {}, _QWEN, _IDS),
    "qwen3_5_moe": ("qwen3_5_moe_text", {}, _QWEN, _IDS),
    "qwen3_vl": ("qwen3_vl_text", {"rope_parameters": _AXES}, _QWEN, _IDS),
}


def multimodal_config(kind: str, **options: Any) -> PreTrainedConfig:
    """The config of a small model of this kind; options are of its decoder."""
    decoder, own, tower, ids = KINDS[kind]
    text = tiny_model("qwen3" if decoder == "qwen3_vl_text" else decoder, **options).config.to_dict()
    text |= {"model_type": decoder} | own
    return AutoConfig.for_model(kind, text_config=text, vision_config=dict(tower), tie_word_embeddings=False, **ids)


def multimodal_model(kind: str = "", config: PreTrainedConfig | None = None) -> PreTrainedModel:
    """A random model in evaluation mode."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForImageTextToText.from_config(config or multimodal_config(kind)).eval()
