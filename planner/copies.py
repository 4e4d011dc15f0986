"""Copies among texts: what a second one shows is what the first one showed, so that both count as one sample.

Texts are compared as the tokens that a model is given, after they were cut. What they have in common may stand anywhere
in them, at their beginning (a system prompt, examples) or behind headers of different lengths (a document), so windows
of 16 tokens are compared. Long texts are thinned to about a thousand each, by the least hash of every stretch, which
picks the same ones wherever a stretch stands (winnowing: Schleimer, Wilkerson and Aiken, SIGMOD 2003).

Samples of a task need no such look: each is drawn by itself, and none is another one but for its end.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from sparsekv.planner.tasks.text import Ids

END = 64  # tokens that a copy may differ in at any length: a question, an answer
_SHARE = 0.1  # of a text, that a copy may differ in
_WINDOW = 16
_WINDOWS = 1024  # of a text, about
_FACTORS = np.random.default_rng(0).integers(1 << 63, size=_WINDOW + 1, dtype=np.uint64) * 2 + 1

Hashes = npt.NDArray[np.uint64]


@dataclass(slots=True)
class Seen:
    """Texts of one length.

    A text is a copy where all of its windows but 64, or but a tenth if that is more, stand in one earlier text: where
    it equals that one but for the last 64 tokens, for instance. Of a text of less than 128 windows it is all but half.

    Attributes:
        length: of the longest text, about; those that are compared have it in common.
    """

    length: int
    _windows: list[Hashes] = field(default_factory=list)

    def add(self, ids: Ids) -> None:
        """Adds a text, be it a copy or not."""
        self._windows.append(_windows(ids, self.length)[0])

    def is_new(self, ids: Ids) -> bool:
        """Adds a text, unless it is a copy; whether it was added."""
        windows, counts = _windows(ids, self.length)
        apart = max(_SHARE * counts.sum(), min(END, counts.sum() // 2))
        if any(counts[~_stand_in(windows, one)].sum() <= apart for one in self._windows):
            return False
        self._windows.append(windows)
        return True


def _stand_in(windows: Hashes, others: Hashes) -> npt.NDArray[np.bool_]:
    """Returns which of the windows are among the others, which ascend."""
    found: npt.NDArray[np.bool_] = others[np.searchsorted(others, windows).clip(max=len(others) - 1)] == windows
    return found


def _windows(ids: Ids, length: int) -> tuple[Hashes, npt.NDArray[np.int64]]:
    """Hashes of different windows of a text, ascending, and how many windows each stands for."""
    width = min(_WINDOW, len(ids))
    rows = np.lib.stride_tricks.sliding_window_view(ids.astype(np.uint64), width)
    hashes = (rows @ _FACTORS[:width]) * _FACTORS[-1]
    hashes ^= hashes >> np.uint64(32)  # the least of them are to be any
    span = 1
    while 2 * span * _WINDOWS <= length and span < len(hashes):
        hashes = np.minimum(hashes[:-span], hashes[span:])
        span *= 2
    return np.unique(hashes, return_counts=True)
