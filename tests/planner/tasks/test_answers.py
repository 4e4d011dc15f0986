"""What a prompt says: the answer is in it, once, and nothing else could be meant."""

import re

import numpy as np
import pytest
from task_oracle import NEEDLE, OWNER, PAIR, answer_of, is_statement, statements
from task_tokenizers import NAMES, kit_named, tokenizer_named

from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Sample, Split, make_sample, make_samples

PREFIXES = {
    "niah_single": r" The special number for \S+ is",
    "niah_multikey": r" The special number for \S+ is",
    "kv_retrieval": r"\? \S+-\S+:",
    "two_stage": r" The key of \S+ is",
    "variable_tracking": r" VAR \S+_\S+ =",
}


def text(sample: Sample, tokenizer: str = "shipped") -> str:
    return str(tokenizer_named(tokenizer).decode(sample.prompt_ids, skip_special_tokens=True))


def samples(
    task: str, length: int = 1000, count: int = 20, tokenizer: str = "shipped", split: Split = Split.CALIBRATION
) -> list[Sample]:
    drawn = list(make_samples(TASKS[task], kit_named(tokenizer, split), length, seed=1, count=count))
    assert len(drawn) == count  # tests that assert sample by sample have seen that many
    return drawn


@pytest.mark.parametrize("split", [Split.CALIBRATION, Split.VERIFICATION, Split.EVALUATION])
@pytest.mark.parametrize("tokenizer", NAMES)
@pytest.mark.parametrize("task", RETRIEVAL_TASKS)
def test_the_answer_follows_from_the_context_and_is_what_its_tokens_say(
    task: str, tokenizer: str, split: Split
) -> None:
    for sample in samples(task, count=8, tokenizer=tokenizer, split=split):
        assert answer_of(text(sample, tokenizer), split) == sample.answer.strip()
        whole = np.concatenate([sample.prompt_ids, sample.answer_ids])
        decoded = tokenizer_named(tokenizer).decode(whole, skip_special_tokens=True)
        assert decoded == text(sample, tokenizer) + sample.answer
        assert sample.answer.startswith(" ")


@pytest.mark.parametrize("task", RETRIEVAL_TASKS)
def test_a_prompt_ends_with_the_beginning_of_its_answer(task: str) -> None:
    for sample in samples(task):
        assert re.search(PREFIXES[task] + r"\Z", text(sample))


@pytest.mark.parametrize("tokenizer", NAMES)
def test_a_prompt_begins_as_the_tokenizer_lets_every_text_begin(tokenizer: str) -> None:
    begins = list(tokenizer_named(tokenizer)("x")["input_ids"])[:-1]
    assert len(TASKS) > len(RETRIEVAL_TASKS) > 0
    for task in TASKS:
        prompt = make_sample(TASKS[task], kit_named(tokenizer), 640, 0, 0).prompt_ids.tolist()
        special = tokenizer_named(tokenizer).all_special_ids
        assert [token for token in prompt if token in special] == begins * ("metaspace_no" not in tokenizer)


def test_needles_pairs_and_chains_come_in_the_documented_numbers() -> None:
    def lines(task: str, length: int) -> list[str]:
        return text(samples(task, length, 1)[0]).split("\n")

    assert len(statements(lines("niah_single", 4096), NEEDLE)) == 1
    assert len(statements(lines("niah_multikey", 4097), NEEDLE)) == 8 + 2
    assert len(statements(lines("two_stage", 4097), OWNER)) == 2 + 4
    assert len(statements(lines("two_stage", 4097), PAIR)) == 8 * (2 + 4)
    assert sum(line.startswith("VAR ") for line in lines("variable_tracking", 4097)) == 3 * (4 + 1)


@pytest.mark.parametrize("length", [700, 1024, 3001])
def test_pairs_fill_the_context_but_for_less_than_a_line_of_text_in_front(length: int) -> None:
    for sample in samples("kv_retrieval", length):
        *lines, _ = text(sample).split("\n")
        pairs = [PAIR.fullmatch(line) is not None for line in lines]
        assert all(pairs[pairs.index(True) :])
        in_front = "".join(line + "\n" for line in lines[: pairs.index(True)])
        assert len(tokenizer_named("shipped")(in_front, add_special_tokens=False)["input_ids"]) < 20


def test_statements_stand_on_lines_of_their_own_in_text_that_is_otherwise_untouched() -> None:
    filler = tokenizer_named("shipped").decode(kit_named("shipped").filler.ids)
    for task in ("niah_multikey", "two_stage", "variable_tracking"):
        *lines, _ = text(samples(task, 1500, 1)[0]).split("\n")
        rest = "\n".join(line for line in lines if not is_statement(line))
        assert rest in filler + filler


def test_two_stage_pairs_stand_before_and_behind_the_statement_that_names_them() -> None:
    orders = {_pair_comes_first(text(sample)) for sample in samples("two_stage", 1500)}
    assert orders == {True, False}


def _pair_comes_first(prompt: str) -> bool:
    key = answer_of(prompt).split(":")[0]
    return prompt.index(f"- {key}: ") < prompt.index(f" is {key}.\n")
