"""Layer weights follow what whole plans do to the answers, and come with the profile; by a loss also their level."""

from pathlib import Path

import numpy as np
import pytest
import torch
from planner_models import bare_job, made_up_prices, quick_options

from sparsekv.planner.allocate import at_loss
from sparsekv.planner.evaluation.predictions import PlanMode, after_prompt, prefill
from sparsekv.planner.job import Job
from sparsekv.planner.options import settle
from sparsekv.planner.plan import compile_once
from sparsekv.planner.predict import Choice, ScoreTables, choice_of
from sparsekv.planner.profile.profile_data import LayerScores, Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.records import read_measured, write_measured
from sparsekv.planner.refine import _patterns_of, _Run, refine
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import capture_attention

LEVELS = (0.6, 0.8, 1.0, 1.2)
OPTIONS = settle(quick_options(phases=("prefill",), levels=LEVELS).but(refine_rounds=10), 4096, "cpu")
FACTORS = (1 / 30, 1.0, 30.0)


@pytest.fixture(scope="module")
def judged(loaded: LoadedModel) -> Profile:
    return profile(bare_job(loaded, OPTIONS))


@pytest.fixture(scope="module")
def misjudged(judged: Profile) -> Profile:
    """A profile with the damage of whole layers wrong by a factor each."""
    (entry,) = judged.lengths
    layers = []
    for scores, factor in zip(entry.layers, FACTORS, strict=True):
        wrong = {name: np.array(getattr(scores, name)) * factor for name in ("damage", "worst")}
        tables = {name: tuple(map(tuple, table.tolist())) for name, table in wrong.items()}
        layers.append(LayerScores.model_validate(dict(scores) | tables))
    return judged.model_copy(update={"lengths": (entry.model_copy(update={"layers": tuple(layers)}),)})


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
    prompts, dense, every_tile, first, second = 1, 1, 1, 2 + len(FACTORS), 1
    assert len(passes) == prompts * (dense + every_tile + first + second)


@pytest.mark.parametrize(
    "changes",
    [{"refine_rounds": 0}, {"phases": ("decode",)}, {"target_density": (), "preset": "minference"}],
    ids=["rounds", "phase", "preset"],
)
def test_nothing_is_run_where_there_is_nothing_to_refine(misjudged: Profile, changes: dict) -> None:
    without_model = Job(misjudged.model, OPTIONS.but(**changes))
    assert refine(without_model, misjudged) is misjudged


LOSS = 2e-3
BY_LOSS = OPTIONS.but(target_density=(), loss=LOSS, refine_rounds=0)


def leveled(profile: Profile, factor: float) -> Profile:
    """The profile with all damage wrong by a factor."""
    (entry,) = profile.lengths
    layers = tuple(scores.model_copy(update={"weight": factor}) for scores in entry.layers)
    return profile.model_copy(update={"lengths": (entry.model_copy(update={"layers": layers}),)})


def planned(profile: Profile) -> tuple[ScoreTables, Choice]:
    tables = ScoreTables.of(profile.lengths[0])
    return tables, at_loss(tables, BY_LOSS.families, LOSS)[0]


@pytest.mark.parametrize("step", [None, 300])
def test_a_plan_that_is_run_predicts_what_it_does_in_a_model_in_the_same_steps(
    loaded: LoadedModel, judged: Profile, step: int | None
) -> None:
    plan = compile_once(loaded.info, OPTIONS, judged, made_up_prices())
    (entry,), (prompt,) = judged.lengths, bare_job(loaded, OPTIONS).prompts[1024]
    bucket = plan.prefill.bucket(1024)
    choice = choice_of(bucket, ScoreTables.of(entry))
    every_step = plan.prefill.model_copy(update={"lengths": (bucket.model_copy(update={"up_to": None}),)})
    plan = plan.model_copy(update={"prefill": every_step})
    ids_1S, end = torch.from_numpy(prompt.ids.astype(np.int64))[None], prompt.answer_start
    with torch.no_grad():
        run = _Run(loaded, prompt, judged.tile, judged.backend, step)
        with capture_attention(loaded.model, run._attend):
            expected_TV = run._forward(_patterns_of(entry, choice))
        with PlanMode(plan, "prefill").applied(loaded.model):
            prefilled = prefill(loaded.model, ids_1S[:, :end], step)
            found_AV = after_prompt(loaded.model, prefilled, ids_1S[:, end:], stepwise=True)[0]
    torch.testing.assert_close(found_AV[:-1].log_softmax(-1), expected_TV, atol=1e-4, rtol=1e-4)
    assert run._divergence(expected_TV) > 1e-6


@pytest.mark.parametrize("factor", [1e-3, 1.0, 1e3])
def test_the_plan_that_a_loss_gives_was_measured_to_be_inside_it_and_is_sparse(
    loaded: LoadedModel, judged: Profile, factor: float
) -> None:
    job = bare_job(loaded, BY_LOSS)
    found = refine(job, leveled(judged, factor))
    tables, choice = planned(found)
    (prompt,) = job.prompts[1024]
    with torch.no_grad():
        run = _Run(loaded, prompt, found.tile, found.backend, None)
        divergence, _ = run.measured(_patterns_of(found.lengths[0], choice))
    assert 0.0 < divergence <= LOSS
    assert tables.density(choice) < 0.95
    if factor < 1.0:  # what is predicted to do no damage is not believed
        assert tables.density(choice) > tables.density(planned(leveled(judged, factor))[1])


def test_a_plan_that_loses_right_answers_on_calibration_is_made_denser(
    loaded: LoadedModel, judged: Profile, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = bare_job(loaded, BY_LOSS)
    before = planned(refine(job, judged))
    monkeypatch.setattr(_Run, "measured", lambda *_: (LOSS / 2, 1))  # near enough to the loss, but the answer is wrong
    after = planned(refine(job, judged))
    assert after[0].density(after[1]) > before[0].density(before[1])
