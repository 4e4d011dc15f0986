"""Prompts for calibration and evaluation."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from sparsekv.planner.tasks.draws import Draws
from sparsekv.planner.tasks.encoding import PieceEncoder
from sparsekv.planner.tasks.filler import Filler, load_filler_text
from sparsekv.planner.tasks.seeding import generator
from sparsekv.planner.tasks.types import Kit, Request, Sample, Split, Task


def prepare(tokenizer: Any, split: Split) -> Kit:
    """Everything that samples of a split are built from, for any Hugging Face tokenizer.

    Encodes the split's text once, about a second; keep the kit.

    Raises:
        TaskError: for training, whose text is not shipped.
    """
    encoder = PieceEncoder.of(tokenizer)
    return Kit(split, encoder, Filler.from_text(load_filler_text(split), encoder))


def make_sample(task: Task, kit: Kit, length: int, seed: int, index: int) -> Sample:
    """One prompt with its answer.

    Args:
        task: what to ask.
        kit: made by `prepare`.
        length: most tokens of the prompt and the answer together; filler makes it exact, pairs come close.
        seed: of the whole set.
        index: which sample of the set; samples do not depend on each other.

    Raises:
        TaskError: the length does not hold one statement and its question.
    """
    draws = Draws(generator(kit.split, task.name, length, seed, index))
    document = task.document(kit, Request(length - len(kit.encoder.bos_ids)), draws)
    query = document.queries[0]
    bos_ids = np.asarray(kit.encoder.bos_ids, np.int32)
    prompt_ids = np.concatenate([bos_ids, document.context_ids, query.question_ids])
    return Sample(prompt_ids, query.answer_ids, query.answer, task.name, length)


def make_samples(task: Task, kit: Kit, length: int, seed: int, count: int) -> Iterator[Sample]:
    """The first `count` samples of a set; see `make_sample`."""
    return (make_sample(task, kit, length, seed, index) for index in range(count))
