"""Prefill attention of one layer: the plan's patterns for its heads, or dense.

Shapes: B batch, H query heads, G KV heads, S queries, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import torch

from sparsekv.kernels.backends import Fallback, dense_by_flash, dense_by_triton, dense_prefill, prefill_attention
from sparsekv.kernels.index.build import BuilderName, build_index
from sparsekv.kernels.keys import PLAIN, KeyView
from sparsekv.kernels.prefill.dense import attend_last_rows, dense_attention
from sparsekv.kernels.tiles import Chunk, TileIndex, spent_tiles
from sparsekv.plans.errors import ShapeError
from sparsekv.plans.patterns import Dense
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.stats import Meter


@dataclass(frozen=True, slots=True)
class DenseLayers:
    """Layers in which a chunk's rows, all of one past and length, attend to everything before them and nothing else is
    to be done: that is decided once for all of them. Of short prompts the device waits for the host."""

    layers: Mapping[int, LayerProgram]
    tiles: Mapping[int | None, int]  # causal ones of a head, by the layer's own window
    chunk: Chunk
    fallback: Fallback
    meter: Meter
    by_torch: dict[int, bool] = field(default_factory=dict)  # by head size, for the backend of the first such layer

    def attend(
        self, layer: int, q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, scale: float
    ) -> torch.Tensor:
        """As `prefill`, of keys with the chunk's included."""
        program, size = self.layers[layer], q_BHSD.shape[3]
        self.meter.add_dense_prefill(program.heads * self.tiles[program.window])
        if size not in self.by_torch:
            self.by_torch[size] = not _has_kernel(q_BHSD, k_BGKD, v_BGKD, self.chunk, self.fallback)
        if self.by_torch[size]:
            return attend_last_rows(q_BHSD, k_BGKD, v_BGKD, self.chunk.lengths[0], scale, program.window)
        return _by_kernel(program, q_BHSD, k_BGKD, v_BGKD, self.chunk, scale, self.fallback)


def prefill(
    layer: LayerProgram,
    q_BHSD: torch.Tensor,
    keys: KeyView,
    chunk: Chunk,
    *,
    scale: float,
    fallback: Fallback,
    meter: Meter | None = None,
    overwrite_above: int | None = None,
) -> torch.Tensor:
    """Attention of a chunk's rows to everything before them, as the bucket of the longest row says.

    Args:
        q_BHSD: queries of the rank's heads.
        keys: all keys so far, the chunk's included: contiguous. A host with pages copies a request's past first.
        fallback: the backend, and what follows when it fails.
        overwrite_above: where the output holds more bytes than this, it takes the place of q, in groups of KV heads
            that keep each output within it (or one by one); the output of a layer is as large as its queries: 8.6 GB
            at 1M tokens of an 8B model. None never overwrites.

    Returns:
        [B, H, S, D]: q itself where it was overwritten.

    Raises:
        ShapeError: the keys are in pages.
    """
    if keys.table_BP is not None:
        raise ShapeError("prefill takes contiguous keys, found pages: copy a request's tokens with KeyView.contiguous")
    attend = partial(_attend, chunk=chunk, scale=scale, fallback=fallback, meter=meter or Meter())
    groups = keys.kv_heads if overwrite_above is None else _groups(q_BHSD, keys.kv_heads, overwrite_above)
    if groups >= keys.kv_heads:
        return attend(layer, q_BHSD, keys)
    per_kv = layer.heads // keys.kv_heads
    for first in range(0, keys.kv_heads, groups):
        kv = slice(first, min(first + groups, keys.kv_heads))
        queries = slice(kv.start * per_kv, kv.stop * per_kv)
        part_BHSD = q_BHSD[:, queries]
        part_BHSD.copy_(attend(layer.for_heads(queries, kv), part_BHSD, keys.heads(kv, queries)))
    return q_BHSD


def _groups(q_BHSD: torch.Tensor, kv_heads: int, most_bytes: int) -> int:
    """KV heads of a group, as even as they go."""
    per_head = q_BHSD.numel() * q_BHSD.element_size() // kv_heads
    count = -(-kv_heads // max(1, most_bytes // max(per_head, 1)))
    return -(-kv_heads // count)


def _attend(
    layer: LayerProgram, q_BHSD: torch.Tensor, keys: KeyView, chunk: Chunk, scale: float, fallback: Fallback,
    meter: Meter,
) -> torch.Tensor:  # fmt: skip
    k_BGKD, v_BGKD = keys.contiguous(chunk.longest)
    window, patterns = layer.window, layer.patterns_at(chunk.longest)
    causal = layer.heads * chunk.causal_tiles(layer.tile, window)
    if not patterns and keys.softmax is PLAIN:
        meter.add_dense_prefill(causal)
        if _has_kernel(q_BHSD, k_BGKD, v_BGKD, chunk, fallback):
            return _by_kernel(layer, q_BHSD, k_BGKD, v_BGKD, chunk, scale, fallback)
        return dense_attention(q_BHSD, k_BGKD, v_BGKD, chunk, scale=scale, window=window).out_BHSD
    patterns = patterns or (Dense(),) * layer.heads  # dense kernels know no other softmax
    index_of = partial(build_index, scale=scale, window=window, softmax=keys.softmax)
    build = partial(index_of, patterns, q_BHSD, k_BGKD, chunk, layer.tile, layer=layer.layer)

    def build_and_count(builder: BuilderName) -> tuple[TileIndex, torch.Tensor]:
        index = build(builder=builder)
        return index, spent_tiles(index, chunk, window, by_torch=builder == "torch")

    index, spent_BH = fallback.build(build_and_count, q_BHSD.device)
    meter.add_sparse_prefill(spent_BH, causal)
    by = partial(prefill_attention, scale=scale, window=window, softmax=keys.softmax)
    attend = partial(by, q_BHSD, k_BGKD, v_BGKD, index, chunk)
    return fallback.run(lambda backend: attend(backend=backend), q_BHSD, layer.tile).out_BHSD


def _has_kernel(
    q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, chunk: Chunk, fallback: Fallback
) -> bool:
    """Returns whether the backend has a dense kernel. Where it has none, torch attends, and may fail alone."""
    by_triton = dense_by_triton(q_BHSD, backend=fallback.backend)
    return by_triton or dense_by_flash(q_BHSD, k_BGKD, v_BGKD, chunk, backend=fallback.backend)


def _by_kernel(
    layer: LayerProgram, q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, chunk: Chunk, scale: float,
    fallback: Fallback,
) -> torch.Tensor:  # fmt: skip
    attend = partial(dense_prefill, q_BHSD, k_BGKD, v_BGKD, chunk, scale=scale, window=layer.window)
    if dense_by_triton(q_BHSD, backend=fallback.backend):
        return fallback.dense(lambda backend: attend(backend=backend), q_BHSD.device).out_BHSD
    return fallback.run(lambda backend: attend(backend=backend), q_BHSD).out_BHSD
