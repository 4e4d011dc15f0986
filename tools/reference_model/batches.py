"""Training rows and batches: every row depends on its place in the run and on nothing else, so that resuming is exact.

Shapes: R rows of a micro-batch, T tokens a row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, Dataset

from reference_model.formats import TRAINED
from reference_model.prepare import training_kit
from reference_model.recipe import Recipe, Stage
from sparsekv.planner.tasks import TASKS, generator
from sparsekv.planner.tasks.documents import Document, DocumentRequest, Draws, Kit
from sparsekv.planner.tasks.text import Ids, Split

NO_LOSS = 0
TEXT = 1
FIRST_ANSWER = 2  # answers of task number t of the recipe have kind FIRST_ANSWER + t

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


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """A micro-batch."""

    ids_RT: torch.Tensor  # int32
    kinds_RT: torch.Tensor  # uint8: what predicting each token counts for, as in `Row`

    def to(self, device: torch.device) -> Batch:
        """Copies to a device without waiting."""
        return Batch(self.ids_RT.to(device, non_blocking=True), self.kinds_RT.to(device, non_blocking=True))

    def pin_memory(self) -> Batch:
        """Called by the loader."""
        return Batch(self.ids_RT.pin_memory(), self.kinds_RT.pin_memory())


def make_row(kit: Kit, recipe: Recipe, length: int, index: int) -> Row:
    """Row number `index` of the run at a length."""
    rng = generator(Split.TRAINING, "row", length, recipe.seed, index)
    if rng.random() < recipe.text_share:
        return _text_row(kit, length, rng)
    draws = Draws(rng)
    rows = [_retrieval_row(kit, recipe, span, draws) for span in _spans(recipe, length, rng)]
    return join(rows, length, kit.encoder.bos_ids[0])


def _text_row(kit: Kit, length: int, rng: np.random.Generator) -> Row:
    document = TASKS["perplexity"].document(
        kit, DocumentRequest(length - len(kit.encoder.bos_ids), queries=0), Draws(rng)
    )
    return document_row(document, 0, kit)


def _spans(recipe: Recipe, length: int, rng: np.random.Generator) -> Iterator[int]:
    """Divides a row into documents of varied lengths."""
    if length < 2 * recipe.shortest_document or rng.random() >= recipe.split_chance:
        yield length
        return
    first = int(rng.integers(recipe.shortest_document, length - recipe.shortest_document + 1))
    yield from _spans(recipe, first, rng)
    yield from _spans(recipe, length - first, rng)


def _retrieval_row(kit: Kit, recipe: Recipe, length: int, draws: Draws) -> Row:
    weights = np.array([share.weight for share in recipe.shares.values()])
    number = int(draws.rng.choice(len(weights), p=weights / weights.sum()))
    task, share = list(recipe.shares.items())[number]
    queries = min(recipe.most_queries, max(1, length // recipe.tokens_per_query))
    statements = _statements(share.tokens_per_statement, length, draws.rng)
    if statements:
        queries = min(queries, statements)
    room = length - answer_overhead(queries, kit)
    document = TRAINED[task].document(kit, DocumentRequest(room, queries, statements), draws)
    return document_row(document, number, kit)


def _statements(spacing: int, length: int, rng: np.random.Generator) -> int | None:
    if not spacing:
        return None
    return max(1, round(float(np.exp(rng.uniform(0, np.log(max(2.0, length / spacing)))))))


class MicroBatches(Dataset[Batch]):
    """The micro-batches of a stage by their number."""

    def __init__(self, recipe: Recipe, stage: Stage, work: Path) -> None:
        self._recipe, self._length, self._work = recipe, stage.length, work
        self._kit: Kit | None = None

    def __getitem__(self, number: int) -> Batch:
        kit = self._kit = self._kit or training_kit(self._work)
        rows = rows_per_micro_batch(self._recipe, self._length)
        made = [make_row(kit, self._recipe, self._length, number * rows + i) for i in range(rows)]
        return Batch(
            torch.from_numpy(np.stack([row.ids for row in made])),
            torch.from_numpy(np.stack([row.kinds for row in made])),
        )


def rows_per_micro_batch(recipe: Recipe, length: int) -> int:
    """At least one."""
    return max(1, recipe.micro_tokens // length)


def micro_batches_per_step(recipe: Recipe, length: int) -> int:
    """At least one."""
    return max(1, recipe.tokens_per_step // (rows_per_micro_batch(recipe, length) * length))


def batches(
    recipe: Recipe, stage: Stage, work: Path, first_step: int, last_step: int, workers: int
) -> DataLoader[Batch]:
    """The micro-batches of steps `first_step` to `last_step` (exclusive), made by background processes, in order."""
    per_step = micro_batches_per_step(recipe, stage.length)
    return DataLoader(
        MicroBatches(recipe, stage, work),
        batch_size=None,
        sampler=range(first_step * per_step, last_step * per_step),
        num_workers=workers,
        prefetch_factor=6 if workers else None,
        pin_memory=torch.cuda.is_available(),
        worker_init_fn=_one_thread,
    )


def _one_thread(_: int) -> None:
    """Keeps every worker to one core: the tokenizer would start as many threads as there are."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
