"""Long forward passes by an executor of our own: everything row-wise in chunks of rows, attention over the whole.

A Hugging Face decoder layer makes float32 copies of its whole input in each norm, several copies of the queries in its
rotary embedding, and tensors of the MLP's width: 100 GB at 1M tokens of an 8B model. Here a layer writes queries, keys
and values chunk by chunk into preallocated tensors, attends once, and adds the output projection and the MLP to its
input in place, again chunk by chunk. It calls the model's own norms, projections, rotary function and MLP.

The executor takes the place of the decoder's forward where the input is long and nothing unknown is asked for. A layer
that is not as transformers made it (another forward, other parts, hooks) is called whole, and what it has seen is not
overwritten.

Shapes: B batch, S tokens, E hidden size, H query heads, G KV heads, D head size, R rotated part of a head.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers.modeling_outputs import BaseModelOutputWithPast

from sparsekv.runtime.architecture import Architecture, architecture_of
from sparsekv.runtime.hf.attention import Attachment, Pass
from sparsekv.runtime.stores.store import Layout

_DORMANT = "transformers.utils.output_capturing"  # hooks that stay behind once hidden states were asked for
_OWN = str(Path(transformers.__file__).parent)
_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", "past_key_values", "use_cache"}


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
    under_way: Pass


class LongInputs:
    """The long forward passes of one attached decoder.

    Args:
        chunking: what is long, and how it is cut.
        model_type: the model's.
    """

    def __init__(self, chunking: Chunking, model_type: str) -> None:
        self._chunking = chunking
        self._architecture = architecture_of(model_type)

    def takes(self, attached: Attachment, under_way: Pass, inputs: dict[str, Any]) -> bool:
        """Whether the pass is long, asks for nothing unknown, and the decoder is of a known class."""
        given = [inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
        if len(given) != 1 or not self._chunking.applies(*given[0].shape[:2]):
            return False
        plain = not (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled(given[0].device.type)
            or torch_modules._global_forward_hooks
            or torch_modules._global_forward_pre_hooks
        )
        return plain and self._is_own(attached.decoder) and not asks_for_more(attached.decoder, inputs)

    def _is_own(self, *parts: object) -> bool:
        """Whether these modules are of transformers' classes for this model type."""
        return all(type(part).__module__ == self._architecture.home for part in parts)

    def run(self, attached: Attachment, under_way: Pass, inputs: dict[str, Any]) -> BaseModelOutputWithPast:
        """What the decoder's own forward returns."""
        decoder: Any = attached.decoder
        given_BSE, cache = inputs.get("inputs_embeds"), under_way.cache
        own = given_BSE is None and type(decoder.embed_tokens) is nn.Embedding and not is_touched(decoder.embed_tokens)
        hidden_BSE = decoder.embed_tokens(inputs["input_ids"]) if given_BSE is None else given_BSE
        positions_BS = inputs.get("position_ids")
        if positions_BS is None:
            past = 0 if cache is None else cache.get_seq_length()
            positions_BS = torch.arange(past, past + hidden_BSE.shape[1], device=hidden_BSE.device)[None]
        rotary = decoder.rotary_emb(hidden_BSE, positions_BS)
        pieces = list(self._chunking.pieces(*hidden_BSE.shape[:2]))
        with attached.attending(under_way):
            for layer in decoder.layers[: decoder.config.num_hidden_layers]:
                if self._can_cut(layer):
                    given = LayerInput(hidden_BSE, rotary[0], rotary[1], under_way)
                    into_BSE = hidden_BSE if own else torch.empty_like(hidden_BSE)
                    hidden_BSE = forward_in_pieces(layer, self._architecture, given, pieces, into_BSE)
                    own = True
                else:
                    options = {"past_key_values": cache, "use_cache": inputs.get("use_cache")}
                    whole = {"attention_mask": None, "position_ids": positions_BS, "position_embeddings": rotary}
                    hidden_BSE, own = layer(hidden_BSE, **whole, **options), False
        out_BSE = self._norm(decoder.norm, hidden_BSE, pieces, own)
        return BaseModelOutputWithPast(last_hidden_state=out_BSE, past_key_values=cache)

    def _norm(self, norm: nn.Module, hidden_BSE: torch.Tensor, pieces: Sequence[slice], own: bool) -> torch.Tensor:
        if not self._is_own(norm) or not type(norm).__name__.endswith("RMSNorm") or is_touched(norm):
            return norm(hidden_BSE)  # type: ignore[no-any-return]
        out_BSE = hidden_BSE if own else torch.empty_like(hidden_BSE)
        for rows in pieces:
            out_BSE[:, rows] = norm(hidden_BSE[:, rows])
        return out_BSE

    def _can_cut(self, layer: nn.Module) -> bool:
        """Whether the layer is as transformers made it."""
        record: Any = self._architecture
        if not record.has_parts(layer) or any(map(is_touched, layer.modules())):
            return False
        parts = [layer, *(getattr(layer, name) for name in (record.attention, record.mlp, *record.norms))]
        return self._is_own(*parts) and all(_has_own_forward(part) for part in parts[:2])


def _has_own_forward(module: nn.Module) -> bool:
    """Whether the forward of a module's class is transformers', and nobody else's in its place."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and code.co_filename.startswith(_OWN)


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
    architecture: Architecture,
    given: LayerInput,
    pieces: Sequence[slice],
    into_BSE: torch.Tensor,
) -> torch.Tensor:
    """What a decoder layer's own forward returns, up to rounding of products cut by rows.

    Args:
        layer: of the architecture.
        given: the layer's input.
        pieces: which tokens are worked on together.
        into_BSE: where the result goes; may be the input itself.
    """
    attention, mlp = getattr(layer, architecture.attention), getattr(layer, architecture.mlp)
    project, norm = getattr(attention, architecture.output), getattr(layer, architecture.norms[1])
    out_BHSD = _attend(layer, architecture, given, pieces)
    for rows in pieces:
        attended_BSE = out_BHSD[:, :, rows].transpose(1, 2).flatten(2)
        hidden_BSE = into_BSE[:, rows]
        torch.add(given.hidden_BSE[:, rows], project(attended_BSE), out=hidden_BSE)
        hidden_BSE += mlp(norm(hidden_BSE))
    return into_BSE


def _attend(layer: nn.Module, architecture: Architecture, given: LayerInput, pieces: Sequence[slice]) -> torch.Tensor:
    """[B, H, S, D], in the memory of the queries where the engine put it there. Keys and values are let go of."""
    attention, (batch, tokens, _) = getattr(layer, architecture.attention), given.hidden_BSE.shape
    heads, kv_heads, size = (
        attention.config.num_attention_heads,
        attention.config.num_key_value_heads,
        attention.head_dim,
    )
    # Queries first: their memory is then free again in one block when the next layer asks for as much.
    q_BSHD = given.hidden_BSE.new_empty((batch, tokens, heads, size), requires_grad=False)
    q_BHSD = q_BSHD.transpose(1, 2)
    entry = given.under_way.entry(attention.layer_idx)
    dtype = q_BHSD.dtype if entry is None else entry.dtype_for(q_BHSD)
    layout = Layout(batch, kv_heads, size, dtype, q_BHSD.device)
    k_BGSD, v_BGSD = (layout.empty(tokens), layout.empty(tokens)) if entry is None else entry.room(tokens, layout)
    for rows in pieces:
        q_BHSD[:, :, rows], k_BGSD[:, :, rows], v_BGSD[:, :, rows] = _project(layer, architecture, given, rows)
    if entry is not None:
        entry.commit(k_BGSD, v_BGSD)
    window = architecture.window_of(attention)
    qkv = q_BHSD, k_BGSD, v_BGSD
    return given.under_way.attend(attention.layer_idx, qkv, attention.scaling, window, q_is_spare=True)


def _project(
    layer: nn.Module, architecture: Architecture, given: LayerInput, rows: slice
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, and values, of some tokens: what the attention's own forward makes of them."""
    attention = getattr(layer, architecture.attention)
    x_BSE = getattr(layer, architecture.norms[0])(given.hidden_BSE[:, rows])
    q_BSHD, k_BSGD, v_BSGD = _projected(attention, architecture, x_BSE)
    if architecture.head_norms:
        q_norm, k_norm = (getattr(attention, name) for name in architecture.head_norms)
        q_BSHD, k_BSGD = q_norm(q_BSHD), k_norm(k_BSGD)
    rotate = sys.modules[type(attention).__module__].apply_rotary_pos_emb  # what its own forward would call now
    q_BHSD, k_BGSD = rotate(
        q_BSHD.transpose(1, 2), k_BSGD.transpose(1, 2), given.cos_BSR[:, rows], given.sin_BSR[:, rows]
    )
    return q_BHSD, k_BGSD, v_BSGD.transpose(1, 2)


def _projected(attention: Any, architecture: Architecture, x_BSE: torch.Tensor) -> Sequence[torch.Tensor]:
    """Queries, keys and values, [B, S, heads, D] each."""
    config, size = attention.config, attention.head_dim
    found = [getattr(attention, name)(x_BSE) for name in architecture.projections]
    if len(found) == 1:
        heads = (config.num_attention_heads, config.num_key_value_heads, config.num_key_value_heads)
        found = list(found[0].split([count * size for count in heads], -1))
    return [x_BSF.unflatten(-1, (-1, size)) for x_BSF in found]
