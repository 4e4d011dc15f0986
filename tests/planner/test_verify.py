"""Running the test of a plan: the prompts of a run, dense before the plan, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from made_outcomes import Made, made_up
from own_texts import text_of
from planner_models import loaded_tiny, quick_options
from tiny_plans import EVERYTHING, decode_plan, drops, every_head, plan_for, segment

from sparsekv.planner.evaluation.given import HeldOut
from sparsekv.planner.fixed_test import FULL, LONG, RUNGS, SIZES, SMALL, TURNS, level_of_run
from sparsekv.planner.options import GivenPrompt, Settled, settle
from sparsekv.planner.tasks import Sample
from sparsekv.planner.verify import Verification, VerifyRun, verify, verify_plan
from sparsekv.planner.verify_cells import TESTED, cells_tested, content_seed, lengths_tested
from sparsekv.plans.brief import sentence
from sparsekv.plans.errors import PlanWarning, UnsupportedError, UsageError
from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, PrefillBucket
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel

FIRST = VerifyRun("small", 1, RUNGS[0])
LENGTHS = (2048, 4096)
Rng = np.random.Generator


def options(*lengths: int, **changes: object) -> Settled:
    return settle(quick_options(lengths=lengths or (512,), **changes), max((4096, *lengths)), "cpu")


def everything(model) -> Plan:
    return plan_for(model, every_head(model, BlockSparse(keep=EVERYTHING)), decode_plan(segment(0, (1, 2), EVERYTHING)))


def narrow(model, decode: DecodePlan | None = None) -> Plan:
    return plan_for(model, every_head(model, AShape(sink=tokens(64), window=tokens(64))), decode)


def right(sample: Sample, rng: Rng) -> bool:
    return True


@pytest.fixture
def real_sizes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "small", SMALL)
    monkeypatch.setitem(SIZES, "full", FULL)


def run(monkeypatch, loaded: LoadedModel, made: Made, run: VerifyRun = FIRST, lengths=LENGTHS) -> Verification:
    made_up(monkeypatch, made)
    return verify(loaded, narrow(loaded.model, decode_plan(segment(0, (1, 2), 64))), options(*lengths), run)


@pytest.mark.usefixtures("real_sizes")
@pytest.mark.parametrize(("size", "prompts"), [("small", 299), ("full", 728)])
def test_a_plan_near_dense_is_verified_in_a_sentence(monkeypatch, loaded: LoadedModel, size: str, prompts: int) -> None:
    made = Made({"dense": right, "both": lambda sample, rng: rng.random() > 0.01})
    found = run(monkeypatch, loaded, made, replace(FIRST, size=size))
    told = sentence(found.recorded(narrow(loaded.model)))

    assert found.verified, found.reasons
    assert sum(cell.prompts for cell in found.quality.cells) == prompts
    assert told.startswith(f"verified ({size}): {prompts} prompts, 7 tasks at 2k, 4k: -")
    assert "points over all, or " in told
    assert told.endswith("in any task, is excluded (95%)")
    assert found.quality.excludes.net_loss <= SIZES[size].net_loss
    assert found.quality.excludes.task_loss <= SIZES[size].cell_loss


@pytest.mark.usefixtures("real_sizes")
def test_one_task_that_collapses_at_one_length_is_seen_whatever_others_win(monkeypatch, loaded: LoadedModel) -> None:
    def dense(sample: Sample, rng: Rng) -> bool:
        return sample.task == "kv_retrieval" or rng.random() < 0.8

    def plan(sample: Sample, rng: Rng) -> bool:
        return (sample.task, sample.length) != ("kv_retrieval", 4096) or rng.random() < 0.5

    found = run(monkeypatch, loaded, Made({"dense": dense, "both": plan}))

    assert not found.passed
    assert found.quality.missed == (4096,)
    assert found.reasons[0].startswith("loss of kv_retrieval at 4k")
    assert found.test.net_loss.mean < 0
    assert found.test.worst_at(4096).startswith("loss of kv_retrieval")


@pytest.mark.usefixtures("real_sizes")
def test_dense_runs_before_the_plan_and_alone_where_it_fails(monkeypatch, loaded: LoadedModel) -> None:
    hard = {"two_stage", "kv_retrieval"}
    made = Made({"dense": lambda sample, rng: sample.task not in hard, "both": right})
    found = run(monkeypatch, loaded, made)
    tries = {task: sum(count for name, one, _, count in made.calls if (name, one) == ("dense", task)) for task in hard}

    assert tries == dict.fromkeys(hard, 2 * SMALL.answered)  # at two lengths, once 20 of 40 are wrong
    assert {task for name, task, *_ in made.calls if name == "both"} == {*TESTED, TURNS} - hard
    assert {length for _, task, length, _ in made.calls if task == TURNS} == {4096}
    assert found.verified
    assert sentence(found.recorded(narrow(loaded.model))).endswith(
        "not judged: kv_retrieval at 2k 4k, two_stage at 2k 4k"
    )


@pytest.mark.usefixtures("real_sizes")
def test_a_model_that_answers_too_few_tasks_verifies_nothing_and_misses_nothing(monkeypatch, loaded) -> None:
    made = Made({"dense": lambda sample, rng: sample.task in TESTED[:2], "both": right})
    found = run(monkeypatch, loaded, made)

    assert found.passed
    assert not found.verified
    assert found.reasons == ("the model answers too few of these tasks at 2k, 4k",)


@pytest.mark.usefixtures("real_sizes")
def test_a_plan_far_from_dense_misses_at_its_lengths(monkeypatch, loaded: LoadedModel) -> None:
    found = run(monkeypatch, loaded, Made({"dense": right, "both": right}, nats=0.04))

    assert found.quality.missed == LENGTHS
    assert all("divergence" in line for line in found.reasons)


@pytest.mark.usefixtures("real_sizes")
def test_a_net_loss_of_other_lengths_is_not_one_of_long_prompts(monkeypatch, loaded) -> None:
    def plan(sample: Sample, rng: Rng) -> bool:
        return rng.random() > 0.06 if sample.length < 2 * LONG else (sample.task, sample.answer) != (TESTED[0], "0")

    found = run(monkeypatch, loaded, Made({"dense": right, "both": plan}), lengths=(*LENGTHS, 2 * LONG))

    assert any(cell.lost for cell in found.test.cells if cell.length == 2 * LONG)
    assert found.quality.missed == LENGTHS
    assert {bound.name for bound in found.test.missed} == {"net loss of right answers"}
    assert found.test.worst_at(4096).startswith("net loss")


@pytest.mark.usefixtures("real_sizes")
def test_rounding_of_the_kernels_is_not_the_plans(monkeypatch, loaded: LoadedModel) -> None:
    sides = {"dense": right, "both": right, "every tile and token": right}
    found = run(monkeypatch, loaded, Made(sides, nats=0.025, modes={"both": None, "every tile and token": None}))

    assert found.verified
    assert found.quality.lengths[0].floor == pytest.approx(0.025, abs=0.02)


@pytest.mark.usefixtures("real_sizes")
def test_an_interrupted_run_goes_on_with_the_same_prompts(monkeypatch, loaded: LoadedModel, tmp_path: Path) -> None:
    sides = {"dense": right, "both": lambda sample, rng: rng.random() > 0.02}
    whole = run(monkeypatch, loaded, Made(sides))
    place, left = replace(FIRST, path=tmp_path / "outcomes"), iter(range(9))

    def stops(sample: Sample, rng: Rng) -> bool:
        if sample.answer == "0" and next(left, None) is None:
            raise KeyboardInterrupt
        return True

    with pytest.raises(KeyboardInterrupt):
        run(monkeypatch, loaded, Made(sides | {"dense": stops}), place)
    after = Made(sides)
    found = run(monkeypatch, loaded, after, place)

    assert found.quality == whole.quality
    assert sum(count for name, *_, count in after.calls if name == "both") < 299
    other = Made(sides)
    assert run(monkeypatch, loaded, other, replace(place, number=2, level=level_of_run(2))).quality.run == 2
    assert sum(count for name, *_, count in other.calls if name == "both") == 299  # of another run: begun anew


def test_prompts_follow_from_the_plan_and_the_run(loaded: LoadedModel) -> None:
    plan, other = narrow(loaded.model), everything(loaded.model)
    renamed = plan.model_copy(update={"extensions": {"a": 1}, "status": "verified"})

    assert content_seed(plan, 1) == content_seed(renamed, 1)
    assert len({content_seed(plan, 1), content_seed(plan, 2), content_seed(other, 1)}) == 3


def test_the_next_run_on_a_plan_has_a_smaller_level(loaded: LoadedModel) -> None:
    plan = narrow(loaded.model)
    first = VerifyRun.after(plan, "small")
    again = VerifyRun.after(verify(loaded, plan, options(), first).recorded(plan), "full")

    assert (first.number, again.number, again.level) == (1, 2, 0.05 / 6)


def test_lengths_at_which_a_plan_is_dense_are_not_run() -> None:
    model = loaded_tiny().model
    plan = narrow(model)
    late = (PrefillBucket(up_to=512, dense=True), plan.prefill.lengths[-1].model_copy(update={"up_to": None}))
    plan = plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"lengths": late})})

    assert lengths_tested(plan, (512, 1024)) == (1024,)
    assert lengths_tested(narrow(model), (8192, 65536, 131072, 262144)) == (8192, 65536, 262144)


def test_turns_are_a_cell_at_the_longest_length_with_bounds_of_its_own() -> None:
    assert cells_tested((TURNS,), (8192, 65536, 262144)) == [(65536, TURNS)]
    assert cells_tested((TURNS,), (262144,)) == [(262144, TURNS)]


def test_a_plan_without_finite_numbers_is_wrong_and_far_away(monkeypatch, loaded: LoadedModel) -> None:
    class Broken(Made):
        def _outcome(self, name: str, sample: Sample):
            found = super()._outcome(name, sample)
            return replace(found, kl=float("nan")) if name == self.modes["broken"] else found

    modes = {"both": None, "broken": "both"}
    found = run(monkeypatch, loaded, Broken({"dense": right, "both": right}, modes=modes))
    assert found.quality.missed == LENGTHS
    assert found.quality.lengths[0].kl == 20.0


def test_a_model_without_finite_numbers_is_refused() -> None:
    loaded = loaded_tiny()
    torch.nn.init.constant_(loaded.model.lm_head.weight, float("inf"))
    with pytest.raises(UnsupportedError, match="found NaN"):
        verify(loaded, narrow(loaded.model, decode_plan(segment(0, (1, 2), 4))), options(), FIRST)


def test_a_real_model_is_run(loaded: LoadedModel) -> None:
    found = verify(loaded, narrow(loaded.model, decode_plan(segment(0, (1, 2), 4))), options(), FIRST)

    assert [(cell.answered, cell.judged) for cell in found.quality.cells] == [(0, False)] * len((*TESTED, TURNS))
    assert (found.passed, found.verified) == (True, False)


def test_own_prompts_are_drawn_once_and_verify_nothing(loaded: LoadedModel) -> None:
    prompts = [GivenPrompt(text_of(number, 1200), " and more") for number in (0, 1, 2, 3, 3)]
    with pytest.warns(PlanWarning, match="4 of 5 prompts are different texts at 512"):
        found = verify(loaded, narrow(loaded.model), options(), FIRST, prompts=prompts)

    (cell,) = found.quality.cells
    assert (cell.task, cell.prompts, found.quality.test) == ("prompts", 4, "prompts")
    assert any("--prompts" in line for line in found.reasons)


def test_prompts_that_were_set_aside_verify_where_there_are_enough(loaded: LoadedModel) -> None:
    prompts = [GivenPrompt(text_of(number, 400), "yz") for number in range(4)]
    held_out = HeldOut.of(loaded.tokenizer, (), prompts, options(verify="small"))
    found = verify(loaded, narrow(loaded.model), options(), FIRST, held_out=held_out.part(0))

    assert held_out.part(0).count == held_out.part(1).count == 2
    assert held_out.part(2) is None
    assert found.quality.cells[0].prompts == 2
    assert not any("--prompts" in line for line in found.reasons)
    few = replace(held_out, by_length={512: held_out.by_length[512][:1]})
    assert "fewer than 2" in verify(loaded, narrow(loaded.model), options(), FIRST, held_out=few).reasons[0]


def test_tasks_and_seeds_of_ones_own_verify_nothing(loaded: LoadedModel) -> None:
    for changes, word in (({"verify_tasks": ("niah_single",)}, "--set tasks"), ({"verify_seed": 1}, "--set seed")):
        found = verify(loaded, narrow(loaded.model), options(**changes), FIRST)

        assert any(word in line for line in found.reasons)


def test_an_evicting_plan_is_asked_a_second_question_and_reads_long_texts(monkeypatch, loaded: LoadedModel) -> None:
    plan, made = (
        plan_for(loaded.model, None, None, drops((0, 1, 2), 8, generated=4)),
        Made({"dense": right, "both": right}),
    )
    made_up(monkeypatch, made)
    found = verify(loaded, plan, options(1024), FIRST)

    assert [cell.task for cell in found.quality.cells] == [*TESTED[:-2], "niah_multikey", "second_question"]
    assert any(bound.name.startswith("divergence over texts") for bound in found.test.bounds)


@pytest.mark.parametrize(
    ("asked", "offload", "evicting", "step"),
    [(None, (), (), 16384), (128, (), (), 128), (None, (1, 2), (), None), (None, (), (3,), None), (64, (), (3,), 64)],
)
def test_prompts_run_in_steps_unless_layers_evict_or_are_in_host_memory(
    monkeypatch, loaded: LoadedModel, asked, offload, evicting, step
) -> None:
    made_up(monkeypatch, Made({"dense": right, "both": right}))
    plan = narrow(loaded.model, decode_plan(segment(0, (1, 2), 64), offload=offload))
    plan = plan.model_copy(update={"kv_cache": (drops(evicting, 8, generated=4),) if evicting else None})
    assert verify(loaded, plan, options(prefill_chunk=asked), FIRST).quality.step == step


def test_half_precision_has_rounding_of_its_own() -> None:
    half = loaded_tiny(seed=0)
    half.model.to(torch.bfloat16)
    prompts = [GivenPrompt(text_of(number, 500), "yz") for number in range(2)]
    found = verify(half, narrow(half.model, decode_plan(segment(0, (1, 2), 4))), options(), FIRST, prompts=prompts)

    assert 0.0 < found.quality.lengths[0].floor < 0.05


def test_a_plan_that_computes_everything_is_not_called_verified(loaded: LoadedModel) -> None:
    prompts = [GivenPrompt(text_of(number, 500), "yz") for number in range(2)]
    found = verify(loaded, everything(loaded.model), options(), FIRST, prompts=prompts)

    assert any("was not run sparse" in line for line in found.reasons)


def test_sparse_buckets_that_no_prompt_reached_are_named(loaded: LoadedModel) -> None:
    prompts = [GivenPrompt(text_of(number, 500), "yz") for number in range(2)]
    buckets = tuple(DecodeBucket(up_to=end, segments=(segment(0, (1, 2), 16),)) for end in (512, 1024, None))
    found = verify(
        loaded, plan_for(loaded.model, decode=DecodePlan(lengths=buckets)), options(), FIRST, prompts=prompts
    )

    assert [line.split()[3] for line in found.reasons if "was not run sparse" in line] == ["1k", "4k"]


def test_a_program_verifies_a_plan_in_a_file_as_the_command_does(loaded: LoadedModel, tmp_path) -> None:
    plan = narrow(loaded.model, decode_plan(segment(0, (1, 2), 4)))
    write_plan(plan, tmp_path / "plan.yaml")
    found = verify_plan(loaded.model, tmp_path / "plan.yaml", loaded.tokenizer, lengths=(512,))

    assert not found.verified
    assert load_plan(tmp_path / "plan.yaml").quality is None
    with pytest.raises(UsageError, match="tokenizer"):
        verify_plan(loaded.model, plan)
    with pytest.raises(UsageError, match="own prompts"):
        verify_plan(loaded, plan, prompts=(GivenPrompt("a", "b"),))
    with pytest.raises(UsageError, match="'none'"):
        verify_plan(loaded, plan, verify="none")


def test_a_plan_without_phases_cannot_be_verified(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="nothing to verify"):
        verify(loaded, plan_for(loaded.model, None), options(), FIRST)
