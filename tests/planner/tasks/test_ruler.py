"""RULER's tasks: the answer is read off the prompt, and the words come as often as RULER says."""

import re
from collections import Counter

import numpy as np
import pytest
from task_tokenizers import NAMES, kit_named, tokenizer_named

from sparsekv.planner.tasks import RULER_TASKS, TASKS, Sample, make_samples


def text(sample: Sample, tokenizer: str = "shipped") -> str:
    return str(tokenizer_named(tokenizer).decode(sample.prompt_ids, skip_special_tokens=True))


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
@pytest.mark.parametrize("task", RULER_TASKS)
def test_the_answer_follows_from_the_prompt_and_is_what_its_tokens_say(task: str, tokenizer: str) -> None:
    for length in (640, 5000):
        for sample in make_samples(TASKS[task], kit_named(tokenizer), length, seed=1, count=3):
            assert solved(text(sample, tokenizer)) == sample.answer.strip()
            whole = np.concatenate([sample.prompt_ids, sample.answer_ids])
            decoded = tokenizer_named(tokenizer).decode(whole, skip_special_tokens=True)
            assert decoded == text(sample, tokenizer) + sample.answer
