"""Training rows: what is learned is text and answers, never what nobody could predict."""

import numpy as np
import pytest
from reference_model.batches import FIRST_ANSWER, NO_LOSS, TEXT, document_row, join
from task_oracle import is_statement
from task_tokenizers import kit_named, tokenizer_named

from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Document, DocumentRequest, Kit, Split
from sparsekv.planner.tasks.documents import Draws
from sparsekv.planner.tasks.samples import generator

TOKENIZERS = ("shipped", "metaspace", "byte_level")
NUMBER = 3


def document(kit: Kit, task: str, length: int = 1500, queries: int = 6) -> Document:
    return TASKS[task].document(
        kit, DocumentRequest(length, queries), Draws(generator(Split.TRAINING, task, length, 0, 0))
    )


def decode(tokenizer: str, ids: np.ndarray) -> str:
    return str(tokenizer_named(tokenizer).decode(ids, skip_special_tokens=True))


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("task", RETRIEVAL_TASKS)
def test_there_is_loss_on_filler_text_and_answers_only(task: str, tokenizer: str) -> None:
    kit = kit_named(tokenizer)
    made = document(kit, task)
    row = document_row(made, NUMBER, kit)
    spans = [decode(tokenizer, row.ids[span]) for span in _spans(row.kinds == FIRST_ANSWER + NUMBER)]
    assert [span.strip() for span in spans] == [query.answer.strip() for query in made.queries]
    assert all(span.endswith("\n") for span in spans)
    assert (row.ids[row.kinds == TEXT] == made.context_ids[made.context_is_text]).all()
    assert set(np.unique(row.kinds).tolist()) <= {NO_LOSS, TEXT, FIRST_ANSWER + NUMBER}


@pytest.mark.parametrize("tokenizer", TOKENIZERS)
@pytest.mark.parametrize("task", RETRIEVAL_TASKS)
def test_a_context_is_text_but_for_its_statements(task: str, tokenizer: str) -> None:
    kit = kit_named(tokenizer)
    made = document(kit, task)
    planted = decode(tokenizer, made.context_ids[~made.context_is_text])
    assert planted.endswith("\n")
    assert all(is_statement(line) for line in planted.splitlines())
    text = decode(tokenizer, made.context_ids[made.context_is_text])
    assert text in decode(tokenizer, np.tile(kit.filler.ids, 2))


def test_documents_of_one_row_share_no_key() -> None:
    kit, draws = kit_named("shipped"), Draws(generator(Split.TRAINING, "row", 0, 0, 0))
    made = [TASKS["kv_retrieval"].document(kit, DocumentRequest(600), draws) for _ in range(4)]
    keys = [line.split(":")[0] for each in made for line in decode("shipped", each.context_ids).splitlines()]
    assert len(set(keys)) == len(keys) > 100


def test_joined_rows_are_padded_without_loss() -> None:
    kit = kit_named("shipped")
    rows = [document_row(document(kit, task, 400, 2), 0, kit) for task in ("niah_single", "two_stage")]
    joined = join(rows, 1000, pad_id=7)
    used = sum(len(row.ids) for row in rows)
    assert len(joined.ids) == len(joined.kinds) == 1000
    assert (joined.ids[:used] == np.concatenate([row.ids for row in rows])).all()
    assert (joined.ids[used:] == 7).all()
    assert (joined.kinds[used:] == NO_LOSS).all()


def _spans(mask: np.ndarray) -> list[slice]:
    edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(np.int8), [0]])))
    return [slice(int(start), int(stop)) for start, stop in edges.reshape(-1, 2)]
