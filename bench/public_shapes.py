"""The config of a model by its name, or its public shape where not even the config can be had.

Public shapes are facts from the models' own cards and configs, rope bases included: no time or memory depends on those.
"""

from __future__ import annotations

from typing import Any

from transformers import AutoConfig

from sparsekv.plans.aliases import ALIASES, ModelSource, resolve_model
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.architecture import architecture_of
from sparsekv.runtime.hf.load import load_config

_SIZES = (
    *("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("vocab_size", "max_position_embeddings"),
)


def _shape(model_type: str, rope_theta: float, *sizes: int) -> dict[str, Any]:
    """Returns what a config says that time and memory depend on, as transformers names it."""
    return dict(zip(_SIZES, sizes, strict=True)) | {
        "model_type": model_type,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "default", "rope_theta": rope_theta},
        "tie_word_embeddings": False,
        "bos_token_id": 0,
        "eos_token_id": None,
        "pad_token_id": None,
    }


def _llama(context: int, rope_theta: float) -> dict[str, Any]:
    return _shape("llama", rope_theta, 32, 4096, 14336, 32, 8, 128256, context)


def _qwen2(context: int, rope_theta: float) -> dict[str, Any]:
    return _shape("qwen2", rope_theta, 28, 3584, 18944, 28, 4, 152064, context)


def _gemma3(head_dim: int, query_scalar: int, *sizes: int) -> dict[str, Any]:
    return _shape("gemma3_text", 1e6, *sizes) | {
        "head_dim": head_dim,
        "sliding_window": 1024,
        "query_pre_attn_scalar": query_scalar,
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
    }


def _gemma4(window: int, *sizes: int, **own: Any) -> dict[str, Any]:
    return _shape("gemma4_text", 1e6, *sizes) | {
        "head_dim": 256,
        "global_head_dim": 512,
        "sliding_window": window,
        "final_logit_softcapping": 30.0,
        "rope_parameters": {
            "full_attention": {"rope_type": "proportional", "rope_theta": 1e6, "partial_rotary_factor": 0.25},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        },
        "tie_word_embeddings": True,
        "pad_token_id": 0,
        **own,
    }


_GEMMA4_31B = _gemma4(
    *(1024, 60, 5376, 21504, 32, 16, 262144, 262144),
    **{"num_global_key_value_heads": 4, "attention_k_eq_v": True, "hidden_size_per_layer_input": 0},
)
_GEMMA4_E4B = _gemma4(*(512, 42, 2560, 10240, 8, 2, 262144, 131072), num_kv_shared_layers=18)
_LLAMA_70B = _shape("llama", 5e5, 80, 8192, 28672, 64, 8, 128256, 131072)
_OLMO3_32B = _shape("olmo3", 5e5, 64, 5120, 27648, 40, 8, 100278, 65536) | {
    "sliding_window": 4096,
    "rope_parameters": {
        "full_attention": {
            "rope_type": "yarn",
            "rope_theta": 5e5,
            "factor": 8.0,
            "original_max_position_embeddings": 8192,
        },
        "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
    },
}
_GLM4_5_AIR = _shape("glm4_moe", 1e6, 46, 4096, 10944, 96, 8, 151552, 131072) | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
    "moe_intermediate_size": 1408,
    "n_routed_experts": 128,
    "attention_bias": True,
}
_MINIMAX_M2 = _shape("minimax_m2", 5e6, 62, 3072, 1536, 48, 8, 200064, 196608) | {
    "rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5},
    "num_local_experts": 256,
    "num_experts_per_tok": 8,
}


def _qwen3_moe(rope_theta: float, expert: int, *sizes: int) -> dict[str, Any]:
    """A Qwen3 with 128 experts of this size."""
    return _shape("qwen3_moe", rope_theta, *sizes) | {
        "moe_intermediate_size": expert,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "norm_topk_prob": True,
    }


_QWEN3_5_27B = _shape("qwen3_5_text", 1e7, 64, 5120, 17408, 24, 4, 248320, 262144) | {
    "head_dim": 256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25},
    "linear_num_value_heads": 48,
}
_GPT_OSS_20B = _shape("gpt_oss", 150000.0, 24, 2880, 2880, 64, 8, 201088, 131072) | {
    "head_dim": 64,
    "sliding_window": 128,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
}
_FULL, _LOCAL = "full_attention", "sliding_attention"
_LAGUNA_XS = {
    "model_type": "laguna",
    "max_position_embeddings": 262144,
    "layer_types": [_FULL, *[_LOCAL] * 3] * 10,
    "num_attention_heads_per_layer": [48, *[64] * 3] * 10,
}
_NEMOTRON3_NANO = {
    "model_type": "nemotron_h",
    "hybrid_override_pattern": "MEMEM*E" * 5 + "MEMEMEM*E" + "MEMEMEME",
    "hidden_size": 2688,
    "num_key_value_heads": 2,
    "max_position_embeddings": 262144,
    "mamba_num_heads": 64,
    "n_routed_experts": 128,
    "num_experts_per_tok": 6,
    "intermediate_size": 1856,
    "moe_intermediate_size": 1856,
    "moe_shared_expert_intermediate_size": 3712,
}

# By alias, see plans/data/aliases.toml. The sizes that a config of transformers has by default are those of its first
# checkpoint.
PUBLIC_SHAPES: dict[str, dict[str, Any]] = {
    "llama3-8b": _llama(8192, 5e5),
    "llama3-8b-262k": _llama(262144, 283461213.0),
    "llama3-8b-1m": _llama(1048576, 3580165449.0),
    "llama3.1-8b": _llama(131072, 5e5),
    "llama3.1-70b": _LLAMA_70B,
    "llama3.3-70b": _LLAMA_70B,
    "yi-9b-200k": _shape("llama", 1e7, 48, 4096, 11008, 32, 4, 64000, 262144),
    "mistral-7b": _shape("mistral", 1e6, 32, 4096, 14336, 32, 8, 32768, 32768),
    "qwen2-7b": _qwen2(32768, 1e6),
    "qwen2.5-7b": _qwen2(32768, 1e6),
    "qwen2.5-7b-1m": _qwen2(1010000, 1e7),
    "qwen2.5-14b-1m": _shape("qwen2", 1e7, 48, 5120, 13824, 40, 8, 152064, 1010000),
    "qwen3-8b": _shape("qwen3", 1e6, 36, 4096, 12288, 32, 8, 151936, 40960),
    "qwen3-14b": _shape("qwen3", 1e6, 40, 5120, 17408, 40, 8, 151936, 40960),
    "qwen3-30b-a3b": _qwen3_moe(1e6, 768, 48, 2048, 6144, 32, 4, 151936, 40960),
    "qwen3-30b-a3b-2507": _qwen3_moe(1e7, 768, 48, 2048, 6144, 32, 4, 151936, 262144),
    "qwen3-235b-a22b-2507": _qwen3_moe(5e6, 1536, 94, 4096, 12288, 64, 4, 151936, 262144),
    "qwen3.5-27b": _QWEN3_5_27B,
    "gemma3-12b": _gemma3(256, 256, 48, 3840, 15360, 16, 8, 262208, 131072),
    "gemma3-27b": _gemma3(128, 168, 62, 5376, 21504, 32, 16, 262208, 131072),
    "gemma4-31b": _GEMMA4_31B,
    "gemma4-e4b": _GEMMA4_E4B,
    "olmo3-32b": _OLMO3_32B,
    "glm4.5-air": _GLM4_5_AIR,
    "minimax-m2": _MINIMAX_M2,
    "gpt-oss-20b": _GPT_OSS_20B,
    "hy3": {"model_type": "hy_v3"},
    "jais2-8b": {"model_type": "jais2"},
    "laguna-xs": _LAGUNA_XS,
    "mellum2-12b": {"model_type": "mellum", "layer_types": [*[_LOCAL] * 3, _FULL] * 7},
    "nemotron3-nano-30b": _NEMOTRON3_NANO,
    "phi3.5-moe": {"model_type": "phimoe"},
}


def config_of(name: str, source: ModelSource | None = None) -> tuple[Any, list[str]]:
    """The config of a model, or one of its shape where it cannot be had; and what there is to say about that.

    Args:
        source: what the name stands for, where it was looked for.
    """
    source = source or resolve_model(name)
    try:
        return load_config(source), []
    except UsageError as error:
        alias = next((alias for alias, model in ALIASES.items() if name.lower() in (alias, model.lower())), "")
        if alias not in PUBLIC_SHAPES:
            error.add_note(f"Shapes known without a config: {', '.join(PUBLIC_SHAPES)}")
            raise
    architecture_of(PUBLIC_SHAPES[alias]["model_type"])
    return AutoConfig.for_model(**PUBLIC_SHAPES[alias]), ["its shape is from a table: no config to be had"]
