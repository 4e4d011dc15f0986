"""The caller's own calibration prompts: JSON lines of {"prompt", "answer"?}, or one text."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from sparsekv.cli.prompts import text_of
from sparsekv.plans.errors import PromptError


def own_prompts(file: Path) -> tuple[str, ...]:
    """The prompts in a file, each with its answer behind it. A file that is not called .jsonl is one prompt.

    Raises:
        UsageError: the file cannot be read.
        PromptError: it is no text, or a line is not what it should be.
    """
    text = text_of(file)
    if file.suffix.lower() != ".jsonl":
        return (text,)
    lines = [(number, line) for number, line in enumerate(text.split("\n"), start=1) if line.strip()]
    return tuple(_prompt(file, number, line) for number, line in lines)


def _prompt(file: Path, number: int, line: str) -> str:
    expected = f'{file}, line {number}: expected {{"prompt": TEXT}}, with "answer": TEXT if there is one'
    try:
        found: Any = json.loads(line)
    except (json.JSONDecodeError, RecursionError) as error:
        raise PromptError(f"{expected}, found no JSON") from error
    if not isinstance(found, dict):
        raise PromptError(f"{expected}, found a {type(found).__name__}")
    unknown = set(found) - {"prompt", "answer"}
    if unknown:
        raise PromptError(f"{expected}, found also {', '.join(sorted(unknown))}")
    prompt, answer = found.get("prompt"), found.get("answer", "")
    if not isinstance(prompt, str) or not prompt.strip() or not isinstance(answer, str):
        raise PromptError(f"{expected}, found {line.strip()[:60]}")
    return prompt + answer
