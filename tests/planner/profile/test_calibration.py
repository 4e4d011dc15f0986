"""Calibration prompts: whose turn it is, and which rows of a prompt look back."""

import pytest
from task_tokenizers import tokenizer_named

from sparsekv.planner.common_options import DEFAULT_TASKS
from sparsekv.planner.options import PlanOptions, settle
from sparsekv.planner.profile.calibration import (
    Calibration,
    CalibrationPrompt,
    digest_of_calibration,
    mix_of,
    task_of_each,
)


def prompts(**options: object) -> tuple[CalibrationPrompt, ...]:
    settled = settle(PlanOptions(lengths=(1024,), **options), 4096, "cpu")  # type: ignore[arg-type]
    return Calibration(
        tokenizer_named("shipped"), tuple(one.text for one in settled.prompts), settled.tasks, settled.seed
    ).prompts(1024, settled.calibration_samples)


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


def test_eight_samples_have_every_task_and_more_have_no_more_quotations() -> None:
    assert mix_of(DEFAULT_TASKS, 8) == dict.fromkeys(mix_of(DEFAULT_TASKS, 8), 1)
    assert set(mix_of(DEFAULT_TASKS, 8)) == set(DEFAULT_TASKS)
    assert mix_of(("quote_text", "quote_code", "perplexity"), 8) == {"quote_text": 1, "quote_code": 1, "perplexity": 6}
    assert mix_of(("quote_text",), 3) == {"quote_text": 3}


def test_own_prompts_are_counted_as_such() -> None:
    assert mix_of((), 4) == {"prompts": 4}


@pytest.mark.parametrize("task", ["quote_code", "kv_retrieval", "perplexity"])
def test_the_rows_that_predict_the_answer_are_scored(task: str) -> None:
    (prompt,) = prompts(tasks=(task,))
    assert prompt.answer_rows == range(prompt.answer_start - 1, len(prompt.ids) - 1)


def test_of_an_own_prompt_the_last_rows_are_scored() -> None:
    (prompt,) = prompts(prompts=("a text of several words " * 200,))
    assert prompt.answer_rows == range(1024 - 32 - 1, 1024 - 1)


def test_the_digest_covers_tokens_and_where_the_answer_begins() -> None:
    one = prompts(tasks=("quote_code",))
    other = CalibrationPrompt(one[0].ids, one[0].answer_start - 1)
    assert digest_of_calibration({1024: one}) == digest_of_calibration({1024: prompts(tasks=("quote_code",))})
    assert digest_of_calibration({1024: one}) != digest_of_calibration({1024: (other,)})
