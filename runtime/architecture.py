"""The record of each model type: where a decoder layer of transformers has its parts. The loader, descriptions, long
inputs and memory estimates read it, and so does vLLM. A new architecture is a record here and a row of
tests/support/tiny_models.py.

Every one of them calls its attention through `AttentionInterface`, and its decoder has `layers` and a last norm, which
it calls one after the other. What its softmax has besides scores (a soft cap, sinks) it hands to that interface. Layers
with a recurrent state in place of keys and values may be of any make: they run as they are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.model import INDEXED
from sparsekv.plans.types import MAX_ID


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names of attributes.

    Attributes:
        norms: of a layer, before its attention and before its MLP; empty where it has none there.
        parallel: whether the MLP of a layer reads what its attention reads: the first norm of the layer's input.
        shared: of a config, the width of the MLP of every token beside experts, or how many experts it is as wide as.
        at_once: numbers that an MLP, or an expert, holds of each token, in its widths; 0 is what most have: gate, up
            and product, and of an expert its gate once more.
        whole: whether layers are called whole, also of long inputs: the output of attention is more than a projection
            of what it attends to, or a layer returns more than hidden states.
        needs_position_ids: whether a decoder numbers the tokens of every pass from 0, those behind a past too, where
            the call does not say their positions.
        one_piece: whether layers with a recurrent state begin every pass of several tokens without one, behind a past
            too.
        text_as: the model type that computes the same of text: tokens of this one have a position on each of three axes
            (M-RoPE), and those of text have the same on all.
    """

    model_type: str
    package: str = ""  # of transformers.models, that has its classes; the model type where empty
    attention: str = "self_attn"
    mlp: str = "mlp"  # of a layer; may be a mixture of experts
    beside: str = ""  # of a layer, an MLP whose output is added to that of the other one; it may have none
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    norms_after: tuple[str, str] = ("", "")  # of a layer, of what its attention and its MLP add to the hidden states
    parallel: bool = False
    last_norm: str = "norm"
    output: str = "o_proj"  # of an attention, its last projection
    residual: str = ""  # of a layer, the number by which it multiplies what it adds
    idle: tuple[str, ...] = ()  # of a layer, modules that do nothing in evaluation
    experts: str = ""  # of a config, the width of an expert; empty where the MLP is dense
    shared: str = ""
    at_once: int = 0
    whole: bool = False
    needs_position_ids: bool = False
    one_piece: bool = False
    text_as: str = ""

    @property
    def home(self) -> str:
        package = self.package or self.model_type
        return f"transformers.models.{package}.modeling_{package}"

    def width_of(self, config: Any) -> int:
        """A third of the numbers that an MLP of a model with this config has of each token. Each expert that a token
        goes to has them too, and beside them four hidden states: copied, projected, weighted and in order."""
        dense = int(getattr(config, "intermediate_size", 0))  # some have nothing but experts
        dense = max(dense, int(getattr(config, "prefix_dense_intermediate_size", 0)))  # of layers before those
        dense *= 2 if getattr(config, "use_double_wide_mlp", False) else 1  # of layers without keys of their own
        if not self.experts or getattr(config, self.experts) is None:
            return -(-(self.at_once or 3) * dense // 3)
        width = getattr(config, self.experts)
        expert = -(-((self.at_once or 4) * width + 4 * config.hidden_size) // 3)
        experts: int = experts_per_token(config) * expert + self._shared_width(config, width)
        return max(dense, experts)

    def _shared_width(self, config: Any, expert: int) -> int:
        shared = int(getattr(config, self.shared, None) or 0) if self.shared else 0
        return shared if self.shared.endswith("size") else shared * expert

    def runs_whole(self, config: Any) -> bool:
        """Returns whether layers of a model with this config are called whole; some families are so by an option."""
        return self.whole or bool(getattr(config, "use_parallel_residual", False))

    def has_parts(self, layer: Any) -> bool:
        parts = {self.attention, self.mlp, *self.norms, *self.norms_after, *self.idle} - {""}
        if self.whole:
            return False
        children = dict(layer.named_children()).keys() - {self.beside}
        return children == parts and hasattr(getattr(layer, self.attention), self.output)


def experts_per_token(config: Any) -> int:
    """Returns to how many experts a token goes, where layers differ in the one with the most; 0 without experts."""
    experts = getattr(config, "num_experts_per_tok", None) or getattr(config, "top_k_experts", None) or 0
    has_experts = getattr(config, "num_local_experts", None) != 0  # Granite 4 has a family with none
    return (max(experts) if isinstance(experts, list) else int(experts)) if has_experts else 0


_BEFORE = ("input_layernorm", "pre_feedforward_layernorm")
_AFTER = ("post_attention_layernorm", "post_feedforward_layernorm")
_ONE = ("input_layernorm", "")
_GRANITE = "residual_multiplier"
_MOE = "moe_intermediate_size"

ARCHITECTURES = {
    record.model_type: record
    for record in (
        Architecture(
            "afmoe",
            norms=("input_layernorm", "pre_mlp_layernorm"),
            norms_after=("post_attention_layernorm", "post_mlp_layernorm"),
            experts=_MOE,
            shared="num_shared_experts",
            whole=True,
        ),
        Architecture("apertus", norms=("attention_layernorm", "feedforward_layernorm"), at_once=6),
        Architecture("arcee"),
        Architecture("bamba", mlp="feed_forward", last_norm="final_layernorm", whole=True, needs_position_ids=True),
        Architecture("cohere", norms=_ONE, parallel=True),
        Architecture("cohere2", norms=_ONE, parallel=True),
        Architecture(
            "cohere2_moe", norms=_ONE, parallel=True, experts="intermediate_size", shared="num_shared_experts"
        ),
        Architecture("cwm"),
        Architecture("dots1", experts=_MOE, shared="n_shared_experts"),
        Architecture("ernie4_5"),
        Architecture("ernie4_5_moe", experts=_MOE, shared="moe_num_shared_experts"),
        Architecture("exaone4", norms=("", ""), norms_after=_AFTER),
        Architecture("exaone_moe", experts=_MOE, shared="num_shared_experts"),
        Architecture("flex_olmo", norms=("", ""), norms_after=_AFTER, experts="intermediate_size"),
        Architecture("gemma"),
        Architecture("gemma2", norms=_BEFORE, norms_after=_AFTER),
        Architecture("gemma3_text", package="gemma3", norms=_BEFORE, norms_after=_AFTER),
        Architecture("gemma4_text", package="gemma4", norms=_BEFORE, norms_after=_AFTER, experts=_MOE, whole=True),
        Architecture("glm", at_once=4),
        Architecture("glm4", at_once=4, norms_after=("post_self_attn_layernorm", "post_mlp_layernorm")),
        Architecture("glm4_moe", experts=_MOE, shared="n_shared_experts"),
        Architecture("gpt_oss", experts="intermediate_size", at_once=10),
        Architecture("granite", residual=_GRANITE),
        Architecture("granite_swa", residual=_GRANITE),
        Architecture("granitemoe", mlp="block_sparse_moe", residual=_GRANITE, experts="intermediate_size"),
        *(
            Architecture(
                name,
                mlp="block_sparse_moe",
                beside="shared_mlp",
                residual=_GRANITE,
                experts="intermediate_size",
                shared="shared_intermediate_size",
            )
            for name in ("granitemoe_swa", "granitemoehybrid", "granitemoeshared")
        ),
        Architecture("helium"),
        Architecture("hunyuan_v1_dense"),
        Architecture("hunyuan_v1_moe", experts="intermediate_size", shared="intermediate_size"),
        Architecture("hy_v3", experts=_MOE, shared="num_shared_experts"),
        Architecture("jais2"),
        *(
            Architecture(
                name,
                mlp="feed_forward",
                norms=("operator_norm", "ffn_norm"),
                output="out_proj",
                last_norm="embedding_norm",
                experts=experts,
            )
            for name, experts in (("lfm2", ""), ("lfm2_moe", _MOE))
        ),
        Architecture(
            "jamba",
            mlp="feed_forward",
            norms=("input_layernorm", "pre_ff_layernorm"),
            last_norm="final_layernorm",
            experts="intermediate_size",
            one_piece=True,
        ),
        Architecture("laguna", experts=_MOE, shared="shared_expert_intermediate_size", whole=True),
        Architecture("llama"),
        Architecture("mellum", experts=_MOE),
        Architecture("minimax_m2", experts="intermediate_size"),
        Architecture("ministral"),
        Architecture("ministral3"),
        Architecture("mistral"),
        Architecture("mixtral", experts="intermediate_size"),
        Architecture("nemotron"),
        Architecture(
            "nemotron_h",
            attention="mixer",
            mlp="mixer",
            norms=("norm", ""),
            last_norm="norm_f",
            experts=_MOE,
            shared="moe_shared_expert_intermediate_size",
            whole=True,
        ),
        Architecture("olmo"),
        Architecture("olmo2", norms=("", ""), norms_after=_AFTER),
        Architecture("olmo3", norms=("", ""), norms_after=_AFTER),
        Architecture("olmoe", experts="intermediate_size"),
        Architecture(
            "phi",
            norms=_ONE,
            parallel=True,
            output="dense",
            last_norm="final_layernorm",
            idle=("resid_dropout",),
            at_once=4,
        ),
        Architecture("phi3", at_once=4, idle=("resid_attn_dropout", "resid_mlp_dropout")),
        Architecture("phimoe", experts="intermediate_size"),
        Architecture("qwen2"),
        Architecture("qwen2_moe", experts=_MOE, shared="shared_expert_intermediate_size"),
        Architecture("qwen3"),
        Architecture(
            "qwen3_5_moe_text", "qwen3_5_moe", experts=_MOE, shared="shared_expert_intermediate_size", whole=True
        ),
        Architecture("qwen3_5_text", package="qwen3_5", whole=True),
        Architecture("qwen3_moe", experts=_MOE),
        Architecture("qwen3_next", experts=_MOE, shared="shared_expert_intermediate_size", whole=True),
        Architecture("qwen3_vl_text", package="qwen3_vl", text_as="qwen3"),
        Architecture("seed_oss"),
        Architecture("smollm3"),
        Architecture("solar_open", experts=_MOE, shared="n_shared_experts"),
        Architecture("stablelm", idle=("dropout",)),
        Architecture("starcoder2"),
        Architecture("vaultgemma", norms=_BEFORE),
    )
}


# Multimodal checkpoints by model type, with what their inputs may hold beside text. Their decoders are planned and run.
MODALITIES: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "cohere2_vision": ("image",),
        "gemma3": ("image",),
        "gemma4": ("image", "video", "audio"),
        "mistral3": ("image",),
        "qwen3_5": ("image", "video"),
        "qwen3_5_moe": ("image", "video"),
        "qwen3_vl": ("image", "video"),
    }
)
_INDEXER = "it chooses the keys of a query by an indexer of its own (sparse attention that was trained with it)"
_REASONS = {  # why families that are often asked for are refused, and their model types
    "its layers attend within chunks of tokens, for which kernels have no mask": "llama4 llama4_text",
    "each of its layers has a recurrent state beside its keys and values, and a layer here has one of the two": (
        "falcon_h1"
    ),
    "its decoder, whose tokens have three positions each, is in no class of transformers that loads it alone": (
        "qwen2_vl qwen2_5_vl qwen3_vl_moe"
    ),
    "transformers has no causal class of its decoder without the vision tower": "muse_glimmer muse_glimmer_text",
    "its values are narrower than its keys, and a head here has one size": "mimo_v2_flash",
    "it caches one compressed vector a token in place of keys and values (MLA), for which there is no store here": (
        "axk1 bailing_hybrid deepseek_v2 deepseek_v3 glm4_moe_lite kimi_k2 kimi_k25 kimi_k3 kimi_linear longcat_flash "
        "minicpm3 mistral4 sarvam_mla youtu"
    ),
    _INDEXER: "minimax_m3 minimax_m3_vl minimax_m3_vl_text qwen4_exp qwen4_exp_text",
    f"{_INDEXER}, over compressed keys and values (MLA)": (
        "axk2 deepseek_v4 dots3_note dots3_note_text glm5_next glm5_next_text hy_v4 hy_v4_vl hy_v4_vl_text "
        "mistral_large4"
    ),
}
REFUSED = {kind: why for why, kinds in _REASONS.items() for kind in kinds.split()}


def record_of(model_type: str) -> Architecture:
    """The record of a model that is described, loaded and run as it is: those with indexers too."""
    if model_type in INDEXED:
        return Architecture(model_type, experts=_MOE, shared="n_shared_experts")
    return architecture_of(model_type)


def architecture_of(model_type: str) -> Architecture:
    """The record of a model whose attention is ours to compute."""
    if model_type in ARCHITECTURES:
        return ARCHITECTURES[model_type]
    if model_type in INDEXED:
        raise UnsupportedError(
            f"expected attention that may be replaced, found {model_type!r}: {_INDEXER}, over compressed keys and "
            "values (MLA); `sparsekv plan` finds which layers may share a choice, and `run` and `apply` set that"
        )
    if model_type in REFUSED:
        raise UnsupportedError(
            f"expected one of the supported architectures, found {model_type!r}: {REFUSED[model_type]}; "
            f"choose a model of another family (docs/models.md)"
        )
    nearest = get_close_matches(model_type, ARCHITECTURES, n=1, cutoff=0.7)
    like = f"; the nearest by name is {nearest[0]!r}" if nearest else ""
    raise UnsupportedError(
        f"expected one of the supported architectures ({', '.join(ARCHITECTURES)}), found {model_type!r}{like}; choose "
        f"a model of a supported one, or add a record to runtime/architecture.py (docs/extending.md, An architecture)"
    )


if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_CHUNK = 64  # tokens that torch computes together in a gated delta rule


@dataclass(frozen=True, slots=True)
class Recurrence:
    """The sizes of a layer with a recurrent state."""

    heads: int
    key_heads: int  # heads or groups of what is written to it
    head_dim: int  # numbers of a head that a token adds
    state_bytes: int  # of a row, whatever its length
    token_bytes: int  # of a token in a prompt, as torch computes it; fast kernels of transformers take less


def recurrence_of(config: PreTrainedConfig) -> Recurrence:
    for name, of_kind in _KINDS.items():
        if getattr(config, name, None) is not None:
            return of_kind(config)
    raise UnsupportedError(
        f"expected layers with a gated delta rule, a state space or a short convolution, found others in "
        f"{config.model_type!r}; choose a model of a supported architecture"
    )


def _gated_delta(config: PreTrainedConfig) -> Recurrence:
    """In float32: a matrix a head, and in chunks of tokens."""
    heads, size = config.linear_num_value_heads, config.linear_value_head_dim
    token = 4 * heads * (14 * size + 5 * _CHUNK)
    return Recurrence(heads, config.linear_num_key_heads, size, 4 * heads * size**2, token)


def _mamba_2(config: PreTrainedConfig) -> Recurrence:
    heads, size, state = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    return _of_mamba_2(heads, config.mamba_n_groups, size, state, config.mamba_chunk_size)


def _of_mamba_2(heads: int, groups: int, size: int, state: int, chunk: int) -> Recurrence:
    """In float32: a matrix a head, one for every chunk of tokens, and every pair of tokens of a chunk."""
    token = 4 * heads * (8 * size + 6 * state + 4 * chunk + -(-4 * size * state // chunk))
    return Recurrence(heads, groups, size, 4 * heads * size * state, token)


def _mamba_1(config: PreTrainedConfig) -> Recurrence:
    """In float32: the state of every token at once."""
    width, state = config.mamba_expand * config.hidden_size, config.mamba_d_state
    return Recurrence(*_in_heads(width), 4 * width * (state + config.mamba_d_conv), 4 * width * (4 * state + 8))


def _short_convolution(config: PreTrainedConfig) -> Recurrence:
    """The last inputs of a convolution: no state beside them."""
    width = config.hidden_size
    return Recurrence(*_in_heads(width), 4 * width * config.conv_L_cache, 4 * 10 * width)


def _in_heads(width: int) -> tuple[int, int, int]:
    """Heads, groups and numbers of a head of a layer without heads: as few as a plan can name."""
    size = width if width <= MAX_ID else math.gcd(width, MAX_ID + 1)
    return width // size, width // size, size


def _mamba_2_of_nemotron(config: PreTrainedConfig) -> Recurrence:
    heads, size, state, chunk = config.mamba_num_heads, config.mamba_head_dim, config.ssm_state_size, config.chunk_size
    return _of_mamba_2(heads, config.n_groups, size, state, chunk)


_KINDS = {
    "mamba_num_heads": _mamba_2_of_nemotron,
    "linear_num_value_heads": _gated_delta,
    "mamba_n_heads": _mamba_2,
    "mamba_d_state": _mamba_1,
    "conv_L_cache": _short_convolution,
}
