"""What a plan's figures do not say is told: heads that went dense, lengths that could not be predicted."""

import re
from dataclasses import replace

import numpy as np
import pytest
from planner_models import made_up_cost
from planner_profiles import made_up_length, made_up_model, made_up_profile, made_up_reuse, options_for

from sparsekv.planner.allocate import allocate
from sparsekv.planner.cost.device_cost import DeviceCost, Line
from sparsekv.planner.cost.predict import predict
from sparsekv.planner.cost.remarks import (
    crossover_remarks,
    dense_decode_remarks,
    offload_remarks,
    plan_remarks,
    unpriced_remarks,
)
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.plan import compile_once
from sparsekv.planner.profile.profile_data import DecodeTrial, LengthProfile, Profile
from sparsekv.planner.settled import settle
from sparsekv.planner.verify import tightened_remarks
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Offload, Segment

TARGET = options_for(target_density=(0.3,))
WHERE = "on made up (cpu, float32)"


def profile_with(**options) -> Profile:
    return made_up_profile(made_up_length(8192, np.random.default_rng(0), **options))


def remarks(profile: Profile, cost: DeviceCost, options: PlanOptions = TARGET) -> tuple[str, ...]:
    return crossover_remarks(profile, cost, allocate(profile, cost, options), options)


def slower_layer(share: float) -> Profile:
    """Layer 1 computes this share of the tiles whatever its heads follow."""
    profile = profile_with(levels=(0.2,))
    scores = profile.lengths[0].layers
    count = len(profile.lengths[0].candidates)
    update = {"tiles": ((share,) * 4,) * count, "columns": ((0.0,) * 4,) * count}
    layers = (scores[0], scores[1].model_copy(update=update), scores[2])
    return made_up_profile(profile.lengths[0].model_copy(update={"layers": layers}))


def decode_remarks(cost: DeviceCost, kept: float = 1.0, **options) -> tuple[str, ...]:
    entry = LengthProfile(length=8192, prompt_tokens=(8192,), reuse=made_up_reuse(np.full((3, 3), kept)))
    profile, asked = made_up_profile(entry), PlanOptions(decode_budget=tokens(2000), **options)
    return dense_decode_remarks(profile, cost, choose_filter_layers(profile, cost, asked), asked)


def test_a_decode_budget_that_is_not_used_is_told_with_the_reason() -> None:
    assert decode_remarks(made_up_cost()) == ()
    slow = made_up_cost(decode_sparse=Line(prices=(1000.0, 1.0)))
    (line,) = decode_remarks(slow)
    assert line.startswith("decode at 8k runs dense, its budget (2000) is not used: it is not predicted")
    assert line.endswith("--no-crossover keeps it sparse")
    assert decode_remarks(slow, crossover=False) == ()
    (line,) = decode_remarks(made_up_cost(), kept=0.5)
    assert "lose at most 0.02 of the attention" in line
    assert line.endswith("change --decode-loss or --decode-budget")


def test_a_plan_that_keeps_to_its_target_needs_no_remark() -> None:
    assert remarks(profile_with(), made_up_cost()) == ()


def test_a_length_that_runs_dense_is_told_with_the_device_and_the_way_out() -> None:
    (line,) = remarks(profile_with(), made_up_cost(prefill_sparse=Line(prices=(0.0, 0.0, 10.0, 10.0))))
    assert line.startswith("prefill at 8k runs dense: sparse attention is not predicted to be faster")
    assert WHERE in line
    assert line.endswith("--no-crossover keeps it sparse")


def test_layers_that_run_dense_are_counted_and_the_density_they_make_is_told() -> None:
    profile, target = slower_layer(0.32), options_for(target_density=(0.25,))
    cost = made_up_cost(prefill_sparse=Line(prices=(0.7 * 4 * 128 * 129 / 2, 0.0, 1.0, 1.0)))
    (line,) = remarks(profile, cost, target)
    density = predict(profile, cost, allocate(profile, cost, target), None).lengths[0].prefill.density
    assert density > 0.3
    assert f"predicted to compute {density:.3f} of the tiles, more than the target of 0.25" in line
    assert f"faster for 1 of 3 layers {WHERE}" in line


def test_a_target_that_nobody_set_is_named_as_the_default_until_it_is_raised() -> None:
    profile, default = slower_layer(0.32), settle(PlanOptions(lengths=(8192,)), 131072, "cpu")
    cost = made_up_cost(prefill_sparse=Line(prices=(0.7 * 4 * 128 * 129 / 2, 0.0, 1.0, 1.0)))
    prefill = allocate(profile, cost, options_for(target_density=(0.3,)))
    (line,) = crossover_remarks(profile, cost, prefill, default)
    assert "more than the default target of 0.3572:" in line
    (line,) = crossover_remarks(profile, cost, prefill, default.but(target_density=(0.46,)))
    assert "more than the target of 0.46:" in line


def test_the_target_of_a_preset_is_exceeded_with_a_remark_too() -> None:
    entry = profile_with(levels=(0.3,)).lengths[0]
    count = len(entry.candidates)
    update = {"tiles": ((0.32,) * 4,) * count, "columns": ((0.0,) * 4,) * count}
    layers = (entry.layers[0], entry.layers[1].model_copy(update=update), entry.layers[2])
    profile = made_up_profile(entry.model_copy(update={"layers": layers})).model_copy(update={"preset": "minference"})
    cost = made_up_cost(prefill_sparse=Line(prices=(0.67 * 4 * 128 * 129 / 2, 0.0, 1.0, 1.0)))
    options = settle(PlanOptions(preset="minference"), 131072, "cpu")
    (line,) = remarks(profile, cost, options)
    assert "more than the target of 0.3" in line


def test_heads_that_run_dense_in_sparse_layers_are_counted() -> None:
    dear, free = Line(prices=(0.0, 10.0, 0.0)), Line(prices=(0.0, 0.0, 0.0))
    index = {"a_shape": free, "vertical_slash": dear, "block_sparse": dear}
    profile = profile_with(levels=(0.3,))
    scores = profile.lengths[0].layers[0]
    tiles = [list(row) for row in scores.tiles]
    for place, candidate in enumerate(profile.lengths[0].candidates):
        if candidate.range == "a":
            tiles[place][:2] = [0.9, 0.9]  # the only family whose index pays has no room in two heads
    layers = (scores.model_copy(update={"tiles": tuple(map(tuple, tiles))}), *profile.lengths[0].layers[1:])
    entry = profile.lengths[0].model_copy(update={"layers": layers})
    (line,) = remarks(made_up_profile(entry), made_up_cost(index=index))
    assert f"faster for 2 heads {WHERE}" in line
    assert "predicted to compute 0.417 of the tiles" in line


def test_without_a_crossover_the_target_holds_and_nothing_is_said() -> None:
    slow = made_up_cost(prefill_sparse=Line(prices=(0.0, 0.0, 10.0, 10.0)))
    options = options_for(target_density=(0.3,), crossover=False)
    plan = allocate(profile_with(), slow, options)
    assert crossover_remarks(profile_with(), slow, plan, options) == ()
    assert predict(profile_with(), slow, plan, None).lengths[0].prefill.density <= 0.3001


def test_a_target_speedup_has_no_density_to_exceed() -> None:
    assert remarks(profile_with(), made_up_cost(), options_for(target_speedup=2.0)) == ()


@pytest.mark.parametrize("crossover", [True, False])
def test_lengths_that_miss_the_target_speedup_are_told(crossover: bool) -> None:
    rng = np.random.default_rng(0)
    profile = made_up_profile(made_up_length(4096, rng, levels=(0.5,)), made_up_length(8192, rng, levels=(0.2,)))
    (line,) = remarks(profile, made_up_cost(), options_for(target_speedup=3.0, crossover=crossover))
    assert line.startswith("prefill attention at 4k is predicted to be 2.00 times as fast as dense, less than the 3 ")


def decode_profile(*kept: np.ndarray) -> Profile:
    lengths = [
        LengthProfile(length=8192 << place, prompt_tokens=(8192 << place,), reuse=made_up_reuse(table))
        for place, table in enumerate(kept)
    ]
    return made_up_profile(*lengths, model=made_up_model(layers=len(kept[0])))


OFFLOAD = PlanOptions(offload=True)


def test_rows_in_host_memory_without_a_price_are_not_predicted_and_it_says_so() -> None:
    profile, cost = decode_profile(np.ones((3, 3))), made_up_cost()
    plan = choose_filter_layers(profile, cost, OFFLOAD)
    assert predict(profile, cost, None, plan).lengths == ()
    (line,) = offload_remarks(profile, cost, plan, OFFLOAD)
    assert "no prices of rows in host memory; measure again with --offload" in line


def test_rows_in_host_memory_cost_what_reading_them_takes() -> None:
    profile = decode_profile(np.ones((3, 3)))
    cost = made_up_cost(decode_host=Line(prices=(9.0, 0.001, 0.01)))
    plan = choose_filter_layers(profile, cost, OFFLOAD)
    assert plan.offload.layers == (1, 2)
    (found,) = predict(profile, cost, None, plan).lengths
    chosen, hot = 820, 4096
    one = 9.0 + 0.001 * (4 + chosen + 128) + 0.01 * chosen * 0.7 * chosen / hot
    assert found.decode.sparse_us == pytest.approx(8.192 + 0.8192 + 2 * one, rel=1e-5)
    (line,) = offload_remarks(profile, cost, plan, OFFLOAD)
    assert (
        f"decode at 8k is predicted to take {found.decode.sparse_us / found.decode.dense_us:.2f} times as long" in line
    )
    cheap = made_up_cost(decode_host=Line(prices=(1.0, 0.001, 0.001)))
    assert offload_remarks(profile, cheap, plan, OFFLOAD) == ()


@pytest.mark.parametrize(
    ("length", "own", "backend", "told"),
    [
        (160_000, {}, "triton", ""),
        (170_000, {}, "triton", "33808 slots a layer for chosen rows, of 32768 that these may have"),
        (170_000, {}, "cpu", ""),
        (8192, {"recent": 1}, "flash", "1 recent token, of 2 that these need"),
        (8192, {"window": 16, "selector": "uniform"}, "flash", "a selector that looks at older queries (uniform)"),
        (100, {"recent": 1, "budget": DecodeBudget(tokens=200)}, "flash", ""),  # reads everything back instead
    ],
)
def test_offloaded_steps_that_are_not_captured_are_told_with_the_reason(
    length: int, own: dict, backend: str, told: str
) -> None:
    entry = LengthProfile(length=length, prompt_tokens=(length,), reuse=made_up_reuse(np.ones((3, 3))))
    profile = made_up_profile(entry, model=made_up_model(layers=3, context=1 << 18))
    cost = made_up_cost(decode_host=Line(prices=(0.0, 1e-9, 1e-9)), backend=backend)
    part = Segment(
        **{"filter": 0, "layers": (1, 2), "budget": DecodeBudget(fraction=0.1, at_most=17_000), "recent": 128} | own
    )
    offload = Offload(layers=(1, 2), hot=fraction(0.2))
    plan = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(part,)),), offload=offload)
    found = [line for line in offload_remarks(profile, cost, plan, OFFLOAD) if "single launches" in line]
    assert len(found) == bool(told)
    assert told in "".join(found)


def test_a_length_at_which_offloaded_layers_read_everything_back_is_not_predicted() -> None:
    cost = made_up_cost(decode_host=Line(prices=(1.0, 0.001, 0.001)))
    profile = decode_profile(np.zeros((3, 3)), np.ones((3, 3)))  # nothing may be chosen at 8192
    plan = choose_filter_layers(profile, cost, OFFLOAD)
    assert plan.bucket(8192).dense
    assert plan.offload is not None
    assert [entry.length for entry in predict(profile, cost, None, plan).lengths] == [16384]
    (line,) = offload_remarks(profile, cost, plan, OFFLOAD)
    assert line.startswith("decode at 8k is not predicted")


def test_filter_layers_that_were_tried_over_their_own_choice_and_have_no_price_are_told_of() -> None:
    own = Segment(filter=0, layers=(0, 1, 2), budget=DecodeBudget(tokens=100), recent=128)
    profile = decode_profile(np.ones((3, 3)))
    trials = (DecodeTrial(segments=(own,), kl=0.0, kl_bound=0.001, prompts=3),)
    entry = profile.lengths[0].model_copy(update={"trials": trials})
    profile = profile.model_copy(update={"lengths": (entry,)})
    (line,) = unpriced_remarks(profile, made_up_cost(), PlanOptions())
    assert "no price of that" in line
    priced = made_up_cost(decode_choose_alone=Line(prices=(1.0, 0.001)))
    assert unpriced_remarks(profile, priced, PlanOptions()) == ()
    assert unpriced_remarks(profile, made_up_cost(), PlanOptions(decode_loss=0.1)) == ()
    alone = own.model_copy(update={"layers": (0,)})
    plan = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=(alone,)),))
    (line,) = offload_remarks(profile, priced, plan, OFFLOAD)
    assert "nothing is offloaded" in line


def test_decode_on_the_device_needs_no_price_of_the_host() -> None:
    profile = decode_profile(np.ones((3, 3)))
    plan = choose_filter_layers(profile, made_up_cost(), PlanOptions(crossover=False))
    assert offload_remarks(profile, made_up_cost(), plan, PlanOptions()) == ()
    assert len(predict(profile, made_up_cost(), None, plan).lengths) == 1


def compiled(cost: DeviceCost, *, context: int = 8192, **options) -> tuple[str, ...]:
    """The remarks of a plan of 8192 tokens."""
    entry = profile_with().lengths[0].model_copy(update={"reuse": made_up_reuse(np.ones((3, 3)))})
    profile = made_up_profile(entry, model=made_up_model(context=context))
    asked = TARGET.but(**options)
    return plan_remarks(compile_once(profile.model, asked, profile, cost), asked, profile, cost)


def about(line: str, phase: str) -> int:
    """The length from which on a phase would gain."""
    told = re.search(
        rf"dense {phase} is faster up to 8192 tokens on made up: sparse {phase} .* about (\d+) tokens", line
    )
    assert told, line
    return int(told[1])


def test_decode_that_is_dense_at_every_length_says_from_where_it_would_gain() -> None:
    """Two layers of three save 0.9 us in 1000 tokens each, for 100 us a step."""
    slow = made_up_cost(decode_choose=Line(prices=(100.0, 0.0)))
    *_, line = compiled(slow, phases=("decode",))
    assert 55_000 < about(line, "decode") < 72_000
    assert line.endswith("this model's context ends at 8192: plan a model with a longer one")
    *_, line, _ = compiled(slow, phases=("decode",), context=131072)
    assert line.endswith("--lengths 8k,128k plans that")
    *_, line = compiled(made_up_cost(decode_sparse=Line(prices=(0.0, 1.0))), phases=("decode",))
    assert line.endswith("sparse decode is not predicted to gain at any length")


def test_prefill_that_is_dense_at_every_length_says_from_where_it_would_gain() -> None:
    saved = 0.7 * 4 * 128 * 129 / 2  # by a layer at 8192 tokens
    dear = made_up_cost(prefill_sparse=Line(prices=(5.0 * saved, 0.0, 1.0, 1.0)))
    *_, line = compiled(dear, phases=("prefill",))
    assert 16_384 < about(line, "prefill") < 20_000  # more than four times the tiles, of which fewer are computed
    assert line.endswith("plan a model with a longer one")
    *_, line, _ = compiled(dear, phases=("prefill",), context=32768)
    assert line.endswith("--lengths 8k,32k plans that")
    *_, line = compiled(made_up_cost(prefill_sparse=Line(prices=(0.0, 0.0, 99.0, 99.0))), phases=("prefill",))
    assert line.endswith("sparse prefill is not predicted to gain at any length")


def test_a_plan_that_is_sparse_somewhere_or_asked_to_be_does_not_say_what_would_gain() -> None:
    slow = made_up_cost(decode_choose=Line(prices=(100.0, 0.0)), prefill_sparse=Line(prices=(1e6, 0.0, 1.0, 1.0)))
    assert not any("would gain" in line for line in (*compiled(made_up_cost()), *compiled(slow, crossover=False)))
    assert sum("would gain" in line for line in compiled(slow)) == 2


def test_sparse_decode_says_from_which_length_on_and_by_how_much_attention_alone_gains() -> None:
    (line,) = compiled(made_up_cost(), phases=("decode",))
    ratio = 3 * 8.192 / (8.192 + 0.8192 + 2 * (0.001 * (4 + 820 + 128)))
    assert line.startswith("decode is sparse from 256 cached tokens on: ")
    assert f"predicted speedup of attention in a step {ratio:.2f}x at 8k on made up" in line
    assert line.endswith("the rest of a step (weights, sampling) takes as long as before and is not in these ratios")
    (line,) = compiled(made_up_cost(), phases=("decode",), crossover=False)
    assert line.startswith("decode is sparse at every length: ")


def test_a_longer_context_is_said_to_be_extrapolated_with_the_lengths_that_plan_it() -> None:
    *_, line = compiled(made_up_cost(), context=131072)
    assert line == (
        "contexts above 8k, up to the model's 128k, were not profiled and run by what was found at 8k, extrapolated "
        "and not verified; --lengths 8k,16k,32k,128k plans them, which takes a CPU hours"
    )
    slow = made_up_cost(prefill_sparse=Line(prices=(1e6, 0.0, 1.0, 1.0)), backend="triton")
    *_, line = compiled(slow, context=131072, phases=("prefill",))
    assert line.endswith("were not profiled and run dense; --lengths 8k,16k,32k,128k plans them")
    *_, line = compiled(made_up_cost(), context=16384)
    assert line.endswith("--lengths 8k,16k plans them")
    assert not any("not profiled" in line for line in compiled(made_up_cost(), context=8192))


def test_what_was_given_up_to_meet_the_gate_is_told() -> None:
    asked = settle(PlanOptions(lengths=(4096, 8192), target_density=(0.4, 0.3)), 8192, "cpu")
    profile = made_up_profile(*(made_up_length(n, np.random.default_rng(0)) for n in (4096, 8192)))
    assert tightened_remarks(asked, asked, profile) == ()
    (prefill,) = tightened_remarks(asked, asked.but(target_density=(0.4, 0.45)), profile)
    assert "prefill at 8k is planned for a density of 0.45: with the 0.3 that was asked for" in prefill
    (decode,) = tightened_remarks(asked, asked.but(decode_loss=0.01), profile)
    assert "loss of 0.01 and a budget of 0.1 of the context" in decode
