"""Golden files of what is said: blocks of a line `$ ...` and what it gives, to the letter."""

from __future__ import annotations

import os
import re
from pathlib import Path


class Golden:
    """A golden file; with WRITE_MESSAGES=1 in the environment, what is said takes the place of what was."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._head, *blocks = re.split(r"^(?=\$ )", path.read_text(), flags=re.MULTILINE)
        parts = (block.removeprefix("$ ").partition("\n") for block in blocks)
        self.blocks = {line: said.strip("\n") for line, _, said in parts}

    def check(self, line: str, said: str) -> None:
        if os.environ.get("WRITE_MESSAGES"):
            self.blocks[line] = said
            self._path.write_text(self._head + "\n".join(f"$ {line}\n{said}\n" for line, said in self.blocks.items()))
        assert said == self.blocks[line]
