"""Prefill attention of one layer: the plan's patterns for its heads, or dense.

Shapes: B batch, H query heads, S queries, D head size.
"""

from __future__ import annotations

from functools import partial

import torch

from sparsekv.kernels.density import computed_tiles
from sparsekv.kernels.dispatch import dense_by_flash, dense_prefill, prefill_attention
from sparsekv.kernels.fallback import Fallback
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.plans.patterns import Dense, TileShape
from sparsekv.plans.phases import PrefillPlan
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.engine import LayerCall

DEFAULT_TILE = TileShape()


def attend_prefill(call: LayerCall, plan: PrefillPlan | None, fallback: Fallback, meter: Meter) -> torch.Tensor:
    """Attention of the call's rows to everything before them, as the plan's bucket for this length says."""
    k_BGSD, v_BGSD = call.keys_values()
    heads = call.q_BHSD.shape[1]
    tile = plan.tile if plan else DEFAULT_TILE
    causal = heads * call.chunk.causal_tiles(tile)
    patterns = call.own(plan.bucket(call.length).patterns(call.layer, call.layer_heads)) if plan else ()
    if all(isinstance(pattern, Dense) for pattern in patterns):
        meter.add_dense_prefill(causal)
        return _dense_layer(call, k_BGSD, v_BGSD, fallback)
    build = partial(build_index, patterns, call.q_BHSD, k_BGSD, call.chunk, tile, scale=call.scale, window=call.window)
    index = fallback.build(lambda builder: build(builder=builder), call.q_BHSD.device)
    meter.add_sparse_prefill(computed_tiles(index), causal)
    attend = partial(
        prefill_attention, call.q_BHSD, k_BGSD, v_BGSD, index, call.chunk, scale=call.scale, window=call.window
    )
    return fallback.run(lambda backend: attend(backend=backend), call.q_BHSD, tile).out_BHSD


def _dense_layer(call: LayerCall, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, fallback: Fallback) -> torch.Tensor:
    """By the backend's dense kernel where it has one. What fails in torch is no fault of the backend."""
    if not dense_by_flash(call.q_BHSD, k_BGSD, v_BGSD, call.chunk, backend=fallback.backend):
        return attend_dense(call, k_BGSD, v_BGSD)
    attend = partial(dense_prefill, call.q_BHSD, k_BGSD, v_BGSD, call.chunk, scale=call.scale, window=call.window)
    return fallback.run(lambda backend: attend(backend=backend), call.q_BHSD).out_BHSD


def attend_dense(call: LayerCall, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> torch.Tensor:
    """Dense causal attention within the layer's own window, by torch."""
    return dense_attention(call.q_BHSD, k_BGSD, v_BGSD, call.chunk, scale=call.scale, window=call.window).out_BHSD
