"""What a prompt says: the answer is in it, once, and nothing else could be meant."""

import numpy as np
import pytest
from task_oracle import answer_of
from task_tokenizers import NAMES, kit_named, tokenizer_named

from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Sample, Split, make_sample, make_samples


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


@pytest.mark.parametrize("tokenizer", NAMES)
def test_a_prompt_begins_as_the_tokenizer_lets_every_text_begin(tokenizer: str) -> None:
    begins = list(tokenizer_named(tokenizer)("x")["input_ids"])[:-1]
    assert len(TASKS) > len(RETRIEVAL_TASKS) > 0
    for task in TASKS:
        prompt = make_sample(TASKS[task], kit_named(tokenizer), 640, 0, 0).prompt_ids.tolist()
        special = tokenizer_named(tokenizer).all_special_ids
        assert [token for token in prompt if token in special] == begins * ("metaspace_no" not in tokenizer)
