"""Samples depend on what they are asked for and on nothing else; splits share neither seeds nor text."""

import hashlib
import json
import re
from dataclasses import fields
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from task_tokenizers import kit_named

from sparsekv.bench.ruler_suite import SUITES
from sparsekv.planner.tasks import TASKS, Split, Task, TaskError, generator, load_filler_text, make_samples
from sparsekv.planner.tasks.wording import WORDINGS, Asked, Wording

DIGESTS = Path(__file__).parents[2] / "data" / "samples.json"
HELD_OUT = (Split.CALIBRATION, Split.VERIFICATION, Split.EVALUATION)


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


def frames(wording: Wording) -> list[str]:
    values = [getattr(wording, field.name) for field in fields(wording) if field.name != "second_words"]
    asked = [value for value in values if isinstance(value, Asked)]
    return [value for value in values if isinstance(value, str)] + [
        text for value in asked for text in (value.line, value.question, value.cue)
    ]


def is_sentence(frame: str) -> bool:
    """Of two words or more: `key:` and `VAR name =` are the form that all wordings have."""
    return len(re.findall("[A-Za-z]+", re.sub(r"\{\w+\}", "", frame))) > 1


@pytest.mark.parametrize(("one", "other"), [*permutations(HELD_OUT, 2)])
def test_no_sentence_or_key_of_a_split_stands_in_another(one: Split, other: Split) -> None:
    sentences, others = [*filter(is_sentence, frames(WORDINGS[one]))], frames(WORDINGS[other])
    assert len(sentences) > 20
    assert not [text for text in sentences for found in others if text.strip() in found]
    assert not [text for text in frames(WORDINGS[one]) if text.endswith("\n") and text in others]
    assert len(WORDINGS[one].second_words) > 150
    assert not set(WORDINGS[one].second_words) & set(WORDINGS[other].second_words)


@pytest.mark.parametrize(("one", "other"), [*permutations(HELD_OUT, 2)])
def test_no_eight_lines_of_text_in_a_row_serve_two_splits(one: Split, other: Split) -> None:
    lines, others = (_runs(load_filler_text(split), 8) for split in (one, other))
    assert len(lines) > 10_000
    assert not lines & others


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


def test_samples_stay_the_same_so_that_scores_can_be_compared_over_time(tmp_path: Path) -> None:
    """Whoever changes a digest measures again what was published for that task; the new ones are in `tmp_path`."""
    tasks = {(name, length): task for name, task in TASKS.items() for length in (1024, 4100)}
    tasks |= {(f"{suite}, {name}", 8192): task for suite, those in SUITES.items() for name, task in those.items()}
    found = {f"{name} at {length}": _digest(task, length) for (name, length), task in tasks.items()}
    (tmp_path / DIGESTS.name).write_text(json.dumps(found, indent=0))
    assert found == json.loads(DIGESTS.read_text())


def _digest(task: Task, length: int) -> str:
    kit = kit_named("shipped", Split.EVALUATION)
    digest = hashlib.sha256()
    for sample in make_samples(task, kit, length, seed=0, count=3):
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
