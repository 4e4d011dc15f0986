"""Answers read off the text of a prompt, by brute force and without the generators."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import takewhile

_KEY = r"[a-z]+[-_][a-z]+"
NEEDLE = re.compile(rf"The special number for ({_KEY}) is (\d+)\.")
PAIR = re.compile(rf"-\s?({_KEY}): (\d+)")
OWNER = re.compile(rf"The key of ({_KEY}) is ({_KEY})\.")
NUMBER = re.compile(rf"VAR ({_KEY}) = (\d+)")
COPY = re.compile(rf"VAR ({_KEY}) = VAR ({_KEY})")
STATEMENTS = (NEEDLE, PAIR, OWNER, NUMBER, COPY)


def answer_of(prompt: str) -> str:
    """The answer to the question in the last line of a prompt.

    Raises:
        LookupError: the last line is no question, or the context does not answer it.
    """
    *context, question = prompt.split("\n")
    for form, find in _FINDERS.items():
        if asked := re.fullmatch(form, question):
            return find(context, asked[1])
    raise LookupError(f"no question: {question!r}")


def statements(lines: Iterable[str], form: re.Pattern[str]) -> dict[str, str]:
    """What every key of a kind of line stands for.

    Raises:
        LookupError: a key stands twice.
    """
    found = [match.groups() for line in lines if (match := form.fullmatch(line))]
    if len({key for key, _ in found}) < len(found):
        raise LookupError(f"a key stands twice: {sorted(key for key, _ in found)}")
    return dict(found)


def is_statement(line: str) -> bool:
    return any(form.fullmatch(line) for form in STATEMENTS)


def _needle(lines: list[str], key: str) -> str:
    return statements(lines, NEEDLE)[key]


def _pair(lines: list[str], key: str) -> str:
    return statements(lines, PAIR)[key]


def _two_stage(lines: list[str], owner: str) -> str:
    key = statements(lines, OWNER)[owner]
    return f"{key}: {statements(lines, PAIR)[key]}"


def _trace(lines: list[str], variable: str) -> str:
    """Follows assignments backwards: each must stand in front of the one that uses it."""
    return " = ".join(_steps(lines, variable))


def _steps(lines: list[str], variable: str) -> Iterator[str]:
    before = list(takewhile(lambda line: not line.startswith(f"VAR {variable} ="), lines))
    (line,) = [line for line in lines if line.startswith(f"VAR {variable} =")]
    if number := NUMBER.fullmatch(line):
        yield number[2]
    elif copy := COPY.fullmatch(line):
        yield f"VAR {copy[2]}"
        yield from _steps(before, copy[2])


_FINDERS: dict[str, Callable[[list[str], str], str]] = {
    rf"What is the special number for ({_KEY}) in the text above\? The special number for \1 is": _needle,
    rf"Which value in the list above belongs to ({_KEY})\? \1:": _pair,
    rf"Give the key of ({_KEY}) and the value of that key, written as key: value\. The key of \1 is": _two_stage,
    rf"Trace the variable ({_KEY}) back to its number\. VAR \1 =": _trace,
}
