"""Says which tokens a decode step attends to: sinks, chosen tokens, recent ones (OmniKV, ICLR 2025, section 3.2).

Shapes: B batch, G KV heads, N chosen tokens at most; g is 1 (one choice for all KV heads) or G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

ALL = -1  # a count: the row attends to everything


@dataclass(frozen=True, slots=True, eq=False)
class Selection:
    """The tokens of a sparse layer, row by row: a row attends to everything, or to `sink + count + recent` tokens.

    A row of length L with a count c >= 0 attends to tokens [0, sink), to the first c entries of its list, and to
    [L - recent, L). The list names each token once and none outside [sink, L - recent); nobody asks the device.
    Negative entries are skipped.
    """

    chosen_BgN: torch.Tensor  # int32
    counts_B: torch.Tensor  # int32: chosen tokens of each row, or ALL
    sink: int
    recent: int

    @property
    def most(self) -> int:
        """Tokens that a row attends to at most, unless it attends to everything."""
        return self.sink + self.chosen_BgN.shape[2] + self.recent

    def to(self, device: torch.device) -> Selection:
        """The same selection for keys on that device; itself where it is there."""
        if self.counts_B.device == device:
            return self
        return Selection(self.chosen_BgN.to(device), self.counts_B.to(device), self.sink, self.recent)

    def listed(self, lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sinks, chosen and recent tokens of each row as one list, in this order and without gaps, for stores that
        fetch tokens: int32 [B, g, sink + N + recent], -1 behind them; and int32 [B], how many.

        Rows that attend to everything list nothing.
        """
        chosen_BgN, sink = self.chosen_BgN, self.sink
        batch, lists, _ = chosen_BgN.shape
        number_M = torch.arange(self.most, dtype=torch.int32, device=chosen_BgN.device)
        count_B1 = self.counts_B[:, None].clamp(min=0)
        total_B = torch.where(self.counts_B < 0, 0, self.counts_B + sink + self.recent)
        recent_BM = lengths_B[:, None] - self.recent + number_M - sink - count_B1
        ends_BM = torch.where(number_M < sink, number_M, recent_BM)[:, None]
        at_M = (number_M - sink).clamp(0, max(chosen_BgN.shape[2] - 1, 0)).long()
        none_Bg1 = chosen_BgN.new_full((batch, lists, 1), -1)
        middle_BgM = (chosen_BgN if chosen_BgN.shape[2] else none_Bg1).index_select(2, at_M)
        is_chosen_BM = (number_M >= sink) & (number_M < sink + count_B1)
        listed_BgM = torch.where(is_chosen_BM[:, None], middle_BgM, ends_BM)
        return listed_BgM.masked_fill((number_M >= total_B[:, None])[:, None], -1), total_B


@dataclass(frozen=True, slots=True, eq=False)
class Scoring:
    """Says which rows of a decode call get a score for every token, and where their scores lie: one row behind the
    other.

    The score of a token is the largest attention weight that any head of the list gives it; scores are float32
    [g, tokens], those of row b in [starts_B[b], starts_B[b] + length).
    """

    starts_B: torch.Tensor  # int32; -1 where a row is not scored
    tokens: int  # room for the tokens of all rows
    lists: int  # g: 1 (one score for all heads) or G (one for the heads of each KV head)
    scratch: torch.Tensor | None = None  # float32 for the logits and scores of Triton; allocated where there is none
