"""Small random models of every supported architecture, and a tokenizer of single characters."""

from __future__ import annotations

import string
from typing import Any, cast

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    GlmConfig,
    GlmForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    PreTrainedTokenizerFast,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ARCHITECTURES = {
    "glm": (GlmConfig, GlmForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
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
    config_class, model_class = ARCHITECTURES[architecture]
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
        **({"sliding_window": None} if architecture == "mistral" else {}) | options,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return model_class(config).to(dtype).eval()


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
            out = runs_model(piece, past_key_values=cache, logits_to_keep=1)
            cache = out.past_key_values
            seen.append(out.logits)
    return torch.cat(seen, 1), cache
