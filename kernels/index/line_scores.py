"""Scores of the columns and diagonals of a layer's heads, so that one estimate can serve many patterns.

Shapes: B batch, h heads, S keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class LineScores:
    """How much attention each line received, float32, summing over a head to its sampled queries."""

    vertical_BhS: torch.Tensor  # index j: the column of key j
    slash_BhS: torch.Tensor  # index o: the diagonal i - j = o
