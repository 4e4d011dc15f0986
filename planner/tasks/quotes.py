"""Passages quoted again: text whose continuation stands further up, so that any language model can give it.

Copying what followed the last time is the work of induction heads (Olsson et al. 2022, arXiv 2209.11895), which
language models of every size have. A prompt quotes several passages, each from another distance: the last quotation
breaks off behind its beginning, and the rest of it is the answer; those before it stand in the context in full.
`Perplexity` continues plain text.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sparsekv.planner.tasks.documents import Document, DocumentRequest, Draws, Kit, Query
from sparsekv.planner.tasks.text import Ids, Mask, PieceEncoder, TaskError, plant

_CUE = 16  # tokens of a passage by which it is recognised
_ANSWER = 32  # tokens of it that follow from that
_ANSWER_SHARE = 12  # at short lengths, one token of answer for so many
_TOKENS_PER_QUOTE = 256
_MOST_QUOTES = 8
_PROSE = (0.6, 1.0)  # the share of prose in a passage of text
_CODE = (0.0, 0.2)
_ATTEMPTS = 16  # layouts drawn until every passage is at the distance meant for it
_TRIED = 64  # passages looked at for one quotation, the best first

Indices = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Quote:
    """Text in which passages are quoted again, from distances that cover the whole prompt.

    Distances are counted from a token to the one that it repeats. They are drawn log-uniformly between a passage's
    own size and the length of the text, one in each of as many equal parts of that range as there are quotations.

    Attributes:
        prose: whether passages are prose or code, where the text has both.
    """

    name: str
    prose: bool

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """See `Task`. Every answer is that long."""
        return min(_ANSWER, max(0, length) // _ANSWER_SHARE)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        """See `Task`. There is one question, whatever the request says; `statements` counts all quotations."""
        before = kit.wording.quoted if self.prose else kit.wording.repeated
        frame, newline = (kit.encoder.encode([piece]) for piece in (before, "\n"))
        answer = self.longest_answer(kit.encoder, request.length)
        count = request.statements or min(_MOST_QUOTES, max(1, round(request.length / _TOKENS_PER_QUOTE)))
        sizes = _Sizes(len(frame), _CUE + answer, len(frame) + _CUE + answer + len(newline))
        text = request.length - len(frame) - sizes.passage - (count - 1) * sizes.quotation
        if not answer or text < 2 * sizes.passage:
            least = request.length + 2 * (_CUE + _ANSWER) - text + (_ANSWER - answer)
            raise TaskError(
                f"expected at least {least} tokens to hold passages and their quotations, {count} of each, found "
                f"{request.length}; use a longer length"
            )
        source = _Source.drawn(kit, text, self.prose, draws.rng)
        quotations = _draw_layout(source, sizes, count, draws.rng)
        *others, asked = [source.ids[one.first : one.first + sizes.passage] for one in quotations]
        points = np.asarray([one.point for one in quotations[:-1]], np.int32)
        lines = [[*frame, *passage.tolist(), *newline] for passage in others]
        context_ids, is_text = plant(source.ids, source.breaks, lines, points)
        question_ids = np.concatenate([np.asarray(frame, np.int32), asked[:_CUE]])
        query = Query(question_ids, asked[_CUE:], _compared(kit.encoder, asked[_CUE:]), _CUE)
        return Document(context_ids, is_text, (query,))


def _compared(encoder: PieceEncoder, answer_ids: Ids) -> str:
    """The beginning of a right answer: without a number or a character that its end cuts off."""
    return encoder.text_of(answer_ids.tolist()).rstrip("0123456789\ufffd")


@dataclass(frozen=True, slots=True)
class _Sizes:
    """In tokens."""

    frame: int
    passage: int
    quotation: int  # frame, passage and the end of the line


@dataclass(frozen=True, slots=True, eq=False)
class _Source:
    """Text that passages are taken from.

    Attributes:
        repeats: the text is longer than what there is of it, so that nothing in it is unique.
        wanted: token by token, whether it is of the wanted kind; None where all are.
    """

    ids: Ids
    breaks: Indices
    repeats: bool
    prose: bool
    is_prose: Mask | None

    @classmethod
    def drawn(cls, kit: Kit, count: int, prose: bool, rng: np.random.Generator) -> _Source:
        """Text of the wanted kind; all kinds where there is too little prose. Code has its comments."""
        only = kit.filler.prose() if prose else None
        filler = only if only is not None and len(only.ids) >= count else kit.filler
        ids, breaks, is_prose = filler.excerpt_of_kinds(count, rng)
        return cls(ids, breaks, count > len(filler.ids), prose, is_prose)

    def pools(self, size: int) -> tuple[Mask, ...]:
        """Where a passage of `size` tokens may begin, best first: lines of its kind, any line, anywhere."""
        anywhere = np.ones(len(self.ids) - size + 1, np.bool_)
        starts = np.zeros(len(self.ids) + 1, np.bool_)
        starts[self.breaks] = True
        lines = starts[: len(anywhere)]
        if self.is_prose is None:
            return lines, anywhere
        sums = np.cumsum(np.concatenate([[0], self.is_prose]))
        share = (sums[size:] - sums[: len(anywhere)]) / size
        least, most = _PROSE if self.prose else _CODE
        return lines & (share >= least) & (share <= most), lines, anywhere

    def is_recognised(self, first: int, end: int) -> bool:
        """True where the beginning of the passage at `first` identifies it, at index `end`."""
        cue = self.ids[first : first + _CUE]
        found = np.flatnonzero(self.ids[: len(self.ids) - _CUE + 1] == cue[0])
        for offset in range(1, _CUE):
            found = found[self.ids[found + offset] == cue[offset]]
        # The same text repeated goes on in the same way: the last occurrence is the one to copy.
        return not ((found > first) & (found < end)).any() if self.repeats else len(found) == 1


@dataclass(frozen=True, slots=True)
class _Quotation:
    """A passage at index `first` of the text, quoted in front of `point`."""

    first: int
    point: int


class _Layout:
    """Quotations so far: the points of the text in front of which they stand, and where in it their passages begin."""

    def __init__(self, source: _Source, sizes: _Sizes, rng: np.random.Generator) -> None:
        self.points: list[int] = []
        self.passages: list[int] = []
        self._source, self._sizes, self._rng = source, sizes, rng

    def quote(self, least: float, most: float) -> bool:
        """Quotes a passage from `least` to `most` tokens behind it; whether there is room for that."""
        end = len(self._source.ids)
        for pool in self._source.pools(self._sizes.passage):
            firsts = np.flatnonzero(pool & self._is_free(len(pool)) & (np.arange(len(pool)) < end - least))
            for first in self._rng.permutation(firsts)[:_TRIED].tolist():
                point = self._point(first, least, min(most, end - first))
                if point is not None and least <= self.distance(first, point) < most and self._add(first, point):
                    return True
        return False

    def ask(self, least: float, most: float) -> bool:
        """The same at the end of the text, where the question stands."""
        point = len(self._source.ids)
        for pool in self._source.pools(self._sizes.passage):
            distance = self.distance(np.arange(len(pool)), point)
            firsts = np.flatnonzero(pool & self._is_free(len(pool)) & (distance >= least) & (distance < most))
            order = np.argsort(np.log(self._rng.random(len(firsts))) * distance[firsts])[::-1]  # in proportion to 1 / d
            if any(self._add(first, point) for first in firsts[order[:_TRIED]].tolist()):
                return True
        return False

    def distance(self, first: Any, point: int) -> Any:
        """From the tokens of passages that begin at `first` to those of their quotation in front of `point`."""
        points = np.sort(np.asarray(self.points, np.int64))
        between = np.searchsorted(points, point, "right") - np.searchsorted(points, first, "right")
        return point - first + self._sizes.frame + between * self._sizes.quotation

    def quotations(self) -> tuple[list[_Quotation], list[int]]:
        """All of them in their order, and their distances, ascending."""
        size, body = self._sizes.quotation, np.sort(self.points[:-1])
        found, distances = [], []
        for number, i in enumerate(np.argsort(self.points, kind="stable").tolist()):
            first, start = self.passages[i], self.points[i] + number * size + self._sizes.frame
            found.append(_Quotation(first, self.points[i]))
            distances.append(start - first - int(np.searchsorted(body, first, "right")) * size)
        return found, sorted(distances)

    def _point(self, first: int, least: float, most: float) -> int | None:
        """A point at a distance drawn log-uniformly; None where the passage or a quoted one would be cut."""
        wanted = math.exp(self._rng.uniform(math.log(least), math.log(max(least, most))))
        point = first + wanted - self._sizes.frame
        point -= self.distance(first, int(point)) - int(wanted)  # what is quoted in between
        number = int(np.searchsorted(self._source.breaks, point))
        if number == len(self._source.breaks):
            return None
        found = int(self._source.breaks[number])
        cut = any(one < found < one + self._sizes.passage for one in (*self.passages, first))
        return None if cut or found <= first or found in self.points else found

    def _add(self, first: int, point: int) -> bool:
        if not self._source.is_recognised(first, point):
            return False
        self.points.append(point)
        self.passages.append(first)
        return True

    def _is_free(self, count: int) -> Mask:
        """True of the first `count` indices that begin a passage not quoted yet and not cut by a quotation."""
        size, free = self._sizes.passage, np.ones(count, np.bool_)
        for point in self.points:
            free[max(0, point - size + 1) : point] = False
        for first in self.passages:
            free[max(0, first - size + 1) : first + size] = False
        return free


def _draw_layout(source: _Source, sizes: _Sizes, count: int, rng: np.random.Generator) -> list[_Quotation]:
    """The first of a few layouts in which every passage is as far away as meant, else the last of them.

    The question's quotation comes last.
    """
    near, far = sizes.frame + sizes.passage, len(source.ids)
    edges = near * (far / near) ** (np.arange(count + 1) / count)
    found = None
    for _ in range(_ATTEMPTS):
        layout = _Layout(source, sizes, rng)
        asked, *others = rng.permutation(count).tolist()
        # Far ones first: they have the fewest places.
        fits = all(layout.quote(*edges[part : part + 2]) or layout.quote(near, far) for part in sorted(others)[::-1])
        if fits and (layout.ask(*edges[asked : asked + 2]) or layout.ask(near, math.inf)):
            found, distances = layout.quotations()
            if all(low <= one < high for one, low, high in zip(distances, edges[:-1], edges[1:], strict=True)):
                break
    if found is None:
        raise TaskError(
            f"expected text with passages that their first {_CUE} tokens identify, {count} of them, found fewer in "
            f"{len(source.ids)} tokens; use another length, or give your own calibration prompts"
        )
    return found


@dataclass(frozen=True, slots=True)
class Perplexity:
    """An excerpt of the filler text, another one in each sample.

    The one query has an empty question; its answer is the end of the excerpt, for a teacher-forced score. Its text is
    empty: a generated continuation is not compared. Without queries, all of the excerpt is context.

    Attributes:
        most_scored: most tokens of the answer; it is at most a quarter of the excerpt.
    """

    name: str = "perplexity"
    most_scored: int = 256

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        return min(self.most_scored, length // 4)

    def document(self, kit: Kit, request: DocumentRequest, draws: Draws) -> Document:
        scored = self.longest_answer(kit.encoder, request.length) if request.queries else 0
        if request.queries and not scored:
            raise TaskError(f"expected at least 4 tokens of text, found {request.length}; use a longer length")
        ends = kit.filler.ends(request.length)
        ids = kit.filler.before(int(ends[draws.new_index(len(ends))]), request.length)
        split = len(ids) - scored
        query = Query(np.zeros(0, np.int32), ids[split:], "")
        return Document(ids[:split], np.ones(split, np.bool_), (query,) if scored else ())
