"""The gate: what counts as missed, and which lengths did worst."""

import numpy as np
import pytest
from planner_models import quick_options
from planner_profiles import made_up_length, made_up_profile, made_up_reuse
from tiny_plans import EVERYTHING, decode_plan, every_head, plan_for, segment

from sparsekv.planner.evaluation.results import EvalResult, Outcome, Spent, TaskResult
from sparsekv.planner.gates import misses_of
from sparsekv.planner.options import Gate, PlanOptions
from sparsekv.planner.profile.profile_data import for_profile
from sparsekv.planner.settled import settle
from sparsekv.planner.verify import planned_phases, verify
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import AShape, BlockSparse, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, PrefillBucket, PrefillPlan
from sparsekv.runtime.hf.load import LoadedModel

GATE = Gate(max_accuracy_drop=1.0)


def outcomes(right: int, of: int, kl: float = 0.0) -> tuple[Outcome, ...]:
    return tuple(Outcome(place < right, 1.0, kl) for place in range(of))


def result(dense: int, sparse: int, of: int = 100, kl: float = 0.0) -> EvalResult:
    return EvalResult((4096,), {"t": TaskResult(outcomes(dense, of), outcomes(sparse, of, kl))}, Spent())


@pytest.mark.parametrize(
    ("dense", "sparse", "missed"),
    [(90, 90, False), (90, 89, False), (90, 88, True), (90, 95, False), (49, 10, False), (50, 10, True)],
)
def test_a_task_that_dense_solves_may_lose_a_point(dense: int, sparse: int, missed: bool) -> None:
    assert bool(misses_of([result(dense, sparse)], GATE)) == missed


def test_a_collapse_at_one_length_is_not_hidden_by_the_others() -> None:
    kept = [result(100, 100, of=1000), result(100, 100, of=1000), result(50, 40, of=50)]
    assert misses_of([*kept[:2]], GATE) == []
    (line,) = misses_of(kept, GATE)
    assert "100.0% to 80.0%" in line


def test_lengths_that_dense_does_not_solve_do_not_excuse_those_it_does() -> None:
    assert misses_of([result(50, 0, of=50), result(10, 0, of=50), result(0, 0, of=50)], GATE) != []


def test_a_drop_of_zero_points_is_allowed_to_be_asked_for() -> None:
    strict = Gate(max_accuracy_drop=0.0)
    assert misses_of([result(90, 90)], strict) == []
    assert misses_of([result(90, 89)], strict) != []


def agreeing(kl: float, top1: float = 1.0, exact: float = 1.0, length: int = 4096, of: int = 100) -> EvalResult:
    """A text task of `of` samples of ten positions."""
    dense = (Outcome(None, 1.0, 0.0, 10, 10, True),) * of
    sparse = tuple(Outcome(None, 1.0, kl, round(10 * top1), 10, place < exact * of) for place in range(of))
    return EvalResult((length,), {"perplexity": TaskResult(dense, sparse)}, Spent())


@pytest.mark.parametrize(
    ("found", "gate", "phase", "words"),
    [
        (agreeing(kl=0.04), Gate(), "prefill", None),
        (agreeing(kl=0.06), Gate(), "prefill", "0.06 nats, more than 0.05"),
        (agreeing(kl=0.004), Gate(), "decode", None),
        (agreeing(kl=0.006), Gate(), "decode", "0.006 nats, more than 0.005"),
        (agreeing(kl=0.056), Gate(), "both", "0.056 nats, more than 0.055"),
        (agreeing(kl=0.09), Gate(max_kl=0.1), "decode", None),
        (agreeing(kl=0.09), Gate(max_kl=0.1, max_decode_kl=0.01), "decode", "more than 0.01"),
        (agreeing(kl=0.0, top1=0.9), Gate(), "both", "90.0%"),
        (agreeing(kl=0.0, top1=0.9), Gate(min_agreement=0.9), "both", None),
        (agreeing(kl=0.0, exact=0.5), Gate(), "both", "50.0%"),
        (agreeing(kl=0.0, exact=0.5), Gate(min_exact=0.5), "both", None),
    ],
)
def test_every_gate_is_missed_by_its_mean_whether_or_not_dense_solves_a_task(found, gate, phase, words) -> None:
    lines = misses_of([found], gate, phase)
    assert len(lines) == (words is not None)
    assert words is None or words in lines[0]


def test_a_length_at_which_a_plan_surely_breaks_is_not_hidden_by_the_others() -> None:
    fine = [agreeing(kl=0.0, length=length, of=500) for length in (4096, 8192)]
    (missed,) = misses_of([*fine, agreeing(kl=0.2, length=16384, of=50)], Gate(), "prefill")
    assert "at 16k" in missed
    assert misses_of([*fine, agreeing(kl=0.0, exact=0.3, length=16384)], Gate(), "prefill") != []


def test_one_answer_of_a_task_may_be_lost_where_all_tasks_together_lose_less_than_the_gate() -> None:
    """A task of ten answers cannot lose less than ten points."""
    kept, lost = TaskResult(outcomes(10, 10), outcomes(10, 10)), TaskResult(outcomes(10, 10), outcomes(9, 10))
    many = {f"t{number}": kept for number in range(10)}
    assert misses_of([EvalResult((4096,), many | {"t": lost}, Spent())], GATE) == []
    assert misses_of([EvalResult((4096,), {"t": lost}, Spent())], GATE) != []


def test_perplexity_is_measured_and_not_gated() -> None:
    dense = tuple(Outcome(None, 1.0) for _ in range(10))
    sparse = tuple(Outcome(None, 3.0) for _ in range(10))
    assert misses_of([EvalResult((4096,), {"perplexity": TaskResult(dense, sparse)}, Spent())], GATE) == []


def test_a_full_plan_passes_for_each_phase_and_a_strict_gate_stops_a_sparse_one(loaded: LoadedModel) -> None:
    options = settle(quick_options(lengths=(512,)), 4096, "cpu")
    model = loaded.model
    full = plan_for(model, every_head(model, BlockSparse(keep=EVERYTHING)), decode_plan(segment(0, (1, 2), EVERYTHING)))
    kept = verify(loaded, full, options)
    assert kept.passed
    assert kept.quality.prefill.lengths == (512,)
    assert kept.quality.both.tasks["kv_retrieval"].samples == 1
    narrow = AShape(sink=tokens(64), window=tokens(64))
    lossy = verify(loaded, plan_for(model, every_head(model, narrow), decode_plan(segment(0, (1, 2), 4))), options)
    assert not lossy.passed
    assert set(lossy.missed) == {"prefill", "decode", "both"}
    assert lossy.missed["prefill"] == (512,)
    assert any(line.startswith("decode: ") for line in lossy.reasons)


def test_a_plan_that_equals_dense_is_verified_by_fifty_samples_though_dense_solves_nothing(loaded: LoadedModel) -> None:
    options = settle(quick_options(lengths=(256,), verify_samples=50), 4096, "cpu")
    plan = plan_for(loaded.model, every_head(loaded.model, BlockSparse(keep=EVERYTHING)))
    found = verify(loaded, plan, options)
    assert found.passed
    assert found.conclusive
    assert found.recorded(plan).status == "verified"
    measured = found.quality.prefill
    assert measured.tasks["kv_retrieval"].dense < 0.5
    assert (measured.agreement.samples, measured.agreement.top1, measured.agreement.exact) == (50, 1.0, 1.0)
    assert measured.by_length[0].agreement == measured.tasks["kv_retrieval"].agreement == measured.agreement


def test_too_few_samples_leave_a_plan_unverified_with_the_bounds_that_they_do_not_prove(loaded: LoadedModel) -> None:
    options = settle(quick_options(lengths=(512,), verify_samples=3), 4096, "cpu")
    plan = plan_for(loaded.model, every_head(loaded.model, BlockSparse(keep=EVERYTHING)))
    found = verify(loaded, plan, options)
    assert found.passed
    assert not found.conclusive
    assert "50 or more" in found.reasons[0]
    assert "43.9% at 512" in found.reasons[1]
    assert found.recorded(plan).status == "unverified"
    assert found.recorded(plan).quality.prefill.agreement.exact_interval == pytest.approx((0.4385, 1.0), abs=1e-4)


def test_a_plan_whose_sparse_part_never_ran_is_not_called_verified(loaded: LoadedModel) -> None:
    model = loaded.model
    narrow = every_head(model, AShape(sink=tokens(64), window=tokens(64)))
    plan = plan_for(model, narrow)
    late = PrefillPlan(
        tile=plan.prefill.tile,
        lengths=(PrefillBucket(up_to=1024, dense=True), plan.prefill.lengths[-1].model_copy(update={"up_to": None})),
    )
    options = settle(quick_options(lengths=(512,)), 4096, "cpu")
    found = verify(loaded, plan.model_copy(update={"prefill": late}), options)
    assert found.passed
    assert not found.conclusive
    assert "more than 1k" in found.reasons[-1]


def test_decode_that_chose_nothing_at_the_verified_lengths_is_not_called_verified(loaded: LoadedModel) -> None:
    options = settle(quick_options(lengths=(512,)), 4096, "cpu")
    found = verify(loaded, plan_for(loaded.model, decode=decode_plan(segment(0, (1, 2), 1000))), options)
    assert found.passed  # of course: at 512 tokens all of them are attended to
    assert not found.conclusive
    assert "every length" in found.reasons[-1]


def test_ranges_that_were_not_run_sparse_are_named_by_both_their_ends(loaded: LoadedModel) -> None:
    some = (segment(0, (1, 2), 16),)
    buckets = tuple(DecodeBucket(up_to=end, segments=some) for end in (512, 1024, None))
    loose = Gate(max_kl=100.0, min_agreement=0.0, min_exact=0.0, max_accuracy_drop=100.0)
    options = settle(quick_options(lengths=(512,)).but(gate=loose), 4096, "cpu")
    found = verify(loaded, plan_for(loaded.model, decode=DecodePlan(lengths=buckets)), options)
    assert ["up to 1k" in reason for reason in found.reasons[-2:]] == [True, False]


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
