"""The input and output of task generators, and documents built from units: statements planted together and their
question.

Keys are distinct for as long as one `Draws` lives. Prompts come out exact in length also in the frame that a chat
template puts around a user's message.

Token ids are int32 arrays of one dimension.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, Protocol

import numpy as np

from sparsekv.planner.tasks.text import SHORT, Corpus, Filler, Ids, Mask, PieceEncoder, Shares, Split, TaskError, plant
from sparsekv.planner.tasks.wording import FIRST_WORDS, SECOND_WORDS, WORDINGS, Asked, Pieces, Wording, filled
from sparsekv.plans.errors import PlanWarning

_MESSAGE, _REPLY, _NEXT = "the-message-itself", "the-reply-to-it", "the-next-message"
# Templates that know these otherwise write today's date, or leave room to think before the answer.
_SETTINGS: dict[str, Any] = {"date_string": "26 Jul 2024", "enable_thinking": False}


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Token ids before a user's message, with the begin token where there is one, and between it and the answer; and
    between an answer and the user's next message, where the template has several."""

    before_ids: tuple[int, ...]
    after_ids: tuple[int, ...]
    between_ids: tuple[int, ...] | None = None

    @classmethod
    def of(cls, tokenizer: Any, encoder: PieceEncoder) -> ChatFrame | None:
        """The frame of a tokenizer's chat template; None where it has none.

        A template that fails on a single message, or does not repeat it as it is, warns with a `PlanWarning` and
        counts as none.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            return None
        try:
            rendered = _rendered(tokenizer, _MESSAGE)
        except Exception as error:  # a template is a program: it raises what it likes
            _warn(f"one that fails ({error!s:.200})")
            return None
        parts = rendered.split(_MESSAGE)
        if len(parts) != 2:
            _warn(f"one that repeats it {len(parts) - 1} times")
            return None
        before_ids, after_ids = encoder.encode_lines(parts)
        return cls(tuple(before_ids), tuple(after_ids), _between(tokenizer, encoder))


def _rendered(tokenizer: Any, *messages: str) -> str:
    """Messages of a user and replies in turn, and the beginning of a reply."""
    told = [{"role": ("user", "assistant")[at % 2], "content": message} for at, message in enumerate(messages)]
    text: str = tokenizer.apply_chat_template(told, tokenize=False, add_generation_prompt=True, **_SETTINGS)
    return text


def _between(tokenizer: Any, encoder: PieceEncoder) -> tuple[int, ...] | None:
    try:
        rendered = _rendered(tokenizer, _MESSAGE, _REPLY, _NEXT)
    except Exception:  # one that knows single messages alone
        return None
    found = re.findall(f"{_REPLY}(.*?){_NEXT}", rendered, re.DOTALL)
    return tuple(encoder.encode_lines(found)[0]) if len(found) == 1 else None


def _warn(found: str) -> None:
    warnings.warn(
        f"expected a chat template that repeats a user's message once, found {found}; prompts of tasks go without it",
        PlanWarning,
        stacklevel=4,
    )


class Draws:
    """A random generator that never hands out the same key twice.

    Documents that share a row share one `Draws`, so that no key has two values within a row.

    Args:
        earlier: the generators of the samples before, in their order.
        second_words: the second words of keys.
    """

    def __init__(
        self,
        rng: np.random.Generator,
        earlier: Iterable[np.random.Generator] = (),
        second_words: tuple[str, ...] = SECOND_WORDS,
    ) -> None:
        self.rng = rng
        self._second_words = second_words
        self._earlier = earlier
        self._used: set[int] = set()

    def new_index(self, count: int) -> int:
        """An index below `count` that no earlier sample was given, as long as there are any; called once a sample."""
        given: set[int] = set()
        for rng in (*self._earlier, self.rng):
            index = int(rng.integers(count))
            while index in given and len(given) < count:
                index = int(rng.integers(count))
            given.add(index)
        return index

    def keys(self, count: int, joiner: str = "-") -> list[Pieces]:
        """Distinct two-word keys as pieces to encode: `(" amber", "-falcon")`."""
        keys = len(FIRST_WORDS) * len(self._second_words)
        if len(self._used) + count > keys * 3 // 4:
            raise TaskError(
                f"expected at most {keys * 3 // 4} keys in a document, found {len(self._used) + count}; "
                "use a shorter length"
            )
        chosen: list[int] = []
        while len(chosen) < count:
            for number in self.rng.integers(0, keys, count - len(chosen)).tolist():
                if number not in self._used:
                    self._used.add(number)
                    chosen.append(number)
        pairs = (divmod(number, len(self._second_words)) for number in chosen)
        return [(f" {FIRST_WORDS[first]}", joiner + self._second_words[second]) for first, second in pairs]

    def values(self, count: int, digits: int) -> list[str]:
        """Decimal numbers of exactly `digits` digits, each with a leading space."""
        return [f" {number}" for number in self.rng.integers(10 ** (digits - 1), 10**digits, count).tolist()]


def longest_key(encoder: PieceEncoder, joiner: str = "-") -> int:
    """Tokens of the longest key that `Draws.keys` can give in any split."""
    first = encoder.encode_all([(f" {word}",) for word in FIRST_WORDS])
    second = encoder.encode_all([(joiner + word,) for word in SECOND_WORDS])
    return max(map(len, first)) + max(map(len, second))


def longest_value(digits: int) -> int:
    """Tokens that no value of `Draws.values` exceeds: no tokenizer needs more than one a character."""
    return 1 + digits


@dataclass(frozen=True, slots=True, eq=False)
class Query:
    """A question that ends in a cue, the beginning of the answer, and the answer proper (with its leading space).

    Attributes:
        cue: how many tokens of the question are the cue: where there are turns, it begins that of the model.
    """

    question_ids: Ids
    answer_ids: Ids
    answer: str
    cue: int = 0

    def __len__(self) -> int:
        return len(self.question_ids) + len(self.answer_ids)


@dataclass(frozen=True, slots=True, eq=False)
class Document:
    """A context and the questions about it.

    Attributes:
        context_is_text: true on filler, false on planted statements.
        cuts: of a conversation, tokens of the context before each question but the last.
    """

    context_ids: Ids
    context_is_text: Mask
    queries: tuple[Query, ...]
    cuts: tuple[int, ...] = ()

    def __len__(self) -> int:
        return len(self.context_ids) + sum(len(query) for query in self.queries)


class Turn(NamedTuple):
    """The reply to a prompt, which is generated, and the next prompt."""

    reply_ids: Ids
    prompt_ids: Ids


@dataclass(frozen=True, slots=True, eq=False)
class Sample:
    """One prompt to complete: BOS if the tokenizer has one, the context, a question; in the frame of a chat, if any.

    Attributes:
        later: the turns between the prompt and the answer.
        length: most tokens of all turns and the answer together.
    """

    prompt_ids: Ids
    answer_ids: Ids
    answer: str
    task: str
    length: int
    later: tuple[Turn, ...] = ()

    @property
    def past_ids(self) -> Ids:
        return np.concatenate([self.prompt_ids, *(ids for turn in self.later for ids in turn)])


@dataclass(frozen=True, slots=True)
class DocumentRequest:
    """The document that a task is to build.

    Attributes:
        length: most tokens of the context and all questions and answers together.
        queries: most questions about the context.
        statements: how many needles, pairs or chains to plant; None for the task's standard number at this length.
            Fewer are planted where they do not fit.
        answer_room: tokens reserved for the last answer, whatever it needs of them: the rest then takes exactly the
            rest of the length, in every document. None: answers take what they need.
    """

    length: int
    queries: int = 1
    statements: int | None = None
    answer_room: int | None = None


@dataclass(frozen=True, slots=True)
class Kit:
    """The parts that tasks build from.

    Attributes:
        filler: text of the split that is shipped.
        chat: the frame of a chat, where there is one.
        corpus: all text of the split, by the seed of a run; None for `filler` alone.
        shares: the tasks and lengths of a run that share this text; None: one task and length.
    """

    split: Split
    encoder: PieceEncoder
    filler: Filler
    chat: ChatFrame | None = None
    corpus: Callable[[int], Corpus] | None = None
    shares: Shares | None = None

    @property
    def wording(self) -> Wording:
        return WORDINGS[self.split]

    def shared_by(self, tasks: Sequence[str], lengths: Sequence[int]) -> Kit:
        """Gives each sample of a run text of its own, as long as there is some; a kit that is shared stays as it is."""
        return self if self.shares else replace(self, shares=Shares(tuple(tasks), tuple(lengths)))

    def of_sample(self, task: str, length: int, seed: int, index: int) -> Kit:
        """The kit whose filler is the text of one sample; a short one has any that is shipped."""
        if self.corpus is None or length <= SHORT:
            return self
        shares = self.shares or Shares((task,), (length,))
        return replace(self, filler=self.corpus(seed).share(shares.start(task, length, index), length))


class Task(Protocol):
    """A family of documents."""

    @property
    def name(self) -> str:
        """The name in the registry, in reports and in seeds."""

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """Tokens that no answer about a document of `length` tokens exceeds; depends on nothing else."""

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """Builds one document of at most `request.length` tokens; raises `TaskError` where not even one query fits."""


@dataclass(frozen=True, slots=True)
class Unit:
    """Lines that belong together, in their order, as pieces; with a question and answer where it may be asked for.

    The cue follows the question and begins the answer.
    """

    lines: tuple[Pieces, ...]
    question: Pieces = ()
    cue: Pieces = ()
    answer: Pieces = ()

    @classmethod
    def asking(cls, asked: Asked, lines: Iterable[Pieces], answer: Pieces, **fields: Pieces) -> Unit:
        """Lines with the question of a wording, whose fields are filled in."""
        return cls(tuple(lines), filled(asked.question, **fields), filled(asked.cue, **fields), answer)


def build(kit: Kit, units: list[Unit], request: DocumentRequest, draws: Draws, scattered: bool = True) -> Document:
    """Plants units at random positions and asks for the first ones that have a question.

    Args:
        units: in order of importance: the last ones are left out where the length does not hold them all.
        request: its questions take together at most half the length where there is more than one.
        scattered: over filler text that makes up the rest of the length. Otherwise the units stand by themselves,
            behind what little text a request with `answer_room` needs to come out exact.
    """
    encoded = iter(kit.encoder.encode_all([line for unit in units for line in unit.lines]))
    lines = [[next(encoded) for _ in unit.lines] for unit in units]
    asked = _fitting_queries(kit.encoder, units[: request.queries], request.length)
    sizes = np.cumsum([sum(len(line) for line in unit) for unit in lines])
    count = int(np.searchsorted(sizes, _room(request, asked), side="right"))
    if count == 0:
        raise TaskError(
            f"expected at least {request.length - _room(request, asked) + sizes[0]} tokens to hold one statement and "
            f"its question, found {request.length}; use a longer length"
        )
    asked = asked[:count]
    text = int(_room(request, asked) - sizes[count - 1]) if scattered or request.answer_room is not None else 0
    return _lay_out(kit, lines[:count], asked, text, scattered, draws)


def _room(request: DocumentRequest, asked: list[Query]) -> int:
    last = sum(len(query.answer_ids) for query in asked[-1:])
    reserved = last if request.answer_room is None else request.answer_room
    return request.length - sum(len(query) for query in asked) + last - reserved


def _lay_out(
    kit: Kit, units: list[list[list[int]]], asked: list[Query], text: int, scattered: bool, draws: Draws
) -> Document:
    rng = draws.rng
    ids, breaks = kit.filler.excerpt(text, rng)
    positions = np.concatenate([np.sort(rng.random(len(unit))) for unit in units])
    order = np.argsort(positions, kind="stable")
    lines = [line for unit in units for line in unit]
    wanted = (positions[order] * (text + 1)).astype(np.int32) if scattered else np.full(len(lines), text, np.int32)
    context_ids, is_text = plant(ids, breaks, [lines[i] for i in order.tolist()], wanted)
    return Document(context_ids, is_text, tuple(asked))


def _fitting_queries(encoder: PieceEncoder, units: list[Unit], length: int) -> list[Query]:
    units = [unit for unit in units if unit.question]
    questions = encoder.encode_all([(*unit.question, *unit.cue) for unit in units])
    cues = encoder.encode_all([unit.cue for unit in units])
    answers = encoder.encode_all([unit.answer for unit in units])
    sizes = np.cumsum([len(q) + len(a) for q, a in zip(questions, answers, strict=True)])
    count = max(1, int(np.searchsorted(sizes, length // 2, side="right")))
    return [
        Query(np.asarray(question, np.int32), np.asarray(answer, np.int32), "".join(unit.answer), len(cue))
        for unit, question, cue, answer in list(zip(units, questions, cues, answers, strict=True))[:count]
    ]
