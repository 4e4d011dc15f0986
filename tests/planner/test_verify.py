"""The gate: what counts as missed, and which lengths did worst."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from own_texts import text_of
from planner_models import loaded_tiny, quick_options
from planner_profiles import made_up_length, made_up_profile, made_up_reuse
from tiny_plans import EVERYTHING, decode_plan, drops, every_head, plan_for, segment

from sparsekv.kernels.prefill import cpu
from sparsekv.planner.common_options import GivenPrompt
from sparsekv.planner.evaluation.given import HeldOut
from sparsekv.planner.options import Gate, PlanOptions, settle
from sparsekv.planner.profile.profile_data import for_profile
from sparsekv.planner.verify import content_seed, planned_phases, verify
from sparsekv.planner.verify_plan import verify_plan
from sparsekv.plans.errors import PlanWarning, PromptError, UsageError
from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.patterns import AShape, BlockSparse, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, PrefillBucket
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel


def options(samples: int | None = 3, *, lengths: tuple[int, ...] = (512,), **changes):
    settled = settle(quick_options(lengths=lengths, verify_samples=samples, **changes), 4096, "cpu")
    return settled.but(verify_chosen=tuple(flag for flag in settled.verify_chosen if flag != "--set tasks"))


def everything(model) -> Plan:
    """A plan that computes all tiles and attends to all tokens."""
    return plan_for(model, every_head(model, BlockSparse(keep=EVERYTHING)), decode_plan(segment(0, (1, 2), EVERYTHING)))


def narrow(model, decode: DecodePlan | None = None) -> Plan:
    return plan_for(model, every_head(model, AShape(sink=tokens(64), window=tokens(64))), decode)


LOOSE = Gate(max_kl=100.0, min_agreement=0.0, min_exact=0.0, max_failed=1.0, max_accuracy_drop=100.0)


def test_a_lossy_plan_misses_in_every_phase_and_drawing_ends_there(loaded: LoadedModel) -> None:
    plan = narrow(loaded.model, decode_plan(segment(0, (1, 2), 4)))
    found = verify(loaded, plan, options(None, gate=Gate(max_kl=1e-4), verify_time=1e6))
    assert not found.passed
    assert found.missed["prefill"] == (512,)
    assert any(line.startswith("prefill: ") for line in found.reasons)
    assert found.quality.evidence.prompts < 40
    assert found.recorded(plan).status == "unverified"


def test_a_program_verifies_a_plan_in_a_file_as_the_command_does(loaded: LoadedModel, tmp_path) -> None:
    plan = narrow(loaded.model, decode_plan(segment(0, (1, 2), 4)))
    write_plan(plan, tmp_path / "plan.yaml")
    asked = {"lengths": (512,), "tasks": ("kv_retrieval",), "verify_samples": 1, "max_kl": 1e-4}
    found = verify_plan(loaded.model, tmp_path / "plan.yaml", loaded.tokenizer, **asked)
    assert not found.conclusive
    measured = found.quality.both
    assert (measured.lengths, measured.agreement.samples) == ((512,), 1)
    assert found.quality.evidence.gates == Gate(max_kl=1e-4).named
    assert load_plan(tmp_path / "plan.yaml").quality is None
    with pytest.raises(UsageError, match="tokenizer"):
        verify_plan(loaded.model, plan)
    with pytest.raises(UsageError, match="own prompts"):
        verify_plan(loaded, plan, prompts=(GivenPrompt("a", "b"),))


def test_a_plan_near_dense_is_verified_once_enough_samples_show_it(loaded: LoadedModel) -> None:
    """On a random model whose answers are never right, so that nothing is said of accuracy."""
    whole = plan_for(loaded.model, every_head(loaded.model, AShape(sink=tokens(64), window=tokens(64))))
    one = whole.prefill.lengths[-1].heads[-1].model_copy(update={"heads": (0,)})
    sparse = whole.prefill.lengths[-1].model_copy(update={"heads": (one,), "up_to": 256})
    buckets = (sparse, PrefillBucket(up_to=None, extrapolated=True, same_as=256))
    plan = whole.model_copy(update={"prefill": whole.prefill.model_copy(update={"lengths": buckets})})
    found = verify(loaded, plan, options(None, lengths=(256,), verify_time=1e6))
    assert found.conclusive, found.reasons
    assert found.recorded(plan).status == "verified"
    measured, evidence = found.quality.prefill, found.quality.evidence
    assert measured.density < 1.0
    assert {claim.outcome for claim in measured.claims.values()} == {"met"}
    assert measured.claims["failed"].prompts == evidence.prompts == evidence.looks
    assert evidence.gates == Gate().named
    assert evidence.seed is None
    assert "no task is solved" in evidence.excludes


def test_too_few_samples_leave_a_plan_undecided_and_say_how_many_more(loaded: LoadedModel) -> None:
    found = verify(loaded, narrow(loaded.model), options(3, gate=Gate(max_kl=9.0, min_agreement=0.0, min_exact=0.0)))
    assert found.passed
    assert not found.conclusive
    assert "undecided" in found.reasons[0]
    assert "more prompts like these" in found.reasons[0]
    assert "s a prompt" in found.reasons[0]
    assert "s a prompt" not in found.quality.evidence.reason  # a plan says the same each time it is made
    assert found.outcomes is not None
    assert found.quality.prefill.claims["failed"].prompts == 3


@pytest.mark.parametrize(
    ("changes", "word"),
    [({"gate": LOOSE}, "looser"), ({"verify_seed": 1}, "--set seed")],
)
def test_loose_gates_and_chosen_samples_verify_nothing(loaded: LoadedModel, changes, word) -> None:
    found = verify(loaded, narrow(loaded.model), options(2, **changes))
    assert not found.conclusive
    assert any(word in line for line in found.reasons)
    assert found.quality.evidence.gates == changes.get("gate", Gate()).named
    assert found.quality.evidence.seed == changes.get("verify_seed")


def test_lengths_at_which_a_phase_is_dense_do_not_dilute_what_is_shown_of_it(loaded: LoadedModel) -> None:
    plan = narrow(loaded.model)
    sparse = plan.prefill.lengths[-1].model_copy(update={"up_to": None})
    late = plan.prefill.model_copy(update={"lengths": (PrefillBucket(up_to=512, dense=True), sparse)})
    found = verify(loaded, plan.model_copy(update={"prefill": late}), options(1, lengths=(512, 1024), gate=LOOSE))
    assert [part.length for part in found.quality.prefill.by_length] == [1024]
    assert found.quality.prefill.claims["failed"].prompts == found.quality.evidence.prompts


def test_a_plan_without_finite_numbers_missed_its_gate_and_ends_nothing(loaded: LoadedModel, monkeypatch) -> None:
    def broken(*call, **settings):
        found = compute(*call, **settings)
        return replace(found, out_BHSD=torch.full_like(found.out_BHSD, torch.nan))

    compute = cpu.prefill
    monkeypatch.setattr(cpu, "prefill", broken)
    found = verify(loaded, narrow(loaded.model), options(None, verify_time=1e6))
    assert not found.passed
    assert found.missed == {"prefill": (512,)}
    assert "nan" in found.reasons[0]


def test_tasks_of_ones_own_verify_nothing(loaded: LoadedModel) -> None:
    settled = settle(quick_options(lengths=(512,), verify_samples=1), 4096, "cpu")
    found = verify(loaded, narrow(loaded.model), settled)
    assert any("--set tasks" in line for line in found.reasons)
    assert found.quality.evidence.tasks == settled.tasks


def test_own_prompts_are_drawn_once_and_verify_nothing(loaded: LoadedModel) -> None:
    prompts = [GivenPrompt(text_of(number, 1200), " and more") for number in (0, 1, 2, 3, 3)]
    settled = options(None, verify_time=1e6, gate=Gate(max_kl=9.0, min_agreement=0.0, min_exact=0.0))
    with pytest.warns(PlanWarning, match="4 of 5 prompts are different texts at 512"):
        found = verify(loaded, narrow(loaded.model), settled, prompts=prompts)
    assert found.quality.evidence.tasks == ("prompts",)
    assert found.quality.prefill.claims["failed"].prompts == 4
    assert any("--prompts" in line for line in found.reasons)
    assert (found.used_up, found.seconds, found.outcomes) == (True, None, None)
    assert "used up: add to them" in found.reasons[0]
    with pytest.raises(PromptError, match="512"):
        verify(loaded, narrow(loaded.model), options(None, lengths=(512, 4096)), prompts=prompts)


def test_prompts_that_were_set_aside_may_verify_at_the_lengths_that_they_come_near(loaded: LoadedModel) -> None:
    lengths = [300, 380, 400, 900]  # tokens, with two of an answer
    prompts = [GivenPrompt(text_of(length, length - 2), "yz") for length in lengths]
    settled = options(None, lengths=(512, 1024), verify_time=1e6, gate=Gate(max_kl=9.0, min_agreement=0.0))
    held_out = HeldOut.of(loaded.tokenizer, (), prompts, settled)
    found = verify(loaded, narrow(loaded.model), settled, held_out=held_out)
    by_length = {part.length: part.claims["divergence"].prompts for part in found.quality.prefill.by_length}
    assert by_length == {512: 3, 1024: 1}  # 300 is too short for both, 900 is cut for one
    assert found.drawn >= 3
    assert not any("--prompts" in line for line in found.reasons)
    later = verify(loaded, narrow(loaded.model), settled, held_out=held_out, skipped=1)
    assert later.quality.evidence.skipped == 1
    assert later.quality.evidence.prompts == 2
    with pytest.raises(PromptError, match="no earlier attempt"):
        verify(loaded, narrow(loaded.model), settled, held_out=held_out, skipped=3)


def test_what_is_known_of_a_plan_gives_way_only_to_more(loaded: LoadedModel) -> None:
    plan, loose = narrow(loaded.model), {"gate": LOOSE}
    three, two = (verify(loaded, plan, options(count, **loose)) for count in (3, 2))
    missed = verify(loaded, plan, options(None, gate=Gate(max_kl=1e-4), verify_time=1e6))
    known = three.recorded(plan)
    assert (three.says_more(plan), three.says_more(known), two.says_more(known)) == (True, True, False)
    assert not missed.says_more(known)  # by other gates
    assert missed.says_more(missed.recorded(plan))
    assert not three.says_more(known.model_copy(update={"status": "verified"}))


def test_samples_follow_from_what_the_plan_executes(loaded: LoadedModel) -> None:
    plan, other = narrow(loaded.model), everything(loaded.model)
    renamed = plan.model_copy(update={"extensions": {"a": 1}, "status": "verified"})
    assert content_seed(plan) == content_seed(renamed) != content_seed(other)


def test_a_plan_that_computes_everything_is_not_called_verified(loaded: LoadedModel) -> None:
    found = verify(loaded, everything(loaded.model), options(3))
    assert found.passed
    assert any("was not run sparse" in line for line in found.reasons)


def test_a_plan_whose_sparse_part_never_ran_is_not_called_verified(loaded: LoadedModel) -> None:
    plan = narrow(loaded.model)
    last = plan.prefill.lengths[-1].model_copy(update={"up_to": None})
    late = plan.prefill.model_copy(update={"lengths": (PrefillBucket(up_to=1024, dense=True), last)})
    found = verify(loaded, plan.model_copy(update={"prefill": late}), options())
    assert not found.conclusive
    assert "more than 1k" in found.reasons[-1]


def test_decode_that_chose_nothing_at_the_verified_lengths_is_not_called_verified(loaded: LoadedModel) -> None:
    found = verify(loaded, plan_for(loaded.model, decode=decode_plan(segment(0, (1, 2), 1000))), options())
    assert found.passed  # of course: at 512 tokens all of them are attended to
    assert "every length" in found.reasons[-1]


def test_ranges_that_were_not_run_sparse_are_named_by_both_their_ends(loaded: LoadedModel) -> None:
    some = (segment(0, (1, 2), 16),)
    buckets = tuple(DecodeBucket(up_to=end, segments=some) for end in (512, 1024, None))
    found = verify(loaded, plan_for(loaded.model, decode=DecodePlan(lengths=buckets)), options(1, gate=LOOSE))
    told = [line for line in found.reasons if "was not run sparse" in line]
    assert ["up to 1k" in line for line in told] == [True, False]


@pytest.mark.parametrize("own", [True, False])
def test_an_extrapolated_bucket_counts_only_as_what_was_run(loaded: LoadedModel, own: bool) -> None:
    pattern = AShape(sink=tokens(64), window=tokens(64))
    ran = narrow(loaded.model).prefill.lengths[-1].model_copy(update={"up_to": 512})
    shares = [group.model_copy(update={"pattern": group.pattern.of_context(512)}) for group in ran.heads]
    others = [group.model_copy(update={"pattern": AShape(sink=tokens(8), window=tokens(8))}) for group in ran.heads]
    beyond = PrefillBucket(up_to=None, extrapolated=True, heads=tuple(others) if own else ran.heads)
    first = ran.model_copy(update={"heads": tuple(shares)})
    plan = narrow(loaded.model)
    plan = plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"lengths": (first, beyond)})})
    found = verify(loaded, plan, options(1, gate=LOOSE))
    assert any("more than 512" in line for line in found.reasons) == own, pattern


def test_half_precision_has_a_floor_on_the_same_prompts(loaded: LoadedModel) -> None:
    half = loaded_tiny(seed=0)
    half.model.to(torch.bfloat16)
    found = verify(half, narrow(half.model, decode_plan(segment(0, (1, 2), 4))), options(2, gate=LOOSE)).quality
    for phase in ("prefill", "decode", "both"):
        measured = getattr(found, phase)
        assert 0.0 < measured.floor < 0.05
        assert measured.by_length[0].floor == measured.floor
    assert verify(loaded, narrow(loaded.model), options(1, gate=LOOSE)).quality.prefill.floor is None


def test_dropped_tokens_are_measured_by_answers_behind_a_prefill_of_their_own(loaded: LoadedModel) -> None:
    plan = plan_for(loaded.model, None, None, drops((0, 1, 2), 8, generated=4))
    found = verify(loaded, plan, options(2, gate=LOOSE))
    assert found.quality.phases.keys() == {"decode"}
    assert found.quality.decode.density < 0.2
    assert found.quality.decode.kl > 1e-3


def test_time_ends_drawing(loaded: LoadedModel) -> None:
    found = verify(loaded, narrow(loaded.model), options(None, gate=LOOSE, verify_time=1e-3))
    assert found.quality.evidence.looks == 1


def test_a_plan_without_phases_cannot_be_verified(loaded: LoadedModel) -> None:
    with pytest.raises(UsageError, match="nothing to verify"):
        verify(loaded, plan_for(loaded.model, None), settle(quick_options(lengths=(512,)), 4096, "cpu"))


def test_a_phase_that_is_not_planned_is_not_measured(loaded: LoadedModel) -> None:
    only = plan_for(loaded.model, None, decode_plan(segment(0, (1, 2), 16)))
    assert planned_phases(only) == ("decode",)
    quality = verify(loaded, only, settle(quick_options(lengths=(512,)), 4096, "cpu")).quality
    assert quality.prefill is None
    assert quality.both is None
    assert quality.decode.density < 1.0


PROFILE = made_up_profile(
    made_up_length(4096, np.random.default_rng(0)).model_copy(update={"reuse": made_up_reuse(np.eye(3))}),
    made_up_length(8192, np.random.default_rng(1)).model_copy(update={"reuse": made_up_reuse(np.eye(3))}),
)


def test_a_profile_brings_its_own_lengths_tile_and_preset() -> None:
    options, profile = for_profile(PlanOptions(), PROFILE)
    assert options.lengths == (4096, 8192)
    assert options.tile == PROFILE.tile
    options, profile = for_profile(PlanOptions(lengths=(8192,)), PROFILE)
    assert [entry.length for entry in profile.lengths] == [8192]
    with pytest.raises(UsageError, match=r"\(4k, 8k\), found 16k"):
        for_profile(PlanOptions(lengths=(16384,)), PROFILE)
