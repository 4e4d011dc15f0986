"""Says which fields of a config the graph follows, and which change nothing in it.

A field that is in neither list may change arithmetic: where it is not at its default, the model is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.onnx.nodes import Nodes

# The modules of the model show these: their weights, scales and angles are written, or refused by `check_exportable`.
FOLLOWED = frozenset(
    (
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "hidden_act",
        "rms_norm_eps",
        "rope_parameters",
        "attention_bias",
        "mlp_bias",
        "tie_word_embeddings",
        "dtype",
        "sliding_window",
        "use_sliding_window",
        "max_window_layers",
        "layer_types",
    )
)
# Of training, of generation, of how a model is described, or read by no decoder that is written here.
NEUTRAL = frozenset(
    (
        "transformers_version",
        "architectures",
        "output_hidden_states",
        "output_attentions",
        "return_dict",
        "chunk_size_feed_forward",
        "is_encoder_decoder",
        "id2label",
        "label2id",
        "problem_type",
        "max_position_embeddings",
        "initializer_range",
        "use_cache",
        "pad_token_id",
        "bos_token_id",
        "eos_token_id",
        "pretraining_tp",
        "attention_dropout",
        "model_type",
        "_name_or_path",
    )
)


def check_fields(config: Any) -> None:
    """Refuses a config with a field that may change arithmetic and is not followed.

    Raises:
        UnsupportedError: naming the field and its value.
    """
    usual = type(config)().to_dict()
    for name, value in config.to_dict().items():
        is_usual = name in usual and usual[name] == value
        if name not in FOLLOWED | NEUTRAL and not is_usual and value is not None:
            raise UnsupportedError(
                f"expected a config whose fields the ONNX graph follows, found {name}: {value!r:.60}; run the model in "
                "transformers or vLLM"
            )
    if config.hidden_act not in ACTIVATIONS:
        raise UnsupportedError(
            f"expected hidden_act of {', '.join(sorted(ACTIVATIONS))} to write as ONNX, found "
            f"{config.hidden_act!r:.40}; run the model in transformers or vLLM"
        )


def _gelu(approximate: str) -> Callable[[Nodes, str], str]:
    return lambda n, x: n.op("Gelu", x, approximate=approximate)


def _sigmoid_times(factor: float) -> Callable[[Nodes, str], str]:
    def write(n: Nodes, x: str) -> str:
        scaled = (
            x if factor == 1.0 else n.op("Mul", x, n.op("CastLike", n.constant(np.asarray([factor], np.float32)), x))
        )
        return n.op("Mul", x, n.op("Sigmoid", scaled))

    return write


def _squared_relu(n: Nodes, x: str) -> str:
    positive = n.op("Relu", x)
    return n.op("Mul", positive, positive)


# By the names of transformers' activations.
ACTIVATIONS: Mapping[str, Callable[[Nodes, str], str]] = {
    **dict.fromkeys(("silu", "swish"), _sigmoid_times(1.0)),
    "quick_gelu": _sigmoid_times(1.702),
    **dict.fromkeys(("gelu", "gelu_python"), _gelu("none")),
    **dict.fromkeys(("gelu_accurate", "gelu_fast", "gelu_new", "gelu_python_tanh", "gelu_pytorch_tanh"), _gelu("tanh")),
    "relu": lambda n, x: n.op("Relu", x),
    "relu2": _squared_relu,
    "tanh": lambda n, x: n.op("Tanh", x),
    "sigmoid": lambda n, x: n.op("Sigmoid", x),
    "linear": lambda n, x: x,
}
