"""Says what a model type is, one record each: where a decoder layer of transformers has its parts. The loader,
descriptions, long inputs and memory estimates read it, and so does vLLM. A new architecture is a record here and a row
of tests/support/tiny_models.py.

Every one of them calls its attention through `AttentionInterface`, and its decoder has `layers` and `norm`, which it
calls one after the other. What its softmax has besides scores (a soft cap, sinks) it hands to that interface.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sparsekv.plans.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names of attributes.

    Attributes:
        model_type: of the config.
        package: of transformers.models, that has its classes; the model type where empty.
        attention: of a layer.
        mlp: of a layer; may be a mixture of experts.
        norms: of a layer, before its attention and before its MLP; empty where it has none there.
        norms_after: of a layer, of what its attention and its MLP add to the hidden states.
        output: of an attention, its last projection.
        residual: of a layer, the number by which it multiplies what it adds.
        idle: of a layer, modules that do nothing in evaluation.
        experts: of a config, the width of an expert; empty where the MLP is dense.
        gated: whether the output of an attention is more than a projection of what it attends to; its layers are then
            called whole, also of long inputs.
    """

    model_type: str
    package: str = ""
    attention: str = "self_attn"
    mlp: str = "mlp"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    norms_after: tuple[str, str] = ("", "")
    output: str = "o_proj"
    residual: str = ""
    idle: tuple[str, ...] = ()
    experts: str = ""
    gated: bool = False

    @property
    def home(self) -> str:
        """The module of transformers with its classes."""
        package = self.package or self.model_type
        return f"transformers.models.{package}.modeling_{package}"

    def width_of(self, config: Any) -> int:
        """A third of the numbers that an MLP of a model with this config has of each token: gate, up and product. Each
        expert that a token goes to has them too, and beside them four hidden states: copied, projected, weighted and
        in order."""
        dense = int(getattr(config, "intermediate_size", 0))  # some have nothing but experts
        if not self.experts:
            return dense
        expert = getattr(config, self.experts) + -(-4 * config.hidden_size // 3)
        shared = getattr(config, "shared_expert_intermediate_size", 0)
        return max(dense, int(config.num_experts_per_tok * expert + shared))

    def has_parts(self, layer: Any) -> bool:
        """Returns whether a layer has the parts that are named here, and no others."""
        parts = {self.attention, self.mlp, *self.norms, *self.norms_after, *self.idle} - {""}
        if self.gated:
            return False
        return dict(layer.named_children()).keys() == parts and hasattr(getattr(layer, self.attention), self.output)


_BEFORE = ("input_layernorm", "pre_feedforward_layernorm")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")

ARCHITECTURES = {
    record.model_type: record
    for record in (
        Architecture("ernie4_5"),
        Architecture("gemma2", norms=_BEFORE, norms_after=_AFTER),
        Architecture("gemma3_text", package="gemma3", norms=_BEFORE, norms_after=_AFTER),
        Architecture("glm"),
        Architecture("gpt_oss", experts="intermediate_size"),
        Architecture("granite", residual="residual_multiplier"),
        Architecture("granitemoe", mlp="block_sparse_moe", residual="residual_multiplier", experts="intermediate_size"),
        Architecture("llama"),
        Architecture("mistral"),
        Architecture("mixtral", experts="intermediate_size"),
        Architecture("olmo2", norms=("", ""), norms_after=_AFTER),
        Architecture("phi3", idle=("resid_attn_dropout", "resid_mlp_dropout")),
        Architecture("qwen2"),
        Architecture("qwen2_moe", experts="moe_intermediate_size"),
        Architecture("qwen3"),
        Architecture("qwen3_5_moe_text", package="qwen3_5_moe", experts="moe_intermediate_size", gated=True),
        Architecture("qwen3_5_text", package="qwen3_5", gated=True),
        Architecture("qwen3_moe", experts="moe_intermediate_size"),
        Architecture("qwen3_next", experts="moe_intermediate_size", gated=True),
        Architecture("seed_oss"),
        Architecture("smollm3"),
    )
}


# Of checkpoints for images, the decoder inside, which the loader takes alone.
TEXT_DECODERS = {"gemma3": "gemma3_text", "qwen3_5": "qwen3_5_text", "qwen3_5_moe": "qwen3_5_moe_text"}
_IMAGES = "tokens of an image attend in both directions, or have positions of their own, and its decoder is inside"
_REFUSED = {  # families that are often asked for, and why not yet
    "llama4": "its layers attend within chunks of tokens, for which kernels have no mask",
    **dict.fromkeys(("mistral3", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe"), _IMAGES),
    **dict.fromkeys(TEXT_DECODERS, f"{_IMAGES}; load_model takes that decoder alone"),
}


def architecture_of(model_type: str) -> Architecture:
    """The record of a model type.

    Raises:
        UnsupportedError: this version cannot run it; the message names those it can.
    """
    if model_type not in ARCHITECTURES:
        why = f" ({_REFUSED[model_type]})" if model_type in _REFUSED else ""
        raise UnsupportedError(
            f"expected one of the supported architectures ({', '.join(ARCHITECTURES)}), found {model_type!r}{why}; "
            f"choose a model of a supported architecture"
        )
    return ARCHITECTURES[model_type]
