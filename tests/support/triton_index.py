"""Indices built by the Triton builders, in poisoned memory, beside those of the torch builders."""

from __future__ import annotations

from typing import Any

from index_cases import Layer, build
from torch_state import poisoned_memory

from sparsekv.kernels.index.build import empty_index
from sparsekv.kernels.index.layout import FamilyHeads, IndexCall, LineScores
from sparsekv.kernels.index.triton import vertical_slash
from sparsekv.kernels.index.triton.sizes import KeyPass, Sizes
from sparsekv.kernels.tiles import TileIndex

# So small that tiny prompts take several runs, and every loop more than one turn.
SMALL = Sizes(
    stats={1: KeyPass(2, 64, 64, 1), 2: KeyPass(1, 64, 128, 1), 4: KeyPass(2, 64, 192, 1)},
    lines={1: KeyPass(1, 64, 128, 1), 2: KeyPass(2, 64, 64, 1), 4: KeyPass(1, 64, 128, 1)},
    select_block=256,
    crossings_block=4,
    diagonals_block=16,
    rows_block=2,
    rows_tiles=8,
    rows_words=4,
    products_block=16,
    products_numbers=16,
    choose_block=2,
    choose_tiles=4,
)


def call_of(layer: Layer, lines: dict[int, LineScores] | None = None) -> IndexCall:
    return IndexCall.of(layer.q_BHSD, layer.k_BGKD, layer.chunk, layer.tile, layer.scale, layer.window, lines)


def group_of(layer: Layer) -> FamilyHeads:
    """All heads, whose patterns are of one kind."""
    return FamilyHeads.of(layer.patterns, range(len(layer.patterns)))


def triton_index(
    layer: Layer, sizes: Sizes = SMALL, lines: dict[int, LineScores] | None = None, builder: Any = vertical_slash
) -> TileIndex:
    """All heads by a Triton builder; every number of the index is poison before."""
    call, group = call_of(layer, lines), group_of(layer)
    assert builder.takes(group, call)
    with poisoned_memory():
        prepared = builder.prepare(group, call, sizes)
        index = empty_index([prepared.widths], call.layout, ())
        prepared.fill(index)
    return index


def torch_index(layer: Layer, lines: dict[int, LineScores] | None = None) -> TileIndex:
    return build(layer, builder="torch", lines=lines)
