"""Documents out of units: a unit is what has to be planted together, and the question that asks for it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sparsekv.planner.tasks.draws import Draws, Pieces, text_of
from sparsekv.planner.tasks.encoding import PieceEncoder, as_ids
from sparsekv.planner.tasks.filler import plant
from sparsekv.planner.tasks.types import Document, Kit, Query, Request, TaskError


@dataclass(frozen=True, slots=True)
class Unit:
    """Lines that belong together, in their order, as pieces; with a question and answer where it may be asked for."""

    lines: tuple[Pieces, ...]
    question: Pieces = ()
    answer: Pieces = ()


def build(kit: Kit, units: list[Unit], request: Request, draws: Draws, scattered: bool = True) -> Document:
    """Plants units at random places and asks for the first ones that have a question.

    Args:
        kit: encoder and filler.
        units: in order of importance: the last ones are left out where the length does not hold them all.
        request: its questions take together at most half the length where there is more than one.
        draws: the source of randomness.
        scattered: over filler text that makes up the rest of the length. Otherwise the units stand by themselves,
            behind what little text a request with `answer_room` needs to come out exact.

    Raises:
        TaskError: not even one unit and its question fit.
    """
    lines = _encode_lines(kit.encoder, units)
    asked = _fitting_queries(kit.encoder, units[: request.queries], request.length)
    sizes = np.cumsum([sum(len(line) for line in unit) for unit in lines])
    kept = int(np.searchsorted(sizes, _room(request, asked), side="right"))
    if kept == 0:
        raise TaskError(
            f"expected at least {request.length - _room(request, asked) + sizes[0]} tokens to hold one statement and "
            f"its question, found {request.length}; use a longer length"
        )
    asked = asked[:kept]
    text = int(_room(request, asked) - sizes[kept - 1]) if scattered or request.answer_room is not None else 0
    return _lay_out(kit, lines[:kept], asked, text, scattered, draws)


def _room(request: Request, asked: list[Query]) -> int:
    """Tokens for the context."""
    if request.answer_room is None:
        return request.length - sum(len(query) for query in asked)
    return request.length - sum(len(query.question_ids) + request.answer_room for query in asked)


def _lay_out(
    kit: Kit, units: list[list[list[int]]], asked: list[Query], text: int, scattered: bool, draws: Draws
) -> Document:
    rng = draws.rng
    ids, breaks = kit.filler.excerpt(text, rng)
    places = np.concatenate([np.sort(rng.random(len(unit))) for unit in units])
    order = np.argsort(places, kind="stable")
    lines = [line for unit in units for line in unit]
    wanted = (places[order] * (text + 1)).astype(np.int32) if scattered else np.full(len(lines), text, np.int32)
    context_ids, is_text = plant(ids, breaks, [lines[i] for i in order.tolist()], wanted)
    return Document(context_ids, is_text, tuple(asked))


def _encode_lines(encoder: PieceEncoder, units: list[Unit]) -> list[list[list[int]]]:
    encoded = iter(encoder.encode_all([line for unit in units for line in unit.lines]))
    return [[next(encoded) for _ in unit.lines] for unit in units]


def _fitting_queries(encoder: PieceEncoder, units: list[Unit], length: int) -> list[Query]:
    units = [unit for unit in units if unit.question]
    questions = encoder.encode_all([unit.question for unit in units])
    answers = encoder.encode_all([unit.answer for unit in units])
    sizes = np.cumsum([len(q) + len(a) for q, a in zip(questions, answers, strict=True)])
    count = max(1, int(np.searchsorted(sizes, length // 2, side="right")))
    return [
        Query(as_ids(question), as_ids(answer), text_of(unit.answer))
        for unit, question, answer in list(zip(units, questions, answers, strict=True))[:count]
    ]
