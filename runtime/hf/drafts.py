"""Decides what of a draft counts, and how long drafts should be: the rules of speculative decoding, apart from any
model.

Sources: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (ICML 2023), algorithm 1; Zhang
et al., Draft & Verify (ACL 2024) on drafts by the model itself.

Shapes: B batch, K drafted tokens, Q = K + 1 checked ones, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sparsekv.plans.exact_gain import DRAFTS, tokens_a_cycle

_FIRST = 4  # before anything was measured
_UNTRIED = 0.97  # of what a length promises that would be captured first
_FRESH = 0.3  # weight of the latest time among those before it
_FADING = 0.98  # of what was agreed on before, a token
_PRIOR_AGREED, _PRIOR_ASKED = 4.5, 5.0
_FIRST_PAUSE = 256  # dense tokens before drafts that did not pay are tried again; twice as many each time


@dataclass(frozen=True, slots=True)
class Verdict:
    """Holds what a check found."""

    accepted_B: torch.Tensor  # drafted tokens that count, the first ones of each row
    next_B: torch.Tensor  # the token behind them


class Judge(Protocol):
    """Draws drafts, and decides which of them dense attention would have drawn."""

    def draft(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """[B]: the next token of a draft, from processed scores."""

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """Returns the verdict of all drafts since the last verdict, by the processed scores of dense attention behind
        each prefix."""


class Greedy:
    """The likeliest token: drafts count as far as they are those of dense attention."""

    def draft(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """The likeliest."""
        return scores_BV.argmax(-1)

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """The longest agreeing prefix, and the likeliest token behind it."""
        likeliest_BQ = scores_BQV.argmax(-1)
        agrees_BK = likeliest_BQ[:, : drafts_BK.shape[1]] == drafts_BK
        accepted_B = agrees_BK.int().cumprod(1).sum(1)
        return Verdict(accepted_B, likeliest_BQ.gather(1, accepted_B[:, None])[:, 0])


class Sampled:
    """Rejection sampling: whatever drafts are, tokens are distributed as dense attention's."""

    def __init__(self) -> None:
        self._drawn_from: list[torch.Tensor] = []

    def draft(self, scores_BV: torch.Tensor) -> torch.Tensor:
        """Drawn from the softmax of the scores."""
        p_BV = scores_BV.softmax(-1)
        self._drawn_from.append(p_BV)
        return torch.multinomial(p_BV, 1)[:, 0]

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """A draft of probability q that dense attention gives p counts with probability min(1, p / q); behind the first
        that does not, a token is drawn from what p has more than q; behind the last, from p."""
        p_BQV, (_, drafted) = scores_BQV.softmax(-1), drafts_BK.shape
        q_BQV = torch.zeros_like(p_BQV)  # nothing was drafted behind the last draft
        for number, drawn_BV in enumerate(self._drawn_from):
            q_BQV[:, number] = drawn_BV
        self._drawn_from.clear()
        p_BK, q_BK = (x[:, :drafted].gather(2, drafts_BK[:, :, None])[:, :, 0] for x in (p_BQV, q_BQV))
        counts_BK = torch.rand_like(p_BK) * q_BK < p_BK
        accepted_B = counts_BK.int().cumprod(1).sum(1)
        row_B = torch.arange(len(accepted_B), device=accepted_B.device)
        p_BV, q_BV = p_BQV[row_B, accepted_B], q_BQV[row_B, accepted_B]
        left_BV = (p_BV - q_BV).clamp(min=0)
        # Rounding may leave nothing of two equal distributions.
        left_BV = torch.where(left_BV.sum(-1, keepdim=True) > 0, left_BV, p_BV)
        return Verdict(accepted_B, torch.multinomial(left_BV, 1)[:, 0])


class DraftLength:
    """Says how many tokens to draft before the next check: those that give most tokens a second, by the share of drafts
    that counted lately and the seconds that cycles of each length took. Where no draft pays it is 0, dense decoding,
    but for one now and then of the shortest length that was tried: another one would be captured for it."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._seen: set[int] = set()
        self._agreed, self._asked = _PRIOR_AGREED, _PRIOR_ASKED
        self._pause, self._dense = _FIRST_PAUSE, 0

    @property
    def agreement(self) -> float:
        """Estimated share of drafted tokens that count where the ones before them do."""
        return self._agreed / self._asked

    def next(self, most: int) -> int:
        """One of DRAFTS, at most `most`."""
        if 0 not in self._seconds:
            return 0
        if len(self._seconds) < 2:
            return max(size for size in DRAFTS if size <= min(most, _FIRST))
        best = max((size for size in DRAFTS if size <= most), key=self._tokens_a_second)
        shortest = min(size for size in self._seen if size)
        if best or self._dense < self._pause or most < shortest:
            return best
        self._pause *= 2
        return shortest

    def ran(self, drafted: int, seconds: float, accepted: list[int]) -> None:
        """A cycle is over.

        Args:
            drafted: tokens of its draft.
            seconds: that it took, the check included.
            accepted: of each row that was not finished, how many of them counted.
        """
        self._dense = 0 if drafted else self._dense + 1
        for count in accepted if drafted else ():
            asked = min(count + 1, drafted)
            self._agreed = self._agreed * _FADING**asked + count
            self._asked = self._asked * _FADING**asked + asked
        if drafted not in self._seen:  # it compiled, or was captured
            self._seen.add(drafted)
            return
        before = self._seconds.get(drafted, seconds)
        self._seconds[drafted] = before + _FRESH * (seconds - before)

    def _tokens_a_second(self, drafted: int) -> float:
        tokens = tokens_a_cycle(self.agreement, drafted)
        return tokens / self._expected_seconds(drafted) * (1.0 if drafted in self._seen else _UNTRIED)

    def _expected_seconds(self, drafted: int) -> float:
        if drafted in self._seconds:
            return self._seconds[drafted]
        dense = self._seconds[0]
        steps = [max(seconds - dense, 0.0) / size for size, seconds in self._seconds.items() if size]
        return dense + drafted * sum(steps) / len(steps)
