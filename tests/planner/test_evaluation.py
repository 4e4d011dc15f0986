"""Dense and sparse on the same samples: what is measured is what a user gets."""

import weakref
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from compared import compare
from planner_models import loaded_hybrid, loaded_tiny
from tiny_models import tiny_model, tiny_tokenizer
from tiny_plans import EVERYTHING, decode_plan, every_head, plan_for, segment

from sparsekv.planner.evaluation import DENSE, EvalSamples, PlanMode, predictions
from sparsekv.planner.evaluation.batches import MOST_TEXT
from sparsekv.planner.evaluation.predictions import divergence
from sparsekv.planner.progress import StageStep
from sparsekv.planner.tasks import Kit, Sample, Split, prepare
from sparsekv.plans.errors import GateError, PlanMismatchError, PromptError, UsageError
from sparsekv.plans.patterns import AShape, BlockSparse, TileShape, tokens
from sparsekv.plans.phases import DecodePlan, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import KVDtype
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.load import LoadedModel

LENGTH, PROMPT = 512, 300
PHASES = ("prefill", "decode", "both")
NARROW = AShape(sink=tokens(64), window=tokens(64))
CHOICE = decode_plan(segment(0, (1, 2), 8))


@pytest.fixture(scope="module")
def kit(loaded: LoadedModel) -> Kit:
    return prepare(loaded.tokenizer, Split.EVALUATION)


@pytest.fixture(scope="module")
def windowed() -> LoadedModel:
    """Two of four layers see the last 100 tokens."""
    model = tiny_model("qwen2", layers=4, use_sliding_window=True, sliding_window=100, max_window_layers=2)
    return LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/tiny"))


def sparse_plan(loaded: LoadedModel, decode: DecodePlan = CHOICE) -> Plan:
    return plan_for(loaded.model, every_head(loaded.model, NARROW), decode)


def modes_of(plan: Plan, phases: tuple[str, ...] = PHASES, kv_dtype: KVDtype = "auto") -> dict[str, PlanMode]:
    return {phase: PlanMode(plan, phase, kv_dtype=kv_dtype) for phase in phases}


def drawn(count: int = 3, answer: int = 4, prompt: int = PROMPT, text: str = "") -> list[Sample]:
    """Prompts that are of no task."""
    rng = np.random.default_rng(5)
    both = [(rng.integers(1, 90, prompt, np.int32), rng.integers(1, 90, answer, np.int32)) for _ in range(count)]
    return [Sample(*ids, text, "own", prompt + answer) for ids in both]


@contextmanager
def passes(loaded: LoadedModel) -> Iterator[Counter[int]]:
    """How many forward passes there were of each number of tokens."""
    seen: Counter[int] = Counter()
    with loaded.model.register_forward_pre_hook(
        lambda _, args, inputs: seen.update([inputs["input_ids"].shape[1]]), with_kwargs=True
    ):
        yield seen


# --- what is measured -------------------------------------------------------------------------------------------------


def by_hand(loaded: LoadedModel, sample: Sample, chunk: int | None, plan: Plan | None, **phases: Any) -> torch.Tensor:
    """[A + 1, V]: the prompt in pieces, then the answer token by token."""
    model: Any = loaded.model
    with nullcontext() if plan is None else apply(model, plan, sparse="always", **phases), torch.no_grad():
        ids_1S, cache = torch.tensor(sample.prompt_ids[None].astype(np.int64)).to(model.device), None
        for piece in torch.split(ids_1S, piece_sizes(PROMPT, chunk) if chunk else PROMPT, 1):
            out = model(piece, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
        rows = [out.logits[:, -1:]]
        for token in sample.answer_ids.tolist():
            rows.append(model(torch.tensor([[token]], device=model.device), past_key_values=cache).logits)
    return torch.cat(rows, 1)[0].float().log_softmax(-1)


def check_by_hand(
    loaded: LoadedModel, plan: Plan, chunk: int | None, kl: float, phases: tuple[str, ...] = PHASES,
    kv_dtype: KVDtype = "auto",
) -> None:  # fmt: skip
    samples = drawn(answer=4)
    found = compare(loaded, modes_of(plan, phases, kv_dtype), samples, batch=2, chunk=chunk)
    for place, sample in enumerate(samples):
        p = by_hand(loaded, sample, chunk, None)
        for phase in phases:
            first = int(phase == "decode")  # whose row before is dense's own
            own = {"prefill": phase != "decode", "decode": phase != "prefill", "kv_dtype": kv_dtype}
            q = by_hand(loaded, sample, chunk, plan, **own)
            outcome = found[phase].outcomes[place]
            kl_by_hand = float((p.exp() * (p - q))[first:].sum(-1).mean())
            assert outcome.kl == pytest.approx(kl_by_hand, rel=kl, abs=kl * 1e-4)
            assert outcome.kl > 1e-4  # it was sparse


CASES = {
    "on the device": (CHOICE, None),
    "offloaded": (decode_plan(segment(0, (1, 2), 8), offload=(1, 2)), None),
    "offloaded, in chunks": (decode_plan(segment(0, (1, 2), 8), offload=(1, 2)), 128),
    "a selector of older queries": (decode_plan(segment(0, (1, 2), 8, selector="uniform", window=4)), None),
}


@pytest.mark.parametrize("case", CASES)
def test_what_is_measured_is_what_a_user_gets(loaded: LoadedModel, case: str) -> None:
    """A prefill, then decode steps, each sparse or not."""
    decode, chunk = CASES[case]
    check_by_hand(loaded, sparse_plan(loaded, decode), chunk, 1e-3)


@pytest.mark.parametrize("selector", ["last", "uniform"])
def test_keys_and_values_in_8_bits_are_measured_as_a_user_gets_them(loaded: LoadedModel, selector: str) -> None:
    """In every phase: dense steps behind a sparse prefill read and write the same cache."""
    decode = decode_plan(segment(0, (1, 2), 8, selector=selector, window=1 if selector == "last" else 4))
    check_by_hand(loaded, sparse_plan(loaded, decode), None, 2e-3, kv_dtype="fp8")


@pytest.mark.parametrize("chunk", [None, 128])
def test_a_recurrent_state_goes_on_from_the_end_of_the_prompt(chunk: int | None) -> None:
    hybrid = loaded_hybrid()
    heads = tuple(group for group in every_head(hybrid.model, NARROW).lengths[0].heads if group.layer in (0, 1, 3))
    prefill = PrefillPlan(tile=TileShape(query=64, key=64), lengths=(PrefillBucket(up_to=None, heads=heads),))
    plan = plan_for(hybrid.model, prefill, decode_plan(segment(0, (1, 3), 8)))
    check_by_hand(hybrid, plan, chunk, 1e-3)


@pytest.mark.parametrize("chunk", [None, 128])
def test_dense_decode_reads_behind_layers_with_a_window(windowed: LoadedModel, chunk: int | None) -> None:
    """Which keep fewer tokens for the unmodified model than for the plan."""
    full = every_head(windowed.model, NARROW).lengths[0].heads[:2]
    prefill = PrefillPlan(tile=TileShape(query=64, key=64), lengths=(PrefillBucket(up_to=None, heads=full),))
    check_by_hand(windowed, plan_for(windowed.model, prefill, None), chunk, 1e-3, ("prefill",))


@pytest.mark.gpu
@pytest.mark.parametrize("case", ["on the device", "offloaded"])
def test_what_is_measured_on_a_gpu_is_what_a_user_gets(case: str) -> None:
    """With captured steps, and layers whose keys and values move between the device and the host."""
    loaded = loaded_tiny(head_dim=64, dtype=torch.bfloat16)
    loaded.model.cuda()
    check_by_hand(loaded, sparse_plan(loaded, CASES[case][0]), None, 0.1)


@pytest.mark.gpu
def test_dense_steps_need_no_plan_for_every_number_of_keys() -> None:
    """Which cuDNN makes for each step it has not met: a tenth of a second."""
    loaded = loaded_tiny(head_dim=64, dtype=torch.bfloat16)
    loaded.model.cuda()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as trace:
        compare(loaded, {}, drawn(answer=8), batch=2)
    calls = {event.key: event.count for event in trace.key_averages() if "scaled_dot_product" in event.key}
    layers, batches_of_two = len(loaded.model.model.layers), 2
    assert calls["aten::scaled_dot_product_attention"] == layers * batches_of_two * (1 + 7 + 1)
    assert calls.get("aten::_scaled_dot_product_cudnn_attention", 0) <= layers * batches_of_two  # whole prompts


def greedily(loaded: LoadedModel, sample: Sample, count: int, **options: Any) -> list[int]:
    prompt = torch.tensor(sample.prompt_ids[None].astype(np.int64))
    options |= {"attention_mask": torch.ones_like(prompt), "max_new_tokens": count, "do_sample": False}
    return loaded.model.generate(prompt, **options)[0, prompt.shape[1] :].tolist()


def test_an_answer_is_right_when_the_model_generates_it(loaded: LoadedModel) -> None:
    """That, or one with a token changed."""
    (sample,) = drawn(1, prompt=30)
    *own, after = greedily(loaded, sample, 5, eos_token_id=None)
    for ids, wanted in ((own, True), ([*own[:2], (own[2] + 1) % 90, own[3]], False)):
        text = loaded.tokenizer.decode(ids)
        digits = text[-1].isdigit() and loaded.tokenizer.decode([after]).isdigit()
        asked = replace(sample, answer_ids=np.array(ids, np.int32), answer=text)
        assert compare(loaded, {}, [asked])[DENSE].outcomes[0].correct == (wanted and not digits)


def test_divergence_is_that_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    dense, sparse = (torch.randn(1, 4, 10, generator=generator).log_softmax(-1) for _ in range(2))
    p, q = dense[0].exp(), sparse[0].exp()
    kl = float((p * (p / q).log()).sum(-1).mean())
    assert float(divergence(dense, sparse)) == pytest.approx(kl, rel=1e-5)


def test_of_a_long_text_only_the_beginning_is_fed(loaded: LoadedModel) -> None:
    (sample,) = drawn(1, answer=MOST_TEXT + 30)
    modes = modes_of(sparse_plan(loaded), ("decode",))
    cut = replace(sample, answer_ids=sample.answer_ids[:MOST_TEXT])
    whole, part = (compare(loaded, modes, [one])["decode"] for one in (sample, cut))
    assert whole == part


# --- by which passes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["on the device", "offloaded"])
def test_at_most_two_caches_of_a_batch_are_there_at_once(loaded: LoadedModel, case: str) -> None:
    alive: weakref.WeakSet[Any] = weakref.WeakSet()
    counts = []

    def note(module: Any, args: Any, out: Any) -> None:
        alive.update(out.past_key_values.layers)
        counts.append(sum(layer.get_seq_length() > 0 for layer in alive))

    with loaded.model.register_forward_hook(note):
        compare(loaded, modes_of(sparse_plan(loaded, CASES[case][0])), drawn(), batch=2, text=4)
    assert max(counts) == 2 * loaded.info.layers


class Interrupts(StageStep):
    def advance(self, units: float = 1, note: str = "") -> None:
        raise KeyboardInterrupt


def test_the_model_is_dense_after_an_interruption(loaded: LoadedModel) -> None:
    before = loaded.model.config._attn_implementation
    with pytest.raises(KeyboardInterrupt):
        compare(loaded, modes_of(sparse_plan(loaded)), drawn(1), step=Interrupts())
    assert loaded.model.config._attn_implementation == before
    apply(loaded.model, sparse_plan(loaded)).close()


def test_what_cannot_be_measured_is_found_out_before_any_forward_pass(loaded: LoadedModel, kit: Kit) -> None:
    other = PlanMode(sparse_plan(loaded_tiny(layers=2), decode_plan(segment(0, (1,), 8))))
    asked = EvalSamples(("perplexity", "kv_retrieval"), (LENGTH,), 1)
    with passes(loaded) as seen:
        with pytest.raises(PlanMismatchError):
            compare(loaded, {"both": other}, drawn(1))
        with pytest.raises(PromptError, match="kv_retrieval"):  # perplexity fits 32 tokens
            replace(asked, lengths=(LENGTH, 32)).check_fit(kit)
        with pytest.raises(UsageError):
            compare(loaded, {}, drawn(1), chunk=4)
        with pytest.raises(UsageError, match="chess"):
            replace(asked, tasks=("perplexity", "chess")).check_fit(kit)
    assert not seen


# --- on tasks ---------------------------------------------------------------------------------------------------------


def test_a_plan_of_full_density_scores_as_dense_does(loaded: LoadedModel, kit: Kit) -> None:
    keep = every_head(loaded.model, BlockSparse(keep=EVERYTHING))
    full = plan_for(loaded.model, keep, decode_plan(segment(0, (1, 2), EVERYTHING)))
    asked = EvalSamples(("kv_retrieval", "perplexity"), (LENGTH,), 2)
    found = compare(loaded, modes_of(full), asked.drawn(kit, LENGTH))
    for phase in PHASES:
        assert found[phase].outcomes == tuple(
            replace(o, kl=pytest.approx(0.0, abs=1e-6)) for o in found[DENSE].outcomes
        )
    assert found["prefill"].spent.density == pytest.approx(1.0)
    assert found["prefill"].spent.read == 1.0


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_samples_that_were_not_run_sparse_are_refused(loaded: LoadedModel, monkeypatch, phase: str) -> None:
    plan = sparse_plan(loaded)
    monkeypatch.setattr(predictions, "apply", lambda *args, **named: apply(*args, **named | {"sparse": "never"}))
    with pytest.raises(GateError, match=f"expected {phase} of .* to be sparse"):
        compare(loaded, {phase: PlanMode(plan, phase)}, drawn(1, prompt=LENGTH))
