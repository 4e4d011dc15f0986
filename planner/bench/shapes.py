"""Shapes of public models, for benchmarks with random weights where not even their config can be had.

Facts from the models' own cards and configs. Rope bases are among them, though no time depends on them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class PublicShape:
    """What a config says that time and memory depend on."""

    model_type: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    vocabulary: int
    rope_theta: float
    context: int
    head_dim: int = 128

    def config(self) -> dict[str, Any]:
        """As transformers names it."""
        return {
            "num_hidden_layers": self.layers,
            "hidden_size": self.hidden,
            "intermediate_size": self.ffn,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": self.vocabulary,
            "max_position_embeddings": self.context,
            "rope_parameters": {"rope_type": "default", "rope_theta": self.rope_theta},
            "tie_word_embeddings": False,
            "bos_token_id": 0,
            "eos_token_id": None,
            "pad_token_id": None,
        }


def _llama(context: int, rope_theta: float) -> PublicShape:
    return PublicShape("llama", 32, 4096, 14336, 32, 8, 128256, rope_theta, context)


def _qwen2(context: int, rope_theta: float) -> PublicShape:
    return PublicShape("qwen2", 28, 3584, 18944, 28, 4, 152064, rope_theta, context)


# By alias, see plans/aliases.py.
PUBLIC_SHAPES: dict[str, PublicShape] = {
    "llama3-8b": _llama(8192, 5e5),
    "llama3-8b-262k": _llama(262144, 283461213.0),
    "llama3-8b-1m": _llama(1048576, 3580165449.0),
    "llama3.1-8b": _llama(131072, 5e5),
    "llama3.1-70b": PublicShape("llama", 80, 8192, 28672, 64, 8, 128256, 5e5, 131072),
    "yi-9b-200k": PublicShape("llama", 48, 4096, 11008, 32, 4, 64000, 1e7, 262144),
    "mistral-7b": PublicShape("mistral", 32, 4096, 14336, 32, 8, 32768, 1e6, 32768),
    "qwen2-7b": _qwen2(32768, 1e6),
    "qwen2.5-7b": _qwen2(32768, 1e6),
    "qwen2.5-7b-1m": _qwen2(1010000, 1e7),
    "qwen2.5-14b-1m": PublicShape("qwen2", 48, 5120, 13824, 40, 8, 152064, 1e7, 1010000),
    "qwen3-8b": PublicShape("qwen3", 36, 4096, 12288, 32, 8, 151936, 1e6, 40960),
    "qwen3-14b": PublicShape("qwen3", 40, 5120, 17408, 40, 8, 151936, 1e6, 40960),
}
