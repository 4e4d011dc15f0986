"""The tokens that a decode step attends to: sinks, chosen tokens, recent ones (OmniKV, ICLR 2025, section 3.2).

Shapes: B batch, G KV heads, N chosen tokens at most, T scored tokens of all rows; g is 1 (one choice for all KV heads)
or G.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsekv.kernels.cpu_threads import one_thread, spread
from sparsekv.kernels.tiles import NO_TOKEN
from sparsekv.kernels.topk import best_ascending

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
        if self.counts_B.device == device:
            return self
        return Selection(self.chosen_BgN.to(device), self.counts_B.to(device), self.sink, self.recent)

    def listed(self, lengths_B: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Sinks, chosen and recent tokens of each row as one list, in this order and without gaps, for stores that
        fetch tokens: int32 [B, g, sink + N + recent], -1 behind them; and int32 [B], how many. Rows that attend to
        everything list nothing."""
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
    other. The score of a token is the largest attention weight that any head of the list gives it; scores are float32
    [g, tokens], those of row b in [starts_B[b], starts_B[b] + length)."""

    starts_B: torch.Tensor  # int32; -1 where a row is not scored
    tokens: int  # room for the tokens of all rows
    lists: int  # g: 1 (one score for all heads) or G (one for the heads of each KV head)
    scratch: torch.Tensor | None = None  # float32 for the logits and scores of Triton; allocated where there is none


_READS = 16  # elements that are read in the time that it takes to rank one


def choose(
    scores_gT: torch.Tensor,
    scoring: Scoring,
    lengths_B: torch.Tensor,
    counts_B: torch.Tensor,
    *,
    capacity: int,
    most: int,
    sink: int,
    recent: int,
    backend: str,
) -> torch.Tensor:
    """The `counts_B[b]` best tokens among [sink, length - recent) of every row that is scored.

    Among equal scores the lower position wins. On a GPU nothing waits for the device.

    Args:
        scores_gT: float32, from 0 to below 2; where each row's begin says `scoring`.
        counts_B: int32, how many to choose: no more than there are. Rows that are not scored hold anything.
        capacity: most tokens that a row can have.
        most: length of the lists.
        backend: of the attention; "reference" asks the device.

    Returns:
        int32 [B, g, most]: ascending positions, the rest NO_TOKEN.
    """
    if scores_gT.is_cuda and backend != "reference":
        from sparsekv.kernels.decode.radix import choose as choose_by_radix

        return choose_by_radix(
            scores_gT, scoring.starts_B, lengths_B, counts_B, capacity=capacity, most=most, sink=sink, recent=recent
        )
    with one_thread():
        shape, device = (lengths_B.shape[0], scoring.lists, most), scores_gT.device
        chosen_BgN = torch.full(shape, NO_TOKEN, dtype=torch.int32, device=device)
    rows = zip(scoring.starts_B.tolist(), lengths_B.tolist(), counts_B.tolist(), strict=True)
    choices = [
        (chosen_BgN[b, g, :count], scores_gT[g, start + sink : start + length - recent])
        for b, (start, length, count) in enumerate(rows)
        if start >= 0
        for g in range(scoring.lists)
    ]

    def fill(choice: tuple[torch.Tensor, torch.Tensor]) -> None:
        chosen_N, free_S = choice
        best_N = best_ascending(free_S, len(chosen_N))
        chosen_N.copy_(torch.where(best_N < 0, NO_TOKEN, best_N + sink))  # fewer where scores are no numbers

    spread(fill, choices, elements=_READS * sum(len(free_S) for _, free_S in choices), device=device)
    return chosen_BgN
