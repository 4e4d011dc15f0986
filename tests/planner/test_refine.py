"""Layer weights follow what whole plans do to the answers, and come with the profile."""

from pathlib import Path

import numpy as np
import pytest
from planner_models import bare_job, made_up_prices, quick_options

from sparsekv.planner.job import Job
from sparsekv.planner.options import settle
from sparsekv.planner.plan import compile_once
from sparsekv.planner.profile.profile_data import LayerScores, Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.records import read_measured, write_measured
from sparsekv.planner.refine import refine
from sparsekv.runtime.hf.load import LoadedModel

LEVELS = (0.6, 0.8, 1.0, 1.2)
OPTIONS = settle(quick_options(phases=("prefill",), levels=LEVELS).but(refine_rounds=10), 4096, "cpu")
FACTORS = (1 / 30, 1.0, 30.0)


@pytest.fixture(scope="module")
def misjudged(loaded: LoadedModel) -> Profile:
    """A profile with the damage of whole layers wrong by a factor each."""
    measured = profile(bare_job(loaded, OPTIONS))
    (entry,) = measured.lengths
    layers = []
    for scores, factor in zip(entry.layers, FACTORS, strict=True):
        wrong = {name: np.array(getattr(scores, name)) * factor for name in ("damage", "worst")}
        tables = {name: tuple(map(tuple, table.tolist())) for name, table in wrong.items()}
        layers.append(LayerScores.model_validate(dict(scores) | tables))
    return measured.model_copy(update={"lengths": (entry.model_copy(update={"layers": tuple(layers)}),)})


@pytest.fixture(scope="module")
def refined(loaded: LoadedModel, misjudged: Profile) -> Profile:
    return refine(bare_job(loaded, OPTIONS), misjudged)


def test_misjudged_layers_get_weights_that_make_up_for_it(misjudged: Profile, refined: Profile) -> None:
    before, after = ([scores.weight for scores in one.lengths[0].layers] for one in (misjudged, refined))
    assert before == [1.0, 1.0, 1.0]
    assert after[0] > 3.0
    assert after[2] < 1 / 3


def test_weights_travel_with_the_profile_and_change_the_plan(
    loaded: LoadedModel, misjudged: Profile, refined: Profile, tmp_path: Path
) -> None:
    write_measured(refined, tmp_path / "p")
    read = read_measured(Profile, tmp_path / "p")
    assert read == refined
    plans = [compile_once(loaded.info, OPTIONS, one, made_up_prices()) for one in (misjudged, refined, read)]
    assert plans[1].prefill == plans[2].prefill != plans[0].prefill


def test_refining_is_deterministic(loaded: LoadedModel, misjudged: Profile, refined: Profile) -> None:
    assert refine(bare_job(loaded, OPTIONS), misjudged) == refined


def test_layers_are_taken_apart_only_where_a_round_improved(loaded: LoadedModel, refined: Profile) -> None:
    passes = []
    hook = loaded.model.model.layers[-1].register_forward_hook(lambda *_: passes.append(1))
    try:
        again = refine(bare_job(loaded, OPTIONS), refined)
    finally:
        hook.remove()
    assert again == refined  # the next round is the one that ended the first run
    prompts, dense, first, second = 1, 1, 1 + len(FACTORS), 1
    assert len(passes) == prompts * (dense + first + second)


@pytest.mark.parametrize(
    "changes",
    [{"refine_rounds": 0}, {"phases": ("decode",)}, {"target_density": ()}],
    ids=["rounds", "phase", "target"],
)
def test_nothing_is_run_where_there_is_nothing_to_refine(misjudged: Profile, changes: dict) -> None:
    without_model = Job(misjudged.model, OPTIONS.but(**changes))
    assert refine(without_model, misjudged) is misjudged
