"""GGUF files of small llamas, as llama.cpp's converter writes them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import torch
from tiny_models import VOCABULARY
from transformers import PreTrainedModel

_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
_WHOLE = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(
    model: PreTrainedModel,
    path: Path,
    *,
    quantisation: gguf.GGMLQuantizationType = gguf.GGMLQuantizationType.F32,
    architecture: str = "llama",
    extra: dict[str, torch.Tensor] | None = None,
) -> Path:
    """A llama with a tokenizer of bytes, at `path`; matrices are quantised, and `extra` tensors added."""
    writer = gguf.GGUFWriter(path, architecture)
    _write_config(writer, model.config)
    _write_tokenizer(writer)
    for name, tensor in model.state_dict().items():
        data = _rotated_as_llama_cpp(name, tensor, model.config).float().numpy()
        kind = quantisation if data.ndim == 2 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(_named(name), gguf.quantize(data, kind), raw_dtype=kind)
    for name, tensor in (extra or {}).items():
        writer.add_tensor(name, tensor.float().numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _write_config(writer: gguf.GGUFWriter, config: Any) -> None:
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)


def _write_tokenizer(writer: gguf.GGUFWriter) -> None:
    visible = [chr(byte) if 33 <= byte <= 126 else chr(256 + byte) for byte in range(VOCABULARY - 4)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list([*visible, "ab", "abc", "<unk>", "</s>"])
    writer.add_token_types([1] * (VOCABULARY - 2) + [3, 3])
    writer.add_token_merges(["a b", "ab c"])
    writer.add_eos_token_id(VOCABULARY - 1)
    writer.add_bos_token_id(VOCABULARY - 1)
    writer.add_unk_token_id(VOCABULARY - 2)


def _named(name: str) -> str:
    stem, _, kind = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{kind}"
    layer, _, part = stem.removeprefix("model.layers.").partition(".")
    return f"blk.{layer}.{_PARTS[part]}.{kind}"


def _rotated_as_llama_cpp(name: str, tensor: torch.Tensor, config: Any) -> torch.Tensor:
    """Rows of queries and keys in the order of ggml: the two halves of a head interleaved."""
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}.get(name.split(".")[-2])
    if heads is None:
        return tensor
    return tensor.unflatten(0, (heads, 2, -1)).transpose(1, 2).flatten(0, 2)
