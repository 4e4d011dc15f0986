"""The phases of one plan from shared prefills: the very numbers of each phase by itself, from fewer passes."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from planner_models import loaded_tiny
from tiny_models import tiny_model, tiny_tokenizer
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.planner.compare import PlanMode, batches, compare, dense_reference
from sparsekv.planner.shared_prefills import Measured, measured_together, phases_of_one_plan
from sparsekv.planner.tasks import Sample
from sparsekv.plans.errors import PlanMismatchError
from sparsekv.plans.patterns import AShape, TileShape, tokens
from sparsekv.plans.phases import DecodePlan, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

PHASES = ("prefill", "decode", "both")
PROMPT = 300


def sparse(loaded: LoadedModel, decode: DecodePlan) -> Plan:
    return plan_for(loaded.model, every_head(loaded.model, AShape(sink=tokens(64), window=tokens(64))), decode)


def modes_of(plan: Plan, phases: tuple[str, ...] = PHASES) -> dict[str, PlanMode]:
    return {phase: PlanMode(plan, phase) for phase in phases}


def drawn(count: int = 3, answer: int = 4) -> list[Sample]:
    rng = np.random.default_rng(5)
    return [
        Sample(rng.integers(1, 90, PROMPT, np.int32), rng.integers(1, 90, answer, np.int32), "", "own", PROMPT + answer)
        for _ in range(count)
    ]


def together(loaded: LoadedModel, modes: dict[str, PlanMode], chunk: int | None = None) -> dict[str, list[Measured]]:
    found: dict[str, list[Measured]] = {}
    for one in measured_together(loaded, modes, batches(drawn(), 2), chunk):
        found.setdefault(one.name, []).append(one)
    return found


@contextmanager
def passes(loaded: LoadedModel) -> Iterator[Counter[int]]:
    """How many forward passes there were of each number of tokens."""
    seen: Counter[int] = Counter()
    note = loaded.model.register_forward_pre_hook(
        lambda _, args, inputs: seen.update([inputs["input_ids"].shape[1]]), with_kwargs=True
    )
    with note:
        yield seen


CHOICE = segment(0, (1, 2), 8)
CASES = {
    "on the device": (decode_plan(CHOICE), None),
    "offloaded": (decode_plan(CHOICE, offload=(1, 2)), None),
    "in chunks": (decode_plan(CHOICE), 128),
    "offloaded, in chunks": (decode_plan(CHOICE, offload=(1, 2)), 128),
    "a selector of older queries": (decode_plan(segment(0, (1, 2), 8, selector="uniform", window=4)), None),
}


@pytest.mark.parametrize("case", CASES)
def test_each_phase_measures_what_it_does_by_itself(loaded: LoadedModel, case: str) -> None:
    decode, chunk = CASES[case]
    modes = modes_of(sparse(loaded, decode))
    found = together(loaded, modes, chunk)
    alone = compare(loaded, modes, dense_reference(loaded, drawn(), batch=2, chunk=chunk))
    outcomes = {phase: tuple(outcome for one in found[phase] for outcome in one.outcomes) for phase in PHASES}
    assert outcomes["both"] == alone["both"].outcomes
    for phase in ("prefill", "decode"):  # which the unmodified model has a part in
        for outcome, other in zip(outcomes[phase], alone[phase].outcomes, strict=True):
            assert (outcome.agreed, outcome.scored, outcome.exact) == (other.agreed, other.scored, other.exact)
            assert outcome.kl == pytest.approx(other.kl, rel=1e-3)
            assert outcome.nll == pytest.approx(other.nll, rel=1e-4)
        assert all(one.kl > 1e-4 for one in outcomes[phase])  # it was sparse
    for phase in ("prefill", "both"):
        assert sum(one.spent.tiles for one in found[phase]) == alone[phase].spent.tiles
    for phase in ("decode", "both"):
        assert sum(one.spent.attended for one in found[phase]) == alone[phase].spent.attended


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["on the device", "offloaded"])
def test_each_phase_measures_on_a_gpu_what_it_does_by_itself(case: str) -> None:
    """With captured steps, and layers whose keys and values move between the device and the host."""
    loaded = loaded_tiny(head_dim=64, dtype=torch.bfloat16)
    loaded.model.cuda()
    modes = modes_of(sparse(loaded, CASES[case][0]))
    found, alone = together(loaded, modes), compare(loaded, modes, dense_reference(loaded, drawn(), batch=2))
    for phase in PHASES:
        kl = [outcome.kl for one in found[phase] for outcome in one.outcomes]
        np.testing.assert_allclose(kl, alone[phase].kl, rtol=0.05, atol=2e-3)
    for phase in ("decode", "both"):
        assert sum(one.spent.attended for one in found[phase]) == alone[phase].spent.attended


@pytest.mark.gpu
def test_dense_steps_need_no_plan_for_every_number_of_keys() -> None:
    """Which cuDNN makes for each step it has not met: a tenth of a second."""
    loaded = loaded_tiny(head_dim=64, dtype=torch.bfloat16)
    loaded.model.cuda()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        dense_reference(loaded, drawn(answer=8), batch=2)
    calls = {event.key: event.count for event in trace.key_averages() if "scaled_dot_product" in event.key}
    layers, batches_of_two = len(loaded.model.model.layers), 2
    assert calls["aten::scaled_dot_product_attention"] == layers * batches_of_two * (1 + 7 + 1)
    assert calls.get("aten::_scaled_dot_product_cudnn_attention", 0) <= layers * batches_of_two  # whole prompts


@pytest.mark.parametrize(
    ("phases", "prefills"),
    [(PHASES, 2), (("prefill",), 2), (("decode",), 1), (("decode", "both"), 2)],
)
def test_a_prompt_is_prefilled_once_dense_and_once_sparse(loaded, phases, prefills) -> None:
    """In two batches."""
    with passes(loaded) as seen:
        together(loaded, modes_of(sparse(loaded, decode_plan(CHOICE)), phases))
    assert seen[PROMPT] == 2 * prefills


@pytest.mark.parametrize("case", ["on the device", "offloaded"])
def test_at_most_two_caches_of_a_batch_are_there_at_once(loaded: LoadedModel, case: str) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts = []

    def note(module: Any, args: Any, out: Any) -> None:
        alive.update(out.past_key_values.layers)
        counts.append(sum(layer.get_seq_length() > 0 for layer in alive))

    with loaded.model.register_forward_hook(note):
        together(loaded, modes_of(sparse(loaded, CASES[case][0])))
    assert max(counts) == 2 * loaded.info.layers


def test_decode_prefills_where_its_selector_looks_at_older_queries(loaded: LoadedModel) -> None:
    decode, _ = CASES["a selector of older queries"]
    with passes(loaded) as seen:
        together(loaded, modes_of(sparse(loaded, decode)))
    assert seen[PROMPT] == 2 * 3


def test_decode_prefills_where_the_dense_cache_has_dropped_tokens() -> None:
    model = tiny_model("qwen2", layers=4, use_sliding_window=True, sliding_window=100, max_window_layers=3)
    windowed = LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/tiny"))
    modes = modes_of(plan_for(model, None, decode_plan(CHOICE)), ("decode",))
    with passes(windowed) as seen:
        found = together(windowed, modes)["decode"]
    assert seen[PROMPT] == 2 * 2
    alone = compare(windowed, modes, dense_reference(windowed, drawn(), batch=2))["decode"]
    assert tuple(outcome for one in found for outcome in one.outcomes) == alone.outcomes


@pytest.mark.parametrize("chunk", [None, 128])
def test_dense_decode_reads_behind_layers_with_a_window(chunk: int | None) -> None:
    """Which keep fewer tokens for the unmodified model than for the plan."""
    model = tiny_model("qwen2", layers=4, use_sliding_window=True, sliding_window=100, max_window_layers=2)
    windowed = LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/tiny"))
    full = every_head(model, AShape(sink=tokens(64), window=tokens(64))).lengths[0].heads[:2]
    prefill = PrefillPlan(tile=TileShape(query=64, key=64), lengths=(PrefillBucket(up_to=None, heads=full),))
    modes = modes_of(plan_for(model, prefill, None), ("prefill",))
    (alone,) = compare(windowed, modes, dense_reference(windowed, drawn(), batch=2, chunk=chunk)).values()
    found = [outcome for one in together(windowed, modes, chunk)["prefill"] for outcome in one.outcomes]
    assert [outcome.kl for outcome in found] == pytest.approx(alone.kl, rel=1e-3)
    assert min(alone.kl) > 1e-3


def test_the_model_is_dense_between_batches_and_afterwards(loaded: LoadedModel) -> None:
    before = loaded.model.config._attn_implementation
    for one in measured_together(loaded, modes_of(sparse(loaded, decode_plan(CHOICE))), batches(drawn(), 2), None):
        assert loaded.model.config._attn_implementation == before, one.name


def test_a_plan_that_cannot_run_is_refused_before_anything_runs(loaded: LoadedModel) -> None:
    other = loaded_tiny(layers=2)
    modes = modes_of(sparse(other, decode_plan(segment(0, (1,), 8))))
    with passes(loaded) as seen, pytest.raises(PlanMismatchError):
        together(loaded, modes)
    assert not seen


def test_only_different_phases_of_one_plan_share(loaded: LoadedModel) -> None:
    plan, other = (sparse(loaded, decode_plan(segment(0, (1, 2), budget))) for budget in (8, 9))
    assert list(phases_of_one_plan(modes_of(plan))) == list(PHASES)
    assert phases_of_one_plan({"a": PlanMode(plan, "both"), "b": PlanMode(other, "prefill")}) == {}
    assert phases_of_one_plan({"a": PlanMode(plan, "both"), "b": PlanMode(plan, "prefill", "reference")}) == {}
    assert phases_of_one_plan({"a": PlanMode(plan, "both"), "b": PlanMode(plan, "both")}) == {}
    assert phases_of_one_plan({"a": PlanMode(plan, "both"), "b": object()}) == {}
    assert phases_of_one_plan({}) == {}
