"""Decides what of a draft counts: the rules of speculative decoding, apart from any model.

Sources: Leviathan et al., Fast Inference from Transformers via Speculative Decoding (ICML 2023), algorithm 1; Zhang
et al., Draft & Verify (ACL 2024) on drafts by the model itself.

Shapes: B batch, K drafted tokens, Q = K + 1 checked ones, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch


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
