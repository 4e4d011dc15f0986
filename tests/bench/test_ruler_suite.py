"""RULER's tasks in RULER's sizes: what is planted stands in prompts as often as stated, and the score finds it."""

import re
from collections import Counter

import numpy as np
import pytest
from task_tokenizers import NAMES, kit_named, tokenizer_named

from sparsekv.bench.ruler_suite import RULER_SUITE, SUITES, recall
from sparsekv.planner.tasks import Sample, TaskError, make_sample, make_samples


def sample_of(task: str, length: int = 4096, seed: int = 0, tokenizer: str = "shipped") -> Sample:
    return make_sample(RULER_SUITE[task], kit_named(tokenizer), length, seed, 0)


def needles(context: str) -> list[tuple[str, str]]:
    return re.findall(r"^The special number for (\S+) is (\S+)\.$", context, re.MULTILINE)


@pytest.mark.parametrize("tokenizer", NAMES)
@pytest.mark.parametrize("task", RULER_SUITE)
@pytest.mark.parametrize("length", [700, 5000])
def test_a_prompt_and_what_is_generated_behind_it_take_exactly_the_length(task, tokenizer, length) -> None:
    room = {"vt": 34, "cwe": 120, "fwe": 50}.get(task, 128)
    sizes = set()
    for sample in make_samples(RULER_SUITE[task], kit_named(tokenizer), length, seed=3, count=3):
        sizes.add(len(sample.prompt_ids))
        assert len(sample.answer_ids) <= length - len(sample.prompt_ids)
        assert recall(sample.answer, sample.answer) == 1.0
    (size,) = sizes
    assert size <= length - room
    assert size == length - room or tokenizer != "byte_level"  # more than RULER's room only where answers need it


def test_a_length_that_cannot_hold_all_needles_is_refused() -> None:
    with pytest.raises(TaskError, match="hold 4 needles"):
        sample_of("niah_multikey_1", 225)


@pytest.mark.parametrize(
    ("generated", "score"),
    [
        (" 1234567, 7654321", 1.0),
        ("7654321 and then 1234567.", 1.0),
        ("It is 1234567", 0.5),
        ("123456 7", 0.0),
        ("", 0.0),
    ],
)
def test_recall_is_the_share_of_strings_in_the_text_in_any_order(generated, score) -> None:
    assert recall(generated, " 1234567, 7654321") == score


@pytest.mark.parametrize(
    ("generated", "is_right"),
    [
        (" 11, 22, 33", True),
        ("1, 2, 33. The end", True),
        ("11, 22, 34", False),
        ("22, 33", False),
        ("11, 22, 333", False),
    ],
)
def test_a_long_answer_is_judged_by_its_last_number_in_its_place(generated, is_right) -> None:
    assert SUITES["long"]["table"].is_exact(generated, " 11, 22, 33") is is_right
    assert not SUITES["ruler"]["niah_multivalue"].is_exact("1, 2, 33", " 11, 22, 33")


def solved(prompt: str) -> str:
    """The answer, by brute force."""
    *lines, question = prompt.split("\n")
    context = "\n".join(lines)
    if asked := re.match(r"What are the special numbers for (\S+?), in the order of the text", question):
        found = re.findall(rf"^One special number for {asked[1]} is (\d+)\.$", context, re.MULTILINE)
    elif asked := re.match(r"What are the special numbers for (.*), in that order", question):
        needles = dict(re.findall(r"^The special number for (\S+) is (\d+)\.$", context, re.MULTILINE))
        found = [needles[key] for key in asked[1].split(", ")]
    elif asked := re.match(r"Which variables have the value (\d+),", question):
        found = _variables(context, asked[1])
    elif asked := re.match(r"Which (\d+) words", question):
        found = _most_common(_numbered(context), int(asked[1]))
    else:
        assert question.startswith("Which three coded words")
        found = _most_common([word for word in _coded(context) if word != "..."], 3)
    return ", ".join(found)


def _variables(context: str, value: str) -> list[str]:
    found: list[str] = []
    for new, old in re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", context, re.MULTILINE):
        if old in (value, *found):
            found.append(new)
    return found


def _numbered(context: str) -> list[str]:
    entries = re.findall(r" (\d+)\. ([a-z]+-[a-z]+)", context[context.index("Words:") :])
    assert [int(number) for number, _ in entries] == list(range(1, len(entries) + 1))
    return [word for _, word in entries]


def _coded(context: str) -> list[str]:
    return context[context.index("Coded text:") :].split()[2:]


def _most_common(words: list[str], count: int) -> list[str]:
    """The most frequent first, equally frequent ones as they appear; those behind must be less frequent."""
    ranked = Counter(words).most_common(count + 1)
    assert ranked[count - 1][1] > ranked[count][1]
    return [word for word, _ in ranked[:count]]


@pytest.mark.parametrize("tokenizer", NAMES)
@pytest.mark.parametrize("task", ["niah_multivalue", "niah_multiquery", "vt", "cwe", "fwe"])
def test_the_answer_follows_from_the_prompt_and_is_what_its_tokens_say(task: str, tokenizer: str) -> None:
    for length in (900, 5000):
        for sample in make_samples(RULER_SUITE[task], kit_named(tokenizer), length, seed=1, count=3):
            prompt, whole = (
                str(tokenizer_named(tokenizer).decode(ids, skip_special_tokens=True))
                for ids in (sample.prompt_ids, np.concatenate([sample.prompt_ids, sample.answer_ids]))
            )
            assert solved(prompt) == sample.answer.strip()
            assert whole == prompt + sample.answer
