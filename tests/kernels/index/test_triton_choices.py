"""What the Triton builder makes of given scores: choices among equals, slashes within max_tiles, lists and bits.

Scores are drawn from a handful of values, so that ties straddle every edge; the torch builder says what is right, and
plain Python says what the k-th largest is.
"""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from index_cases import TILES, Layer, budgets, differences, make_layer
from triton_index import SMALL, call_of, group_of, torch_index, triton_index

from sparsekv.kernels.device_cache import fields_on_device
from sparsekv.kernels.index.layout import LineScores
from sparsekv.kernels.index.triton.vertical_slash import Numbers, plan_build, score
from sparsekv.kernels.index.vertical_slash import UNSEEN, score_lines
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.patterns import VerticalSlash, fraction, tokens

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="with a GPU the kernels run there")

VALUES = torch.tensor([0.0, 0.0, 0.0, 1e-30, 0.25, 1.0, 1.0, 1.5, 2.0, 63.0])
patterns = st.builds(
    VerticalSlash,
    vertical=st.one_of(st.integers(0, 60).map(tokens), budgets),
    slash=st.one_of(st.integers(0, 12).map(tokens), budgets),
    max_tiles=budgets,
)


def drawn_scores(layer: Layer, kinds: int, seed: int) -> LineScores:
    """Few different scores, and UNSEEN behind each batch row's length."""
    generator = torch.Generator().manual_seed(seed)
    shape = (len(layer.chunk.lengths), len(layer.patterns), layer.chunk.longest)
    made = [VALUES[torch.randint(kinds, shape, generator=generator)] for _ in range(2)]
    beyond_B1S = (torch.arange(shape[-1]) >= torch.tensor(layer.chunk.lengths)[:, None])[:, None]
    return LineScores(*(x.masked_fill_(beyond_B1S, UNSEEN) for x in made))


@st.composite
def scored_layers(draw: st.DrawFn) -> tuple[Layer, LineScores]:
    places = [(draw(st.integers(0, 400)), draw(st.integers(0, 300))) for _ in range(draw(st.integers(1, 2)))]
    places[0] = (places[0][0], max(1, places[0][1]))
    layer = make_layer(
        [draw(patterns) for _ in range(draw(st.integers(1, 2)))],
        Chunk(tuple(p for p, _ in places), tuple(p + n for p, n in places)),
        draw(st.sampled_from(TILES)),
        window=draw(st.one_of(st.none(), st.integers(1, 400))),
    )
    return layer, drawn_scores(layer, draw(st.integers(1, len(VALUES))), draw(st.integers(0, 1 << 20)))


@settings(
    max_examples=6,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(scored_layers())
def test_choices_among_equal_scores_are_those_of_torch(drawn: tuple[Layer, LineScores]) -> None:
    layer, scores = drawn
    lines = {64: scores}
    assert differences(triton_index(layer, lines=lines), torch_index(layer, lines=lines)) == []


@pytest.mark.parametrize(
    ("last_q", "chunk", "window"),
    [
        ((64, 7), Chunk((0,), (321,)), None),
        ((16, 100), Chunk((50, 0), (260, 190)), None),
        ((256, 130), Chunk((0,), (300,)), None),
        ((64, 64), Chunk((0,), (300,)), 90),
        ((40,), Chunk((300, 100), (312, 160)), 50),
    ],
    ids=["group", "two strips", "four strips", "window", "short chunk"],
)
def test_scores_of_columns_and_diagonals_are_those_of_torch(last_q, chunk, window) -> None:
    chosen = [VerticalSlash(vertical=tokens(1), slash=tokens(1), max_tiles=tokens(1), last_q=q) for q in last_q]
    layer = make_layer(chosen, chunk, TILES[0], window=window, spare=30, seed=4)
    call, heads = call_of(layer), tuple(range(len(last_q)))
    expected = score_lines(heads, last_q, call)
    _, (plan,) = plan_build(group_of(layer), call.layout, SMALL, 1 << 27)
    found = score(plan, call, Numbers(*fields_on_device(call.layout.device, plan.fields)))
    for b, length in enumerate(chunk.lengths):
        for name in ("vertical_BhS", "slash_BhS"):
            scores = getattr(found, name)[b, :, :length]
            torch.testing.assert_close(scores, getattr(expected, name)[b, :, :length], rtol=1e-5, atol=1e-6)
            sampled = [float(min(q, length - chunk.past[b])) for q in last_q]
            assert scores.sum(-1).tolist() == pytest.approx(sampled, rel=1e-5)


def test_scores_that_are_not_numbers_neither_hang_nor_list_what_is_not_there() -> None:
    pattern = VerticalSlash(vertical=tokens(40), slash=tokens(10), max_tiles=fraction(0.5))
    layer = make_layer((pattern,), Chunk((0,), (150,)), TILES[0])
    layer.q_BHSD[:] = torch.nan
    index = triton_index(layer)
    assert index.columns_BHC.max() < 150
    assert ((index.tiles_BHTW != -1).sum(-1) == index.counts_BHT).all()
    assert index.tiles_BHTW.max() <= 2
