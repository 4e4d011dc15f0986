"""Prompts of the caller: which of them a plan is made from, and which are set aside to verify it on."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class GivenPrompt:
    """A prompt, the answer that follows it as it is (with its leading space, if any), and what it counts as. Without an
    answer its last tokens stand in for one.

    Attributes:
        source: where it stands, for messages, such as "prompts.jsonl, line 3"; "" where nobody said.
    """

    prompt: str
    answer: str = ""
    task: str = "prompts"
    source: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """All of it."""
        return self.prompt + self.answer

    @property
    def digest(self) -> bytes:
        """Returns the digest of its text, whatever its parts are."""
        return hashlib.sha256(self.text.encode("utf-8", "surrogatepass")).digest()


def as_prompts(given: Any) -> Any:
    """Texts as prompts without answers."""
    if isinstance(given, str | bytes | Mapping) or not isinstance(given, Iterable):
        return given  # which is refused by its type
    return tuple(GivenPrompt(one) if isinstance(one, str) else one for one in given)


def set_aside(prompts: Iterable[GivenPrompt]) -> tuple[tuple[GivenPrompt, ...], tuple[GivenPrompt, ...]]:
    """Prompts to calibrate on, and as many to verify on, which the search never sees: none of a single one.

    Both follow from the texts alone, and so does their order: equal ones count once, and nobody chooses a part by
    ordering a file.
    """
    found = sorted({one.digest: one for one in prompts}.values(), key=lambda one: one.digest)
    half = (len(found) + 1) // 2
    return tuple(found[:half]), tuple(found[half:])


def digest_of_prompts(prompts: Iterable[GivenPrompt]) -> str:
    """`sha256:...` of a set of prompts."""
    parts = json.dumps(sorted(one.digest.hex() for one in prompts))
    return f"sha256:{hashlib.sha256(parts.encode()).hexdigest()}"
