"""Small random models of every supported architecture, and a tokenizer of single characters."""

from __future__ import annotations

import string
from typing import Any, cast

import pytest
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from sparsekv.runtime.hf.describe import CACHE_NAME

# Of the whole matrix in every run.
USUAL = (
    *("ernie4_5", "gemma2", "gemma3_text", "glm", "gpt_oss", "granite", "granitemoe", "llama", "mistral", "mixtral"),
    *("olmo2", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "seed_oss", "smollm3"),
)
# Of one test of everything in every run, and of the whole matrix in a slow one.
MORE = (
    *("afmoe", "apertus", "arcee", "cohere", "cohere2", "cohere2_moe", "cwm", "dots1", "ernie4_5_moe", "exaone4"),
    *("exaone_moe", "flex_olmo", "gemma", "gemma4_text", "glm4", "glm4_moe", "granite_swa", "granitemoe_swa"),
    *("granitemoeshared", "helium", "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "jais2", "laguna", "mellum"),
    *("minimax_m2", "ministral", "ministral3", "nemotron", "olmo", "olmo3", "olmoe", "phi", "phimoe", "solar_open"),
    *("stablelm", "starcoder2", "vaultgemma"),
)
ARCHITECTURES = (*USUAL, *(pytest.param(name, marks=pytest.mark.slow) for name in MORE))
_FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 4, "num_local_experts": 4}
_SHARED = _FEW_EXPERTS | {"shared_expert_intermediate_size": 40}
_GROUPS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "n_routed_experts": 4, "n_shared_experts": 1}
_GROUPS |= {"n_group": 2, "topk_group": 1}
_GRANITE = {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0}
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_chunk_size": 32, "mamba_expand": 2}
_GEMMA4 = {"global_head_dim": 64, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 128}
_GEMMA4 |= {"final_logit_softcapping": 5.0}
SHARED = "gemma4_text, shared keys"  # whose last layers attend to keys and values of earlier ones
_OWN: dict[str, dict[str, Any]] = {  # what is special to a family, so that leaving it out shows
    "afmoe": _FEW_EXPERTS | {"num_dense_layers": 1, "num_shared_experts": 1, "mup_enabled": True},
    "bamba": _MAMBA,
    "cohere": {"logit_scale": 0.5},
    "cohere2": {"logit_scale": 0.5},
    "cohere2_moe": _FEW_EXPERTS
    | {"first_k_dense_replace": 1, "num_shared_experts": 1, "prefix_dense_intermediate_size": 112},
    "cwm": {"bos_token_id": 1, "eos_token_id": []},
    "dots1": _GROUPS | {"first_k_dense_replace": 1},
    "ernie4_5_moe": {"moe_k": 2, "moe_intermediate_size": 48, "moe_num_experts": 4, "moe_num_shared_experts": 1},
    "exaone_moe": _FEW_EXPERTS | {"num_shared_experts": 1, "n_group": 2, "topk_group": 1},
    "flex_olmo": _FEW_EXPERTS,
    "gemma2": {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "attn_implementation": "eager"},
    "gemma3_text": {"sliding_window_pattern": 1, "query_pre_attn_scalar": 20},
    "gemma4_text": _GEMMA4 | {"attention_k_eq_v": True, "num_global_key_value_heads": 1},
    SHARED: _GEMMA4 | {"hidden_size_per_layer_input": 8, "num_kv_shared_layers": 1},
    "glm4_moe": _GROUPS | {"first_k_dense_replace": 1, "use_qk_norm": True},
    "gpt_oss": _FEW_EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granite": _GRANITE,
    "granite_swa": _GRANITE | {"attn_implementation": "eager"},
    "granitemoe": _FEW_EXPERTS | _GRANITE,
    "granitemoehybrid": _FEW_EXPERTS | _GRANITE | _MAMBA | {"shared_intermediate_size": 40},
    "granitemoeshared": _FEW_EXPERTS | _GRANITE | {"shared_intermediate_size": 40},
    "granitemoe_swa": _FEW_EXPERTS | _GRANITE | {"shared_intermediate_size": 40, "attn_implementation": "eager"},
    "hunyuan_v1_moe": {"num_experts": 4, "moe_topk": 2},
    "hy_v3": _FEW_EXPERTS,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 4, "mamba_dt_rank": 4},
    "laguna": _SHARED | {"moe_routed_scaling_factor": 2.0},
    "lfm2": {"block_auto_adjust_ff_dim": False},
    "lfm2_moe": _FEW_EXPERTS | {"num_dense_layers": 1},
    "mellum": _FEW_EXPERTS,
    "minimax_m2": _FEW_EXPERTS,
    "ministral3": {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 1e4,
            "llama_4_scaling_beta": 0.5,
            "original_max_position_embeddings": 16,
        }
    },
    "mistral": {"sliding_window": None},
    "mixtral": _FEW_EXPERTS,
    "nemotron_h": _GROUPS
    | {"mamba_num_heads": 4, "mamba_head_dim": 32, "ssm_state_size": 16, "chunk_size": 32, "n_groups": 2}
    | {"moe_shared_expert_intermediate_size": 40},
    "olmo": {"clip_qkv": 2.0},
    "olmoe": _FEW_EXPERTS,
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "phimoe": _FEW_EXPERTS,
    "qwen2_moe": _SHARED,
    "qwen3_moe": _FEW_EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_5_moe_text": _SHARED,
    "qwen3_next": _SHARED,
    "smollm3": {"no_rope_layer_interval": 2},
    "solar_open": _GROUPS,
    "vaultgemma": {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "attn_implementation": "eager"},
}
WINDOWED = (  # whose layers have a window of their own where nothing else is said
    *("afmoe", "cohere2", "cohere2_moe", "cwm", "dots1", "exaone4", "exaone_moe", "gemma2", "gemma4_text", "gpt_oss"),
    *("granite_swa", "granitemoe_swa", "laguna", "mellum", "ministral", "olmo3", "vaultgemma", SHARED),
)
_SQUARE = ("helium", "olmoe", "stablelm")  # whose heads are together as wide as a hidden state
# One of each kind, for what does not depend on the numbers of a family.
TYPICAL = ("glm", "gpt_oss", "gemma3_text", "granitemoe", "llama", "olmo2", "phi3", "qwen3")
DELTA_RULE = ("qwen3_5_moe_text", "qwen3_5_text", "qwen3_next")
HYBRIDS = (*DELTA_RULE, "bamba", "granitemoehybrid", "jamba", "lfm2", "lfm2_moe", "nemotron_h")
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
END = len(CHARACTERS)
VOCABULARY = 128


def heads_of(architecture: str) -> tuple[int, int, int]:
    """Query heads, KV heads and head size of a tiny model whose layers are all full."""
    return (4, 1, 64) if architecture == "gemma4_text" else (4, 2, 32)


def tiny_model(
    architecture: str = "llama",
    *,
    layers: int = 3,
    heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 32,
    hidden: int = 64,
    ffn: int = 96,
    context: int = 4096,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    **options: Any,
) -> PreTrainedModel:
    """A random model in evaluation mode. Weights are large enough that its logits are well apart."""
    if architecture in HYBRIDS:
        options = _with_states(architecture, options)
    if architecture in DELTA_RULE:
        options = _LINEAR | options
    if architecture in WINDOWED:
        options.setdefault("layer_types", ["full_attention"] * layers)
    if architecture in _SQUARE:
        hidden = heads * head_dim
    usual = {
        "vocab_size": VOCABULARY,
        "hidden_size": hidden,
        "intermediate_size": ffn,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": head_dim,
        "max_position_embeddings": context,
        "initializer_range": 0.2,
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": None,
    }
    config = AutoConfig.for_model(architecture.partition(",")[0], **usual | _OWN.get(architecture, {}) | options)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config)
        for name, value in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(value, std=2.0)
            if name.endswith("router.gate.weight"):  # AFMoE's is zero: all experts alike
                torch.nn.init.normal_(value, std=0.2)
        return model.to(dtype).eval()


def _with_states(architecture: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options of a hybrid, with `layer_types` as its family says them; Jamba has every second layer attend."""
    kinds = options.pop("layer_types", ["linear_attention", "full_attention", "full_attention"])
    if architecture == "bamba":
        return options | {"attn_layer_indices": [at for at, kind in enumerate(kinds) if kind == "full_attention"]}
    if architecture.startswith("lfm2"):
        kinds = ["conv" if kind == "linear_attention" else kind for kind in kinds]
    return options if architecture == "jamba" else options | {"layer_types": kinds}


def steady_model(architecture: str) -> PreTrainedModel:
    """A model whose logits rounding moves little: in bfloat16, mixtures in float32 and with a single expert."""
    if architecture in ("gpt_oss", "granitemoe"):
        return tiny_model(architecture, head_dim=64, num_local_experts=1, num_experts_per_tok=1)
    return tiny_model(architecture, head_dim=64, dtype=torch.bfloat16)


def tiny_tokenizer() -> PreTrainedTokenizerFast:
    """One token a character, for printable ASCII."""
    vocabulary = {character: number for number, character in enumerate(CHARACTERS)} | {"</s>": END, "<unk>": END + 1}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("[\\s\\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>", unk_token="<unk>")


def random_tokens(batch: int, length: int, seed: int = 0) -> torch.Tensor:
    """Token ids [batch, length]; none is the padding token."""
    return torch.randint(1, VOCABULARY, (batch, length), generator=torch.Generator().manual_seed(seed))


def steps(
    model: PreTrainedModel, prompt: torch.Tensor, new: torch.Tensor, cache: Any = None
) -> tuple[torch.Tensor, Any]:
    """Logits of the last token of a prompt and of each token after it, one forward pass each; and the cache."""
    seen, runs_model = [], cast(Any, model)
    with torch.no_grad():
        for piece in (prompt, *(new.split(1, 1) if new.numel() else ())):
            out = runs_model(piece, logits_to_keep=1, **{CACHE_NAME: cache})
            cache = out[CACHE_NAME]
            seen.append(out.logits)
    return torch.cat(seen, 1), cache
