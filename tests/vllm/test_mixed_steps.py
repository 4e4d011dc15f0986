"""Decode beside chunks of prompts: with max_num_batched_tokens far below what is asked for, most steps are such."""

from typing import Any

from vllm_engine import NEW, Oracle, chunks_of, generate, same
from vllm_steps import SPARSE_FROM_DENSE, apart, likely_answers, recorded_choices

from sparsekv.runtime.vllm.engine_host import serving_stats

Prompts = dict[int, list[int]]
LENGTHS = (200, 1100, 700, 2000)  # tokens of the second are decoded while the last is a prompt


def test_rows_choose_beside_chunks_of_prompts_as_in_the_transformers_host(
    engine: Any, sparse: Oracle, prompts: Prompts
) -> None:
    with recorded_choices() as steps:
        outputs = generate(engine, [prompts[length] for length in LENGTHS])
    answers = [sparse(prompts[length], cuts) for length, cuts in zip(LENGTHS, chunks_of(LENGTHS), strict=True)]
    assert [same(output, answer) for output, answer in zip(outputs, answers, strict=True)] == [True] * 4
    chose = [length + new for length in (1100, 2000) for new in range(1, NEW)]
    assert sorted(steps.chosen) == [(layer, length) for layer in (1, 6) for length in chose]
    assert steps.mixed == 5 * 8  # steps of the 1,100 before the last prompt is complete, and layers with a choice
    assert serving_stats(engine).decode_sparse == len(chose)


def test_dense_decode_is_told_from_sparse_before_an_answer_differs(engine: Any, plain: Any, prompts: Prompts) -> None:
    """What tests on a GPU rely on, where rounding decides an answer of which the model is not sure."""
    asked = [prompts[length] for length in (200, 2000, 700, 2700)]
    (_, beside, *_), (_, dense, *_) = likely_answers(engine, asked), likely_answers(plain, asked)
    (alone,) = likely_answers(engine, [prompts[2000]])
    assert apart(alone, beside) < 0.2 < SPARSE_FROM_DENSE < apart(beside, dense)
