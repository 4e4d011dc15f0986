"""The types that flow through the task generators. Token ids are int32 arrays of one dimension."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from sparsekv.plans.errors import UsageError

if TYPE_CHECKING:
    from sparsekv.planner.tasks.draws import Draws
    from sparsekv.planner.tasks.encoding import PieceEncoder
    from sparsekv.planner.tasks.filler import Filler

Ids = npt.NDArray[np.int32]
Mask = npt.NDArray[np.bool_]


class TaskError(UsageError):
    """A task cannot be built as asked."""


class Split(enum.Enum):
    """What a document is for. Splits share neither seeds nor filler text."""

    TRAINING = "training"
    CALIBRATION = "calibration"
    EVALUATION = "evaluation"


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A question that ends in an answer prefix, and the answer that completes it (with its leading space)."""

    question_ids: Ids
    answer_ids: Ids
    answer: str

    def __len__(self) -> int:
        return len(self.question_ids) + len(self.answer_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A context and the questions about it. `context_is_text` is true on filler, false on planted statements."""

    context_ids: Ids
    context_is_text: Mask
    queries: tuple[Query, ...]

    def __len__(self) -> int:
        return len(self.context_ids) + sum(len(query) for query in self.queries)


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One prompt to complete: BOS if the tokenizer has one, the context, one question."""

    prompt_ids: Ids
    answer_ids: Ids
    answer: str
    task: str
    length: int


@dataclass(frozen=True, slots=True)
class Request:
    """What a task is asked to build.

    Attributes:
        length: most tokens of the context and all questions and answers together.
        queries: most questions about the context.
        statements: how many needles, pairs or chains to plant; None for the task's standard number at this length.
            Fewer are planted where they do not fit.
        answer_room: tokens kept for the one answer, whatever it needs of them: context and question then take exactly
            the rest of the length, in every document. None: answers take what they need.
    """

    length: int
    queries: int = 1
    statements: int | None = None
    answer_room: int | None = None


@dataclass(frozen=True, slots=True)
class Kit:
    """What tasks build from: an encoder, and the filler text of one split."""

    split: Split
    encoder: PieceEncoder
    filler: Filler


class Task(Protocol):
    """A family of documents."""

    @property
    def name(self) -> str:
        """The name in the registry, in reports and in seeds."""

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """Tokens that no answer about a document of `length` tokens exceeds; depends on nothing else."""

    def document(self, kit: Kit, request: Request, draws: Draws) -> Document:
        """Builds one document of at most `request.length` tokens; raises `TaskError` where not even one query fits."""
