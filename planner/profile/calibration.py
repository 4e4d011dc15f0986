"""Calibration prompts: task samples with their answers, or the caller's own texts, of which copies count once."""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, cycle, islice
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsekv.planner.tasks import HARD_TASKS, QUOTE_TASKS, TASKS, Kit, Sample, Split, TaskError, make_sample, prepare
from sparsekv.planner.tasks.text import Ids
from sparsekv.plans.errors import PlanWarning, PromptError, UsageError
from sparsekv.plans.types import format_length

# Rows before the answer that count as the question.
QUESTION_ROWS = 64
# Rows from which decode statistics are taken: the last of the prompt and the first of the answer.
DECODE_ROWS = 16
# An own prompt has no answer; its last rows stand in for it.
OWN_ANSWER = 32
SHORTEST = 256


@dataclass(frozen=True, slots=True, eq=False)
class CalibrationPrompt:
    """Tokens fed at once, teacher forced.

    Attributes:
        answer_start: the first token of the answer; the row before it is the first that decodes.
        task: empty for the caller's own.
    """

    ids: Ids
    answer_start: int
    task: str = ""

    @property
    def tail_start(self) -> int:
        """The first row of the question: from here on retrieval happens."""
        return max(0, self.answer_start - QUESTION_ROWS)

    @property
    def answer_rows(self) -> range:
        """Rows that predict the tokens of the answer: what sparse prefill must not change."""
        return range(self.answer_start - 1, len(self.ids) - 1)

    @property
    def decode_rows(self) -> tuple[int, ...]:
        """Rows that stand for decode steps: the one that predicts the first token of the answer, and those after."""
        return tuple(range(self.answer_start - 1, len(self.ids)))[:DECODE_ROWS]


@dataclass(frozen=True, eq=False)
class Calibration:
    """The prompts of a job: of tasks, or the caller's own texts in their place. Each is made once.

    Own texts are cut at the length; those of less than half of it, and copies of others (see `Seen`), are left out
    with a `PlanWarning`. `task_of_each` tells whose turn it is.
    """

    tokenizer: Any
    texts: tuple[str, ...]
    tasks: tuple[str, ...]
    seed: int

    def prompts(self, length: int, samples: int) -> tuple[CalibrationPrompt, ...]:
        """So many of a length, or as many as there are; a smaller number are the first ones."""
        made = self._made.get(length, ())
        if self.texts:
            made = made or _own(self.tokenizer, self.texts, length)
        elif len(made) < samples:
            made += self._drawn(length, samples, len(made))
        self._made[length] = made
        return made[:samples]

    def _drawn(self, length: int, samples: int, first: int) -> tuple[CalibrationPrompt, ...]:
        tasks = task_of_each(self.tasks, samples)
        turns = [(task, tasks[:index].count(task)) for index, task in enumerate(tasks)]
        kit = self._kit.shared_by(self.tasks, (length,))
        drawn = (_sample(task, kit, length, self.seed, turn) for task, turn in turns[first:])
        return tuple(map(whole_prompt, drawn))

    @cached_property
    def _kit(self) -> Kit:
        return prepare(self.tokenizer, Split.CALIBRATION)

    @cached_property
    def _made(self) -> dict[int, tuple[CalibrationPrompt, ...]]:
        return {}


def task_of_each(tasks: Sequence[str], samples: int) -> tuple[str, ...]:
    """The task of every calibration sample of a length.

    Quotations come first, once: they say something about any model. The other tasks then take turns, hard retrieval
    first and plain text behind the first of it, so that a few samples see as many kinds of question as possible. More
    quotations instead made plans worse on every model and format that was measured (docs/lab/decisions.md).
    """
    quotes, others = _split(tasks, QUOTE_TASKS)
    if not quotes or not others:
        return tuple(islice(cycle(tasks), samples))
    text, retrieval = _split(others, ("perplexity",))
    retrieval = tuple(chain.from_iterable(_split(retrieval, HARD_TASKS)))
    turn = (*retrieval[:1], *text, *retrieval[1:])
    return tuple(islice(chain(quotes, cycle(turn)), samples))


def over_prompts(values_P: npt.NDArray[np.float64], tasks: Sequence[str]) -> npt.NDArray[np.float64]:
    """The mean over all prompts, or over those of the hard task with the largest: other tasks do not show its loss.

    Args:
        values_P: [P, ...], a number or a table of them a prompt.
        tasks: of each prompt.
    """
    hard = [[task == name for task in tasks] for name in HARD_TASKS if name in tasks]
    return np.asarray(np.max([values_P.mean(0), *(values_P[own].mean(0) for own in hard)], 0))


def _split(names: Sequence[str], first: Sequence[str]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    return tuple(name for name in names if name in first), tuple(name for name in names if name not in first)


def mix_of(tasks: Sequence[str], samples: int) -> dict[str, int]:
    """Returns how many calibration samples each task has at a length of so many; own prompts, without a task, are
    "prompts"."""
    each = task_of_each(tasks, samples) if tasks else ("prompts",) * samples
    return {name: each.count(name) for name in dict.fromkeys(each)}


def digest_of_calibration(prompts: Mapping[int, Sequence[CalibrationPrompt]]) -> str:
    """`sha256:...` over the tokens of all prompts, length by length."""
    digest = hashlib.sha256()
    for prompt in chain.from_iterable(prompts.values()):
        digest.update(len(prompt.ids).to_bytes(8, "little") + prompt.answer_start.to_bytes(8, "little"))
        digest.update(prompt.ids.astype("<i4").tobytes())
    return f"sha256:{digest.hexdigest()}"


def held_out(kit: Kit, task: str, length: int, samples: int, seed: int, first: int = 0) -> Iterator[Sample]:
    """Samples of one task from number `first` on; `kit` is of the evaluation split, which neither training nor
    calibration used.
    """
    return (_sample(task, kit, length, seed, index) for index in range(first, first + samples))


def whole_prompt(sample: Sample) -> CalibrationPrompt:
    """A sample's prompts and answers, fed at once."""
    past_ids = sample.past_ids
    return CalibrationPrompt(np.concatenate([past_ids, sample.answer_ids]), len(past_ids), sample.task)


def _sample(name: str, kit: Kit, length: int, seed: int, index: int) -> Sample:
    if name not in TASKS:
        raise UsageError(f"expected a task of {', '.join(sorted(TASKS))}, found {name!r}")
    try:
        return make_sample(TASKS[name], kit, length, seed, index)
    except TaskError as error:
        raise PromptError(
            f"task {name} at {length} tokens: {error}; leave the task out, or change the length"
        ) from error


def _own(tokenizer: Any, texts: Sequence[str], length: int) -> tuple[CalibrationPrompt, ...]:
    encoded = [np.asarray(tokenizer(text)["input_ids"][:length], np.int32) for text in texts]
    least = max(SHORTEST, length // 2)
    long_enough = [ids for ids in encoded if len(ids) >= least]
    if not long_enough:
        longest = max((len(ids) for ids in encoded), default=0)
        raise PromptError(
            f"expected a calibration prompt of at least {least} tokens to plan for {length}, "
            f"found {longest} in the longest of {len(encoded)}; give longer prompts, or shorter lengths"
        )
    if len(long_enough) < len(encoded):
        warnings.warn(
            f"{len(encoded) - len(long_enough)} of {len(encoded)} calibration prompts are shorter than {least} tokens "
            f"and are not used to plan for {format_length(length)}",
            PlanWarning,
            stacklevel=3,
        )
    seen = Seen(length)
    different = [ids for ids in long_enough if seen.is_new(ids)]
    others = "the others are copies of those, and are not used"
    tell_copies(different, long_enough, length, others, "calibration prompts")
    return tuple(CalibrationPrompt(ids, len(ids) - OWN_ANSWER) for ids in different)


def tell_copies(
    different: Sequence[object], texts: Sequence[object], length: int, others: str, what: str = "prompts"
) -> None:
    if len(different) < len(texts):
        counts = f"{len(different)} of {len(texts)} {what} are different texts at {format_length(length)}: {others}"
        warnings.warn(counts, PlanWarning, stacklevel=4)


# --- copies -----------------------------------------------------------------------------------------------------------

# A second copy of a text shows nothing that the first did not, so that both count as one sample. Texts are compared as
# the tokens that a model is given, after they were cut. Common text may stand anywhere, at their beginning (a system
# prompt, examples) or behind headers of different lengths (a document), so windows of 16 tokens are compared. Long
# texts are thinned to about a thousand each, by the least hash of every stretch, which picks the same ones wherever a
# stretch stands (winnowing: Schleimer, Wilkerson and Aiken, SIGMOD 2003). Samples of a task need no such look: each is
# drawn by itself, and none is another one but for its end.
END = 64  # tokens that a copy may differ in at any length: a question, an answer
_SHARE = 0.1  # of a text, that a copy may differ in
_WINDOW = 16
_WINDOWS = 1024  # of a text, about
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=_WINDOW + 1, dtype=np.uint64) * 2 + 1

Hashes = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Seen:
    """Texts of one length.

    A text is a copy where all of its windows but 64, or but a tenth if that is more, stand in one earlier text: where
    it equals that one but for the last 64 tokens, for instance. Of a text of less than 128 windows it is all but half.

    Attributes:
        length: of the longest text, about; those that are compared have it in common.
    """

    length: int
    _windows: list[Hashes] = field(default_factory=list)

    def add(self, ids: Ids) -> None:
        self._windows.append(_windows(ids, self.length)[0])

    def is_new(self, ids: Ids) -> bool:
        """Adds a text, unless it is a copy; whether it was added."""
        windows, counts = _windows(ids, self.length)
        apart = max(_SHARE * counts.sum(), min(END, counts.sum() // 2))
        if any(counts[~_stand_in(windows, one)].sum() <= apart for one in self._windows):
            return False
        self._windows.append(windows)
        return True


def _stand_in(windows: Hashes, others: Hashes) -> npt.NDArray[np.bool_]:
    """True of the windows that are among the others, which ascend."""
    found: npt.NDArray[np.bool_] = others[np.searchsorted(others, windows).clip(max=len(others) - 1)] == windows
    return found


def _windows(ids: Ids, length: int) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Hashes of different windows of a text, ascending, and how many windows each stands for."""
    width = min(_WINDOW, len(ids))
    rows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), width)
    hashes = (rows @ _FACTORS[:width]) * _FACTORS[-1]
    hashes ^= hashes >> np.uint64(32)  # the least of them are to be any
    span = 1
    while 2 * span * _WINDOWS <= length and span < len(hashes):
        hashes = np.minimum(hashes[:-span], hashes[span:])
        span *= 2
    return np.unique(hashes, return_counts=True)
