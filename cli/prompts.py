"""Where a prompt comes from: an option, a file, standard input, or a person at a terminal."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TextIO

from sparsekv.plans.errors import PromptError, UsageError


def given_prompt(text: str | None, file: Path | None, stream: TextIO | None = None) -> str | None:
    """The prompt of a call, or None where a person at a terminal is to be asked for it.

    Args:
        text: the prompt itself.
        file: a file that holds it; `-` is standard input.
        stream: standard input.

    Raises:
        UsageError: text and file are both given, or the file cannot be read.
        PromptError: the prompt is empty or is not text.
    """
    stream = sys.stdin if stream is None else stream
    if text is not None and file is not None:
        raise UsageError("expected --prompt or --prompt-file, found both; leave one out")
    if text is not None:
        # What an argument holds beside UTF-8 reaches us as escapes that no tokenizer takes.
        return _checked(_decoded(text.encode("utf-8", "surrogateescape"), "--prompt"), "--prompt")
    if file is not None and str(file) != "-":
        return text_of(file)
    if file is None and stream.isatty():
        return None
    return _checked(_decoded(stream.buffer.read(), "standard input"), "standard input")


def text_of(file: Path) -> str:
    """The text in a file.

    Raises:
        UsageError: it cannot be read.
        PromptError: it is empty or no text.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise UsageError(f"cannot read the prompt file {file}: {error.strerror}") from error
    return _checked(_decoded(data, str(file)), str(file))


def _decoded(data: bytes, source: str) -> str:
    advice = "give a text file in UTF-8"
    if b"\0" in data:
        raise PromptError(f"expected text in {source}, found binary data (a zero byte at {data.index(0)}); {advice}")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise PromptError(f"expected UTF-8 text in {source}, found other bytes at {error.start}; {advice}") from error


def _checked(text: str, source: str) -> str:
    if not text.strip():
        raise PromptError(f"expected a prompt, found nothing but blanks in {source}; write a question")
    return text
