"""Where a plan was measured, and with which cut of prompts it was verified, and whether that is here: told, never
refused."""

import warnings

import pytest
import torch
from plans_samples import quality_at
from tiny_plans import every_head, plan_for

from sparsekv.plans.errors import PlanWarning
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.phases import PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan, Target
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.plan_checks import check_cut, check_stored

H200 = Target(device="NVIDIA H200", backend="flash", dtype="bfloat16")
PROMPT = torch.arange(200)[None] % 90 + 5


@pytest.fixture(scope="module")
def plan(model) -> Plan:
    return plan_for(model, every_head(model, AShape(sink=tokens(64), window=tokens(64))))


def warned(plan: Plan, model, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        apply(model, plan, **options).close()
    return [str(warning.message) for warning in caught if issubclass(warning.category, PlanWarning)]


def test_a_plan_that_was_measured_on_another_device_runs_without_a_word(plan: Plan, model) -> None:
    assert warned(plan.model_copy(update={"targets": (H200,)}), model) == []


def test_keys_and_values_of_another_precision_than_the_plans_are_told_in_one_line(plan: Plan, model) -> None:
    here, stored = (Target(device="here", backend="cpu", dtype="float32", kv_dtype=dtype) for dtype in (None, "fp8"))
    for target, float8 in ((here, True), (stored, False)):
        planned = plan.model_copy(update={"targets": (target,)})
        with pytest.warns(PlanWarning, match="quality .*float32.*fp8|quality .*fp8.*float32") as told:
            check_stored(planned, "float32", float8)
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            check_stored(planned, "float32", not float8)


def verified(plan: Plan, chunk: int | None) -> Plan:
    """The plan, verified at 200 tokens with prompts that were cut so."""
    quality = quality_at(200, step=chunk)
    return plan.model_copy(update={"status": "verified", "quality": quality})


def told_of(call, *arguments, **options) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        call(*arguments, **options)
    return [str(warning.message) for warning in caught if "proven" in str(warning.message)]


@pytest.mark.parametrize(
    ("known", "here", "tokens", "words"),
    [
        (64, None, 200, ("in chunks of 64", "whole")),
        (None, 64, 200, ("whole", "in chunks of 64", "--prefill-chunk 64")),
        (64, 100, 200, ("in chunks of 64", "in chunks of 100")),
        (64, 64, 200, ()),
        (None, None, 200, ()),
        (None, 256, 4096, ()),  # longer ones were not measured
        (64, None, 64, ()),
    ],
)
def test_another_cut_of_prompts_than_was_verified_is_told(plan: Plan, known, here, tokens, words) -> None:
    told = told_of(check_cut, verified(plan, known), here, tokens)
    assert len(told) == bool(words)
    assert all(word in told[0] for word in words)


@pytest.mark.parametrize(
    "change",
    [
        {"status": "unverified"},
        {"prefill": None},
        {"prefill": PrefillPlan(tile={"query": 64, "key": 64}, lengths=(PrefillBucket(up_to=None, dense=True),))},
    ],
    ids=["nothing is proven", "dense", "dense at this length"],
)
def test_a_cut_that_no_proof_depends_on_is_not_told(plan: Plan, change: dict) -> None:
    assert told_of(check_cut, verified(plan, 64).model_copy(update=change), None, 200) == []


@pytest.mark.parametrize(("known", "other"), [(None, 64), (64, None)], ids=["verified whole", "verified in chunks"])
def test_generate_with_another_cut_is_told_once_and_with_the_same_one_it_is_not(
    plan: Plan, model, known, other
) -> None:
    with apply(model, verified(plan, known)) as handle:

        def generate(chunk: int | None) -> None:
            for _ in range(2):
                cache = handle.new_cache(210, answer=10, chunk=chunk)
                for given in ({}, {"past_key_values": cache}):
                    model.generate(PROMPT, max_new_tokens=2, do_sample=False, prefill_chunk_size=chunk, **given)
                turn = torch.cat([PROMPT, PROMPT[:, :8]], 1)
                model.generate(turn, past_key_values=cache, max_new_tokens=1, do_sample=False)

        assert told_of(generate, known) == []
        assert len(told_of(generate, other)) == 1


def test_a_cut_says_nothing_under_a_handle_whose_prefill_is_dense(plan: Plan, model) -> None:
    with apply(model, verified(plan, 64), prefill=False):
        assert told_of(model.generate, PROMPT, max_new_tokens=1, do_sample=False) == []
