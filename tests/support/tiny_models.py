"""Small random models of every supported architecture, and a tokenizer of single characters."""

from __future__ import annotations

import string
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    Ernie4_5Config,
    Ernie4_5ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GlmConfig,
    GlmForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    GraniteMoeConfig,
    GraniteMoeForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen2MoeConfig,
    Qwen2MoeForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SeedOssConfig,
    SeedOssForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
)

from sparsekv.runtime.hf.cache import CACHE_NAME

ARCHITECTURES = {
    "ernie4_5": (Ernie4_5Config, Ernie4_5ForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3_text": (Gemma3TextConfig, Gemma3ForCausalLM),
    "glm": (GlmConfig, GlmForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "granitemoe": (GraniteMoeConfig, GraniteMoeForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen2_moe": (Qwen2MoeConfig, Qwen2MoeForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "seed_oss": (SeedOssConfig, SeedOssForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
_FEW_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_experts": 4, "num_local_experts": 4}
_OWN: dict[str, dict[str, Any]] = {  # what is special to a family, so that leaving it out shows
    "gemma2": {"query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0, "attn_implementation": "eager"},
    "gemma3_text": {"sliding_window_pattern": 1, "query_pre_attn_scalar": 20},
    "gpt_oss": _FEW_EXPERTS | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0},
    "granitemoe": _FEW_EXPERTS | {"attention_multiplier": 0.2, "residual_multiplier": 0.7, "embedding_multiplier": 3.0},
    "mistral": {"sliding_window": None},
    "mixtral": _FEW_EXPERTS,
    "phi3": {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
    "qwen2_moe": _FEW_EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_moe": _FEW_EXPERTS | {"mlp_only_layers": [1]},
    "qwen3_5_moe_text": _FEW_EXPERTS | {"shared_expert_intermediate_size": 40},
    "qwen3_next": _FEW_EXPERTS | {"shared_expert_intermediate_size": 40},
    "smollm3": {"no_rope_layer_interval": 2},
}
# One of each kind, for what does not depend on the numbers of a family.
TYPICAL = ("glm", "gpt_oss", "gemma3_text", "granitemoe", "llama", "olmo2", "phi3", "qwen3")
HYBRIDS = {
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
}
_LINEAR = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
CHARACTERS = string.ascii_letters + string.digits + string.punctuation + " \n"
END = len(CHARACTERS)
VOCABULARY = 128


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
    config_class, model_class = (ARCHITECTURES | HYBRIDS)[architecture]
    if architecture in HYBRIDS:
        options = _LINEAR | {"layer_types": ["linear_attention", "full_attention", "full_attention"]} | options
    if architecture in ("gemma2", "gpt_oss"):
        options.setdefault("layer_types", ["full_attention"] * layers)
    config = config_class(
        vocab_size=VOCABULARY,
        hidden_size=hidden,
        intermediate_size=ffn,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        max_position_embeddings=context,
        initializer_range=0.2,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=None,
        **_OWN.get(architecture, {}) | options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = model_class(config)
        for name, value in model.named_parameters():
            if name.endswith("sinks"):
                torch.nn.init.normal_(value, std=2.0)
        return model.to(dtype).eval()


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
