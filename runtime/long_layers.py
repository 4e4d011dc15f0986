"""Decoder layers on long inputs: everything row-wise in pieces, attention over the whole.

A Hugging Face decoder layer makes float32 copies of its whole input in each norm, several copies of the queries in its
rotary embedding, and tensors of the MLP's width: 100 GB at 1M tokens of an 8B model. Here a layer writes queries, keys
and values piece by piece into place, attends once, and adds the output projection and the MLP to its input in place,
again piece by piece. It calls the model's own norms, projections, rotary function and MLP.

Shapes: B batch, S tokens, E hidden size, H query heads, G KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import Cache

from sparsekv.runtime.cache import SparseLayer
from sparsekv.runtime.engine import Engine, LayerCall
from sparsekv.runtime.known_layers import rotary_of, window_of
from sparsekv.runtime.stores.base import Layout


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What one decoder layer is called with."""

    model_type: str
    hidden_BSE: torch.Tensor
    cos_BSR: torch.Tensor  # R is D, or less where only a part of each head is rotated
    sin_BSR: torch.Tensor
    cache: Cache | None

    def first(self, tokens: int) -> LayerInput:
        """The first tokens alone, without a cache."""
        rows = slice(0, tokens)
        return LayerInput(self.model_type, self.hidden_BSE[:, rows], self.cos_BSR[:, rows], self.sin_BSR[:, rows], None)


def forward_in_pieces(
    layer: nn.Module, given: LayerInput, engine: Engine, pieces: Sequence[slice], into_BSE: torch.Tensor
) -> torch.Tensor:
    """What the layer's own forward returns, up to rounding of products cut by rows.

    Args:
        layer: one for which `known_layers` holds.
        engine: attends.
        pieces: which tokens are worked on together.
        into_BSE: where the result goes; may be the input itself.
    """
    parts: Any = layer
    out_BHSD = _attend(parts, given, engine, pieces)
    for rows in pieces:
        attended_BSE = out_BHSD[:, :, rows].transpose(1, 2).flatten(2)
        hidden_BSE = into_BSE[:, rows]
        torch.add(given.hidden_BSE[:, rows], parts.self_attn.o_proj(attended_BSE), out=hidden_BSE)
        hidden_BSE += parts.mlp(parts.post_attention_layernorm(hidden_BSE))
    return into_BSE


def _attend(layer: Any, given: LayerInput, engine: Engine, pieces: Sequence[slice]) -> torch.Tensor:
    """[B, H, S, D], in the memory of the queries where the engine put it there. Keys and values are let go of."""
    attention, (batch, tokens, _) = layer.self_attn, given.hidden_BSE.shape
    # Queries first: their memory is then free again as one piece when the next layer asks for as much.
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
    window = window_of(attention, given.model_type)
    return engine.attend(
        LayerCall(attention.layer_idx, q_BHSD, k_BGSD, v_BGSD, given.cache, attention.scaling, window, q_is_spare=True)
    )


def _project(layer: Any, given: LayerInput, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, and values, of some tokens: what the attention's own forward makes of them."""
    attention, x_BSE = layer.self_attn, layer.input_layernorm(given.hidden_BSE[:, rows])
    shape = (*x_BSE.shape[:-1], -1, attention.head_dim)
    q_BSHD, k_BSGD, v_BSGD = (
        projection(x_BSE).view(shape) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q_BSHD, k_BSGD = attention.q_norm(q_BSHD), attention.k_norm(k_BSGD)
    q_BHSD, k_BGSD = rotary_of(attention)(
        q_BSHD.transpose(1, 2), k_BSGD.transpose(1, 2), given.cos_BSR[:, rows], given.sin_BSR[:, rows]
    )
    return q_BHSD, k_BGSD, v_BSGD.transpose(1, 2)
