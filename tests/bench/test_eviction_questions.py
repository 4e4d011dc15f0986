"""Eviction before questions are known: the questions of a context, what rules keep, and what is counted."""

import sys

import pytest
import torch
from task_tokenizers import REFERENCE_MODEL

from sparsekv.bench import eviction_questions
from sparsekv.bench.eviction_questions import Asked, QuestionTrials, by_layout, by_rule, main
from sparsekv.planner.retain_search import by_hand
from sparsekv.planner.tasks import TASKS, Split, prepare
from sparsekv.plans.aliases import ModelSource
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.hf.observe import capture_attention


@pytest.fixture(scope="module")
def retriever() -> LoadedModel:
    return load_model(ModelSource(str(REFERENCE_MODEL)), device="cpu", dtype="float32")


def test_dense_answers_each_question_by_itself_and_rules_keep_as_many_tokens(retriever: LoadedModel) -> None:
    kit = prepare(retriever.tokenizer, Split.EVALUATION)
    asked = Asked.of(kit, TASKS["kv_retrieval"], 512, 2, 0, torch.device("cpu"))
    assert len(asked.questions) == 2
    trials = QuestionTrials(retriever)
    with capture_attention(retriever.model, trials.attend):
        seen, prefixes = trials.evicted(asked)
        for prefix, (question_1Q, answer_1A) in zip(prefixes, asked.questions, strict=True):
            plain = torch.cat((asked.context_1S, question_1Q, answer_1A), 1)
            with torch.no_grad():
                logits_1AV = retriever.model(input_ids=plain, use_cache=False).logits[:, -answer_1A.shape[1] - 1 : -1]
            own_1AV = prefix.dense_1RV[:, -answer_1A.shape[1] :]
            torch.testing.assert_close(own_1AV, logits_1AV.log_softmax(-1), atol=1e-3, rtol=1e-3)
            assert bool((logits_1AV.argmax(-1) == answer_1A).all())
        evenly = by_hand(retriever.info.full_layers, 0.5, 512)["evenly"]
        wanted = by_layout(evenly, trials, seen, prefixes[0])[0].sum(1).float().mean()
        for rule in ("snapkv", "adakv", "expected_attention", "expected_attention_evenly", "tova"):
            kept_gS = by_rule(rule, evenly, trials, seen, prefixes[0])[0]
            assert abs(float(kept_gS.sum(1).float().mean() - wanted)) <= 1.0, rule


def test_every_rule_and_layout_is_in_the_table(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sparsekv.planner.retain_search._SHARES", (0.5, 0.02))
    monkeypatch.setattr(eviction_questions, "_TASKS", {"kv_retrieval": TASKS["kv_retrieval"]})
    command = ["", "tiny-retriever", "--length", "384", "--contexts", "1", "--questions", "1", "--device", "cpu"]
    monkeypatch.setattr(sys, "argv", [*command, "--search", "1", "--retain", "0.6"])
    main()
    printed = capsys.readouterr().out
    for layout in ("evenly", "questions known", "questions unknown"):
        assert f"| our score, {layout} |" in printed
        assert f"| tova, {layout} |" in printed
