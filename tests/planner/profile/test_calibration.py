"""Calibration prompts: whose turn it is, and which rows of a prompt look back."""

import numpy as np
import pytest
from task_tokenizers import tokenizer_named

from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.calibration import CalibrationPrompt, calibration_prompts, digest_of, mix_of, task_of_each
from sparsekv.planner.tasks import TASKS


def prompts(**options: object) -> tuple[CalibrationPrompt, ...]:
    settled = PlanOptions(lengths=(1024,), **options).settled(4096, "cpu")  # type: ignore[arg-type]
    return calibration_prompts(tokenizer_named("shipped"), settled)[1024]


@pytest.mark.parametrize(
    ("solved", "samples", "expected"),
    [
        (("a", "b"), 3, "a b a"),
        (("quote_text", "quote_code", "perplexity"), 3, "quote_text quote_code perplexity"),
        (("quote_text", "quote_code", "niah_single", "perplexity"), 3, "quote_text quote_code niah_single"),
    ],
)
def test_few_samples_quote_first_and_then_take_turns(solved: tuple[str, ...], samples: int, expected: str) -> None:
    assert task_of_each(solved, samples) == tuple(expected.split())


def test_eight_samples_have_every_kind_and_quotations_twice() -> None:
    assert mix_of(tuple(TASKS), 8) == {
        "quote_text": 2,
        "quote_code": 2,
        "niah_single": 1,
        "perplexity": 1,
        "niah_multikey": 1,
        "kv_retrieval": 1,
    }
    assert set(mix_of(tuple(TASKS), 10)) == set(TASKS)


def test_own_prompts_are_counted_as_such() -> None:
    assert mix_of((), 4) == {"prompts": 4}


def test_scored_rows_predict_tokens_that_stand_earlier_and_end_with_the_answer() -> None:
    (prompt,) = prompts(tasks=("quote_code",))
    assert len(prompt.scored) == 4
    assert prompt.scored[-1] == (prompt.answer_start - 1, len(prompt.ids) - 1)
    for first, end in prompt.scored:
        answer = prompt.ids[first + 1 : end + 1]
        windows = np.lib.stride_tricks.sliding_window_view(prompt.ids[:first], len(answer))
        assert (windows == answer).all(1).any()


@pytest.mark.parametrize("task", ["kv_retrieval", "perplexity"])
def test_of_a_prompt_without_quotations_the_rows_of_the_answer_are_scored(task: str) -> None:
    (prompt,) = prompts(tasks=(task,))
    assert prompt.scored == ((prompt.answer_start - 1, len(prompt.ids) - 1),)


def test_of_an_own_prompt_the_last_rows_are_scored() -> None:
    (prompt,) = prompts(prompts=("a text of several words " * 200,))
    assert prompt.scored == ((1024 - 32 - 1, 1024 - 1),)


def test_a_second_sample_of_a_task_is_another_one() -> None:
    first, _, second = prompts(tasks=("quote_code", "perplexity"), samples=3)
    assert not np.array_equal(first.ids, second.ids)


def test_the_digest_covers_tokens_and_scored_rows() -> None:
    one = prompts(tasks=("quote_code",))
    other = CalibrationPrompt(one[0].ids, one[0].answer_start)
    assert digest_of({1024: one}) == digest_of({1024: prompts(tasks=("quote_code",))})
    assert digest_of({1024: one}) != digest_of({1024: (other,)})
