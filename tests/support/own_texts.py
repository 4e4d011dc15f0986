"""Texts as callers bring them, no two alike."""

from __future__ import annotations

import random
from string import ascii_lowercase


def text_of(number: int, characters: int) -> str:
    """Words of random letters; another number is another text."""
    return "".join(random.Random(number).choices(ascii_lowercase + "   ", k=characters))
