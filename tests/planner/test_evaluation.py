"""Dense and sparse on the same samples: what is counted, and that a full plan changes nothing."""

import copy
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from progress import Counting
from tiny_plans import EVERYTHING, decode_plan, every_head, plan_for, segment
from transformers import PreTrainedModel

from sparsekv.planner import evaluation
from sparsekv.planner.compare import (
    Batch,
    answered,
    batches,
    compare,
    dense_reference,
    divergence,
    forced_logits,
    log_likelihood,
)
from sparsekv.planner.eval_results import EvalResult, Outcome, Spent, TaskResult, merged
from sparsekv.planner.evaluation import EvalSamples, Mode, PlanMode, evaluate
from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.prompts_at_once import MOST_TEXT
from sparsekv.planner.tasks import Kit, Sample, Split, prepare
from sparsekv.plans.errors import BackendError, PromptError, UsageError
from sparsekv.plans.patterns import AShape, BlockSparse, tokens
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import LoadedModel

LENGTH = 512


@pytest.fixture(scope="module")
def kit(loaded: LoadedModel) -> Kit:
    return prepare(loaded.tokenizer, Split.EVALUATION)


def full_plan(loaded: LoadedModel) -> Plan:
    keep = BlockSparse(keep=EVERYTHING)
    return plan_for(loaded.model, every_head(loaded.model, keep), decode_plan(segment(0, (1, 2), EVERYTHING)))


def sparse_plan(loaded: LoadedModel) -> Plan:
    narrow = AShape(sink=tokens(64), window=tokens(64))
    return plan_for(loaded.model, every_head(loaded.model, narrow), decode_plan(segment(0, (1, 2), 8)))


def sample(answer: str, prompt_ids: list[int], answer_ids: list[int]) -> Sample:
    return Sample(np.array(prompt_ids, np.int32), np.array(answer_ids, np.int32), answer, "kv_retrieval", 64)


def scored(
    loaded: LoadedModel,
    modes: Mapping[str, Mode],
    kit: Kit,
    tasks: tuple[str, ...] = ("perplexity",),
    samples: int = 2,
    **options: Any,
) -> dict[str, EvalResult]:
    found = evaluate(loaded, modes, EvalSamples(tasks, (LENGTH,), samples, **options), kit)
    return {name: result for name, (result,) in found.items()}


class Counted:
    """A plan's mode that counts how often it is switched on."""

    def __init__(self, mode: PlanMode) -> None:
        self.stepwise, self.dense_prefill = mode.stepwise, mode.dense_prefill
        self._mode, self.times = mode, 0

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        self.times += 1
        with self._mode.running(model) as spent:
            yield spent


TWICE = EvalSamples(("kv_retrieval", "niah_single"), (LENGTH, 2 * LENGTH), 2, batch=1)  # answers of few tokens


def test_a_plan_is_applied_once_to_be_checked_and_once_for_all_batches_tasks_and_lengths(
    loaded: LoadedModel, kit: Kit
) -> None:
    plan = sparse_plan(loaded)
    modes = {phase: Counted(PlanMode(plan, phase)) for phase in ("prefill", "decode")}
    progress = Counting()
    found = evaluate(loaded, modes, TWICE, kit, progress)
    assert progress.done == pytest.approx(progress.total)
    assert [mode.times for mode in modes.values()] == [2, 2]
    for place, length in enumerate(TWICE.lengths):
        alone = evaluate(
            loaded, {"prefill": Counted(PlanMode(plan, "prefill"))}, replace(TWICE, lengths=(length,)), kit
        )
        assert found["prefill"][place] == alone["prefill"][0]


def test_logits_that_cannot_wait_all_at_once_give_the_same_results(loaded, kit, monkeypatch) -> None:
    modes = {"both": Counted(PlanMode(sparse_plan(loaded)))}
    whole = evaluate(loaded, modes, TWICE, kit)
    monkeypatch.setattr(evaluation, "_WAITING_BYTES", 1)
    assert evaluate(loaded, modes, TWICE, kit) == whole
    assert modes["both"].times == 1 + 1 + 1 + 2 * 2 * 2


def test_a_plan_of_full_density_scores_as_dense_does(loaded: LoadedModel, kit: Kit) -> None:
    modes = {phase: PlanMode(full_plan(loaded), phase) for phase in ("prefill", "decode", "both")}
    found = scored(loaded, modes, kit, ("kv_retrieval", "perplexity"))
    for phase in modes:
        assert found[phase].kl == pytest.approx(0.0, abs=1e-6)
        for name, task in found[phase].tasks.items():
            assert task.sparse == tuple(
                Outcome(o.correct, pytest.approx(o.nll, abs=1e-4), pytest.approx(0.0, abs=1e-6), n, n, True)
                for o in found["dense"].tasks[name].dense
                for n in [o.scored - (phase == "decode")]
            )
    assert found["prefill"].prefill_density == pytest.approx(1.0)
    assert found["prefill"].decode_share == 1.0


def test_a_sparse_plan_moves_distributions_and_says_what_it_computed(loaded: LoadedModel, kit: Kit) -> None:
    found = scored(loaded, {p: PlanMode(sparse_plan(loaded), p) for p in ("prefill", "decode", "both")}, kit)
    assert found["prefill"].prefill_density < 0.75
    assert found["decode"].prefill_density == 1.0
    assert found["decode"].decode_share < 0.6
    assert found["both"].prefill_density < 0.8
    assert all(found[phase].kl > 1e-4 for phase in ("prefill", "decode", "both"))
    assert found["dense"].kl == 0.0


def test_without_a_plan_dense_is_on_both_sides(loaded: LoadedModel) -> None:
    (found,) = evaluate(loaded, {}, EvalSamples(("kv_retrieval",), (LENGTH,), 1))["dense"]
    task = found.tasks["kv_retrieval"]
    assert task.dense == task.sparse
    assert found.prefill_density == 1.0


def test_batches_score_as_single_samples_do(loaded: LoadedModel, kit: Kit) -> None:
    one, many = (
        scored(loaded, {"both": PlanMode(sparse_plan(loaded))}, kit, samples=4, batch=size)["both"].tasks["perplexity"]
        for size in (1, 4)
    )
    np.testing.assert_allclose([o.nll for o in one.sparse], [o.nll for o in many.sparse], rtol=1e-4)
    np.testing.assert_allclose([o.nll for o in one.dense], [o.nll for o in many.dense], rtol=1e-4)


def test_prefill_in_chunks_scores_as_in_one_piece(loaded: LoadedModel, kit: Kit) -> None:
    plan = full_plan(loaded)
    whole, pieces = (
        scored(loaded, {"both": PlanMode(plan)}, kit, samples=1, prefill_chunk=chunk)["both"] for chunk in (None, 100)
    )
    a, b = whole.tasks["perplexity"], pieces.tasks["perplexity"]
    np.testing.assert_allclose([o.nll for o in a.sparse], [o.nll for o in b.sparse], rtol=1e-4)


def test_one_forced_pass_tells_what_greedy_generation_gives(loaded: LoadedModel) -> None:
    """The answer is what the model generates, or that with one token changed."""
    prompt = torch.randint(1, 90, (1, 30), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        out = loaded.model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=5, do_sample=False, eos_token_id=None
        )[0, 30:]
    own = out[:4].tolist()
    other = [*own[:2], (own[2] + 1) % 90, own[3]]
    for ids, wanted in ((own, True), (other, False)):
        text = loaded.tokenizer.decode(ids)
        digits = text[-1].isdigit() and loaded.tokenizer.decode([int(out[4])]).isdigit()
        batch = Batch.of([sample(text, prompt[0].tolist(), ids)], torch.device("cpu"))
        for stepwise in (False, True):
            (logits,) = forced_logits(loaded, batch.prompt_BS, [batch.answer_BA], stepwise=stepwise)
            assert answered(loaded, batch, logits) == [wanted and not digits]


def test_an_answer_that_goes_on_with_digits_is_wrong(loaded: LoadedModel) -> None:
    ids = [loaded.tokenizer.convert_tokens_to_ids(c) for c in "42"]
    batch = Batch.of([sample("42", [1, 2, 3], ids)], torch.device("cpu"))
    logits = torch.zeros(1, 3, 128)
    for place, character in enumerate("42"):
        logits[0, place, loaded.tokenizer.convert_tokens_to_ids(character)] = 9.0
    for after, wanted in (("7", False), (".", True)):
        said = logits.clone()
        said[0, 2, loaded.tokenizer.convert_tokens_to_ids(after)] = 9.0
        assert answered(loaded, batch, said) == [wanted]


def test_likelihood_and_divergence_are_those_of_the_definition() -> None:
    generator = torch.Generator().manual_seed(1)
    dense, sparse = (torch.randn(1, 4, 10, generator=generator) for _ in range(2))
    batch = Batch.of([sample("abc", [1], [3, 1, 4])], torch.device("cpu"))
    p, q = dense[0].softmax(-1), sparse[0].softmax(-1)
    nll = -sum(math.log(q[place, token]) for place, token in enumerate((3, 1, 4))) / 3
    assert log_likelihood(batch, sparse) == [pytest.approx(nll, rel=1e-5)]
    assert divergence(dense, sparse) == [pytest.approx(float((p * (p / q).log()).sum(-1).mean()), rel=1e-5)]


def test_only_samples_of_equal_shape_share_a_batch() -> None:
    shapes = [(5, 2), (6, 2), (5, 2), (5, 3), (5, 2)]
    made = [sample("x", [1] * prompt, [2] * answer) for prompt, answer in shapes]
    found = list(batches(made, 2))
    assert [(len(some), len(some[0].prompt_ids), len(some[0].answer_ids)) for some in found] == [
        (2, 5, 2),
        (1, 5, 2),
        (1, 5, 3),
        (1, 6, 2),
    ]


def test_evaluation_samples_are_not_those_of_calibration(loaded: LoadedModel, kit: Kit) -> None:
    calibration = prepare(loaded.tokenizer, Split.CALIBRATION)
    for task in ("kv_retrieval", "perplexity"):
        (a,), (b,) = (list(held_out(source, task, LENGTH, 1, 0)) for source in (kit, calibration))
        assert a.prompt_ids.tolist() != b.prompt_ids.tolist()


class Refused:
    """A mode that cannot be switched on."""

    stepwise = False
    dense_prefill = False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        raise BackendError("not here")
        yield


def test_what_cannot_be_measured_is_found_out_before_any_forward_pass(loaded: LoadedModel, kit: Kit) -> None:
    passes: list[object] = []
    with loaded.model.register_forward_pre_hook(lambda *call: passes.append(call)):
        with pytest.raises(BackendError):
            evaluate(loaded, {"both": Refused()}, TWICE, kit)
        with pytest.raises(PromptError, match="kv_retrieval at 32 tokens"):  # the other task and length fit
            evaluate(loaded, {}, EvalSamples(("perplexity", "kv_retrieval"), (LENGTH, 32), 1), kit)
        with pytest.raises(UsageError, match="chunk"):
            evaluate(loaded, {}, replace(TWICE, prefill_chunk=4), kit)
    assert passes == []


def test_an_unknown_task_and_a_length_too_short_are_named(loaded: LoadedModel, kit: Kit) -> None:
    with pytest.raises(UsageError, match="chess"):
        evaluate(loaded, {}, EvalSamples(("chess",), (LENGTH,), 1))
    with pytest.raises(PromptError, match="kv_retrieval at 32 tokens"):
        evaluate(loaded, {}, EvalSamples(("kv_retrieval",), (32,), 1))


def test_results_of_several_lengths_are_pooled() -> None:
    right, wrong = Outcome(True, 1.0), Outcome(False, 2.0, 0.5)
    first = TaskResult((right, right), (right, wrong))
    second = TaskResult((right,), (right,))
    pooled = merged([EvalResult((4096,), {"t": first}, Spent(1, 4)), EvalResult((8192,), {"t": second}, Spent(3, 4))])
    assert pooled.lengths == (4096, 8192)
    assert pooled.prefill_density == 0.5
    assert pooled.tasks["t"].score.sparse == pytest.approx(2 / 3)
    assert pooled.tasks["t"].score.samples == 3
    assert pooled.kl == pytest.approx(0.5 / 3)


def test_a_perplexity_has_the_interval_of_its_difference() -> None:
    dense = tuple(Outcome(None, value) for value in (1.0, 1.2, 1.4))
    sparse = tuple(Outcome(None, value) for value in (1.08, 1.33, 1.49))
    score = TaskResult(dense, sparse).score
    assert score.dense == pytest.approx(math.exp(1.2))
    assert score.sparse == pytest.approx(math.exp(1.3))
    assert score.interval[0] < score.sparse - score.dense < score.interval[1]


def own_samples(count: int, prompt: int = 300, answer: int = 6) -> list[Sample]:
    """Prompts that are of no task, in two shapes."""
    rng = np.random.default_rng(5)
    shapes = [(prompt + 20 * (place % 2), answer) for place in range(count)]
    return [
        Sample(rng.integers(1, 90, p, np.int32), rng.integers(1, 90, a, np.int32), "", "own", p + a) for p, a in shapes
    ]


def test_one_dense_reference_serves_calls_for_samples_of_any_origin_in_their_order(loaded: LoadedModel) -> None:
    samples, plan = own_samples(3), sparse_plan(loaded)
    reference = dense_reference(loaded, samples)
    first = compare(loaded, {"both": PlanMode(plan), "decode": PlanMode(plan, "decode")}, reference)
    again = compare(loaded, {"both": PlanMode(plan)}, reference)
    assert first["both"] == again["both"]
    assert len(reference.outcomes) == len(first["both"].kl) == 3
    for place, sample in enumerate(samples):
        alone = compare(loaded, {"both": PlanMode(plan)}, dense_reference(loaded, [sample]))
        assert first["both"].outcomes[place].kl == pytest.approx(alone["both"].kl[0], rel=1e-4)
    assert first["both"].spent.attended < first["both"].spent.cached


def test_without_the_greedy_text_divergence_is_the_same_and_exact_agreement_unknown(loaded: LoadedModel) -> None:
    samples, mode = own_samples(1), {"both": PlanMode(sparse_plan(loaded))}
    (full,), (short,) = (
        compare(loaded, mode, dense_reference(loaded, samples, greedy=greedy))["both"].outcomes
        for greedy in (True, False)
    )
    assert full == replace(short, exact=full.exact)
    assert full.exact is not None
    assert short.exact is None


def test_only_rows_that_the_mode_computed_count(loaded: LoadedModel) -> None:
    """With decode alone the first row is dense's; with prefill alone all rows read what was prefilled sparse."""
    (sample,) = own_samples(1, answer=5)
    reference = dense_reference(loaded, [sample])
    modes = {phase: PlanMode(sparse_plan(loaded), phase) for phase in ("prefill", "decode", "both")}
    found = {name: one.outcomes[0].scored for name, one in compare(loaded, modes, reference).items()}
    assert found == {"prefill": 6, "decode": 5, "both": 6}


def by_hand(loaded: LoadedModel, sample: Sample, plan: Plan | None, **phases: bool) -> torch.Tensor:
    """[A + 1, V]: the prompt, then the answer token by token."""
    model: Any = loaded.model
    with nullcontext() if plan is None else apply(model, plan, **phases), torch.no_grad():
        out = model(torch.tensor(sample.prompt_ids[None].astype(np.int64)), use_cache=True)
        rows = [out.logits[:, -1:]]
        for token in sample.answer_ids.tolist():
            rows.append(model(torch.tensor([[token]]), past_key_values=out.past_key_values).logits)
    return torch.cat(rows, 1)[0]


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_what_is_measured_is_what_a_user_gets(loaded: LoadedModel, phase: str) -> None:
    """A sparse prefill, then decode steps."""
    (sample,) = own_samples(1)
    plan = sparse_plan(loaded)
    (found,) = compare(loaded, {"p": PlanMode(plan, phase)}, dense_reference(loaded, [sample]))["p"].outcomes
    first = int(phase == "decode")
    dense = by_hand(loaded, sample, None)[first:]
    sparse = by_hand(loaded, sample, plan, prefill=phase != "decode", decode=phase != "prefill")[first:]
    p, q = dense.log_softmax(-1), sparse.log_softmax(-1)
    assert found.kl == pytest.approx(float((p.exp() * (p - q)).sum(-1).mean()), rel=1e-3, abs=1e-7)
    assert found.agreed == int((p.argmax(-1) == q.argmax(-1)).sum())


@pytest.mark.parametrize("phase", ["prefill", "decode", "both"])
def test_exact_agreement_is_that_greedy_generation_gives_the_same_tokens(loaded: LoadedModel, phase: str) -> None:
    samples, plan = own_samples(6, answer=4), sparse_plan(loaded)
    found = compare(loaded, {"p": PlanMode(plan, phase)}, dense_reference(loaded, samples))["p"].outcomes

    def generated(sample: Sample) -> list[int]:
        prompt = torch.tensor(sample.prompt_ids[None].astype(np.int64))
        return loaded.model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=4, do_sample=False)[
            0, prompt.shape[1] :
        ].tolist()

    dense = [generated(sample) for sample in samples]
    with apply(loaded.model, plan, prefill=phase != "decode", decode=phase != "prefill"):
        sparse = [generated(sample) for sample in samples]
    assert [one.exact for one in found] == [a == b for a, b in zip(dense, sparse, strict=True)]


def test_what_follows_an_end_token_does_not_count(loaded: LoadedModel) -> None:
    (sample,) = own_samples(1, answer=4)
    (batch,) = dense_reference(loaded, [sample]).batches
    assert batch.counted_BG.all()
    ended = copy.deepcopy(loaded.model)
    ended.generation_config.eos_token_id = [int(batch.greedy_BG[0, 1])]
    (batch,) = dense_reference(replace(loaded, model=ended), [sample]).batches
    first = batch.greedy_BG[0].tolist().index(ended.generation_config.eos_token_id[0])
    assert batch.counted_BG[0].tolist() == [place <= first for place in range(4)]


def test_a_sample_without_an_answer_to_measure_on_is_refused(loaded: LoadedModel) -> None:
    with pytest.raises(PromptError, match="at least one"):
        dense_reference(loaded, own_samples(1, answer=0))


def test_of_a_long_text_only_the_beginning_is_fed(loaded: LoadedModel) -> None:
    (sample,) = own_samples(1, answer=MOST_TEXT + 30)
    whole, cut = (
        compare(loaded, {"d": PlanMode(sparse_plan(loaded), "decode")}, dense_reference(loaded, [one], greedy=False))[
            "d"
        ]
        for one in (sample, replace(sample, answer_ids=sample.answer_ids[:MOST_TEXT]))
    )
    assert whole == cut
    assert whole.outcomes[0].scored == MOST_TEXT
