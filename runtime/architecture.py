"""What a model type is, one record each: where a decoder layer of transformers has its parts. The loader, descriptions,
long inputs and memory estimates read it, and so does vLLM. A new architecture is a record here and a row of
tests/support/tiny_models.py.

Every one of them calls its attention through `AttentionInterface`, and its decoder has `layers`, `rotary_emb` and
`norm`. Scores with a soft cap cannot be computed: no kernel has one.
"""

from __future__ import annotations

from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from sparsekv.plans.errors import UnsupportedError


@dataclass(frozen=True, slots=True)
class Architecture:
    """Names of attributes.

    Attributes:
        model_type: of the config; also of the module of transformers that has its classes.
        attention: of a layer.
        mlp: of a layer.
        norms: of a layer, before its attention and before its MLP.
        projections: of an attention: to queries, keys and values; one name where a single projection gives all three.
        output: of an attention, its last projection.
        head_norms: of an attention, of single queries and keys before they are rotated; none where it has none.
        window: the path from an attention to its sliding window; empty where no layer slides.
        width: of a config, that of the MLP.
    """

    model_type: str
    attention: str = "self_attn"
    mlp: str = "mlp"
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm")
    projections: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    output: str = "o_proj"
    head_norms: tuple[str, ...] = ()
    window: str = ""
    width: str = "intermediate_size"

    @property
    def home(self) -> str:
        """The module of transformers with its classes."""
        return f"transformers.models.{self.model_type}.modeling_{self.model_type}"

    def window_of(self, attention: Any) -> int | None:
        """The sliding window of an attention module; None where it sees everything."""
        return attrgetter(self.window)(attention) if self.window else None

    def width_of(self, config: Any) -> int:
        """Of the MLP of a model with this config."""
        return int(getattr(config, self.width))

    def has_parts(self, layer: Any) -> bool:
        """Whether a layer and its attention have the parts that are named here, and no others."""
        attention = getattr(layer, self.attention, None)
        if attention is None:
            return False
        inside = {self.output, *self.projections, *self.head_norms}
        return dict(layer.named_children()).keys() == {self.attention, self.mlp, *self.norms} and (
            dict(attention.named_children()).keys() == inside
        )


ARCHITECTURES = {
    record.model_type: record
    for record in (
        Architecture("glm"),
        Architecture("llama"),
        Architecture("mistral", window="config.sliding_window"),
        Architecture("qwen2", window="sliding_window"),
        Architecture("qwen3", window="sliding_window", head_norms=("q_norm", "k_norm")),
    )
}


def architecture_of(model_type: str) -> Architecture:
    """The record of a model type.

    Raises:
        UnsupportedError: this version cannot run it; the message names those it can.
    """
    if model_type not in ARCHITECTURES:
        raise UnsupportedError(
            f"expected one of the supported architectures ({', '.join(ARCHITECTURES)}), found {model_type!r}; "
            f"choose a model of a supported architecture"
        )
    return ARCHITECTURES[model_type]
