"""Never slower than dense, as far as can be predicted: heads, families, layers, lengths, in both phases."""

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from planner_models import TILE, made_up_prices
from planner_profiles import made_up_length, made_up_model, made_up_profile, made_up_reuse, options_for, rows

from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, density
from sparsekv.planner.allocate import allocate
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.predict import (
    LEAST_GAIN,
    LayerTimes,
    ScoreTables,
    choice_of,
    dense_step_us,
    layer_times,
    longest_losing,
    pays,
    predict,
    shares_at,
    step_us,
)
from sparsekv.planner.prices import Prices
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, TileShape, tokens
from sparsekv.plans.phases import PrefillPlan

FAMILIES = ("a_shape", "vertical_slash", "block_sparse")
HEAD_US = 128 * 129 / 2  # a dense head at 8192 tokens: its causal tiles, a microsecond each
RAY = {"a_shape": "a", "vertical_slash": "v1", "block_sparse": "b"}


def profile_with(length: int = 8192, **options) -> Profile:
    return made_up_profile(made_up_length(length, np.random.default_rng(0), **options))


def two_lengths() -> Profile:
    rng = np.random.default_rng(0)
    return made_up_profile(made_up_length(4096, rng, levels=(0.4,)), made_up_length(16384, rng, levels=(0.3,)))


def preferring(profile: Profile, layer: int, *families: str) -> Profile:
    """The profile with each head of a layer best served by the ray of a family, and next best by a_shape."""
    (entry,) = profile.lengths
    damage = np.full((len(entry.candidates), len(families)), 1.0)
    for place, candidate in enumerate(entry.candidates):
        damage[place, :] = 0.5 if candidate.range == "a" else 1.0
        for head, family in enumerate(families):
            if candidate.range == RAY[family]:
                damage[place, head] = 0.1
    changed = entry.layers[layer].model_copy(update={"damage": rows(damage), "worst": rows(damage)})
    layers = (*entry.layers[:layer], changed, *entry.layers[layer + 1 :])
    return made_up_profile(entry.model_copy(update={"layers": layers}))


def with_tiles(profile: Profile, layer: int, share: float) -> Profile:
    """The profile with every candidate of a layer computing this share of whole tiles, and no columns."""
    (entry,) = profile.lengths
    count = len(entry.candidates)
    changed = entry.layers[layer].model_copy(
        update={"tiles": ((share,) * 4,) * count, "columns": ((0.0,) * 4,) * count}
    )
    layers = (*entry.layers[:layer], changed, *entry.layers[layer + 1 :])
    return made_up_profile(entry.model_copy(update={"layers": layers}))


def kinds(profile: Profile, cost: Prices, layer: int, target: float = 0.3) -> list[str]:
    bucket = allocate(profile, cost, options_for(target_density=(target,))).bucket(8192)
    return [pattern.pattern for pattern in bucket.patterns(layer, 4)]


@pytest.mark.parametrize("length", [1024, 8192, 131072, 1 << 20, 5000])
@pytest.mark.parametrize("share", [0.02, 0.3, 0.77, 0.99])
def test_the_crossing_length_is_found_to_256_tokens(length: int, share: float) -> None:
    pays_from = share * length
    found = longest_losing(lambda n: n >= pays_from, length) or 0
    assert found < max(pays_from, 257) <= found + 256  # buckets are no finer: below the first 256, all or nothing
    assert found % 256 == 0


def test_where_predictions_go_up_and_down_everything_below_the_longest_loss_is_dense() -> None:
    asked = []

    def pays_at(length: int) -> bool:
        asked.append(length)
        return not 2800 < length < 3000

    assert longest_losing(pays_at, 8192) == 2816
    assert asked == sorted(asked, reverse=True)
    assert len(asked) > 5
    assert longest_losing(lambda n: True, 8192) is None


@pytest.mark.parametrize(("above", "found"), [(0, 256), (4096, 4352), (4100, 4352), (8000, None)])
def test_prompts_too_short_for_the_first_multiple_do_not_run_sparse_at_a_loss(above: int, found: int | None) -> None:
    assert longest_losing(lambda n: n > above + 60, 8192, above) == found


@pytest.mark.parametrize("above", [0, 256, 4096, 8000, 8191])
def test_lengths_up_to_the_profiled_one_before_are_not_asked_about(above: int) -> None:
    asked: list[int] = []
    assert longest_losing(lambda n: bool(asked.append(n)) or True, 8192, above) is None
    assert all(above < length < 8192 for length in asked)
    assert asked or above >= 8000
    gaps = [longer - shorter for longer, shorter in zip([8192, *asked], [*asked, above], strict=True)]
    assert max(gaps) <= 512


def test_a_gain_within_what_timings_vary_by_is_none() -> None:
    assert not pays(100.0, 100.0)
    assert not pays(100.0 * (1 - LEAST_GAIN / 2), 100.0)
    assert pays(100.0 * (1 - 2 * LEAST_GAIN), 100.0)


@pytest.mark.parametrize("pattern", [AShape(sink=tokens(64), window=tokens(600)), BlockSparse(keep=tokens(1000))])
@pytest.mark.parametrize("tile", [TileShape(query=64, key=64), TileShape(query=128, key=64)], ids=str)
def test_tiles_at_a_shorter_length_are_about_those_that_the_index_has_there(pattern, tile: TileShape) -> None:
    def counted(length: int) -> float:
        q_11LD = torch.randn(1, 1, length, 8, generator=torch.Generator().manual_seed(0))
        chunk = Chunk.uniform(1, 0, length)
        return float(density(build_index((pattern,), q_11LD, q_11LD, chunk, tile, scale=1.0), chunk))

    entry = made_up_length(8192, np.random.default_rng(0), layers=1, heads=1, levels=(0.3,))
    tables = ScoreTables.of(with_share(entry, counted(8192)))
    choice = np.zeros((1, 1), np.int64)
    for length in (600, 1000, 2048, 4096, 6144):
        tiles_LH, columns_LH = shares_at(tables, choice, tile, length)
        assert tiles_LH[0, 0] == pytest.approx(counted(length), rel=0.1), length
        assert columns_LH[0, 0] == 0.0


def with_share(entry: LengthProfile, share: float) -> LengthProfile:
    update = {"tiles": ((share,),) * len(entry.candidates), "columns": ((0.0,),) * len(entry.candidates)}
    return entry.model_copy(update={"layers": (entry.layers[0].model_copy(update=update),)})


def test_columns_shrink_with_the_length_like_tiles_and_never_beyond_the_triangle() -> None:
    tables = ScoreTables.of(made_up_length(8192, np.random.default_rng(0), levels=(0.4,)))
    choice = np.ones(tables.present_LH.shape, np.int64)  # a ray with columns
    before = 0.4
    for length in (7000, 4096, 2048, 512, 64):
        tiles_LH, columns_LH = shares_at(tables, choice, TILE, length)
        both = float((tiles_LH + columns_LH)[0, 0])
        assert before <= both <= 1.0
        assert (columns_LH >= 0.0).all()
        before = both
    assert before == 1.0


def test_a_head_whose_family_pays_for_its_index_keeps_it() -> None:
    profile = preferring(profile_with(), 1, "vertical_slash", "vertical_slash", "a_shape", "a_shape")
    cost = made_up_prices(index={"vertical_slash": (1.1 * 0.7 * HEAD_US, 0.0, 0.0)})
    assert kinds(profile, cost, 1) == ["vertical_slash", "vertical_slash", "a_shape", "a_shape"]


def test_a_lone_head_takes_another_family_when_its_own_costs_more_to_launch_than_it_saves() -> None:
    profile = preferring(profile_with(levels=(0.3,)), 1, "vertical_slash", "a_shape", "a_shape", "a_shape")
    cost = made_up_prices(index={"vertical_slash": (1.1 * 0.7 * HEAD_US, 0.0, 0.0)})
    assert kinds(profile, cost, 1) == ["a_shape"] * 4
    assert kinds(profile, made_up_prices(), 1)[0] == "vertical_slash"


def test_a_layer_whose_launches_cost_more_than_it_saves_runs_dense_as_a_whole() -> None:
    profile = with_tiles(profile_with(levels=(0.2,)), 1, 0.32)
    dense_us = 4 * HEAD_US
    cost = made_up_prices(tiles=(0.7 * dense_us, 1.0), column=1.0)
    assert kinds(profile, cost, 1, 0.25) == ["dense"] * 4
    assert "dense" not in kinds(profile, cost, 0, 0.25)
    assert "dense" not in kinds(profile, made_up_prices(), 1, 0.25)
    plan = allocate(profile, cost, options_for(target_density=(0.25,)))
    estimate = predict(profile, cost, plan, None).lengths[0].prefill
    assert estimate.sparse_us < estimate.dense_us


def times_at(profile: Profile, cost: Prices, plan: PrefillPlan, length: int) -> LayerTimes:
    """What the plan takes at a length, by the tables of the profiled length whose patterns hold there."""
    entry = next(entry for entry in profile.lengths if entry.length >= length)
    tables = ScoreTables.of(entry)
    return layer_times(cost, tables, choice_of(plan.bucket(length), tables), TILE, length)


def test_sparse_heads_keep_to_the_target_whatever_goes_dense() -> None:
    profile = with_tiles(profile_with(levels=(0.2,)), 1, 0.32)
    cost = made_up_prices(tiles=(0.7 * 4 * HEAD_US, 1.0))
    bucket = allocate(profile, cost, options_for(target_density=(0.3,))).bucket(8192)
    tables = ScoreTables.of(profile.lengths[0])
    choice = choice_of(bucket, tables)
    sparse = choice >= 0
    assert sparse.any()
    assert not sparse.all()
    assert tables.take(tables.density_LCH, choice, 0.0)[sparse].mean() <= 0.3 * 1.0001


def test_between_two_profiled_lengths_dense_runs_where_the_longer_ones_patterns_would_not_pay() -> None:
    profile, cost = two_lengths(), made_up_prices(tiles=(2500.0, 1.0), column=1.0)
    plan = allocate(profile, cost, options_for(target_density=(0.4, 0.3)))
    bounds = [(bucket.up_to, bucket.dense) for bucket in plan.lengths]
    assert [dense for _, dense in bounds] == [True, False, True, False, False]
    assert bounds[1][0] == 4096
    assert 4096 < bounds[2][0] < 9000
    assert bounds[3][0] == 16384
    crossing = bounds[2][0]
    assert not pays(*totals(times_at(profile, cost, sparse_everywhere(profile, cost), crossing)))
    assert pays(*totals(times_at(profile, cost, plan, crossing + 256)))


def sparse_everywhere(profile: Profile, cost: Prices) -> PrefillPlan:
    return allocate(profile, cost, options_for(target_density=(0.4, 0.3), crossover=False))


def totals(times: LayerTimes) -> tuple[float, float]:
    return float(times.sparse_us.sum()), float(times.dense_us.sum())


def test_a_device_on_which_nothing_pays_gets_a_dense_plan() -> None:
    cost = made_up_prices(tiles=(1e8, 1.0), column=1.0)
    plan = allocate(two_lengths(), cost, options_for(target_density=(0.4, 0.3)))
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths] == [(None, True)]
    assert plan.bucket(1 << 20).dense


@pytest.mark.parametrize(("context", "dense"), [(8192, False), (16384, False), (131072, True)])
def test_beyond_the_longest_length_prefill_is_dense_where_index_building_outgrows_what_it_saves(
    context: int, dense: bool
) -> None:
    rng = np.random.default_rng(0)
    profile = made_up_profile(made_up_length(8192, rng, levels=(0.3,)), model=made_up_model(context=context))
    # An index takes more than the dense kernel once its launches no longer make up for it.
    index = dict.fromkeys(FAMILIES, (0.0, 0.0, 1.2e-4))
    cost = made_up_prices(dense=(60_000.0, 1.0), tiles=(0.0, 2.0), column=2.0, index=index)
    plan = allocate(profile, cost, options_for(target_density=(0.3,)))
    assert not plan.bucket(8192).dense
    assert plan.bucket(max(8193, context)).dense is dense
    if not dense:
        assert (plan.lengths[-1].extrapolated, plan.lengths[-1].same_as) == (True, 8192)


PRICES = st.floats(0.0, 5000.0)


@settings(max_examples=60, deadline=None)
@example(seed=0, launch=0.0, index=[0.0] * 3, tile_us=0.375, per_token=0.0234375)
@given(st.integers(0, 1000), PRICES, st.lists(PRICES, min_size=3, max_size=3), st.floats(0.3, 2.0), st.floats(0.0, 1.0))
def test_no_length_is_predicted_to_be_slower_than_dense(
    seed: int, launch: float, index: list[float], tile_us: float, per_token: float
) -> None:
    rng = np.random.default_rng(seed)
    profile = made_up_profile(
        made_up_length(4096, rng, drift=0.08, levels=(0.25, 0.4)), made_up_length(16384, rng, levels=(0.2, 0.3))
    )
    prices = {name: (us, per_token, 0.0) for name, us in zip(FAMILIES, index, strict=True)}
    cost = made_up_prices(tiles=(launch, tile_us), column=1.5 * tile_us, index=prices)
    plan = allocate(profile, cost, options_for(target_density=(0.4, 0.3)))
    asked: list[int] = []
    for length, above in ((4096, 0), (16384, 4096)):
        longest_losing(lambda n: bool(asked.append(n)) or True, length, above)
    assert len(asked) > 30
    for length in (*asked, 1, 3, 40, 255, 4097, 4096, 16384):
        sparse_us, dense_us = totals(times_at(profile, cost, plan, length))
        assert sparse_us <= dense_us * (1 + 1e-9), length
    for entry in profile.lengths:
        times = times_at(profile, cost, plan, entry.length)
        assert (times.sparse_us <= times.dense_us * (1 + 1e-9)).all()


def test_without_a_crossover_nothing_is_dense() -> None:
    cost = made_up_prices(tiles=(1e8, 10.0), column=10.0)
    plan = sparse_everywhere(two_lengths(), cost)
    patterns = [
        p for length in (1, 4096, 5000, 16384) for layer in range(3) for p in plan.bucket(length).patterns(layer, 4)
    ]
    assert len(patterns) == 48
    assert not any(isinstance(pattern, Dense) for pattern in patterns)


def test_decode_goes_dense_below_its_crossing() -> None:
    # Two dense layers of three go, for a launch each and a choice: 12 us, when a dense layer takes 1 us in 1024 tokens.
    cost = made_up_prices(decode_sparse=(5.0, 0.001), choice=(2.0, 0.0))
    lengths = [
        LengthProfile(length=length, prompt_tokens=(length,), reuse=made_up_reuse(np.ones((3, 3))))
        for length in (8192, 32768)
    ]
    plan = choose_filter_layers(made_up_profile(*lengths, model=made_up_model(layers=3)), cost, options_for())
    crossing = plan.lengths[0].up_to
    assert plan.lengths[0].dense
    assert [bucket.dense for bucket in plan.lengths] == [True, False]
    segments = plan.lengths[1].segments
    model = made_up_model(layers=3)
    assert not pays(step_us(segments, cost, crossing, model), dense_step_us(cost, crossing, model))
    longer = crossing + 256
    assert pays(step_us(segments, cost, longer, model), dense_step_us(cost, longer, model))


def decode_profile(*lengths: int, layers: int = 3, sliding: tuple[int, ...] = (), context: int = 65536) -> Profile:
    """Any choice serves every layer, at these lengths; some layers have a window of their own."""
    model = made_up_model(layers=layers, context=context)
    (group,) = model.attention
    full = group.model_copy(update={"layers": tuple(sorted(set(range(layers)).difference(sliding)))})
    window = group.model_copy(update={"layers": sliding, "kind": "sliding", "window": 1024})
    model = model.model_copy(update={"attention": (full, window) if sliding else (full,)})
    reuse = made_up_reuse(np.ones((layers, layers)))
    entries = [LengthProfile(length=length, prompt_tokens=(length,), reuse=reuse) for length in lengths]
    return made_up_profile(*entries, model=model)


def test_a_layer_with_a_window_of_its_own_costs_what_its_window_holds() -> None:
    profile, cost = decode_profile(8192, layers=4, sliding=(1, 3)), made_up_prices()
    decode = choose_filter_layers(profile, cost, options_for())
    assert [(part.filter, part.layers) for part in decode.bucket(8192).segments] == [(0, (2,))]
    (found,) = predict(profile, cost, None, decode).lengths
    attended = 4 + 820 + 128
    assert found.decode.dense_us == pytest.approx(2 * 8.192 + 2 * 1.024)
    assert found.decode.sparse_us == pytest.approx(8.192 + 0.8192 + 0.001 * attended + 2 * 1.024)
    assert found.decode.density == pytest.approx((8192 + attended + 2048) / (2 * 8192 + 2048), rel=1e-4)


@pytest.mark.parametrize("window", [1, 64, 65, 1000, 2048, 100_000])
def test_a_prefill_with_windowed_layers_is_predicted_over_all_layers(window: int) -> None:
    """The layers with windows take the same time either way: the tiles that their windows touch."""
    profile = profile_with(2048, levels=(0.3,))
    (group,) = profile.model.attention
    sliding = group.model_copy(update={"layers": (3, 4), "kind": "sliding", "window": window})
    model = profile.model.model_copy(update={"attention": (group, sliding)})
    mixed = profile.model_copy(update={"model": model})
    plan = allocate(profile, made_up_prices(), options_for(target_density=(0.3,)))
    (without,), (found,) = (predict(one, made_up_prices(), plan, None).lengths for one in (profile, mixed))
    i, j = np.arange(2048)[:, None], np.arange(2048)[None]
    seen = (j <= i) & (i - j < window)
    tiles = seen.reshape(32, 64, 32, 64).any((1, 3)).sum()
    assert found.prefill.dense_us == pytest.approx(without.prefill.dense_us + 2 * 4 * tiles)
    assert found.prefill.sparse_us == pytest.approx(without.prefill.sparse_us + 2 * 4 * tiles)


def test_beyond_the_longest_length_decode_is_dense_where_choosing_outgrows_what_it_saves() -> None:
    cost = made_up_prices(decode_dense=(20.0, 0.001), choice=(0.0, 0.0025))
    plan = choose_filter_layers(decode_profile(8192, context=131072), cost, options_for())
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths] == [(256, True), (8192, False), (None, True)]
    # In a shorter context it never comes to that.
    plan = choose_filter_layers(decode_profile(8192, context=32768), cost, options_for())
    assert [(bucket.up_to, bucket.dense) for bucket in plan.lengths] == [(256, True), (None, False)]


@settings(max_examples=60, deadline=None)
@given(
    dense=st.tuples(st.floats(0.0, 30.0), st.floats(1e-4, 2e-3)),
    sparse=st.tuples(st.floats(0.0, 60.0), st.floats(1e-4, 8e-3)),
    choose=st.tuples(st.floats(0.0, 60.0), st.floats(0.0, 4e-3)),
    sliding=st.sets(st.integers(1, 5), max_size=3),
    rule=st.sampled_from([{}, {"filter_layers": (0,)}]),
    length=st.integers(1, 256).map(lambda part: 256 * part),  # bounds are found to 256 tokens
)
def test_no_decode_step_is_predicted_to_be_slower_than_dense(dense, sparse, choose, sliding, rule, length: int) -> None:
    profile = decode_profile(4096, 16384, layers=6, sliding=tuple(sorted(sliding)))
    cost = made_up_prices(decode_dense=dense, decode_sparse=sparse, choice=choose)
    plan = choose_filter_layers(profile, cost, options_for(**rule))
    for one in (length, 255, 4096, 4097, 16384, 16385, 65536):
        step = step_us(plan.bucket(one).segments, cost, one, profile.model)
        assert step <= dense_step_us(cost, one, profile.model) * (1 + 1e-9), one
