"""Tasks that `eval` runs: RULER's (arXiv 2404.06654, section 3) by RULER's names and sizes, and a long answer.

RULER's qa_1 and qa_2 need a corpus of questions, which is not part of sparsekv. The wording is our own, and no solved
example stands in front. Prompts end in a cue, the beginning of the answer, as RULER's do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal
from uuid import UUID

from sparsekv.bench.ruler_tasks import Cwe, Fwe, Vt
from sparsekv.planner.tasks import matches
from sparsekv.planner.tasks.documents import (
    Document,
    DocumentRequest,
    Draws,
    Kit,
    Task,
    Unit,
    build,
    longest_value,
)
from sparsekv.planner.tasks.retrieval import NiahMultiquery, NiahMultivalue, enough, stated
from sparsekv.planner.tasks.text import Filler, PieceEncoder, TaskError
from sparsekv.planner.tasks.wording import Pieces

Haystack = Literal["noise", "text", "needles", "words"]
HAYSTACKS: Mapping[Haystack, str] = MappingProxyType(
    {
        "noise": "a line of five short sentences, repeated",
        "text": "source files of Python's standard library, and of packages, where RULER has essays",
        "needles": "other needles, up to the length",
        "words": "the words themselves",
    }
)
ABSENT = ("qa_1", "qa_2")
_NOISE = (
    "Rain was falling on the harbour. A lamp stood in the window. The kettle had gone cold again. Somebody closed a "
    "door upstairs. It was a quiet evening after all.\n"
)
_NEEDLE_DIGITS = 7
_UUID = 36  # characters
_LONG = 3584  # a sample of 4096 tokens less the room for the answer and the frame of a chat


@dataclass(frozen=True, slots=True)
class Needles:
    """Values for keys; the question names one key.

    Attributes:
        count: how many needles are planted in filler text; None for as many as fill the length, without text.
    """

    name: str
    count: int | None = 1
    keys: Literal["words", "uuid"] = "words"
    values: Literal["number", "uuid"] = "number"

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return longest_value(_NEEDLE_DIGITS if self.values == "number" else _UUID)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. Raises where not all needles fit."""

        def drawn(count: int) -> list[Unit]:
            return self._drawn(kit, draws, count)

        count = request.statements or self.count
        if count is None:
            return build(kit, enough(kit, request.length, drawn), request, draws, scattered=False)
        units = drawn(count)
        document = build(kit, units, request, draws)
        wanted = sum(map(len, kit.encoder.encode_all([line for unit in units for line in unit.lines])))
        planted = len(document.context_ids) - int(document.context_is_text.sum())
        if planted < wanted:
            least = request.length + wanted - planted
            raise TaskError(
                f"expected at least {least} tokens to hold {count} needles and a question, found {request.length}; use "
                "a longer length"
            )
        return document

    def _drawn(self, kit: Kit, draws: Draws, count: int) -> list[Unit]:
        keys: list[Pieces] = draws.keys(count) if self.keys == "words" else [(one,) for one in _uuids(draws, count)]
        values = draws.values(count, _NEEDLE_DIGITS) if self.values == "number" else _uuids(draws, count)
        return [stated(kit.wording.needle, *pair) for pair in zip(keys, values, strict=True)]


def _uuids(draws: Draws, count: int) -> list[str]:
    """Random identifiers, each with a leading space."""
    return [f" {UUID(bytes=draws.rng.bytes(16), version=4)}" for _ in range(count)]


@dataclass(frozen=True, slots=True)
class RulerTask:
    """A task in RULER's setting: its haystack, and room for as many tokens as RULER generates.

    Attributes:
        tokens: to generate; more where the longest answer needs them with this tokenizer.
        judges_end: `is_exact` of the last string of the answer alone, in its place.
    """

    task: Task
    haystack: Haystack
    tokens: int
    judges_end: bool = False

    @property
    def name(self) -> str:
        return self.task.name

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """Tokens to generate, see `Task`."""
        return max(self.tokens, self.task.longest_answer(encoder, length))

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        if self.haystack == "noise":
            kit = replace(kit, filler=Filler.from_text(_NOISE, kit.encoder))
        return self.task.document(kit, request, draws)

    def is_exact(self, generated: str, answer: str) -> bool:
        """True of text that begins with the answer, or has its last string in its place."""
        if not self.judges_end:
            return matches(generated, answer)
        expected = expected_strings(answer)
        return matches(",".join(expected_strings(generated)[len(expected) - 1 :]), expected[-1])


def expected_strings(answer: str) -> tuple[str, ...]:
    """Returns the strings that RULER looks for in generated text, of the answer of a sample of one of these tasks."""
    return tuple(word.strip() for word in answer.split(","))


def recall(generated: str, answer: str) -> float:
    """Returns the share of the expected strings that occur in the generated text, in whatever case: RULER's score of a
    sample."""
    text, expected = generated.casefold(), expected_strings(answer)
    return sum(word.casefold() in text for word in expected) / len(expected)


_TASKS = (
    RulerTask(Needles("niah_single_1"), "noise", 128),
    RulerTask(Needles("niah_single_2"), "text", 128),
    RulerTask(Needles("niah_single_3", values="uuid"), "text", 128),
    RulerTask(Needles("niah_multikey_1", count=4), "text", 128),
    RulerTask(Needles("niah_multikey_2", count=None), "needles", 128),
    RulerTask(Needles("niah_multikey_3", count=None, keys="uuid", values="uuid"), "needles", 128),
    RulerTask(NiahMultivalue(), "text", 128),
    RulerTask(NiahMultiquery(), "text", 128),
    RulerTask(Vt(), "noise", 34),  # RULER: 30, which five names of a token a letter exceed
    RulerTask(Cwe(long=_LONG), "words", 120),
    RulerTask(Fwe(), "words", 50),
)
RULER_SUITE: Mapping[str, RulerTask] = MappingProxyType({task.name: task for task in _TASKS})
# A hundred numbers out of text, 1,000 tokens where each digit is one.
_TABLE = RulerTask(NiahMultivalue("table", values=100), "text", 1024, judges_end=True)
SUITES = MappingProxyType({"ruler": RULER_SUITE, "long": MappingProxyType({_TABLE.name: _TABLE})})
