"""RULER's tasks in RULER's sizes: what is planted stands in prompts as often as stated, and the score finds it."""

import re
from collections import Counter

import pytest
from task_tokenizers import NAMES, kit_named, tokenizer_named

from sparsekv.planner.tasks import TASKS, Sample, Split, TaskError, make_sample, make_samples
from sparsekv.planner.tasks.ruler_suite import RULER_SUITE, SUITES, expected_strings, recall

UUID = r"[0-9a-f]{8}-[0-9a-f]{4}-4[0-9a-f]{3}-[89ab][0-9a-f]{3}-[0-9a-f]{12}"
WORDS = r"[a-z]+-[a-z]+"
NOISE = "Rain was falling on the harbour."


def text(sample: Sample, tokenizer: str = "shipped") -> str:
    return str(tokenizer_named(tokenizer).decode(sample.prompt_ids, skip_special_tokens=True))


def sample_of(task: str, length: int = 4096, seed: int = 0, tokenizer: str = "shipped") -> Sample:
    return make_sample(RULER_SUITE[task], kit_named(tokenizer), length, seed, 0)


def context_of(task: str, **options: object) -> tuple[str, Sample]:
    sample = sample_of(task, **options)
    return text(sample).rpartition("\n")[0], sample


def needles(context: str) -> list[tuple[str, str]]:
    return re.findall(r"^The special number for (\S+) is (\S+)\.$", context, re.MULTILINE)


@pytest.mark.parametrize(
    ("task", "count", "key", "value"),
    [
        ("niah_single_1", 1, WORDS, r"\d{7}"),
        ("niah_single_2", 1, WORDS, r"\d{7}"),
        ("niah_single_3", 1, WORDS, UUID),
        ("niah_multikey_1", 4, WORDS, r"\d{7}"),
    ],
)
def test_needles_stand_in_the_text_as_often_as_in_ruler(task, count, key, value) -> None:
    context, sample = context_of(task)
    found = needles(context)
    assert len(found) == count
    assert all(re.fullmatch(key, name) and re.fullmatch(value, said) for name, said in found)
    (asked,) = re.findall(r"What is the special number for (\S+) in the text above\?", text(sample))
    assert dict(found)[asked] == sample.answer.strip()
    assert context.count(sample.answer.strip()) == 1


@pytest.mark.parametrize(
    ("task", "key", "value"), [("niah_multikey_2", WORDS, r"\d{7}"), ("niah_multikey_3", UUID, UUID)]
)
def test_a_haystack_of_needles_holds_nothing_else_and_is_asked_for_anywhere_in_it(task, key, value) -> None:
    positions = set()
    for seed in range(4):
        context, sample = context_of(task, seed=seed)
        found = needles(context)
        text_in_front, line, rest = context.partition("The special number")
        assert len(found) == len((line + rest).splitlines())
        size, most = (len(tokenizer_named("shipped")(part)["input_ids"]) for part in (text_in_front, rest))
        assert size < 1.5 * most / len(found)  # what one needle more would not fit into
        assert len(found) > 25
        assert all(re.fullmatch(key, name) and re.fullmatch(value, said) for name, said in found)
        assert len(dict(found)) == len(found)
        positions.add([said for _, said in found].index(sample.answer.strip()))
    assert len(positions) > 1


def test_four_values_of_one_key_and_four_keys_are_asked_for() -> None:
    context, sample = context_of("niah_multivalue")
    found = re.findall(r"^One special number for (\S+) is (\d{7})\.$", context, re.MULTILINE)
    assert len({key for key, _ in found}) == 1
    assert [value for _, value in found] == list(expected_strings(sample.answer))
    assert len(found) == 4
    context, sample = context_of("niah_multiquery")
    assert len(dict(needles(context))) == 4
    assert sorted(value for _, value in needles(context)) == sorted(expected_strings(sample.answer))


def test_variables_are_one_chain_of_four_hops_in_noise() -> None:
    context, sample = context_of("vt")
    found = re.findall(r"^VAR ([A-Z]{5}) = (?:VAR )?(\w+)$", context, re.MULTILINE)
    assert [name for name, _ in found] == list(expected_strings(sample.answer))
    assert [old for _, old in found[1:]] == [name for name, _ in found[:-1]]
    assert len(found) == 5
    assert re.fullmatch(r"\d{5}", found[0][1])
    assert context.count(NOISE) > 50


def test_ten_common_words_stand_30_times_and_others_3_times_from_4k_on() -> None:
    """A document of 4096 tokens with the frame of a chat counts as long."""
    context, sample = context_of("cwe", length=4096)
    counts = Counter(re.findall(rf" \d+\. ({WORDS})", context))
    assert {word for word, count in counts.items() if count == 30} == set(expected_strings(sample.answer))
    assert len(expected_strings(sample.answer)) == 10
    assert set(counts.values()) == {30, 3}


def test_the_three_most_frequent_coded_words_follow_zipfs_law_behind_the_dots() -> None:
    context, sample = context_of("fwe")
    ranked = Counter(context[context.index("Coded text:") :].split()[2:]).most_common(4)
    assert ["...", *expected_strings(sample.answer)] == [word for word, _ in ranked]
    assert [round(ranked[0][1] / count) for _, count in ranked] == [1, 4, 9, 16]


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


def test_the_suite_shares_neither_text_nor_seeds_with_calibration() -> None:
    one, other = (
        make_sample(RULER_SUITE["niah_single_1"], kit_named("shipped", split), 1024, 0, 0)
        for split in (Split.EVALUATION, Split.CALIBRATION)
    )
    assert one.answer != other.answer


def test_tasks_of_the_same_name_are_what_they_were() -> None:
    """Plans and seeds hang on them."""
    assert TASKS["vt"].chains == 4
    assert TASKS["cwe"].long == 4096


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


def test_a_table_has_a_hundred_numbers_and_room_to_write_them() -> None:
    task = SUITES["long"]["table"]
    sample = make_sample(task, kit_named("shipped"), 8192, 0, 0)
    prompt, numbers = text(sample), expected_strings(sample.answer)
    assert len(numbers) == len({*numbers}) == 100
    positions = [prompt.index(f"is {number}.") for number in numbers]
    assert positions == sorted(positions)
    assert 1024 <= task.longest_answer(kit_named("shipped").encoder, 8192) == 8192 - len(sample.prompt_ids)
