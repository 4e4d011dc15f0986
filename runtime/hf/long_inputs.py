"""Long forward passes by an executor of our own: everything row-wise in chunks of rows, attention over the whole.

A Hugging Face decoder layer makes float32 copies of its whole input in each norm, several copies of the queries in its
rotary embedding, and tensors of the MLP's width: 100 GB at 1M tokens of an 8B model. Here a layer writes queries, keys
and values chunk by chunk into preallocated tensors, attends once, and adds the output projection and the MLP to its
input in place, again chunk by chunk. It calls the model's own norms, projections, rotary function and MLP.

The executor takes the place of the decoder's forward where the input is long and nothing unknown is asked for. A layer
that is not transformers' own, or has hooks, is called whole, and what it has seen is not overwritten. Before the first
long input, one layer of each class is compared with its own forward on a few rows: if they disagree, because
transformers or another library has changed what such a layer computes, these run whole too and one warning says so.

Shapes: B batch, S tokens, E hidden size, H query heads, G KV heads, D head size, R rotated part of a head.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from sparsekv.runtime.hf.attention import CONTEXT, Context, DenseEngine, Engine, LayerCall, Phase
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.stores.store import Layout

_DORMANT = "transformers.utils.output_capturing"  # hooks that stay behind once hidden states were asked for
_SLIDING: dict[str, Callable[[Any], int | None]] = {
    "mistral": lambda attention: getattr(attention.config, "sliding_window", None),
    "qwen2": lambda attention: attention.sliding_window,
    "qwen3": lambda attention: attention.sliding_window,
}
_KINDS = frozenset({"glm", "llama", *_SLIDING})
_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")
_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache", CONTEXT}
_PROBED_ROWS = 16
_TOLERANCE = 0.02  # of what the layer adds to its input


@dataclass(frozen=True, slots=True)
class Chunking:
    """How the work of a long input is cut into rows and heads.

    Args:
        above: inputs of more tokens, over all batch rows, are cut.
        rows: tokens worked on together, over all batch rows. Fewer bound memory, more keep matrix products large.
        output_bytes: attention output that a layer may hold beside its queries; a larger one overwrites them in
            groups of heads.
    """

    above: int = 16_384
    rows: int = 16_384
    output_bytes: int = 2 << 30

    def applies(self, batch: int, tokens: int) -> bool:
        """Whether a call of this size is cut. Decode steps are not."""
        return tokens > 1 and batch * tokens > self.above

    def pieces(self, batch: int, tokens: int) -> Iterator[slice]:
        """Which tokens each chunk has: all of them, in order, in chunks of about one size."""
        most = max(1, self.rows // batch)
        size = -(-tokens // -(-tokens // most))
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What one decoder layer is called with."""

    hidden_BSE: torch.Tensor
    cos_BSR: torch.Tensor
    sin_BSR: torch.Tensor
    cache: Cache | None

    def first(self, tokens: int) -> LayerInput:
        """The first tokens alone, without a cache."""
        rows = slice(0, tokens)
        return LayerInput(self.hidden_BSE[:, rows], self.cos_BSR[:, rows], self.sin_BSR[:, rows], None)


class LongInputs:
    """The long forward passes of one attached decoder.

    Args:
        engine: attends.
        chunking: what is long, and how it is cut.
        model_type: the model's.
    """

    def __init__(self, engine: Engine, chunking: Chunking, model_type: str) -> None:
        self._engine = engine
        self._chunking = chunking
        self._model_type = model_type
        self._agree: dict[type, bool] = {}

    def takes(self, decoder: Any, inputs: dict[str, Any]) -> bool:
        """Whether the pass is long, asks for nothing unknown, and the decoder is of a known class."""
        given = [inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
        if len(given) != 1 or not self._is_long(given[0]) or asks_for_more(decoder, inputs):
            return False
        globally = torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks
        return self._model_type in _KINDS and self._is_ours(decoder) and not globally

    def _is_long(self, tokens: torch.Tensor) -> bool:
        return (
            self._engine.open
            and self._chunking.applies(*tokens.shape[:2])
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled(tokens.device.type)
        )

    def _is_ours(self, *parts: object) -> bool:
        """Whether these modules are of transformers' classes for this model type."""
        home = f"transformers.models.{self._model_type}.modeling_{self._model_type}"
        return all(type(part).__module__ == home for part in parts)

    def run(self, decoder: Any, inputs: dict[str, Any]) -> BaseModelOutputWithPast:
        """What the decoder's own forward returns."""
        given_BSE, cache = inputs.get("inputs_embeds"), inputs.get("past_key_values")
        own = given_BSE is None and type(decoder.embed_tokens) is nn.Embedding and not is_touched(decoder.embed_tokens)
        hidden_BSE = decoder.embed_tokens(inputs["input_ids"]) if given_BSE is None else given_BSE
        positions_BS = inputs.get("position_ids")
        if positions_BS is None:
            past = 0 if cache is None else cache.get_seq_length()
            positions_BS = torch.arange(past, past + hidden_BSE.shape[1], device=hidden_BSE.device)[None]
        rotary = decoder.rotary_emb(hidden_BSE, positions_BS)
        pieces = list(self._chunking.pieces(*hidden_BSE.shape[:2]))
        for layer in decoder.layers[: decoder.config.num_hidden_layers]:
            given = LayerInput(hidden_BSE, rotary[0], rotary[1], cache)
            if self._can_cut(layer, given):
                into_BSE = hidden_BSE if own else torch.empty_like(hidden_BSE)
                hidden_BSE = forward_in_pieces(layer, self._model_type, given, self._engine, pieces, into_BSE)
                own = True
            else:
                options = {name: inputs.get(name) for name in ("past_key_values", "use_cache", CONTEXT)}
                whole = {"attention_mask": None, "position_ids": positions_BS, "position_embeddings": rotary}
                hidden_BSE, own = layer(hidden_BSE, **whole, **options), False
        out_BSE = self._norm(decoder.norm, hidden_BSE, pieces, own)
        return BaseModelOutputWithPast(last_hidden_state=out_BSE, past_key_values=cache)

    def _norm(self, norm: nn.Module, hidden_BSE: torch.Tensor, pieces: Sequence[slice], own: bool) -> torch.Tensor:
        if not self._is_ours(norm) or not type(norm).__name__.endswith("RMSNorm") or is_touched(norm):
            return norm(hidden_BSE)  # type: ignore[no-any-return]
        out_BSE = hidden_BSE if own else torch.empty_like(hidden_BSE)
        for rows in pieces:
            out_BSE[:, rows] = norm(hidden_BSE[:, rows])
        return out_BSE

    def _can_cut(self, layer: nn.Module, given: LayerInput) -> bool:
        """Whether the layer is as transformers made it. Waits for the device, once a class of layers."""
        parts = (layer, *(getattr(layer, name, None) for name in _PARTS))
        if not self._is_ours(*parts) or any(map(is_touched, layer.modules())):
            return False
        kind = type(layer)
        if kind not in self._agree:
            self._agree[kind] = _compare(layer, self._model_type, given.first(_PROBED_ROWS))
        return self._agree[kind]


def asks_for_more(decoder: Any, inputs: dict[str, Any]) -> bool:
    """Whether a forward pass wants anything but the last hidden state of tokens and their cache."""
    asked = {name: value for name, value in inputs.items() if name not in _INPUTS}
    plain = asked.pop("return_dict", None) is not False and not decoder.config.output_hidden_states
    return not plain or any(value is not None and value is not False for value in asked.values())


def is_touched(module: nn.Module) -> bool:
    """Whether somebody has a hook on a module, or a forward of their own."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(getattr(hook, "__module__", None) != _DORMANT for hook in hooks)


def forward_in_pieces(
    layer: nn.Module,
    model_type: str,
    given: LayerInput,
    engine: Engine,
    pieces: Sequence[slice],
    into_BSE: torch.Tensor,
) -> torch.Tensor:
    """What a decoder layer's own forward returns, up to rounding of products cut by rows.

    Args:
        layer: of a known class.
        model_type: the model's.
        given: the layer's input.
        engine: attends.
        pieces: which tokens are worked on together.
        into_BSE: where the result goes; may be the input itself.
    """
    parts: Any = layer
    out_BHSD = _attend(parts, model_type, given, engine, pieces)
    for rows in pieces:
        attended_BSE = out_BHSD[:, :, rows].transpose(1, 2).flatten(2)
        hidden_BSE = into_BSE[:, rows]
        torch.add(given.hidden_BSE[:, rows], parts.self_attn.o_proj(attended_BSE), out=hidden_BSE)
        hidden_BSE += parts.mlp(parts.post_attention_layernorm(hidden_BSE))
    return into_BSE


def _attend(layer: Any, model_type: str, given: LayerInput, engine: Engine, pieces: Sequence[slice]) -> torch.Tensor:
    """[B, H, S, D], in the memory of the queries where the engine put it there. Keys and values are let go of."""
    attention, (batch, tokens, _) = layer.self_attn, given.hidden_BSE.shape
    # Queries first: their memory is then free again in one block when the next layer asks for as much.
    q_BSHD = given.hidden_BSE.new_empty(
        (batch, tokens, attention.config.num_attention_heads, attention.head_dim), requires_grad=False
    )
    q_BHSD = q_BSHD.transpose(1, 2)
    entry = None if given.cache is None else given.cache.layers[attention.layer_idx]
    assert entry is None or isinstance(entry, SparseLayer)
    layout = Layout(batch, attention.config.num_key_value_heads, attention.head_dim, q_BHSD.dtype, q_BHSD.device)
    k_BGSD, v_BGSD = (layout.empty(tokens), layout.empty(tokens)) if entry is None else entry.room(tokens, layout)
    for rows in pieces:
        q_BHSD[:, :, rows], k_BGSD[:, :, rows], v_BGSD[:, :, rows] = _project(layer, given, rows)
    if entry is not None:
        entry.commit(k_BGSD, v_BGSD)
    window = _SLIDING[model_type](attention) if model_type in _SLIDING else None
    call = (attention.layer_idx, Phase.PREFILL, q_BHSD, k_BGSD, v_BGSD, given.cache, attention.scaling, window)
    return engine.attend(LayerCall(*call, q_is_spare=True))


def _project(layer: Any, given: LayerInput, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, and values, of some tokens: what the attention's own forward makes of them."""
    attention, x_BSE = layer.self_attn, layer.input_layernorm(given.hidden_BSE[:, rows])
    shape = (*x_BSE.shape[:-1], -1, attention.head_dim)
    q_BSHD, k_BSGD, v_BSGD = (
        projection(x_BSE).view(shape) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q_BSHD, k_BSGD = attention.q_norm(q_BSHD), attention.k_norm(k_BSGD)
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb  # what its own forward would call now
    q_BHSD, k_BGSD = rotate(
        q_BSHD.transpose(1, 2), k_BSGD.transpose(1, 2), given.cos_BSR[:, rows], given.sin_BSR[:, rows]
    )
    return q_BHSD, k_BGSD, v_BSGD.transpose(1, 2)


def _compare(layer: nn.Module, model_type: str, given: LayerInput) -> bool:
    plain, tokens = DenseEngine(), given.hidden_BSE.shape[1]
    expected = type(layer).forward(
        layer,
        given.hidden_BSE,
        attention_mask=None,
        position_embeddings=(given.cos_BSR, given.sin_BSR),
        **{CONTEXT: Context(plain, None, Phase.PREFILL)},
    )
    pieces = [slice(0, tokens // 2), slice(tokens // 2, tokens)]
    found = forward_in_pieces(layer, model_type, given, plain, pieces, torch.empty_like(given.hidden_BSE))
    if _is_close(found, expected, given.hidden_BSE):
        return True
    warnings.warn(
        f"expected {type(layer).__name__} to compute what the tested versions of transformers do, found another "
        f"result; long inputs run in one piece, which takes more memory (close the handle before changing a model)",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _is_close(found: torch.Tensor, expected: Any, given: torch.Tensor) -> bool:
    if not isinstance(expected, torch.Tensor) or (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return False
    added, difference = expected.float() - given.float(), found.float() - expected.float()
    rounding = 2 * torch.finfo(expected.dtype).eps * torch.linalg.vector_norm(expected.float())
    bound = _TOLERANCE * torch.linalg.vector_norm(added) + rounding
    return bool(torch.linalg.vector_norm(difference) <= bound)
