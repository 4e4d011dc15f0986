"""Training rows: documents packed into a fixed number of tokens, with what each token counts for."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from sparsekv.planner.tasks.documents import Document, Kit
from sparsekv.planner.tasks.text import Ids

NO_LOSS = 0
TEXT = 1
FIRST_ANSWER = 2  # answers of task number t have kind FIRST_ANSWER + t

Kinds = npt.NDArray[np.uint8]


@dataclass(frozen=True, slots=True, eq=False)
class Row:
    """Tokens, and for each the kind of loss for predicting it: none, text, or the answer of a task."""

    ids: Ids
    kinds: Kinds


def answer_overhead(queries: int, kit: Kit) -> int:
    """Tokens a row adds to a document of so many queries: BOS, and a newline behind every answer."""
    return len(kit.encoder.bos_ids) + queries * len(kit.encoder.newline_ids)


def document_row(document: Document, task_number: int, kit: Kit) -> Row:
    """BOS, the context, then every question and answer; an answer ends in a newline, which is learned with it.

    Statements and questions hold random keys that nobody could predict: there is no loss on them.
    """
    newline = np.asarray(kit.encoder.newline_ids, np.int32)
    bos = np.asarray(kit.encoder.bos_ids, np.int32)
    ids: list[Ids] = [bos, document.context_ids]
    kinds = [np.zeros(len(bos), np.uint8), document.context_is_text.astype(np.uint8) * np.uint8(TEXT)]
    for query in document.queries:
        ids += [query.question_ids, query.answer_ids, newline]
        answer_size = len(query.answer_ids) + len(newline)
        kinds += [
            np.full(len(query.question_ids), NO_LOSS, np.uint8),
            np.full(answer_size, FIRST_ANSWER + task_number, np.uint8),
        ]
    return Row(np.concatenate(ids), np.concatenate(kinds))


def join(rows: list[Row], length: int, pad_id: int) -> Row:
    """Rows one behind the other, padded to `length` without loss."""
    missing = length - sum(len(row.ids) for row in rows)
    padding = Row(np.full(missing, pad_id, np.int32), np.zeros(missing, np.uint8))
    parts = [*rows, padding]
    return Row(np.concatenate([row.ids for row in parts]), np.concatenate([row.kinds for row in parts]))
