"""Prompts of the caller: to answer, from an option, a file or standard input; to calibrate on and to be evaluated on,
from a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from sparsekv.planner.common_options import GivenPrompt
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.files import as_text, read_text

MAX_BYTES = 64 << 20  # more tokens than any model takes, and nothing that fills the memory of a machine


def given_prompt(text: str | None, file: Path | None) -> str | None:
    """The prompt of a call, or None where a person at a terminal is to be asked for it.

    Args:
        file: a file that holds it; `-` is standard input. Of both, one newline at the end is left out: `echo` and
            editors add it, and a model goes on behind it in another way.

    Raises:
        UsageError: text and file are both given, or the file cannot be read.
        PromptError: the prompt is empty or is not text.
    """
    if text is not None and file is not None:
        raise UsageError("expected --prompt or --prompt-file, found both; leave one out")
    if text is not None:
        # What an argument holds beside UTF-8 reaches us as escapes that no tokenizer takes.
        return _text(text.encode("utf-8", "surrogateescape"), "--prompt")
    if file is not None and str(file) != "-":
        return _without_newline(_text_of(file))
    if file is None and sys.stdin.isatty():
        return None
    return _without_newline(_text(sys.stdin.buffer.read(MAX_BYTES + 1), "standard input"))


def typed_prompt() -> str | None:
    """The next line on standard input, which may be blank; None at its end.

    Raises:
        PromptError: it is not text.
    """
    line = sys.stdin.buffer.readline(MAX_BYTES + 1)
    return as_text(line, "what was typed", MAX_BYTES, PromptError) if line else None


def own_prompts(file: Path) -> tuple[GivenPrompt, ...]:
    """Prompts to plan on: JSON lines of {"prompt", "answer"?, "task"?}. Any file not called .jsonl is one.

    Raises:
        UsageError: the file cannot be read.
        PromptError: it is no text, or a line is not what it should be.
    """
    if file.suffix.lower() != ".jsonl":
        return (GivenPrompt(_text_of(file)),)
    return tuple(_given(file, number, line) for number, line in _lines(file))


def answered_prompts(file: Path) -> tuple[GivenPrompt, ...]:
    """Prompts to evaluate on: JSON lines of {"prompt", "answer", "task"?}.

    Raises:
        UsageError: the file cannot be read.
        PromptError: a line is not what it should be, or has no answer.
    """
    found = tuple(_lines(file))
    unanswered = next((number for number, line in found if not line.get("answer", "").strip()), None)
    if unanswered is not None:
        raise PromptError(f'{file}, line {unanswered}: expected an "answer" to compare with, found none')
    return tuple(_given(file, number, line) for number, line in found)


def _given(file: Path, number: int, line: Mapping[str, str]) -> GivenPrompt:
    return GivenPrompt(**line, source=f"{file}, line {number}")


def _lines(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    lines = enumerate(_text_of(file).split("\n"), start=1)
    return ((number, _fields(file, number, line)) for number, line in lines if line.strip())


def _fields(file: Path, number: int, line: str) -> dict[str, str]:
    expected = f'{file}, line {number}: expected {{"prompt": TEXT}}, with "answer": TEXT and "task": NAME if there are'
    try:
        found: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number may be too long
        raise PromptError(f"{expected}, found no JSON") from error
    if not isinstance(found, dict):
        raise PromptError(f"{expected}, found a {type(found).__name__}")
    unknown = set(found) - {"prompt", "answer", "task"}
    if unknown:
        raise PromptError(f"{expected}, found also {', '.join(sorted(unknown))}")
    if not all(isinstance(text, str) for text in found.values()) or not found.get("prompt", "").strip():
        raise PromptError(f"{expected}, found {line.strip()[:60]}")
    if any("\ud800" <= character <= "\udfff" for text in found.values() for character in text):
        raise PromptError(f"{expected}, found half a surrogate pair (\\ud800 to \\udfff), which no tokenizer takes")
    return found


def _text_of(file: Path) -> str:
    return _with_text(read_text(file, MAX_BYTES, PromptError), str(file))


def _without_newline(text: str) -> str:
    return text.removesuffix("\r\n") if text.endswith("\r\n") else text.removesuffix("\n")


def _text(data: bytes, source: str) -> str:
    return _with_text(as_text(data, source, MAX_BYTES, PromptError), source)


def _with_text(text: str, source: str) -> str:
    if not text.strip():
        raise PromptError(f"expected a prompt, found nothing but blanks in {source}; write a question")
    return text
