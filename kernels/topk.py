"""Choosing the best entries of a row on the device, without asking the host; equal scores are decided by index.

Shapes: X any leading dimensions, N entries, K listed entries.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch

# Temporaries of the index builders hold about this many elements, whatever the length of the prompt.
BLOCK_ELEMENTS = 1 << 24


def blocks(total: int, elements_each: int, budget: int = BLOCK_ELEMENTS) -> Iterator[slice]:
    """Cuts range(total) into slices whose temporaries hold about `budget` elements; at least one entry each."""
    step = max(1, budget // max(1, elements_each))
    for start in range(0, total, step):
        yield slice(start, min(start + step, total))


def top_mask(scores_XN: torch.Tensor, count_X: torch.Tensor, most: int) -> torch.Tensor:
    """Marks the count_X highest entries of each row; among equals the lower index wins.

    Args:
        scores_XN: scores; entries that must not be chosen hold less than any that may.
        count_X: how many to choose, 0 to `most`; counts differ from row to row.
        most: a bound on `count_X` that the host knows, at most N.
    """
    if most == 0:
        return torch.zeros_like(scores_XN, dtype=torch.bool)
    best_XK = scores_XN.topk(most, dim=-1).values
    least_X1 = best_XK.gather(-1, (count_X - 1).clamp(min=0).unsqueeze(-1))
    above_XN = scores_XN > least_X1
    level_XN = scores_XN == least_X1
    room_X1 = count_X.unsqueeze(-1) - above_XN.sum(-1, keepdim=True)
    return above_XN | (level_XN & (level_XN.cumsum(-1, dtype=torch.int32) <= room_X1))


def ascending(mask_XN: torch.Tensor, width: int, padding: int) -> torch.Tensor:
    """Lists the marked entries of each row in ascending order: int32 [X, width], the rest `padding`. `width` bounds the
    number of marks; marks beyond it are lost (they land in a slot that is cut off)."""
    entries = mask_XN.shape[-1]
    slot_XN = mask_XN.cumsum(-1).sub_(1).masked_fill_(~mask_XN, width).clamp_(max=width)
    listed_XK = mask_XN.new_full((*mask_XN.shape[:-1], width + 1), padding, dtype=torch.int32)
    ids_N = torch.arange(entries, dtype=torch.int32, device=mask_XN.device)
    return listed_XK.scatter_(-1, slot_XN, ids_N.expand(mask_XN.shape))[..., :width]


def top_ascending(scores_XN: torch.Tensor, count_X: torch.Tensor, most: int, padding: int) -> torch.Tensor:
    """The count_X highest entries of each row, ascending: int32 [X, most], the rest `padding`."""
    return ascending(top_mask(scores_XN, count_X, most), most, padding).contiguous()


def best_ascending(scores_N: torch.Tensor, count: int) -> torch.Tensor:
    """The `count` highest entries of one row, ascending: int64 [count]; asks the device. Faster than `top_ascending`:
    one selection and two passes, unless entries left out equal the least one chosen."""
    if count == 0:
        return torch.arange(0, device=scores_N.device)
    least = scores_N.topk(count, sorted=False).values.amin()
    best_K = (scores_N >= least).nonzero().squeeze(1)
    if len(best_K) == count:
        return best_K
    return top_ascending(scores_N[None], torch.tensor([count], device=scores_N.device), count, -1)[0].long()
