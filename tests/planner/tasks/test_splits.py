"""Samples depend on what they are asked for and on nothing else; splits share neither seeds nor text."""

import hashlib
import re

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_tokenizers import kit_named, kit_of, tokenizer_named

from sparsekv.planner.tasks import TASKS, Sample, Split, TaskError, load_filler_text, make_sample, make_samples
from sparsekv.planner.tasks.samples import generator

HELD_OUT = (Split.CALIBRATION, Split.EVALUATION)


def same(one: Sample, other: Sample) -> bool:
    return (
        np.array_equal(one.past_ids, other.past_ids)
        and np.array_equal(one.answer_ids, other.answer_ids)
        and one.answer == other.answer
    )


@pytest.mark.parametrize("task", TASKS)
def test_a_sample_does_not_depend_on_those_made_before_it(task: str) -> None:
    used, fresh = kit_named("shipped"), kit_of(tokenizer_named("shipped"))
    forward = list(make_samples(TASKS[task], used, 700, seed=3, count=5))
    backward = [make_sample(TASKS[task], fresh, 700, seed=3, index=index) for index in reversed(range(5))]
    assert all(same(*pair) for pair in zip(forward, reversed(backward), strict=True))


@given(
    st.lists(
        st.tuples(
            st.sampled_from(list(Split)),
            st.sampled_from(sorted(TASKS)),
            st.integers(0, 2**20),
            st.integers(0, 2**40),
            st.integers(0, 10**6),
        ),
        min_size=2,
        max_size=8,
        unique=True,
    )
)
def test_seeds_never_coincide(asked) -> None:
    first_draws = [generator(*each).integers(0, 2**62, 2).tobytes() for each in asked]
    assert len(set(first_draws)) == len(asked)


def test_no_eight_lines_of_text_in_a_row_serve_both_calibration_and_evaluation() -> None:
    calibration, evaluation = (_runs(load_filler_text(split), 8) for split in HELD_OUT)
    assert len(calibration) > 20_000
    assert len(evaluation) > 20_000
    assert not calibration & evaluation


def _runs(text: str, size: int) -> set[str]:
    lines = text.split("\n")
    return {"\n".join(lines[i : i + size]) for i in range(len(lines) - size)}


@pytest.mark.parametrize("split", HELD_OUT)
def test_shipped_text_is_plain_lines_without_anything_a_task_could_be_taken_for(split: Split) -> None:
    text = load_filler_text(split)
    assert text.endswith("\n")
    assert "\r" not in text
    assert not re.search(r"^(VAR \S+ = |The special number for|The key of|- [a-z]+-[a-z]+: \d)", text, re.MULTILINE)


def test_training_text_is_not_shipped() -> None:
    with pytest.raises(TaskError, match="training"):
        load_filler_text(Split.TRAINING)


def test_samples_stay_the_same_so_that_scores_can_be_compared_over_time() -> None:
    """Whoever changes a digest measures again what was published for that task."""
    assert {name: _digest(name) for name in TASKS} == {
        "quote_text": "6d2be5710da2c4b0",
        "quote_code": "8f81dfec7ef7d0db",
        "niah_single": "eb98d48f481bf463",
        "niah_multikey": "e2002e1bf420cfb0",
        "kv_retrieval": "5170576ad6af9cd3",
        "two_stage": "9b4961cb3a5aa531",
        "variable_tracking": "05385f7bacd650f0",
        "perplexity": "f53d05f6608bc1de",
        "niah_multivalue": "3744a0000db26a90",
        "niah_multiquery": "5371da868f5c77e0",
        "vt": "0ec655f49dd32d2c",
        "cwe": "5cb57039a1e21030",
        "fwe": "fc4e69b9562d6342",
        "second_question": "f7f8336a04d68b0a",
    }


def _digest(task: str) -> str:
    kit = kit_named("shipped")
    digest = hashlib.sha256()
    for sample in make_samples(TASKS[task], kit, 1024, seed=0, count=3):
        digest.update(sample.past_ids.astype("<i4").tobytes() + sample.answer_ids.astype("<i4").tobytes())
    return digest.hexdigest()[:16]


@pytest.mark.parametrize("length", [700, 30_000])  # of less text than the kit has, and of more
@pytest.mark.parametrize("task", TASKS)
def test_no_sample_is_another_one_but_for_its_end(task: str, length: int) -> None:
    counts = {Split.EVALUATION: 40 if length < 1000 else 8, Split.CALIBRATION: 4}
    beginnings = [
        np.concatenate([sample.past_ids, sample.answer_ids])[:-64].tobytes()
        for split, count in counts.items()
        for sample in make_samples(TASKS[task], kit_named("shipped", split), length, seed=1, count=count)
    ]
    assert len(set(beginnings)) == sum(counts.values())
