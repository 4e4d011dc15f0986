"""Which steps of an engine that drafts by its plan vLLM's model runner V2 captures, by sizes and rows."""

from __future__ import annotations

from collections.abc import Sequence


def captured(sizes: Sequence[int], rows: int, lengths: Sequence[int]) -> set[tuple[int, int]]:
    """Returns the tokens, and those of a row, of steps that vLLM captures: `CudaGraphManager._init_candidates`, with a
    routine of its own for decode."""
    return {
        (tokens, new)
        for size in sizes
        for new in lengths
        if (tokens := -(-size // new) * new) <= min(rows * max(lengths), rows * new, max(sizes))
    }


def launched(sizes: Sequence[int], rows: int, drafted: int, most: int = 512) -> list[tuple[str, int]]:
    """Returns the steps, and their rows, that find no graph though they have no more than `most` tokens: vLLM looks for
    one among those of the smallest captured size that holds the tokens."""
    kinds = {"draft": (1, (1,)), "step": (1, (1, drafted + 1)), "verification": (drafted + 1, (1, drafted + 1))}
    found = []
    for kind, (new, lengths) in kinds.items():
        made = captured(sizes, rows, lengths)
        ends = sorted({tokens for tokens, _ in made})
        for count in range(1, min(rows, most // new) + 1):
            end = next((end for end in ends if end >= count * new), None)
            if (end, new) not in made:
                found.append((kind, count))
    return found
