"""The text: Python's standard library, divided by the hash of the file name.

The text of the other splits never takes part in training: neither in the weights nor in the tokenizer.
"""

import hashlib
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from sparsekv.planner.tasks.text import Split

# Third-party code, mapping tables, and what installations add.
_SKIPPED_FOLDERS = {"site-packages", "__pycache__", "encodings", "ensurepip", "cjkencodings", "encoded_modules"}
_SKIPPED_NAME = re.compile(r"_sysconfigdata|test_codec(encodings|maps)|unicode_data|badsyntax|bad_coding|big5|euc_")
_LARGEST_HELD_OUT = 100_000
_HELD_OUT_PERCENT = 6


@dataclass(frozen=True, slots=True)
class SourceFile:
    """One file of the standard library: its path below the library's folder, and its text."""

    name: str
    text: str

    @property
    def split(self) -> Split:
        """Where the file belongs: by name, but large files are always for training."""
        bucket = int.from_bytes(hashlib.sha256(f"filler/{self.name}".encode()).digest()[:8], "big") % 100
        if len(self.text) > _LARGEST_HELD_OUT or bucket >= 2 * _HELD_OUT_PERCENT:
            return Split.TRAINING
        if bucket < _HELD_OUT_PERCENT:
            return Split.CALIBRATION
        return Split.VERIFICATION if bucket < _HELD_OUT_PERCENT * 3 // 2 else Split.EVALUATION


def standard_library() -> Path:
    """The folder of the running interpreter's standard library."""
    return Path(sysconfig.get_path("stdlib"))


def source_files(library: Path) -> Iterator[SourceFile]:
    """All text-like sources, sorted by name."""
    for path in sorted(library.rglob("*.py")):
        name = path.relative_to(library).as_posix()
        if _SKIPPED_FOLDERS & set(path.relative_to(library).parts) or _SKIPPED_NAME.search(name):
            continue
        text = path.read_bytes().decode("utf-8", errors="replace").replace("\r\n", "\n")
        if _is_text_like(text):
            yield SourceFile(name, text if text.endswith("\n") else text + "\n")


def split_files(library: Path, split: Split) -> list[SourceFile]:
    """The files of one split, sorted by name."""
    return [file for file in source_files(library) if file.split is split]


def _is_text_like(text: str) -> bool:
    """Leaves out empty files, tables of numbers, and anything that is not mostly ASCII lines."""
    if len(text) < 200 or "\0" in text or "\r" in text:
        return False
    digits = sum(map(text.count, "0123456789")) / len(text)
    foreign = 1 - len(text.encode("ascii", errors="ignore")) / len(text)
    return digits < 0.15 and foreign < 0.02 and max(map(len, text.splitlines())) < 1000
