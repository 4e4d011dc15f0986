"""From a model to a plan in one call: the order, the files between, determinism, and a plan whatever gate is missed."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest
from own_texts import text_of
from planner_models import bare_job, quick_options
from progress import Counting, CtrlC
from tiny_models import tiny_model, tiny_tokenizer

import sparsekv
from sparsekv.planner import plan as planning
from sparsekv.planner.evaluation.given import HeldOut
from sparsekv.planner.fixed_test import SMALL, Cell, FixedTest
from sparsekv.planner.job import job_of
from sparsekv.planner.options import GivenPrompt, digest_of_prompts, set_aside, settle
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.records import read_measured
from sparsekv.planner.verify import Verification, VerifyRun
from sparsekv.plans.brief import sentence
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.quality import Quality
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

OPTIONS = quick_options(verify="small", loss=200.0)
OPTIONS_REFINED = OPTIONS.but(refine_rounds=1)
MEASURING = ("profile", "refine", "decode trials")  # the model; what they find is in the profile
STAGES = (*MEASURING, "evaluate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planned")


@pytest.fixture(scope="module")
def progress() -> Counting:
    return Counting()


@pytest.fixture(scope="module")
def planned(loaded: LoadedModel, folder: Path, progress: Counting) -> planning.PlanResult:
    return compile_plan(job_of(loaded, OPTIONS), profile_out=folder / "profile.json", progress=progress)


@pytest.fixture(scope="module")
def measured(planned: planning.PlanResult, folder: Path) -> Profile:
    return read_measured(Profile, folder / "profile.json")


def test_the_plan_says_what_it_was_tested_on(planned: planning.PlanResult) -> None:
    plan = planned.plan
    assert plan.status == "unverified"
    assert planned.remarks[0] == "the model answers too few of these tasks at 1k"
    assert len(plan.quality.cells) == 7
    assert planned.prefill_density <= 0.7
    assert planned.predicted_speedup > 0
    assert planned.filter_layers == (0,)
    assert plan.provenance.profile.startswith("sha256:")
    assert [(target.backend, target.dtype) for target in plan.targets] == [("cpu", "float32")]
    assert plan.cost.device == "NVIDIA H200"  # prices that ship


def test_nothing_but_the_files_asked_for_is_left(planned: planning.PlanResult, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["profile.json"]


def test_a_plan_from_files_is_the_plan_from_measuring(loaded: LoadedModel, planned, measured) -> None:
    assert compile_plan(job_of(loaded, OPTIONS, profile=measured)).plan == planned.plan


def test_prefill_is_planned_where_prompts_have_fewer_tiles_than_their_length(loaded, measured) -> None:
    shorter = quick_options(lengths=(258,), target_density=(), phases=("prefill",), loss=100.0)
    result = compile_plan(job_of(loaded, shorter.but(tasks=("perplexity",))))
    assert result.prefill_density == pytest.approx(0.9, abs=0.01)  # of 10 tiles, where the whole length has 15


def test_half_of_the_callers_prompts_are_set_aside_before_the_search(loaded: LoadedModel, measured) -> None:
    prompts = [GivenPrompt(text_of(number, 1080)) for number in range(5)]
    asked = OPTIONS.but(prompts=(*prompts, prompts[0]), tasks=(), verify="small", phases=("prefill",))
    job = job_of(loaded, asked)
    calibrated, aside = set_aside(reversed(prompts))
    assert (len(calibrated), len(aside), job.held_out.count, job.options.prompts) == (3, 2, 2, calibrated)
    assert job.calibration.texts == tuple(one.text for one in calibrated)
    result = compile_plan(job)
    assert [(cell.task, cell.prompts) for cell in result.plan.quality.cells] == [("prompts", 2)]
    assert result.plan.provenance.prompts == digest_of_prompts(aside)


def test_plans_are_tried_as_long_as_prompts_that_none_saw_are_left(loaded: LoadedModel, measured, misses) -> None:
    prompts = tuple(GivenPrompt(text_of(number, 1080)) for number in range(4))
    asked = OPTIONS.but(prompts=prompts, tasks=(), phases=("prefill",))
    tried = misses({1024: range(9)})
    result = compile_plan(job_of(loaded, asked))
    assert [len(one.held_out.by_length[1024]) for one in tried] == [2]
    assert "all 2 prompts" in result.remarks[0]
    assert (result.plan.status, result.plan.quality) == ("unverified", None)


def test_prompts_too_short_to_verify_on_are_refused(loaded: LoadedModel) -> None:
    prompts = [GivenPrompt(text_of(number, 540)) for number in range(4)]
    with pytest.raises(PromptError, match="717"):
        job_of(loaded, OPTIONS.but(prompts=tuple(prompts), tasks=(), verify="small"))


@pytest.fixture(scope="module")
def two_lengths(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    file = tmp_path_factory.mktemp("profiles") / "two"
    compile_plan(job_of(loaded, TWO.but(verify="none")), profile_out=file)
    return read_measured(Profile, file)


TESTED = quick_options(lengths=(512, 1024), target_density=(0.75, 0.7), filter_layers=(0,), verify="small")
TWO = quick_options(lengths=(512, 1024), target_density=(0.75, 0.7), filter_layers=(0,))


@dataclass(frozen=True)
class Tried:
    """A plan that was tested."""

    plan: Plan
    run: VerifyRun
    held_out: HeldOut | None


@pytest.fixture
def misses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[int, range]], list[Tried]]:
    """From the call on the plans of these numbers miss at each length, unless they are dense there."""

    def at(left: Mapping[int, range]) -> list[Tried]:
        tried: list[Tried] = []

        def verify(loaded: LoadedModel, plan: Plan, _, run: VerifyRun, *rest: object, held_out=None) -> Verification:
            sparse = {
                n for n in left if not (plan.prefill.bucket(n).dense and (plan.decode is None or is_dense(plan, n)))
            }
            missed = tuple(n for n in left if n in sparse and len(tried) in left[n])
            tried.append(Tried(plan, run, held_out))
            reasons = tuple(f"missed at {n}" for n in missed)
            cells = tuple(Cell("a", n, 30, 30, 20, 0) for n in missed)
            quality = Quality(test=run.size, run=run.number, level=run.level, missed=missed)
            return Verification(quality, FixedTest(SMALL, run.level, cells, {}), reasons)

        monkeypatch.setattr(planning, "verify", verify)
        return tried

    return at


def is_dense(plan: Plan, length: int) -> bool:
    return plan.prefill.bucket(length).dense and plan.decode.bucket(length).dense


def test_a_plan_that_misses_is_followed_by_a_denser_one(loaded: LoadedModel, two_lengths, misses) -> None:
    tried = misses({1024: range(1)})
    result = compile_plan(job_of(loaded, TESTED, profile=two_lengths))
    first, second = ([entry.prefill.density for entry in one.plan.cost.lengths] for one in tried)
    assert [one.run.level for one in tried] == [0.025, 0.0125]
    assert second[1] > first[1]
    assert second[0] == first[0]
    assert (result.plan.status, len(tried)) == ("verified", 2)
    assert any(line.startswith("1k is planned for a smaller loss") for line in result.remarks)


def test_a_length_that_misses_three_times_goes_dense_and_the_others_are_tested_again(
    loaded: LoadedModel, two_lengths, misses
) -> None:
    tried = misses({512: range(2, 3), 1024: range(3)})
    result = compile_plan(job_of(loaded, TESTED, profile=two_lengths))
    assert [is_dense(result.plan, length) for length in (512, 1024)] == [False, True]
    assert [(one.run.number, one.run.level) for one in tried] == [(1, 0.025), (1, 0.0125), (1, 0.0125), (2, 0.05 / 6)]
    assert (result.plan.status, result.plan.quality.run) == ("verified", 2)
    (told,) = (line for line in result.remarks if line.startswith("1k is dense"))
    assert told.count("loss of a at 1k 66.7%") == 3
    assert any(line.startswith("512 is planned for a smaller loss: a plan missed") for line in result.remarks)


def test_a_plan_that_nothing_sparse_serves_is_dense_and_says_that_nothing_is_gained(
    loaded: LoadedModel, two_lengths, misses
) -> None:
    tried = misses({512: range(9), 1024: range(9)})
    result = compile_plan(job_of(loaded, TESTED, profile=two_lengths))
    assert result.plan.is_dense
    assert (result.plan.status, result.plan.quality, len(tried)) == ("unverified", None, 3)
    assert sentence(result.plan) == "dense: nothing gained"


def test_stages_reach_their_totals(planned, progress: Counting) -> None:
    assert progress.stages == [stage for stage in STAGES if stage != "refine"]
    assert 0.0 < progress.done <= progress.total  # of a test fewer, where dense answers too seldom


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_density": (0.1,)}, "density"),
        ({"families": ("block_sparse",)}, "families"),
    ],
)
def test_what_a_profile_does_not_hold_is_found_out_before_the_device_is_measured(
    loaded, measured, changes, message
) -> None:
    progress = Counting()
    with pytest.raises(UsageError, match=message):
        compile_plan(job_of(loaded, quick_options(**changes), profile=measured), progress=progress)
    assert progress.stages == []


def test_a_model_of_windows_alone_is_refused_as_having_nothing_to_plan() -> None:
    model = tiny_model("mistral", sliding_window=128)
    sliding = LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/sliding"))
    progress = Counting()
    with pytest.raises(UsageError, match="128"):
        compile_plan(job_of(sliding, quick_options()), progress=progress)
    assert progress.stages == []


@pytest.mark.parametrize("stage", STAGES)
def test_an_interruption_in_any_stage_leaves_whole_files_and_the_model_as_it_was(
    loaded: LoadedModel, measured, tmp_path: Path, stage: str
) -> None:
    given = {} if stage in MEASURING else {"profile": measured}
    with pytest.raises(KeyboardInterrupt):
        compile_plan(job_of(loaded, OPTIONS_REFINED, **given), profile_out=tmp_path / "p", progress=CtrlC(stage))
    is_profiled = stage not in MEASURING
    assert (tmp_path / "p").exists() == is_profiled
    if is_profiled:
        assert read_measured(Profile, tmp_path / "p") == measured
    assert loaded.model.config._attn_implementation == "sdpa"


def test_the_facade_plans_a_loaded_model_and_reports_on_it(loaded: LoadedModel) -> None:
    progress = Counting()
    options = {
        "lengths": (1024,),
        "tile": OPTIONS.tile,
        "tasks": OPTIONS.tasks,
        "calibration_samples": 1,
    }
    plan = sparsekv.plan_model(
        loaded.model, loaded.tokenizer, verify="none", phases=("decode",), progress=progress, **options
    )
    assert plan.decode is not None
    assert {"profile", "decode trials"} <= {*progress.stages}
    with pytest.raises(UsageError, match="tokenizer"):
        sparsekv.plan_model(loaded.model)


def test_the_published_preset_plans_with_its_own_tiles_and_target(loaded: LoadedModel) -> None:
    options = quick_options(preset="minference", tile=None, target_density=(), levels=(), tasks=OPTIONS.tasks)
    found = profile(bare_job(loaded, settle(options, 4096, "cpu")))
    assert found.preset == "minference"
    assert {candidate.density for candidate in found.lengths[0].candidates} == {1.0}
    plan = compile_plan(job_of(loaded, quick_options(verify="none", target_density=()), profile=found)).plan
    assert plan.provenance.preset == "minference"
    assert plan.prefill.tile.key == 64
