"""The results of a comparison with dense, sample by sample."""

from __future__ import annotations

import math
import operator
from dataclasses import astuple, dataclass
from typing import Annotated

from pydantic import Field

from sparsekv.plans.types import Natural, Positive

Exact = Annotated[float, Field(strict=True, allow_inf_nan=False)]  # not rounded: two halves are to give one whole


@dataclass(frozen=True, slots=True)
class LongText:
    """Dense's own text behind a prompt, read by a mode: mean divergence in nats, and the positions, of those scored, at
    which the likeliest token is dense's."""

    kl: Exact
    agreed: Natural
    scored: Positive


@dataclass(frozen=True, slots=True)
class Outcome:
    """One sample.

    Attributes:
        correct: whether greedy generation gives the answer; None where there is no text to compare.
        kl: mean divergence KL(dense || sparse) over the positions of the answer, in nats.
        text: the same on dense's own continuation, where that is read.
    """

    correct: bool | None
    kl: float = 0.0
    text: LongText | None = None

    @property
    def is_finite(self) -> bool:
        return math.isfinite(self.kl) and (self.text is None or math.isfinite(self.text.kl))


@dataclass(frozen=True, slots=True)
class Spent:
    """The work of a mode: tiles of prefill, tokens of decode, beside those of dense."""

    tiles: float = 0.0
    causal_tiles: float = 0.0
    attended: float = 0.0
    cached: float = 0.0

    @property
    def density(self) -> float:
        """The share of the tiles of dense prefill; 1 where nothing was prefilled."""
        return self.tiles / self.causal_tiles if self.causal_tiles else 1.0

    @property
    def read(self) -> float:
        """The share of the cached tokens that decode attended to; 1 where nothing was decoded."""
        return self.attended / self.cached if self.cached else 1.0

    def __add__(self, other: Spent) -> Spent:
        return Spent(*map(operator.add, astuple(self), astuple(other)))


@dataclass(frozen=True, slots=True)
class Comparison:
    """One mode on some samples."""

    outcomes: tuple[Outcome, ...]
    spent: Spent

    @property
    def kl(self) -> tuple[float, ...]:
        return tuple(outcome.kl for outcome in self.outcomes)
