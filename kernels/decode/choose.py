"""The tokens that a filter layer chooses: the best scores of each row, ascending.

Source: OmniKV (ICLR 2025), section 3.2, context selector.

Shapes: B batch, g lists of a row, T scored tokens of all rows, N listed tokens.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.cpu_threads import one_thread, spread
from sparsekv.kernels.decode.selection import Scoring
from sparsekv.kernels.tiles import NO_TOKEN
from sparsekv.kernels.topk import best_ascending

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
        scoring: as given to `decode_attention`.
        lengths_B: int32, tokens of each row.
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
