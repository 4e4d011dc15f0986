"""Answers read off the text of a prompt, by brute force and without the generators: frames become patterns."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import takewhile

from sparsekv.planner.tasks import Split
from sparsekv.planner.tasks.wording import WORDINGS, Asked, Wording

_KEY = r"[a-z]+[-_][a-z]+"


def pattern(frame: str) -> str:
    """A frame in which keys and numbers are groups; keys have their leading space, or none behind a dash."""
    parts = re.split(r"(\{\w+\})", frame.rstrip("\n"))
    fields = {"{key}": rf"\s?({_KEY})", "{owner}": rf" ({_KEY})", "{value}": r" (\d+)"}
    return "".join(fields.get(part, re.escape(part)) for part in parts)


class Forms:
    """The lines of a wording."""

    def __init__(self, wording: Wording) -> None:
        self.needle, self.pair, self.owner, self.number = (
            re.compile(pattern(asked.line)) for asked in (wording.needle, wording.pair, wording.linked, wording.traced)
        )
        end = re.escape(wording.traced.line.rpartition("}")[2].strip())
        self.copy = re.compile(rf"VAR ({_KEY}) = VAR ({_KEY}){end}")
        self.between = wording.pair.cue.removeprefix("{key}")
        finders = (
            (wording.needle, lambda lines, key: statements(lines, self.needle)[key]),
            (wording.pair, lambda lines, key: statements(lines, self.pair)[key]),
            (wording.linked, self._two_stage),
            (wording.traced, self._trace),
        )
        self.finders = {_question(asked): find for asked, find in finders}

    def _two_stage(self, lines: list[str], owner: str) -> str:
        key = statements(lines, self.owner)[owner]
        return f"{key}{self.between} {statements(lines, self.pair)[key]}"

    def _trace(self, lines: list[str], variable: str) -> str:
        """Follows assignments backwards: each must stand in front of the one that uses it."""
        return " = ".join(self._steps(lines, variable))

    def _steps(self, lines: list[str], variable: str) -> Iterator[str]:
        begin = f"VAR {variable} ="
        before = list(takewhile(lambda line: not line.startswith(begin), lines))
        (line,) = [line for line in lines if line.startswith(begin)]
        if number := self.number.fullmatch(line):
            yield number[2]
        elif copy := self.copy.fullmatch(line):
            yield f"VAR {copy[2]}"
            yield from self._steps(before, copy[2])


def _question(asked: Asked) -> str:
    """Question and cue, which name the same key."""
    cue = pattern(asked.cue)
    return pattern(asked.question) + cue.replace(f"({_KEY})", r"\1")


@cache
def forms(split: Split = Split.CALIBRATION) -> Forms:
    return Forms(WORDINGS[split])


def answer_of(prompt: str, split: Split = Split.CALIBRATION) -> str:
    """The answer to the question in the last line of a prompt.

    Raises:
        LookupError: the last line is no question, or the context does not answer it.
    """
    *context, question = prompt.split("\n")
    for form, find in forms(split).finders.items():
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
