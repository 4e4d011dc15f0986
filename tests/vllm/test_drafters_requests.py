"""Requests of every kind beside each drafter: their answers are those by the same plan without a drafter."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from vllm import SamplingParams
from vllm.sampling_params import StructuredOutputsParams
from vllm_drafters import accepted
from vllm_engine import generate, preemptions, tokens_of

from sparsekv.runtime.paged.metrics import ServingStats
from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats
from sparsekv.runtime.vllm.internals import layers_so_far

NEW = 24  # tokens of an answer
GREEDY = {"temperature": 0.0, "max_tokens": NEW, "ignore_eos": True, "logprobs": 2}
WEATHER = {"type": "object", "properties": {"degrees": {"type": "integer"}}, "required": ["degrees"]}
Asked = dict[str, tuple[list[int], SamplingParams]]


@pytest.fixture(scope="module")
def asked(without: Any, repeated: list[list[int]]) -> Asked:
    """In the order in which they come. What ends an answer, or may not be in it, is of the plain one."""
    first, _, second, _, grows = repeated
    plain = [generate(without, [prompt], NEW)[0].outputs[0] for prompt in (first, second, grows)]
    text, ids = plain[1].text, [answer.token_ids for answer in plain]
    kinds: list[tuple[str, list[int], dict[str, Any]]] = [
        ("plain", first, {}),
        ("frequency penalty", grows, {"frequency_penalty": 2.0}),
        ("grammar", second, {"structured_outputs": StructuredOutputsParams(regex="([0-9]{3} ){3,}end")}),
        ("cancelled", first, {}),
        ("presence penalty", grows, {"presence_penalty": 2.0}),
        ("stop string", second, {"stop": [text[len(text) // 2 :][:3]]}),
        ("least tokens", first, {"ignore_eos": False, "stop_token_ids": [ids[0][2]], "min_tokens": 5}),
        ("repetition penalty", grows, {"repetition_penalty": 1.6}),
        ("log-probabilities", first, {"logprobs": 7}),
        ("cancelled as well", grows, {}),
        ("JSON", first, {"ignore_eos": False, "structured_outputs": StructuredOutputsParams(json=WEATHER)}),
        ("penalties", second, {"frequency_penalty": 1.5, "presence_penalty": 1.5, "repetition_penalty": 1.4}),
        ("bad words", grows, {"bad_words": [without.get_tokenizer().decode(ids[2][4:5])]}),
        ("short", repeated[3], {"frequency_penalty": -0.5}),
    ]
    return {name: (prompt, SamplingParams(**GREEDY | how)) for name, prompt, how in kinds}


def played(llm: Any, asked: Asked) -> tuple[dict[str, Any], set[int]]:
    """What requests were answered, one of which comes every third step, and how many tokens were drafted for one.
    Cancelled ones are so between a draft and its verification."""
    waiting, ended, inner, step = list(asked.items()), {}, llm.llm_engine, 0
    scheduler, drafted = inner.engine_core.engine_core.scheduler, set()
    while waiting or inner.has_unfinished_requests():
        if waiting and (step % 3 == 0 or not inner.has_unfinished_requests()):
            name, (prompt, how) = waiting.pop(0)
            inner.add_request(name, {"prompt_token_ids": prompt}, how)
        ended |= {output.request_id: output for output in inner.step() if output.finished}
        step += 1
        for request in list(scheduler.running):
            drafted.add(len(request.spec_token_ids))
            if request.spec_token_ids and request.num_output_tokens > 3 and request.request_id.startswith("cancelled"):
                name = next(name for name in sorted(asked, reverse=True) if request.request_id.startswith(name))
                inner.abort_request([name])
                ended[name] = None
    assert llm.reset_prefix_cache(), "pages are still taken"
    return ended, drafted


@pytest.fixture(scope="module")
def expected(without: Any, asked: Asked) -> tuple[dict[str, Any], ServingStats]:
    """Answers, and what was counted."""
    reset_stats(without)
    answers, _ = played(without, asked)
    alike = {name for name, (prompt, _) in asked.items() if tokens_of(answers[name]) == tokens_of(answers["plain"])}
    assert alike == {"plain", "cancelled", "log-probabilities"}
    return answers, serving_stats(without)


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("method", "layers"), [("ngram", 0), ("suffix", 0), ("draft_model", 12), ("eagle3", 1), ("mtp", 1)]
)
def test_requests_of_every_kind_have_the_answers_without_a_drafter(
    method: str, layers: int, beside: Callable[[str], Any], asked: Asked, expected: tuple[dict[str, Any], ServingStats]
) -> None:
    """A drafter's own layers are not the plan's, whatever their names and shapes are."""
    llm = beside(method)
    attending = [layer.impl for layer in layers_so_far(llm.llm_engine.vllm_config).values()]
    assert [getattr(impl, "plan_host", None) is None for impl in attending] == [False] * 12 + [True] * layers
    (answers, drafted), (wanted_of, plain) = played(llm, asked), expected
    assert [name for name in asked if answers[name] is None] == ["cancelled", "cancelled as well"]
    for name, output in answers.items():
        if output is not None:
            (answer,), (wanted,) = output.outputs, wanted_of[name].outputs
            assert (name, answer.token_ids, answer.text) == (name, wanted.token_ids, wanted.text)
            assert (answer.finish_reason, answer.stop_reason) == (wanted.finish_reason, wanted.stop_reason)
            assert [likely(at) for at in answer.logprobs] == [
                pytest.approx(likely(at), abs=2e-3) for at in wanted.logprobs
            ]
    stats = serving_stats(llm)
    assert accepted(llm, "draft_tokens") > accepted(llm) > 0
    assert {1, 2 if method == "mtp" else 3} <= drafted
    assert stats.sparse_tokens == plain.sparse_tokens > 3000
    assert stats.tiles_computed == pytest.approx(plain.tiles_computed)
    assert plain.decode_sparse > 8 * NEW
    assert stats.decode_sparse > plain.decode_sparse - 2 * NEW  # of which two were cancelled
    assert (stats.decode_left, stats.failures, preemptions(llm)) == (0, 0, 0)


def likely(at: dict[int, Any]) -> dict[int, float]:
    """Log-probabilities of a place, of what a grammar leaves."""
    return {token: entry.logprob for token, entry in at.items() if math.isfinite(entry.logprob)}
