"""What cannot be built says why and what to do."""

import pytest
from task_tokenizers import NAMES, kit_named

from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, DocumentRequest, Split, TaskError, generator
from sparsekv.planner.tasks.documents import Draws
from sparsekv.planner.tasks.wording import FIRST_WORDS, SECOND_WORDS

KEYS = len(FIRST_WORDS) * len(SECOND_WORDS)


def draws() -> Draws:
    return Draws(generator(Split.EVALUATION, "test", 0, 0, 0))


@pytest.mark.parametrize("tokenizer", NAMES)
@pytest.mark.parametrize("task", RETRIEVAL_TASKS)
def test_a_length_that_holds_no_question_is_refused_with_one_that_would(task: str, tokenizer: str) -> None:
    kit = kit_named(tokenizer)
    with pytest.raises(TaskError, match="found 20") as error:
        TASKS[task].document(kit, DocumentRequest(20), draws())
    enough = int(str(error.value).split()[3])
    document = TASKS[task].document(kit, DocumentRequest(enough), draws())
    assert len(document.queries) == 1
    assert len(document) == enough


def test_more_keys_than_there_are_words_are_refused() -> None:
    with pytest.raises(TaskError, match=rf"at most {KEYS * 3 // 4} keys .* found {KEYS}"):
        draws().keys(KEYS)


def test_keys_stay_distinct_until_they_run_out() -> None:
    source = draws()
    parts = [source.keys(KEYS // 4) for _ in range(3)]
    assert len({key for part in parts for key in part}) == 3 * (KEYS // 4)
    with pytest.raises(TaskError, match="shorter"):
        source.keys(KEYS // 4)
