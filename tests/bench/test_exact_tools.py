"""What the tools around exact output inside vLLM make of an engine's counts and answers."""

import re
import sys

import pytest

from sparsekv.bench import exact_acceptance, vllm_requests
from sparsekv.bench.exact_acceptance import accepted
from sparsekv.bench.vllm_requests import _beside


def test_a_shorter_draft_is_the_beginning_of_a_longer_one() -> None:
    found = accepted([10, 8, 4, 0], [30, 26, 14, 5])
    assert found == {"drafts": 20, "accepted": [0.9, 0.5, 0.25], "tokens_a_cycle": [1.9, 2.4, 2.65]}


def test_an_engine_that_drafted_nothing_yet_has_no_counts() -> None:
    assert accepted([], [4, 4, 2])["accepted"] == [1.0, 0.5]
    assert accepted([], []) == accepted([4, 4], [4, 4]) == {"drafts": 0}


def test_answers_part_where_the_first_token_is_another() -> None:
    dense = {"a": [1, 2, 3, 4], "b": [5, 6, 7, 8], "c": [9]}
    found = {"a": [1, 2, 3, 4], "b": [5, 0, 7, 8], "d": [1]}
    assert _beside(found, dense) == {"beside": 2, "same": 1, "parting_per_1000": 200.0}
    assert _beside({"a": [1, 2]}, dense) == {"beside": 1, "same": 0, "parting_per_1000": 500.0}  # ends before
    assert _beside({}, dense) == {"beside": 0, "same": 0, "parting_per_1000": 0.0}


@pytest.mark.parametrize(
    ("module", "given", "said"),
    [
        (exact_acceptance, ["m", "--plan", "p", "--kinds", "quote_text,other"], "expected --kinds among .*found other"),
        (vllm_requests, ["--model", "m"], "expected --plan with a --model"),
        (vllm_requests, ["--exact", "--dense"], "expected --exact or --dense"),
        (vllm_requests, ["--exact", "--speculative", "ngram"], "expected --exact or --speculative"),
        (vllm_requests, ["--dense", "--model", "m", "--speculative", "eagle"], "of tiny-retriever"),
        (vllm_requests, ["--beside", "no file"], "expected a file that --answers wrote"),
        (vllm_requests, ["--answers", "no folder/a"], "expected a folder for --answers"),
        (exact_acceptance, ["m", "--plan", "p", "--draft", "0"], "expected --samples, --draft, --new and --cache"),
        (exact_acceptance, ["m", "--plan", "p", "--lengths", "100"], "expected --lengths above --new, 128, found 100"),
    ],
)
def test_what_is_asked_for_wrongly_is_said(module, given, said, monkeypatch, capsys) -> None:
    monkeypatch.setattr(sys, "argv", ["x", *given])
    with pytest.raises(SystemExit):
        module._arguments()
    assert re.search(said, capsys.readouterr().err.replace("\n", " "))
