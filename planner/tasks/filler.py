"""Filler text: encoded once, sliced at line boundaries afterwards."""

from __future__ import annotations

import gzip
import io
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from sparsekv.planner.tasks.encoding import PieceEncoder
from sparsekv.planner.tasks.types import Ids, Mask, Split, TaskError

_DATA = Path(__file__).parent / "data"


@dataclass(frozen=True, slots=True, eq=False)
class Filler:
    """Encoded text.

    Attributes:
        ids: token ids, of any integer type; may be a memory map.
        line_ends: ascending indices just behind every newline; the last is `len(ids)`.
    """

    ids: npt.NDArray[np.integer]
    line_ends: npt.NDArray[np.int64]

    @classmethod
    def from_text(cls, text: str, encoder: PieceEncoder) -> Filler:
        """Encodes text line by line."""
        lines = encoder.encode_lines(list(io.StringIO(text, newline="\n")))
        ends = np.cumsum([len(line) for line in lines], dtype=np.int64)
        return cls(np.fromiter((token for line in lines for token in line), np.int32, int(ends[-1])), ends)

    def excerpt(self, count: int, rng: np.random.Generator) -> tuple[Ids, npt.NDArray[np.int64]]:
        """Exactly `count` tokens that end with a line, and the indices in them where statements may stand.

        The beginning may fall inside a line. Text shorter than `count` repeats from its start.
        """
        if count == 0:
            return np.zeros(0, np.int32), np.zeros(1, np.int64)
        usable = self.line_ends[np.searchsorted(self.line_ends, min(count, len(self.ids))) :]
        end = int(usable[rng.integers(len(usable))])
        if end >= count:
            ids = self.ids[end - count : end].astype(np.int32)
        else:
            ids = np.resize(np.roll(self.ids, -end)[::-1], count)[::-1].astype(np.int32)
        return ids, self._breaks(end, count)

    def _breaks(self, end: int, count: int) -> npt.NDArray[np.int64]:
        rounds = range(-(-max(count - end, 0) // len(self.ids)), 0, -1)
        ends = [self.line_ends - turn * len(self.ids) for turn in rounds]
        low, high = np.searchsorted(self.line_ends, (max(end - count, 0), end), side="right")
        breaks = np.concatenate([*ends, self.line_ends[low:high]]) - (end - count)
        return breaks[breaks > 0]


def plant(ids: Ids, breaks: npt.NDArray[np.int64], lines: list[list[int]], wanted: Ids) -> tuple[Ids, Mask]:
    """Puts lines into filler, each at the first break at or behind its wanted index.

    `wanted` ascends; lines keep their order.

    Returns:
        The token ids and, for each, whether it is filler.
    """
    sizes = [len(line) for line in lines]
    tokens = np.fromiter((token for line in lines for token in line), np.int32, sum(sizes))
    if not len(ids):
        return tokens, np.zeros(len(tokens), np.bool_)
    places = breaks[np.minimum(np.searchsorted(breaks, wanted), len(breaks) - 1)]
    is_text = np.ones(len(ids) + len(tokens), np.bool_)
    is_text[np.repeat(places, sizes) + np.arange(len(tokens))] = False
    planted = np.empty(len(is_text), np.int32)
    planted[is_text] = ids
    planted[~is_text] = tokens
    return planted, is_text


def load_filler_text(split: Split) -> str:
    """The text shipped for calibration or evaluation.

    Raises:
        TaskError: for training, whose text is not shipped.
    """
    if split is Split.TRAINING:
        raise TaskError("expected calibration or evaluation, found training; build a Filler from your own text")
    return gzip.decompress((_DATA / f"{split.value}.txt.gz").read_bytes()).decode()
