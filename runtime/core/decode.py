"""Decode attention of one layer: dense, dense and choosing (a filter layer), or over the chosen tokens and the tail.

Source: OmniKV (ICLR 2025), algorithm 1. The layers between a filter and the first layer of its segment are dense:
they are the paper's wait layers.

Shapes: B batch, H query heads, S queries (one), W window queries, D head size.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.decode.rows import DecodeRows
from sparsekv.kernels.dispatch import decode_attention
from sparsekv.kernels.prefill.dense import attend_newest
from sparsekv.plans.phases import DecodeBucket, DecodePlan, Segment
from sparsekv.runtime.core.select import choose_tokens, tokens_for_layer, window_queries, within_window
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.engine import LayerCall
from sparsekv.runtime.hf.cache import Choice, SparseLayer


def attend_decode(call: LayerCall, plan: DecodePlan | None, backend: str, meter: Meter) -> torch.Tensor:
    """Attention of one new token, as the plan's bucket for this length says."""
    bucket = plan.bucket(call.length) if plan else None
    segment = _segment_with(bucket, call.layer)
    choice = _choice_of(call, segment) if segment else None
    if segment and choice is not None:
        return _attend_chosen(call, segment, choice, backend, meter)
    k_BGSD, v_BGSD = call.keys_values()
    filtered = _segment_filtered_by(bucket, call.layer)
    if filtered:
        _choose(call, filtered, k_BGSD)
    visible = _visible(call)
    meter.add_decode(visible, visible)
    return attend_newest(call.q_BHSD, k_BGSD, v_BGSD, scale=call.scale, window=call.window)


def filter_windows(plan: DecodePlan | None) -> dict[int, int]:
    """For each filter layer of any bucket, how many of its last queries have to be remembered."""
    windows: dict[int, int] = {}
    for bucket in plan.lengths if plan else ():
        for segment in bucket.segments:
            windows[segment.filter] = max(windows.get(segment.filter, 1), window_queries(segment))
    return windows


def _segment_with(bucket: DecodeBucket | None, layer: int) -> Segment | None:
    return next((segment for segment in bucket.segments if layer in segment.layers), None) if bucket else None


def _segment_filtered_by(bucket: DecodeBucket | None, layer: int) -> Segment | None:
    return next((segment for segment in bucket.segments if layer == segment.filter), None) if bucket else None


def _entry(call: LayerCall) -> SparseLayer:
    entry = call.entry
    assert entry is not None, "decode without a cache"
    return entry


def _visible(call: LayerCall) -> int:
    return call.length if call.window is None else min(call.length, call.window)


def _choose(call: LayerCall, segment: Segment, k_BGSD: torch.Tensor) -> None:
    entry, queries = _entry(call), window_queries(segment)
    q_BHWD = call.q_BHSD if queries == 1 or entry.recent_BHWD is None else entry.recent_BHWD[:, :, -queries:]
    tokens = choose_tokens(segment, q_BHWD, k_BGSD, entry.prompt_end, scale=call.scale)
    entry.chosen = Choice(call.length, tokens)


def _choice_of(call: LayerCall, segment: Segment) -> torch.Tensor | None:
    """The tokens chosen in this step; None when that is all of them."""
    assert call.cache is not None
    entry = call.cache.layers[segment.filter]
    assert isinstance(entry, SparseLayer)
    assert entry.chosen is not None, "the filter layer comes first"
    assert entry.chosen.length == call.length, "a choice of an earlier step"
    return entry.chosen.tokens_BGN


def _attend_chosen(
    call: LayerCall, segment: Segment, choice_BgN: torch.Tensor, backend: str, meter: Meter
) -> torch.Tensor:
    entry = _entry(call)
    tokens_BgN = tokens_for_layer(segment, call.layer, choice_BgN.to(call.q_BHSD.device))
    tail_start = entry.prompt_end
    if call.window is not None:
        first = call.length - call.window
        tokens_BgN, tail_start = within_window(tokens_BgN, first), max(tail_start, first)
    found = entry.store.gather(DecodeRows(tokens_BgN, tail_start, call.length))
    visible = _visible(call)
    meter.add_decode(min(visible, tokens_BgN.shape[2] + call.length - tail_start), visible)
    return decode_attention(
        call.q_BHSD, found.k_BGSD, found.v_BGSD, found.rows, scale=call.scale, backend=backend
    ).out_BHSD
