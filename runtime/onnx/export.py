"""A decoder of transformers and its plan as one ONNX graph: decode follows the plan, prefill is dense.

Inputs: `input_ids` [B, S], `past` [B] (cached tokens of each row), and of each layer `key.N`, `value.N` [B, G, C, D],
which the caller allocates for as many tokens as it wants and binds as outputs `key.N.out`, `value.N.out` as well: a
step then writes one token in place. Output: `logits` [B, V] of the last token. Prompts run in pieces of any length.

Operators are those of ONNX opset 24: caches by TensorScatter, attention by Attention with `nonpad_kv_seqlen`, the
weights that filter layers choose by from its `qk_matmul_output`.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper

from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import dump_plan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.program import LayerProgram, Program
from sparsekv.runtime.core.roles import Follower
from sparsekv.runtime.core.segments import SegmentProgram
from sparsekv.runtime.onnx.choice import FLOAT, INT64, OPSET, ChoiceStep, Nodes
from sparsekv.runtime.plan_checks import Host, refuse

# The modules of the model show these: their weights, scales and angles are written, or refused by `obstacles_of`.
_FOLLOWED = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "hidden_act rms_norm_eps rope_parameters attention_bias mlp_bias tie_word_embeddings dtype sliding_window "
    "use_sliding_window max_window_layers layer_types"
)
# Of training, of generation, of how a model is described, or read by no decoder that is written here.
_NEUTRAL = (
    "transformers_version architectures output_hidden_states output_attentions return_dict chunk_size_feed_forward "
    "is_encoder_decoder id2label label2id problem_type max_position_embeddings initializer_range use_cache "
    "pad_token_id bos_token_id eos_token_id pretraining_tp attention_dropout model_type _name_or_path"
)
FIELDS = frozenset(f"{_FOLLOWED} {_NEUTRAL}".split())
"""Fields of a config that the graph follows, and fields that change nothing in it. Another one may change arithmetic:
where it is not at its default, the model is refused."""


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


MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3")
_ROPES = ("default", "linear", "llama3", "yarn")  # whose angles do not depend on the length
_WEIGHTS = 3  # of Attention: what it multiplies the values by
_IR_VERSION = 11
_KINDS = {torch.float32: TensorProto.FLOAT, torch.float16: TensorProto.FLOAT16}


def obstacles_of(model: Any, program: Program) -> Iterator[str]:
    """Returns a sentence for everything in a model and its roles that the graph cannot hold."""
    config = model.config
    if config.model_type not in MODEL_TYPES:
        yield f"a model of {config.model_type}: {', '.join(MODEL_TYPES)} are written"
        return
    if model.dtype not in _KINDS:
        yield f"a model in {model.dtype}: use --dtype float32 or float16"
    if sliding := [layer.layer for layer in program.layers if layer.window is not None]:
        yield f"layers with a sliding window ({format_ids(sliding)})"
    rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if rope not in _ROPES:
        yield f"rotary angles of {rope}, which change with the length: {', '.join(_ROPES)} are written"
    size, rotated = model.model.layers[0].self_attn.head_dim, 2 * len(model.model.rotary_emb.inv_freq)
    if rotated != size:
        yield f"rotary angles (rope_parameters) for {rotated} of the {size} numbers of a head"
    usual = type(config)().to_dict()
    for name, value in config.to_dict().items():
        if name not in FIELDS and value is not None and not (name in usual and usual[name] == value):
            yield f"{name}: {value!r:.60} in the config, which may change arithmetic"
    if config.hidden_act not in ACTIVATIONS:
        yield f"hidden_act of {config.hidden_act!r:.40}: {', '.join(sorted(ACTIVATIONS))} are written"
    for layer in program.sparse:
        if layer.role.filters is None and layer.role.follows is None:
            yield f"layer {layer.layer} with a decode method ({type(layer.role).__name__}) of its own: plan without it"


@contextmanager
def new_folder(place: Path) -> Iterator[Path]:
    """Yields a folder to write into, which takes the name `place` once all is written; nothing is left of a failed
    one."""
    made = place.with_name(f".{place.name}.{uuid4().hex[:8]}")
    try:
        made.mkdir(parents=True)
        yield made
        made.rename(place)
    except OSError as error:
        raise UsageError(f"cannot write {place}: {error.strerror or error}; nothing is left of it") from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


def export(model: Any, plan: Plan, program: Program, folder: Path) -> Path:
    """Writes `model.onnx`, its weights beside it, into a folder that is there or not.

    Args:
        plan: for the metadata; `program` is what is written.

    Raises:
        UnsupportedError: the graph cannot hold something of the model or the plan; the message names it.
    """
    way_out = "Run this model in transformers or vLLM, or make another plan."
    obstacles = tuple(obstacles_of(model, program))
    refuse(
        plan,
        plan.model,
        Host("the ONNX graph", older_queries=False, evicts=False, obstacles=obstacles, way_out=way_out),
    )
    folder.mkdir(parents=True, exist_ok=True)
    graph = _Decoder(model, program).graph()
    opset = [helper.make_opsetid("", OPSET)]
    made = helper.make_model(graph, opset_imports=opset, producer_name="sparsekv", ir_version=_IR_VERSION)
    helper.set_model_props(made, _facts(plan))
    path = folder / "model.onnx"
    onnx.save_model(made, str(path), save_as_external_data=True, location="model.onnx.data", size_threshold=4096)
    return path


def _facts(plan: Plan) -> dict[str, str]:
    return {
        "sparsekv.plan": dump_plan(plan),
        "sparsekv.status": plan.status_text,
        "sparsekv.model": plan.model.id,
        "sparsekv.fingerprint": plan.model.fingerprint.architecture,
        "sparsekv.prefill": "dense",
        "sparsekv.decode": "by the plan" if plan.decode is not None else "dense",
    }


class _Decoder:
    def __init__(self, model: Any, program: Program) -> None:
        self._model, self._program, self._n = model, program, Nodes()
        self._kind = _KINDS[model.dtype]
        self._size = int(model.model.layers[0].self_attn.head_dim)
        self._caches: list[tuple[str, str, str, str]] = []

    def graph(self) -> onnx.GraphProto:
        n, decoder = self._n, self._model.model
        steps = n.dimension("input_ids", 1)
        lengths_B = n.op("Add", "past", steps)
        is_step = n.op("Squeeze", n.op("Equal", steps, n.constant([1])), n.constant([0]))
        step = ChoiceStep(n, self._program, lengths_B, is_step)
        angles = self._angles(steps)
        hidden = n.op("Gather", self._weight(decoder.embed_tokens.weight, "embed"), "input_ids")
        for layer, program in zip(decoder.layers, self._program.layers, strict=True):
            hidden = self._layer(layer, program, hidden, step, angles)
        last = n.op("Gather", hidden, n.constant(np.int64(-1)), axis=1)
        normed = self._norm(decoder.norm, last)
        head = self._transposed(self._model.lm_head.weight, "lm_head")
        logits = n.cast(n.op("MatMul", normed, head), FLOAT)
        n.nodes.append(helper.make_node("Identity", [logits], ["logits"]))
        return helper.make_graph(n.nodes, "decoder", self._inputs(), self._outputs(), list(n.constants.values()))

    def _inputs(self) -> list[onnx.ValueInfoProto]:
        info = helper.make_tensor_value_info
        tokens = [info("input_ids", INT64, ["batch", "tokens"]), info("past", INT64, ["batch"])]
        shape = self._cache_shape
        return tokens + [info(name, self._kind, shape) for cache in self._caches for name in cache[:2]]

    def _outputs(self) -> list[onnx.ValueInfoProto]:
        info = helper.make_tensor_value_info
        logits = info("logits", FLOAT, ["batch", self._model.config.vocab_size])
        return [logits, *(info(name, self._kind, self._cache_shape) for cache in self._caches for name in cache[2:])]

    @property
    def _cache_shape(self) -> list[str | int | None]:
        return ["batch", self._program.layers[0].kv_heads, "capacity", self._size]

    def _angles(self, steps: str) -> tuple[str, str]:
        """Cosines and sines, [B, S, D / 2] each, in float32 as transformers computes them."""
        n, rotary = self._n, self._model.model.rotary_emb
        count = n.op("Squeeze", steps, n.constant([0]))
        at_S = n.op("Range", n.constant(np.int64(0)), count, n.constant(np.int64(1)))
        at_BS1 = n.op("Unsqueeze", n.op("Add", n.op("Unsqueeze", "past", n.constant([1])), at_S), n.constant([2]))
        frequency = n.constant(rotary.inv_freq.detach().float().cpu().numpy())
        angle = n.op("Mul", n.cast(at_BS1, FLOAT), frequency)
        scale = n.constant(np.asarray([rotary.attention_scaling], np.float32))
        cos, sin = (n.cast(n.op("Mul", n.op(kind, angle), scale), self._kind) for kind in ("Cos", "Sin"))
        return cos, sin

    def _layer(self, layer: Any, program: LayerProgram, hidden: str, step: ChoiceStep, angles: tuple[str, str]) -> str:
        n = self._n
        mixed = self._attention(layer.self_attn, program, self._norm(layer.input_layernorm, hidden), step, angles)
        hidden = n.op("Add", hidden, mixed)
        normed, mlp = self._norm(layer.post_attention_layernorm, hidden), layer.mlp
        gate = self._linear(mlp.gate_proj, normed)
        active = ACTIVATIONS[self._model.config.hidden_act](n, gate)
        product = n.op("Mul", active, self._linear(mlp.up_proj, normed))
        return n.op("Add", hidden, self._linear(mlp.down_proj, product))

    def _attention(self, module: Any, program: LayerProgram, x: str, step: ChoiceStep, angles: tuple[str, str]) -> str:
        n, number = self._n, program.layer
        q_BHSD, k_BGSD = (
            self._rotated(module, name, x, heads, angles)
            for name, heads in (("q", program.heads), ("k", program.kv_heads))
        )
        v_BGSD = self._heads(self._linear(module.v_proj, x), program.kv_heads)
        names = (f"key.{number}", f"value.{number}", f"key.{number}.out", f"value.{number}.out")
        self._caches.append(names)
        for before, new, after in ((names[0], k_BGSD, names[2]), (names[1], v_BGSD, names[3])):
            n.nodes.append(helper.make_node("TensorScatter", [before, new, "past"], [after], axis=-2, mode="linear"))
        out_BHSD = self._attend(module, program, (q_BHSD, names[2], names[3]), step)
        return self._linear(module.o_proj, n.reshape(n.transpose(out_BHSD, 0, 2, 1, 3), 0, 0, -1))

    def _attend(self, module: Any, program: LayerProgram, qkv: tuple[str, str, str], step: ChoiceStep) -> str:
        scale, everything = float(module.scaling), {"is_causal": 1, "scale": float(module.scaling)}
        inputs = (*qkv, "", "", "", step.lengths_B)

        def dense(n: Nodes) -> list[str]:
            return [n.op("Attention", *inputs, **everything)]

        def weighed(n: Nodes) -> list[str]:
            return n.skipping(
                "Attention",
                *inputs,
                outputs=(True, False, False, True),
                qk_matmul_output_mode=_WEIGHTS,
                **everything,
            )

        def filtering(n: Nodes, segment: SegmentProgram, itself: Follower | None) -> list[str]:
            if itself is None:
                out, weights = weighed(n)
                return [out, step.choose(n, program, segment, weights)]
            chosen = step.choose(n, program, segment, weighed(n)[1])
            return [step.attend(n, program, itself, chosen, qkv, scale), chosen]

        def following(n: Nodes, role: Follower) -> list[str]:
            return [step.attend(n, program, role, step.chosen(role.segment), qkv, scale)]

        segment, follower = program.role.filters, program.role.follows
        if segment is not None:
            out, chosen = self._n.either(
                step.is_sparse,
                (self._kind, INT64),
                lambda n: filtering(n, segment, follower),
                lambda n: [*dense(n), n.constant(np.zeros((1, segment.lists, 1), np.int64))],
            )
            step.remember(segment, chosen)
            return out
        if follower is not None:
            return self._n.either(step.is_sparse, (self._kind,), lambda n: following(n, follower), dense)[0]
        return dense(self._n)[0]

    def _rotated(self, module: Any, name: str, x: str, heads: int, angles: tuple[str, str]) -> str:
        x_BHSD = self._heads(self._linear(getattr(module, f"{name}_proj"), x), heads)
        if norm := getattr(module, f"{name}_norm", None):
            x_BHSD = self._norm(norm, x_BHSD)
        return self._n.op("RotaryEmbedding", x_BHSD, *angles)

    def _heads(self, x: str, heads: int) -> str:
        return self._n.transpose(self._n.reshape(x, 0, 0, heads, self._size), 0, 2, 1, 3)

    def _norm(self, module: Any, x: str) -> str:
        weight = self._weight(module.weight, self._n.name("norm"))
        return self._n.op("RMSNormalization", x, weight, epsilon=float(module.variance_epsilon), axis=-1)

    def _linear(self, module: Any, x: str) -> str:
        product = self._n.op("MatMul", x, self._transposed(module.weight, self._n.name("weight")))
        if module.bias is not None:
            product = self._n.op("Add", product, self._weight(module.bias, self._n.name("bias")))
        return product

    def _transposed(self, weight: torch.Tensor, name: str) -> str:
        return self._weight(weight.detach().t(), name)

    def _weight(self, weight: torch.Tensor, name: str) -> str:
        return self._n.constant(np.ascontiguousarray(weight.detach().cpu().numpy()), name)
