"""A plan from a profile alone: the same plan, without the weights, and honest about what was not looked at."""

from pathlib import Path

import pytest
from model_folders import save_model
from planner_models import bare_job, quick_options

from sparsekv.planner.job import job_of, job_of_profile
from sparsekv.planner.options import settle
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import dump_plan
from sparsekv.runtime.hf.load import LoadedModel

OPTIONS = quick_options(verify="none", filter_layers=(0,))


@pytest.fixture(scope="module")
def measured(loaded: LoadedModel) -> Profile:
    return profile(bare_job(loaded, settle(OPTIONS, 4096, "cpu")))


@pytest.fixture(scope="module")
def folder(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without its weights."""
    folder = save_model(loaded.model, tmp_path_factory.mktemp("models") / "tiny")
    (folder / "model.safetensors").unlink()
    return folder


def test_it_is_the_plan_that_the_loaded_model_gives_twice_the_same_bytes(
    loaded: LoadedModel, measured: Profile, folder: Path
) -> None:
    first, second = (compile_plan(job_of_profile(str(folder), OPTIONS, measured)).plan for _ in range(2))
    assert dump_plan(first) == dump_plan(second)
    assert dump_plan(first) == dump_plan(compile_plan(job_of(loaded, OPTIONS, profile=measured)).plan)
    assert [bucket.dense for bucket in first.buckets] == [True, False, False, False]


def test_the_plan_names_the_device_that_the_model_is_on_and_not_that_of_an_earlier_profile(
    loaded: LoadedModel, measured: Profile
) -> None:
    elsewhere = measured.model_copy(update={"device": "NVIDIA H200", "backend": "triton"})
    (target,) = compile_plan(job_of(loaded, OPTIONS, profile=elsewhere)).plan.targets
    assert (target.device, target.backend) == (measured.device, "cpu")


def test_a_model_that_cannot_be_reached_is_taken_by_its_name_alone(measured: Profile) -> None:
    result = compile_plan(job_of_profile("tests/tiny", OPTIONS, measured))
    assert any("not checked" in remark for remark in result.remarks)
    with pytest.raises(UsageError, match="hub"):
        compile_plan(job_of_profile("tests/other", OPTIONS, measured))


def test_verification_is_refused(measured: Profile, folder: Path) -> None:
    with pytest.raises(UsageError, match="weights"):
        compile_plan(job_of_profile(str(folder), quick_options(verify="small"), measured))
