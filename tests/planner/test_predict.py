"""What is predicted of plans from a profile and the prices of a device."""

import numpy as np
import pytest
from planner_models import TILE, made_up_prices
from planner_profiles import made_up_length, made_up_model, made_up_profile, made_up_reuse, options_for

from sparsekv.planner.allocate import allocate
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.predict import causal_tiles, predict
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan, Segment


def test_a_made_up_prediction_is_what_paper_and_pencil_give() -> None:
    entry = made_up_length(8192, np.random.default_rng(0), levels=(0.3,))
    profile, cost = made_up_profile(entry), made_up_prices()
    prefill = allocate(profile, cost, options_for(target_density=(0.3,)))
    segment = Segment(filter=0, layers=(1, 2), budget=DecodeBudget(tokens=1000), sink=4, recent=128)
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(segment,)),))
    (found,) = predict(profile, cost, prefill, decode).lengths
    tiles = 3 * 4 * causal_tiles(8192, TILE)
    assert found.prefill.dense_us == pytest.approx(tiles)
    assert found.prefill.sparse_us == pytest.approx(0.3 * tiles, rel=1e-4)
    assert found.prefill.density == pytest.approx(0.3, rel=1e-4)
    heads = [sum(head) for layer in found.computed for head in zip(layer.tiles, layer.columns, strict=True)]
    assert sum(heads) == pytest.approx(0.3 * 3 * 4 - (12 - len(heads)), rel=1e-2)  # other layers are dense
    assert found.decode.dense_us == pytest.approx(3 * 8.192)
    assert found.decode.sparse_us == pytest.approx(8.192 + 0.8192 + 2 * 1.132)
    assert found.decode.density == pytest.approx((8192 + 2 * 1132) / (3 * 8192), rel=1e-4)


def test_a_length_that_sinks_chosen_and_recent_tokens_cover_costs_what_dense_costs() -> None:
    profile, cost = made_up_profile(made_up_length(8192, np.random.default_rng(0))), made_up_prices()
    segment = Segment(filter=0, layers=(1, 2), budget=DecodeBudget(tokens=8060), sink=4, recent=128)
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(segment,)),))
    (found,) = predict(profile, cost, None, decode).lengths
    assert found.decode.sparse_us == found.decode.dense_us
    assert found.decode.density == 1.0


def test_a_dense_length_is_predicted_to_cost_what_dense_costs() -> None:
    profile = made_up_profile(made_up_length(8192, np.random.default_rng(0)))
    plan = PrefillPlan(tile=TILE, lengths=(PrefillBucket(up_to=None, dense=True),))
    (found,) = predict(profile, made_up_prices(), plan, None).lengths
    assert found.prefill.sparse_us == found.prefill.dense_us
    assert found.prefill.density == 1.0


def test_a_length_with_patterns_that_were_not_profiled_is_not_predicted() -> None:
    profile = made_up_profile(made_up_length(8192, np.random.default_rng(0)))
    own = HeadGroup(layer=0, heads=(0,), pattern=AShape(sink=tokens(7), window=tokens(7)))
    plan = PrefillPlan(tile=TILE, lengths=(PrefillBucket(up_to=None, heads=(own,)),))
    assert predict(profile, made_up_prices(), plan, None).lengths == ()


def windowed_profile(length: int) -> Profile:
    """Any choice serves every layer; layers 1 and 3 of four have a window of their own."""
    model = made_up_model(layers=4)
    (group,) = model.attention
    full = group.model_copy(update={"layers": (0, 2)})
    window = group.model_copy(update={"layers": (1, 3), "kind": "sliding", "window": 1024})
    model = model.model_copy(update={"attention": (full, window)})
    entry = LengthProfile(length=length, prompt_tokens=(length,), reuse=made_up_reuse(np.ones((4, 4))))
    return made_up_profile(entry, model=model)


def test_a_layer_with_a_window_of_its_own_costs_what_its_window_holds() -> None:
    profile, cost = windowed_profile(8192), made_up_prices()
    decode = choose_filter_layers(profile, options_for(filter_layers=(0,)))
    assert [(part.filter, part.layers) for part in decode.bucket(8192).segments] == [(0, (2,))]
    (found,) = predict(profile, cost, None, decode).lengths
    attended = 4 + 820 + 128
    assert found.decode.dense_us == pytest.approx(2 * 8.192 + 2 * 1.024)
    assert found.decode.sparse_us == pytest.approx(8.192 + 0.8192 + 0.001 * attended + 2 * 1.024)
    assert found.decode.density == pytest.approx((8192 + attended + 2048) / (2 * 8192 + 2048), rel=1e-4)


@pytest.mark.parametrize("window", [1, 64, 65, 1000, 2048, 100_000])
def test_a_prefill_with_windowed_layers_is_predicted_over_all_layers(window: int) -> None:
    """The layers with windows take the same time either way: the tiles that their windows touch."""
    profile = made_up_profile(made_up_length(2048, np.random.default_rng(0), levels=(0.3,)))
    (group,) = profile.model.attention
    sliding = group.model_copy(update={"layers": (3, 4), "kind": "sliding", "window": window})
    model = profile.model.model_copy(update={"attention": (group, sliding)})
    mixed = profile.model_copy(update={"model": model})
    plan = allocate(profile, made_up_prices(), options_for(lengths=(2048,), target_density=(0.3,)))
    (without,), (found,) = (predict(one, made_up_prices(), plan, None).lengths for one in (profile, mixed))
    i, j = np.arange(2048)[:, None], np.arange(2048)[None]
    seen = (j <= i) & (i - j < window)
    tiles = seen.reshape(32, 64, 32, 64).any((1, 3)).sum()
    assert found.prefill.dense_us == pytest.approx(without.prefill.dense_us + 2 * 4 * tiles)
    assert found.prefill.sparse_us == pytest.approx(without.prefill.sparse_us + 2 * 4 * tiles)
