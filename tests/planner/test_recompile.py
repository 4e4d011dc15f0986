"""A plan from files alone: the same plan, without the weights, and honest about what was not looked at."""

from pathlib import Path

import pytest
from model_folders import save_model
from planner_models import bare_job, made_up_prices, quick_options

from sparsekv.planner.job import job_of, job_of_files
from sparsekv.planner.options import settle
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.prices import HeadShape, Prices
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.records import read_measured
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import dump_plan
from sparsekv.runtime.hf.load import LoadedModel

OPTIONS = quick_options(verify="none", decode_loss=1.0)


@pytest.fixture(scope="module")
def measured(loaded: LoadedModel) -> Profile:
    return profile(bare_job(loaded, settle(OPTIONS, 4096, "cpu")))


@pytest.fixture(scope="module")
def cost(measured: Profile) -> Prices:
    return made_up_prices(tile=measured.tile)


@pytest.fixture(scope="module")
def folder(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without its weights."""
    folder = save_model(loaded.model, tmp_path_factory.mktemp("models") / "tiny")
    (folder / "model.safetensors").unlink()
    return folder


@pytest.mark.parametrize("crossover", [False, True])
def test_it_is_the_plan_that_the_loaded_model_gives_twice_the_same_bytes(
    loaded: LoadedModel, measured: Profile, cost: Prices, folder: Path, crossover: bool
) -> None:
    options = OPTIONS.but(crossover=crossover)
    launches = made_up_prices(tile=measured.tile, tiles=(50.0, 1.0))
    first, second = (
        dump_plan(compile_plan(job_of_files(str(folder), options, measured, launches)).plan) for _ in range(2)
    )
    assert first == second == dump_plan(compile_plan(job_of(loaded, options, profile=measured, cost=launches)).plan)
    lengths = compile_plan(job_of_files(str(folder), options, measured, launches)).plan.prefill.lengths
    assert [bucket.dense for bucket in lengths] == [True] * crossover + [False, False]


def test_a_model_that_cannot_be_reached_is_taken_by_its_name_alone(measured: Profile, cost: Prices) -> None:
    result = compile_plan(job_of_files("tests/tiny", OPTIONS, measured, cost))
    assert any("not checked" in remark for remark in result.remarks)
    with pytest.raises(UsageError, match="hub"):
        compile_plan(job_of_files("tests/other", OPTIONS, measured, cost))


def test_a_divergence_of_decode_is_refused_where_the_profile_has_no_trials(
    measured: Profile, folder: Path, cost: Prices
) -> None:
    options = quick_options(verify="none", decode_kl=0.01)
    with pytest.raises(UsageError, match="decode_kl"):
        compile_plan(job_of_files(str(folder), options, measured, cost))


def test_verification_and_costs_of_other_heads_are_refused(measured: Profile, cost: Prices, folder: Path) -> None:
    with pytest.raises(UsageError, match="weights"):
        compile_plan(job_of_files(str(folder), quick_options(verify="small"), measured, cost))
    other = made_up_prices(shape=HeadShape(heads=8, kv_heads=2, head_dim=32))
    with pytest.raises(UsageError, match="device cost"):
        compile_plan(job_of_files(str(folder), OPTIONS, measured, other))


def test_a_cost_without_a_family_that_is_asked_for_says_what_to_do(
    loaded: LoadedModel, cost: Prices, folder: Path
) -> None:
    options = quick_options(verify="none", phases=("prefill",), families=("a_shape", "block_sparse"))
    searched = profile(bare_job(loaded, settle(options, 4096, "cpu")))
    without = cost.model_copy(update={"index": {"a_shape": cost.index["a_shape"]}})
    with pytest.raises(UsageError, match="block_sparse"):
        compile_plan(job_of_files(str(folder), options, searched, without))
    narrow = options.but(families=("a_shape",))
    found, same = (compile_plan(job_of_files(str(folder), narrow, searched, one)).plan for one in (without, cost))
    assert found.prefill == same.prefill


def test_families_that_the_search_dropped_for_heads_are_told(loaded: LoadedModel, folder: Path) -> None:
    options = quick_options(verify="none", phases=("prefill",), families=("a_shape", "vertical_slash"))
    searched = profile(bare_job(loaded, settle(options, 4096, "cpu")))
    narrow = options.but(families=("a_shape",))
    with pytest.raises(UsageError, match="a_shape"):
        compile_plan(job_of_files(str(folder), narrow, searched, made_up_prices(tile=searched.tile)))


def test_without_families_a_plan_has_those_of_its_profile(loaded: LoadedModel, cost: Prices, folder: Path) -> None:
    options = quick_options(verify="none", phases=("prefill",))
    searched = profile(bare_job(loaded, settle(options.but(families=("a_shape",)), 4096, "cpu")))
    bucket = compile_plan(job_of_files(str(folder), options, searched, cost)).plan.prefill.bucket(1024)
    assert {pattern.pattern for layer in range(3) for pattern in bucket.patterns(layer, 4)} <= {"a_shape", "dense"}
    assert not bucket.dense


def test_the_files_are_written_again_where_asked_for(
    measured: Profile, cost: Prices, folder: Path, tmp_path: Path
) -> None:
    compile_plan(
        job_of_files(str(folder), OPTIONS, measured, cost),
        profile_out=tmp_path / "a.profile",
        cost_out=tmp_path / "a.cost",
    )
    assert read_measured(Profile, tmp_path / "a.profile") == measured
    assert read_measured(Prices, tmp_path / "a.cost") == cost
