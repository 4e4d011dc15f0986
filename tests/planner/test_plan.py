"""From a model to a plan in one call: the order, the files between, determinism, and a plan whatever gate is missed."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from own_texts import text_of
from planner_models import bare_job, made_up_prices, quick_options
from progress import Counting, CtrlC
from tiny_models import tiny_model, tiny_tokenizer

import sparsekv
from sparsekv.planner import plan as planning
from sparsekv.planner.common_options import GivenPrompt, digest_of_prompts, set_aside
from sparsekv.planner.job import job_of
from sparsekv.planner.options import Gate, settle
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.prices import Prices
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.profile.profiler import profile
from sparsekv.planner.records import read_measured
from sparsekv.planner.verify import Verification, verify
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.patterns import TileShape, tokens
from sparsekv.plans.schema import Measurement, Plan, Quality
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

LOOSE = Gate(max_kl=50.0, min_agreement=0.0, min_exact=0.0, max_failed=1.0)
OPTIONS = quick_options(gate=LOOSE, decode_kl=100.0)
OPTIONS_REFINED = OPTIONS.but(refine_rounds=1)
MEASURING = ("profile", "refine", "decode trials")  # the model; what they find is in the profile
STAGES = (*MEASURING, "allocate", "filter layers", "evaluate")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("planned")


@pytest.fixture(scope="module")
def progress() -> Counting:
    return Counting()


@pytest.fixture(scope="module")
def planned(loaded: LoadedModel, folder: Path, progress: Counting) -> planning.PlanResult:
    files = {"profile_out": folder / "profile.json", "cost_out": folder / "cost.json"}
    return compile_plan(job_of(loaded, OPTIONS), **files, progress=progress)


@pytest.fixture(scope="module")
def measured(planned: planning.PlanResult, folder: Path) -> tuple[Profile, Prices]:
    return read_measured(Profile, folder / "profile.json"), read_measured(Prices, folder / "cost.json")


def test_the_plan_met_its_gates_and_says_what_was_measured_and_that_it_was_little(planned: planning.PlanResult) -> None:
    plan = planned.plan
    assert plan.status == "unverified"
    assert any("undecided" in line for line in planned.remarks)
    assert {"prefill", "decode", "both"} <= {name for name, value in plan.quality if value is not None}
    assert planned.prefill_density <= 0.7
    assert planned.predicted_speedup > 0
    assert planned.filter_layers == (0,)
    assert plan.provenance.profile.startswith("sha256:")
    assert (plan.targets, plan.cost.device) == ((), "NVIDIA H200")  # prices that ship: nothing was measured here


def test_nothing_but_the_files_asked_for_is_left(planned: planning.PlanResult, folder: Path) -> None:
    assert sorted(path.name for path in folder.iterdir()) == ["cost.json", "profile.json"]


def test_a_plan_from_files_is_the_plan_from_measuring(loaded: LoadedModel, planned, measured) -> None:
    profile, cost = measured
    assert compile_plan(job_of(loaded, OPTIONS, profile=profile, cost=cost)).plan == planned.plan


def test_the_plan_runs_on_its_model(loaded: LoadedModel, planned: planning.PlanResult) -> None:
    prompt = loaded.tokenizer("x = 1; " * 100, return_tensors="pt")["input_ids"]
    with apply(loaded.model, planned.plan) as handle:
        loaded.model.generate(prompt, attention_mask=prompt > 0, max_new_tokens=3, do_sample=False)
        assert handle.stats().prefill_density < 1.0
        assert handle.stats().decode_share < 1.0


def test_the_default_density_is_planned_where_prompts_have_fewer_tiles_than_their_length(loaded, measured) -> None:
    shorter = quick_options(lengths=(258,), target_density=(), phases=("prefill",), verify_samples=0)
    result = compile_plan(job_of(loaded, shorter.but(tasks=("perplexity",)), cost=measured[1]))
    assert result.prefill_density == pytest.approx(0.9, abs=0.01)  # of 10 tiles, where the whole length has 15


def test_a_gate_that_nothing_sparse_meets_gives_a_plan_without_anything_sparse(loaded: LoadedModel, measured) -> None:
    profile, cost = measured
    progress = Counting()
    options = quick_options(gate=Gate(max_kl=0.0), target_density=(0.56,), decode_loss=1.0, verify_samples=None)
    result = compile_plan(job_of(loaded, options, profile=profile, cost=cost), progress=progress)
    assert all(bucket.dense for bucket in result.plan.buckets)
    assert (result.plan.status, result.plan.quality) == ("unverified", None)
    assert 2 <= result.attempts == progress.stages.count("evaluate") <= planning.MOST_ATTEMPTS
    assert progress.stages.count("allocate") == result.attempts + 1  # the end needs no verification
    assert [any(f"{phase} at 1k is dense" in line for line in result.remarks) for phase in ("prefill", "decode")] == [
        True,
        True,
    ]


def test_half_of_the_callers_prompts_are_set_aside_before_the_search(loaded: LoadedModel, measured) -> None:
    prompts = [GivenPrompt(text_of(number, 1080)) for number in range(5)]
    asked = OPTIONS.but(prompts=(*prompts, prompts[0]), tasks=(), verify_samples=None, phases=("prefill",))
    job = job_of(loaded, asked, cost=measured[1])
    calibrated, aside = set_aside(reversed(prompts))
    assert (len(calibrated), len(aside), job.held_out.count, job.options.prompts) == (3, 2, 2, calibrated)
    assert job.calibration.texts == tuple(one.text for one in calibrated)
    result = compile_plan(job)
    assert result.plan.quality.evidence.tasks == ("prompts",)
    assert result.plan.quality.evidence.prompts == 2
    assert result.plan.provenance.prompts == digest_of_prompts(aside)


def test_attempts_share_no_prompt_that_was_set_aside_and_end_with_them(loaded: LoadedModel, measured) -> None:
    prompts = tuple(GivenPrompt(text_of(number, 1080)) for number in range(4))
    gate = Gate(max_kl=1e-6, max_failed=0.0)
    asked = OPTIONS.but(prompts=prompts, tasks=(), verify_samples=None, phases=("prefill",), gate=gate)
    seen = []

    def missed(loaded, plan, options, *rest, **kept) -> Verification:
        seen.append(kept["skipped"])
        return replace(
            verify(loaded, plan, options.but(gate=LOOSE), *rest, **kept), passed=False, missed={"prefill": (1024,)}
        )

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planning, "verify", missed)
        result = compile_plan(job_of(loaded, asked, cost=measured[1]))
    assert seen == [0]
    assert "all 2 prompts" in result.remarks[0]
    assert result.plan.status == "unverified"


def test_prompts_too_short_to_verify_on_are_refused(loaded: LoadedModel) -> None:
    prompts = [GivenPrompt(text_of(number, 540)) for number in range(4)]
    with pytest.raises(PromptError, match="717"):
        job_of(loaded, OPTIONS.but(prompts=tuple(prompts), tasks=(), verify_samples=None))


@pytest.fixture(scope="module")
def two_lengths(loaded: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Profile:
    file = tmp_path_factory.mktemp("profiles") / "two"
    compile_plan(job_of(loaded, TWO.but(verify_samples=0), cost=made_up_prices()), profile_out=file)
    return read_measured(Profile, file)


TWO = quick_options(lengths=(512, 1024), target_density=(0.75, 0.7), decode_loss=1.0)


@pytest.fixture
def misses(monkeypatch: pytest.MonkeyPatch) -> Callable[[Mapping[str, Sequence[int]]], None]:
    """From the call on these phases miss their gate at these lengths unless they are dense there."""

    def sparse_of(plan: Plan, phase: str, lengths: Sequence[int]) -> tuple[int, ...]:
        return tuple(length for length in lengths if not getattr(plan, phase).bucket(length).dense)

    def at(never: Mapping[str, Sequence[int]]) -> None:
        def verify(loaded: LoadedModel, plan: Plan, *_: object, **__: object) -> Verification:
            missed = {phase: sparse for phase, some in never.items() if (sparse := sparse_of(plan, phase, some))}
            quality = Quality(prefill=Measurement(lengths=(1024,), density=1.0))
            return Verification(quality, not missed, not missed, tuple(f"{phase}: missed" for phase in missed), missed)

        monkeypatch.setattr(planning, "verify", verify)

    return at


@pytest.mark.parametrize(
    "never",
    [
        {"prefill": (1024,)},
        {"decode": (1024,)},
        {"prefill": (512,), "decode": (1024,)},
        {"prefill": (512, 1024), "decode": (512,)},
    ],
    ids=str,
)
def test_only_what_nothing_but_dense_serves_goes_dense(loaded: LoadedModel, two_lengths, misses, never) -> None:
    misses(never)
    result = compile_plan(job_of(loaded, TWO, profile=two_lengths, cost=made_up_prices()))
    plan = result.plan
    for phase in ("prefill", "decode"):
        dense = {length for length in (512, 1024) if getattr(plan, phase).bucket(length).dense}
        assert dense == set(never.get(phase, ()))
    assert plan.status == "verified"
    assert plan.provenance.settings["dense"] == {phase: list(lengths) for phase, lengths in never.items()}
    assert sum("is dense: every sparser plan missed its gate" in line for line in result.remarks) == len(never)
    assert not any("runs dense" in line for line in result.remarks)  # is told of what is dense to be faster


@pytest.mark.parametrize(
    ("changes", "known", "first", "count"),
    [
        ({"refine_rounds": 1}, (), "profile", 6),
        ({"phases": ("prefill",)}, (), "profile", 3),
        ({"phases": ("decode",), "verify_samples": 0}, (), "profile", 3),
        ({"filter_layers": (0,), "decode_kl": None, "refine_rounds": 1}, ("cost",), "profile", 5),
        ({"refine_rounds": 1}, ("profile",), "allocate", 3),
        ({"verify_samples": 0}, ("profile", "cost"), "allocate", 2),
    ],
)
def test_stages_that_will_not_run_are_not_counted(loaded: LoadedModel, measured, changes, known, first, count) -> None:
    given = {name: found for name, found in zip(("profile", "cost"), measured, strict=True) if name in known}
    progress = CtrlC(first, steps=0)
    with pytest.raises(KeyboardInterrupt):
        compile_plan(job_of(loaded, OPTIONS.but(**changes), **given), progress=progress)
    assert (progress.stages, progress.numbers) == ([first], [f"1 of {count}"])


def test_stages_are_numbered_without_gaps_and_reach_their_totals(planned, progress: Counting) -> None:
    assert progress.stages == [stage for stage in STAGES if stage != "refine"]
    assert progress.numbers == [f"{number} of 5" for number in range(1, 6)]
    assert progress.done == pytest.approx(progress.total)


def test_a_plan_that_misses_is_tightened_until_it_passes(loaded: LoadedModel, measured) -> None:
    profile, cost = measured
    first = compile_plan(
        job_of(loaded, quick_options(target_density=(0.56,), verify_samples=0), profile=profile, cost=cost)
    )
    loose = settle(quick_options(phases=("prefill",), gate=LOOSE, verify_samples=4), 4096, "cpu")
    kl = planning.verify(loaded, first.plan, loose).quality.prefill.kl
    gate = LOOSE.but(max_kl=kl * 0.4)  # far enough below for 16 samples to show it
    options = quick_options(phases=("prefill",), target_density=(0.56,), gate=gate, verify_samples=16)
    progress = Counting()
    result = compile_plan(job_of(loaded, options, profile=profile, cost=cost), progress=progress)
    assert result.attempts == 2
    assert any("missed its gate" in line and "attempt 2" in line for line in progress.said)
    assert any("the 0.56" in line for line in result.remarks)
    assert result.prefill_density > first.prefill_density
    assert result.plan.quality.prefill.kl < kl
    assert result.plan.quality.evidence.attempt == 2


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"filter_layers": (99,)}, "found 99"),
        ({"filter_layers": (2,)}, "found 2"),
        ({"tasks": ("perplexity", "kv_retrieval"), "lengths": (32,), "target_density": ()}, "kv_retrieval at 32"),
        ({"lengths": (8192,)}, "context"),
    ],
)
def test_what_can_never_be_planned_is_found_out_before_anything_is_measured(loaded, changes, message) -> None:
    progress = Counting()
    with pytest.raises((UsageError, PromptError), match=message):
        compile_plan(job_of(loaded, quick_options(**changes)), progress=progress)
    assert progress.stages == []


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_density": (0.1,)}, "profiled"),
        ({"decode_budget": tokens(1)}, "profiled"),
        ({"families": ("block_sparse",)}, "families"),
    ],
)
def test_what_a_profile_does_not_hold_is_found_out_before_the_device_is_measured(
    loaded, measured, changes, message
) -> None:
    progress = Counting()
    with pytest.raises(UsageError, match=message):
        compile_plan(job_of(loaded, quick_options(**changes), profile=measured[0]), progress=progress)
    assert progress.stages == []


def test_a_device_cost_that_does_not_fit_is_found_out_before_the_model_is_profiled(loaded, measured) -> None:
    progress = Counting()
    with pytest.raises(UsageError, match="device cost"):
        compile_plan(job_of(loaded, quick_options(tile=TileShape()), cost=measured[1]), progress=progress)
    assert progress.stages == []


def test_a_model_of_windows_alone_is_refused_as_having_nothing_to_plan() -> None:
    model = tiny_model("mistral", sliding_window=128)
    sliding = LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/sliding"))
    progress = Counting()
    with pytest.raises(UsageError, match="128"):
        compile_plan(job_of(sliding, quick_options()), progress=progress)
    assert progress.stages == []


@pytest.mark.parametrize("stage", [*STAGES, "cost"])
def test_an_interruption_in_any_stage_leaves_whole_files_and_the_model_as_it_was(
    loaded: LoadedModel, measured, tmp_path: Path, stage: str
) -> None:
    known, cost = measured
    given = {} if stage in MEASURING else {"profile": known}
    given |= {} if stage == "cost" else {"cost": cost}
    with pytest.raises(KeyboardInterrupt):
        compile_plan(
            job_of(loaded, OPTIONS_REFINED.but(kv_dtype="fp8" if stage == "cost" else "auto"), **given),
            profile_out=tmp_path / "p",
            cost_out=tmp_path / "c",
            progress=CtrlC(stage),
        )
    is_profiled = stage not in MEASURING
    assert (tmp_path / "p").exists() == is_profiled
    if is_profiled:
        assert read_measured(Profile, tmp_path / "p") == known
    assert (tmp_path / "c").exists() == (is_profiled and stage != "cost")
    assert loaded.model.config._attn_implementation == "sdpa"


def test_the_facade_plans_a_loaded_model_and_reports_on_it(loaded: LoadedModel) -> None:
    progress = Counting()
    options = {
        "lengths": (1024,),
        "crossover": False,
        "tile": OPTIONS.tile,
        "tasks": OPTIONS.tasks,
        "calibration_samples": 1,
    }
    plan = sparsekv.plan_model(
        loaded.model, loaded.tokenizer, verify_samples=0, phases=("decode",), progress=progress, **options
    )
    assert plan.decode is not None
    assert {"profile", "filter layers"} <= {*progress.stages}
    with pytest.raises(UsageError, match="tokenizer"):
        sparsekv.plan_model(loaded.model)


def test_predictions_that_were_measured_beside_other_work_are_said_to_be(
    loaded: LoadedModel, monkeypatch: pytest.MonkeyPatch, measured: tuple[Profile, Prices]
) -> None:
    monkeypatch.setattr("os.getloadavg", lambda: (999.0,) * 3)
    options = quick_options(verify_samples=0, phases=("decode",), kv_dtype="fp8")  # of which no prices ship
    job = job_of(loaded, options, profile=measured[0])
    assert any("load 999.0" in line for line in compile_plan(job).remarks)


def test_the_published_preset_plans_with_its_own_tiles_and_target(loaded: LoadedModel) -> None:
    options = quick_options(preset="minference", tile=None, target_density=(), levels=(), tasks=OPTIONS.tasks)
    found = profile(bare_job(loaded, settle(options, 4096, "cpu")))
    assert found.preset == "minference"
    assert {candidate.density for candidate in found.lengths[0].candidates} == {1.0}
    plan = compile_plan(
        job_of(loaded, quick_options(verify_samples=0, target_density=()), profile=found, cost=made_up_prices())
    ).plan
    assert plan.provenance.preset == "minference"
    assert plan.prefill.tile.key == 64
