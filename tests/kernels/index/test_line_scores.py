"""Line scores that are estimated once serve every index of the layer."""

import pytest
import torch
from index_cases import TILES, build, differences, make_layer

from sparsekv.kernels.index.build import layer_lines
from sparsekv.kernels.index.layout import LineScores
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import AShape, VerticalSlash, tokens


def slash(count: int, last_q: int = 64) -> VerticalSlash:
    return VerticalSlash(vertical=tokens(count), slash=tokens(2 * count), last_q=last_q, max_tiles=tokens(256))


def test_known_lines_give_the_index_that_scoring_anew_gives() -> None:
    patterns = (slash(4), AShape(sink=tokens(1), window=tokens(9)), slash(9), slash(2))
    layer = make_layer(patterns, Chunk((0, 40), (300, 250)), TILES[0], kv_heads=2)
    place = {"scale": layer.scale, "window": layer.window}
    lines = layer_lines(layer.q_BHSD, layer.k_BGKD, layer.chunk, last_q=64, **place)
    assert differences(build(layer), build(layer, lines={64: lines})) == []


def test_known_lines_of_another_sample_are_not_used() -> None:
    layer = make_layer((slash(4, last_q=16),) * 4, Chunk.uniform(1, 0, 300), TILES[0], kv_heads=2)
    wrong = torch.rand(1, 4, 300)
    assert differences(build(layer), build(layer, lines={64: LineScores(wrong, wrong)})) == []


@pytest.mark.parametrize("at_once", [(1, 1), (7, 1 << 20), (64, 400)])
def test_how_many_rows_are_summed_at_once_changes_no_score(
    monkeypatch: pytest.MonkeyPatch, at_once: tuple[int, int]
) -> None:
    layer = make_layer((slash(4),) * 4, Chunk((30, 0), (300, 41)), TILES[0], kv_heads=2, window=120)
    place = {"scale": layer.scale, "window": layer.window}
    expected = layer_lines(layer.q_BHSD, layer.k_BGKD, layer.chunk, last_q=64, **place)
    monkeypatch.setattr("sparsekv.kernels.index.vertical_slash._AT_ONCE", {"cpu": at_once})
    found = layer_lines(layer.q_BHSD, layer.k_BGKD, layer.chunk, last_q=64, **place)
    torch.testing.assert_close(found.vertical_BhS, expected.vertical_BhS, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(found.slash_BhS, expected.slash_BhS, rtol=1e-5, atol=1e-6)
