"""Curves: a method that leaves nothing out is dense, otherwise it computes less; rules choose what they say."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from planner_models import TILE, bare_job, quick_options
from planner_profiles import made_up_model, made_up_profile, made_up_reuse

from sparsekv.bench.baselines import (
    PAGE,
    ExactTopK,
    QuestPages,
    StepwiseRule,
    segments_by_rule,
)
from sparsekv.bench.curve_methods import CurveInputs, chosen_methods, curve_modes
from sparsekv.bench.tile_rules import cumulative_mass, max_threshold
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.evaluation import Mode, compare
from sparsekv.planner.filter_layers import segments_of
from sparsekv.planner.options import settle
from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.profile.profile_data import DecodeTrial, LengthProfile, Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.tasks import Sample, Split, prepare
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import AttentionCall

LENGTH = 1024


@pytest.fixture(scope="module")
def profiled(loaded: LoadedModel) -> Profile:
    """With one decode trial, as the search leaves it."""
    found = profile(bare_job(loaded, settle(quick_options(row_stride=8), 2048, "cpu")))
    (entry,) = found.lengths
    assert entry.reuse is not None
    segments = segments_of((0,), loaded.info.full_layers, entry.reuse, fraction(0.1), LENGTH)
    trial = DecodeTrial(segments=segments, kl=1e-5, kl_bound=1e-5, prompts=1)
    return found.model_copy(update={"lengths": (entry.model_copy(update={"trials": (trial,)}),)})


@pytest.fixture(scope="module")
def preset(profiled: Profile) -> Profile:
    """As good as one of the published search: it has patterns at one density for every head."""
    return profiled.model_copy(update={"preset": "minference"})


@pytest.fixture(scope="module")
def samples(loaded: LoadedModel) -> list[Sample]:
    return [*held_out(prepare(loaded.tokenizer, Split.EVALUATION), "kv_retrieval", LENGTH, 1, 0)]


def inputs(loaded: LoadedModel, profiled: Profile, preset: Profile, **changes: object) -> CurveInputs:
    given = {"densities": (0.5, 0.7), "budgets": (0.1, 0.3), "task": "kv_retrieval"} | changes
    return CurveInputs(loaded, profile=profiled, preset=preset, **given)


def test_every_method_computes_less_than_dense_in_its_own_phase_alone(
    loaded: LoadedModel, profiled: Profile, preset: Profile, samples: list[Sample]
) -> None:
    given = inputs(loaded, profiled, preset)
    methods = chosen_methods(("prefill", "decode"), (), ("profile", "preset"))
    sparsest = {(point.phase, point.method): point for point in reversed(curve_modes(methods, given, LENGTH))}
    assert sparsest.keys() == {(phase, name) for phase in methods for name in methods[phase]} - {("decode", "omnikv")}
    found = compare(loaded, {point.name: point.mode for point in sparsest.values()}, samples, greedy=False)
    for point in sparsest.values():
        spent = found[point.name].spent
        sides = (spent.tiles, spent.causal_tiles), (spent.attended, spent.cached)
        own, other = sides if point.phase == "prefill" else sides[::-1]
        assert 0 < own[0] < own[1], point.name
        assert other[0] == other[1], point.name
        if point.setting.startswith("density"):
            assert own[0] / own[1] <= float(point.setting.split()[1]) * 1.1, point.name


@pytest.mark.parametrize(
    "mode",
    [
        max_threshold(0.0, TILE),
        cumulative_mass("antidiagonal", 1.0, TILE),
        cumulative_mass("pooled", 1.0, TILE),
        StepwiseRule(ExactTopK(fraction(1.0))),
        StepwiseRule(ExactTopK(fraction(1.0), "per_kv_head")),
        StepwiseRule(QuestPages(fraction(1.0))),
    ],
    ids=lambda mode: str(mode)[:60],
)
def test_a_rule_that_leaves_nothing_out_is_dense(mode: Mode, loaded: LoadedModel, samples: list[Sample]) -> None:
    found = compare(loaded, {"all": mode}, samples, greedy=False)["all"]
    assert max(found.kl) < 1e-4
    assert (found.spent.tiles, found.spent.attended) == (found.spent.causal_tiles, found.spent.cached)


def call_of(length: int) -> AttentionCall:
    draws = torch.Generator().manual_seed(length)
    q_BH1D = torch.randn(2, 4, 1, 16, generator=draws)
    k_BGKD, v_BGKD = (torch.randn(2, 2, length, 16, generator=draws) for _ in "kv")
    return AttentionCall(2, q_BH1D, k_BGKD, v_BGKD, Chunk.uniform(2, length - 1, length), 0.25, None)


@pytest.mark.parametrize("length", [300, 320])
def test_exact_top_k_takes_the_keys_with_most_attention(length: int) -> None:
    call = call_of(length)
    found = ExactTopK(tokens(20), "per_kv_head", sink=4, recent=30)(call)
    assert found is not None
    scores_BGNS = call.q_BHSD.unflatten(1, (2, 2))[:, :, :, 0] @ call.k_BGKD.mT * call.scale
    best_BGS = scores_BGNS.softmax(-1).amax(2)
    between = slice(4, length - 30)
    least_BG = best_BGS[..., between].topk(20).values[..., -1:]
    assert torch.equal(found.seen_BGS[..., between], best_BGS[..., between] >= least_BG)
    assert found.seen_BGS[..., :4].all()
    assert found.seen_BGS[..., -30:].all()
    assert found.read == 54


@pytest.mark.parametrize("length", [300, 320])
def test_quest_takes_whole_pages_and_counts_their_bounds(length: int) -> None:
    found = QuestPages(tokens(64))(call_of(length))
    assert found is not None
    pages = math.ceil(length / PAGE)
    counts_BG = found.seen_BGS.sum(-1)
    assert (counts_BG + pages == found.read).all()
    whole_BGPX = found.seen_BGS[..., : length // PAGE * PAGE].unflatten(-1, (-1, PAGE))
    assert torch.equal(whole_BGPX.any(-1), whole_BGPX.all(-1))
    assert found.seen_BGS[..., -1].all()


def test_quest_bounds_no_score_too_low() -> None:
    """A key that outweighs all others lies in a page that is taken, wherever it is."""
    for position in (0, 100, 299):
        call = call_of(300)
        call.k_BGKD[:, :, position] = 4.0 * call.q_BHSD.unflatten(1, (2, 2))[:, :, 0, 0]
        found = QuestPages(tokens(32))(call)
        assert found is not None
        assert found.seen_BGS[..., position].all()


def omnikv_of(kept_JI: np.ndarray) -> list[tuple[int, tuple[int, ...]]]:
    entry = LengthProfile(length=LENGTH, prompt_tokens=(LENGTH,), reuse=made_up_reuse(kept_JI))
    given = made_up_profile(entry, model=made_up_model(layers=len(kept_JI)))
    return [(one.filter, one.layers) for one in segments_by_rule(given, entry, "omnikv", fraction(0.1))]


def test_omnikvs_rule_takes_the_best_servers_and_leaves_a_wait_layer() -> None:
    kept_JI = np.full((32, 32), 0.5)
    for filter_ in (2, 8, 18):
        kept_JI[:, filter_] = 0.9
    assert omnikv_of(kept_JI) == [(2, tuple(range(4, 8))), (8, tuple(range(10, 18))), (18, tuple(range(20, 32)))]
