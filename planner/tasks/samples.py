"""Prompts for calibration and evaluation, each from a random generator of its own, and how answers are matched."""

import hashlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from sparsekv.planner.tasks.documents import ChatFrame, Draws, Kit, Request, Sample, Task
from sparsekv.planner.tasks.quotes import Perplexity
from sparsekv.planner.tasks.text import Filler, PieceEncoder, Split, TaskError, load_filler_text


def generator(split: Split, task: str, length: int, seed: int, index: int) -> np.random.Generator:
    """A generator of its own for every (split, task, length, seed, index), the same on every machine."""
    name = f"{split.value}/{task}/{length}/{seed}/{index}".encode()
    return np.random.Generator(np.random.PCG64(int.from_bytes(hashlib.sha256(name).digest()[:16], "little")))


def prepare(tokenizer: Any, split: Split, characters: int | None = None) -> Kit:
    """Everything that samples of a split are built from, for any Hugging Face tokenizer.

    Encodes the split's text once, about a second; keep the kit.

    Args:
        characters: of the text, its beginning; None for all of it.

    Raises:
        TaskError: for training, whose text is not shipped.
    """
    encoder = PieceEncoder.of(tokenizer)
    filler = Filler.from_text(load_filler_text(split)[:characters], encoder)
    return Kit(split, encoder, filler, ChatFrame.of(tokenizer, encoder))


def make_sample(task: Task, kit: Kit, length: int, seed: int, index: int) -> Sample:
    """One prompt with its answer.

    Where the kit has the frame of a chat, the prompt is a user's message and the beginning of the reply; text that is
    to be continued has no frame.

    Args:
        length: tokens of the prompt, its frame included, and of the longest answer that the task can have with this
            tokenizer: all prompts of a task, length and tokenizer are equally long.
        index: which sample of the set; samples do not depend on each other.

    Raises:
        TaskError: the length does not hold one statement and its question, or needs more keys than there are.
    """
    plain = ChatFrame(kit.encoder.bos_ids, ())
    frame = plain if kit.chat is None or isinstance(task, Perplexity) else kit.chat
    around = len(frame.before_ids) + len(frame.after_ids)
    if length <= around:
        raise TaskError(f"expected a length of more than {around} tokens, found {length}")
    room = length - around
    draws = Draws(generator(kit.split, task.name, length, seed, index))
    document = task.document(kit, Request(room, answer_room=task.longest_answer(kit.encoder, room)), draws)
    query = document.queries[0]
    before, after = (np.asarray(ids, np.int32) for ids in (frame.before_ids, frame.after_ids))
    asked = len(query.question_ids) - query.cue
    message = np.concatenate([document.context_ids, query.question_ids[:asked]])
    prompt_ids = np.concatenate([before, message, after, query.question_ids[asked:]])
    return Sample(prompt_ids, query.answer_ids, query.answer, task.name, length)


def make_samples(task: Task, kit: Kit, length: int, seed: int, count: int) -> Iterator[Sample]:
    """The first `count` samples of a set; see `make_sample`."""
    return (make_sample(task, kit, length, seed, index) for index in range(count))


def matches(generated: str, answer: str) -> bool:
    """Whether the generated text begins with the answer and does not go on with more digits of its number."""
    text, expected = generated.strip(), answer.strip()
    rest = text[len(expected) :]
    return text.startswith(expected) and not (expected[-1:].isdigit() and rest[:1].isdigit())
