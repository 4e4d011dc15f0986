"""The pattern of docs/extending.md against its definition: what the own test of a pattern looks like."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_cases import Layer, build, layers
from strided import index_strided
from strided_pattern import Strided

from sparsekv.kernels.index.build import BUILDERS, IndexBuilder
from sparsekv.kernels.reference import mask_of


def defined_mask(layer: Layer) -> torch.Tensor:
    """bool [B, H, S, K], from the words of the class."""
    mask_BHSK = torch.zeros(*layer.q_BHSD.shape[:3], layer.chunk.longest, dtype=torch.bool)
    for b, (past, length) in enumerate(zip(layer.chunk.past, layer.chunk.lengths, strict=True)):
        i_S1, j_K = torch.arange(past, length)[:, None], torch.arange(length)
        first_S1 = i_S1 - (i_S1 - past) % layer.tile.query
        last_S1 = (first_S1 + layer.tile.query).clamp(max=length) - 1
        near_SK = (j_K // layer.tile.key >= first_S1 // layer.tile.key - 1) & (j_K <= last_S1)
        seen_SK = (j_K <= i_S1) & (i_S1 - j_K < (layer.window or length))
        for h, pattern in enumerate(layer.patterns):
            chosen_SK = near_SK | (j_K // layer.tile.key % pattern.stride == 0)
            mask_BHSK[b, h, : length - past, :length] = chosen_SK & seen_SK
    return mask_BHSK


@settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(layers(st.builds(Strided, stride=st.integers(1, 9))))
def test_every_stride_th_tile_and_the_mandatory_ones_are_computed(layer: Layer) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(BUILDERS, Strided, IndexBuilder(index_strided))  # type: ignore[misc]
        index = build(layer)
    assert torch.equal(mask_of(index, layer.chunk, layer.q_BHSD.shape[2], layer.window), defined_mask(layer))
