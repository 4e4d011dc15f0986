"""Task generators that serve training, calibration, verification and evaluation, each with its own seeds and text.

A new task is a class that follows `Task`, in a file of its own or that of its kind, and a line in its kind's tuple.
Prompts of each split come from a random generator of their own.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from functools import cache, partial
from itertools import pairwise
from typing import Any

import numpy as np

from sparsekv.planner.tasks.documents import ChatFrame, DocumentRequest, Draws, Kit, Query, Sample, Task, Turn
from sparsekv.planner.tasks.quotes import Perplexity, Quote
from sparsekv.planner.tasks.retrieval import (
    KvRetrieval,
    Niah,
    NiahMultiquery,
    NiahMultivalue,
    SecondQuestion,
    Turns,
    TwoStage,
    VariableTracking,
)
from sparsekv.planner.tasks.text import Corpus, Filler, Ids, PieceEncoder, Split, TaskError, load_filler_text

__all__ = ["Kit", "PieceEncoder", "Sample", "Split", "TaskError"]  # beside the names below

# Any language model can answer these: it copies what stood before.
_QUOTES: tuple[Task, ...] = (Quote("quote_text", prose=True), Quote("quote_code", prose=False))
_RETRIEVAL: tuple[Task, ...] = (
    Niah("niah_single", needles=1, tokens_per_needle=0),
    Niah("niah_multikey", needles=8, tokens_per_needle=2048),
    KvRetrieval(),
    TwoStage(),
    VariableTracking(),
)
_OTHERS: tuple[Task, ...] = (Perplexity(), NiahMultivalue(), NiahMultiquery(), SecondQuestion(), Turns())
_Conversation = SecondQuestion | Turns

TASKS: dict[str, Task] = {task.name: task for task in (*_QUOTES, *_RETRIEVAL, *_OTHERS)}
QUOTE_TASKS = tuple(task.name for task in _QUOTES)
RETRIEVAL_TASKS = tuple(task.name for task in _RETRIEVAL)
# One key among many like it, several keys, several values: few heads answer these, and other tasks do not show them.
HARD_TASKS = ("niah_multikey", "kv_retrieval", "niah_multivalue", "niah_multiquery")


def generator(split: Split, task: str, length: int, seed: int, index: int) -> np.random.Generator:
    """A generator of its own for every (split, task, length, seed, index), the same on every machine."""
    name = f"{split.value}/{task}/{length}/{seed}/{index}".encode()
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name).digest()[:16], "little")))


def prepare(tokenizer: Any, split: Split, characters: int | None = None) -> Kit:
    """Everything that samples of a split are built from, for any Hugging Face tokenizer.

    Encodes the split's shipped text once, about a second; keep the kit.

    Args:
        characters: of this text, its beginning, and no other; None for all of it, and that of installed packages.
    """
    encoder = PieceEncoder.of(tokenizer)
    filler = Filler.from_text(load_filler_text(split)[:characters], encoder)
    corpus = cache(partial(Corpus, split, encoder)) if characters is None else None
    return Kit(split, encoder, filler, ChatFrame.of(tokenizer, encoder), corpus)


def make_sample(task: Task, kit: Kit, length: int, seed: int, index: int) -> Sample:
    """One prompt with its answer.

    Where the kit has the frame of a chat, the prompt is a user's message and the beginning of the reply; text that is
    to be continued has no frame, nor have two questions where the template is one of single messages. Of several
    questions the last is to be answered, behind the others and their answers.

    Args:
        length: tokens before the answer, frame included, and of the longest answer that the task can have with this
            tokenizer: all samples of a task, length and tokenizer are equally long.
        index: which sample of the set, each of which has text of its own where it is long; none but the text of
            `perplexity` depends on earlier ones, to be another one.
    """
    kit = kit.of_sample(task.name, length, seed, index)
    frame = _frame(kit, task)
    parts = (frame.before_ids, frame.after_ids, frame.between_ids or ())
    before, after, between = (np.asarray(ids, np.int32) for ids in parts)
    questions = task.questions(length) if isinstance(task, _Conversation) else 1
    around = len(before) + len(after) + (questions - 1) * (len(between) + len(after))
    if length <= around:
        raise TaskError(f"expected a length of more than {around} tokens, found {length}")
    room = length - around
    earlier = (generator(kit.split, task.name, length, seed, before) for before in range(index))
    draws = Draws(generator(kit.split, task.name, length, seed, index), earlier, kit.wording.second_words)
    request = DocumentRequest(room, questions, answer_room=task.longest_answer(kit.encoder, room))
    document = task.document(kit, request, draws)

    def asked(query: Query) -> list[Ids]:
        cut = len(query.question_ids) - query.cue
        return [query.question_ids[:cut], after, query.question_ids[cut:]]

    first_ids, *later_ids = np.split(document.context_ids, document.cuts)
    prompt_ids = np.concatenate([before, first_ids, *asked(document.queries[0])])
    later = tuple(
        Turn(first.answer_ids, np.concatenate([between, ids, *asked(second)]))
        for (first, second), ids in zip(pairwise(document.queries), later_ids, strict=True)
    )
    last = document.queries[-1]
    return Sample(prompt_ids, last.answer_ids, last.answer, task.name, length, later)


def _frame(kit: Kit, task: Task) -> ChatFrame:
    chat = kit.chat
    lacks_turns = chat is not None and chat.between_ids is None
    if chat is None or isinstance(task, Perplexity) or (lacks_turns and isinstance(task, _Conversation)):
        return ChatFrame(kit.encoder.bos_ids, (), kit.encoder.newline_ids)
    return chat


def make_samples(task: Task, kit: Kit, length: int, seed: int, count: int) -> Iterator[Sample]:
    """The first `count` samples of a set; see `make_sample`."""
    return (make_sample(task, kit, length, seed, index) for index in range(count))


def matches(generated: str, answer: str) -> bool:
    """True of text that begins with the answer and does not go on with more digits of its number."""
    text, expected = generated.strip(), answer.strip()
    rest = text[len(expected) :]
    return text.startswith(expected) and not (expected[-1:].isdigit() and rest[:1].isdigit())
