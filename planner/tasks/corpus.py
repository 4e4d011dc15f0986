"""The text of a split as one sequence, enough for thirty prompts of 128K: what is shipped, then installed packages.

A passage, 64 characters from the first letter of a line, stands in it once, and in the text of no other split.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from types import MappingProxyType

import numpy as np

from sparsekv.planner.tasks.text import Filler, PieceEncoder, Split, load_filler_text

SHORT = 4096  # tokens of a prompt up to which it has text that is shipped, from anywhere in it
# Packages that sparsekv requires, other ones for each split. Calibration's is one whose version a plan records.
_FOLDERS: Mapping[Split, str] = MappingProxyType(
    {
        Split.CALIBRATION: "torch/_dynamo/** torch/fx/**",
        Split.VERIFICATION: "scipy/integrate/** scipy/interpolate/** scipy/linalg/** scipy/optimize/** scipy/signal/** "
        "scipy/sparse/** scipy/spatial/** scipy/special/** scipy/stats/**",
        Split.EVALUATION: "numpy/** transformers transformers/generation/** transformers/integrations/** "
        "transformers/pipelines/** transformers/utils/**",
    }
)
_PASSAGE = 64  # characters
_LONGEST_LINE = 256  # characters; no tokenizer needs more tokens
# Special tokens of some tokenizer, and characters that small vocabularies lack.
_LEFT_OUT = re.compile(r"<[|/\w]|\[/?[A-Z_]{3,}\]|[^\n -~]")
_PART = 1 << 18  # characters encoded at once
_GOLDEN = 0.6180339887498949


@dataclass(frozen=True, slots=True)
class Shares:
    """The tasks and lengths of a run: first sample 0 of each has text of its own, then sample 1 of each."""

    tasks: tuple[str, ...]
    lengths: tuple[int, ...]

    def start(self, task: str, length: int, index: int) -> int:
        """The token at which the text of a sample begins; another task has the first one's."""
        sizes = {_reserved(n) for n in (*self.lengths, length) if n > SHORT}
        before = len(self.tasks) * (index * sum(sizes) + sum(size for size in sizes if size < _reserved(length)))
        return before + (self.tasks.index(task) if task in self.tasks else 0) * _reserved(length)


class Corpus:
    """The text of a split, encoded as far as it is read. Behind its end it begins again.

    Args:
        seed: 0 begins with the text that is shipped, another one elsewhere.
    """

    def __init__(self, split: Split, encoder: PieceEncoder, seed: int) -> None:
        self._unread = (Filler.from_text(part, encoder) for part in _parts(split, seed))
        self._read = next(self._unread)

    def share(self, start: int, length: int) -> Filler:
        """The whole lines of a sample's text, `length` tokens or a few more; all text where there is less."""
        wanted = _reserved(length)
        while len(self._read.ids) < start + wanted and (part := next(self._unread, None)) is not None:
            self._read = self._read.followed_by(part)
        text = self._read
        if start + wanted > len(text.ids):
            start %= max(1, len(text.ids) - wanted)
        first, last = np.searchsorted(text.line_ends, (start, min(start + wanted, len(text.ids))))
        return text.lines(int(first) + (start > 0), int(last) + 1)


def _reserved(length: int) -> int:
    """Tokens for the text of one sample, so that it can begin and end with a line."""
    return length + _LONGEST_LINE


def _parts(split: Split, seed: int) -> Iterator[str]:
    texts: Iterator[str]
    if seed == 0:
        texts = (corpus_text(split, shipped) for shipped in (True, False))
    else:
        whole = corpus_text(split, True) + corpus_text(split, False)
        start = whole.rfind("\n", 0, int(len(whole) * (seed * _GOLDEN % 1.0))) + 1
        texts = iter((whole[start:], whole[:start]))
    for text in texts:
        start = 0
        while start < len(text):
            end = text.find("\n", start + _PART) + 1 or len(text)
            yield text[start:end]
            start = end


@cache
def corpus_text(split: Split, shipped: bool) -> str:
    """Either half of a split's text: what is shipped, or of installed packages."""
    seen: set[str] = set()
    for source in (load_filler_text, _package_text):
        for each in _FOLDERS:
            text = _distinct(source(each), seen)
            if (source is load_filler_text, each) == (shipped, split):
                return text
    raise AssertionError(split)


def _package_text(split: Split) -> str:
    paths = sorted(path for folder in _FOLDERS[split].split() for path in _installed(folder))
    return "\n".join(path.read_bytes().decode("latin-1") for path in paths)


def _installed(folder: str) -> Iterator[Path]:
    package, _, inside = folder.partition("/")
    spec = find_spec(package)
    for root in (spec and spec.submodule_search_locations) or ():
        yield from Path(root).glob(f"{inside}/*.py".lstrip("/"))


def _distinct(text: str, seen: set[str]) -> str:
    """The lines that begin a passage not seen before, from the last one back: what follows each is then settled."""
    lines: list[str] = []
    behind = ""
    for line in reversed(text.split("\n")):
        passage = f"{line.lstrip(' ')}\n{behind}"[:_PASSAGE]
        if passage in seen or len(line) >= _LONGEST_LINE or _LEFT_OUT.search(line):
            continue
        seen.add(passage)
        lines.append(line)
        behind = f"{line}\n{behind}"[:_PASSAGE]
    return "".join(f"{line}\n" for line in reversed(lines))
