"""Adaptive: the fewest tiles of each row tile that hold a given share of its estimated attention.

The rule is FlexPrefill's cumulative-attention index selection and XAttention's threshold block selection, row by row
over the scores of tile_scores.py; the tiles that every pattern computes count towards the share.

Shapes as in layout.py; R row tiles of one block, M key tiles, K candidates of a row.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.block_sparse import tile_limits
from sparsekv.kernels.index.layout import HeadGroup, HeadIndex, IndexCall, RowTiles, empty_tiles, largest
from sparsekv.kernels.index.tile_scores import ScoreKind, tile_scores
from sparsekv.kernels.tiles import NO_TILE
from sparsekv.kernels.topk import ascending, mark_best


def index_adaptive(group: HeadGroup, call: IndexCall) -> HeadIndex:
    """The smallest set of tiles a row whose scores reach `mass` of the row's total, mandatory tiles included.

    Best first, among equals the lower tile. Never more than `max_tiles`, or the mandatory tiles of a whole row tile
    where these are more; a mass of 1 takes all that a row sees, as far as `max_tiles` allows.
    """
    layout, heads = call.layout, group.heads
    bounds = layout.tile_bounds([pattern.max_tiles for pattern in group.patterns])
    width = layout.most_tiles(largest(bounds))
    bound_Bh1 = on_device(bounds, layout.device).unsqueeze(-1)
    # Rounding must not decide whether the whole of a row has been reached.
    shares = [pattern.mass if pattern.mass < 1.0 else float("inf") for pattern in group.patterns]
    mass_h1 = on_device(shares, layout.device, torch.float32)[:, None]
    tiles_BhTW, counts_BhT = empty_tiles(layout, len(heads), width)
    for kind, own in _by_score(group).items() if width else ():
        into = on_device(own, layout.device)
        for rows, scores_BhRM in tile_scores(kind, [heads[number] for number in own], call):
            chosen, counts = _choose(scores_BhRM, mass_h1[into], bound_Bh1[:, into], width, layout.locate().part(rows))
            tiles_BhTW[:, into, rows] = ascending(chosen, width, NO_TILE)
            counts_BhT[:, into, rows] = counts.to(torch.int32)
    return HeadIndex.of_tiles(heads, tiles_BhTW, counts_BhT)


def _by_score(group: HeadGroup) -> dict[ScoreKind, list[int]]:
    """Positions in the group by kind of score."""
    kinds: dict[ScoreKind, list[int]] = {}
    for number, pattern in enumerate(group.patterns):
        kinds.setdefault(pattern.score, []).append(number)
    return kinds


def _choose(
    scores_BhRM: torch.Tensor, mass_h1: torch.Tensor, bound_Bh1: torch.Tensor, width: int, rows: RowTiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Marks the tiles of each row, and counts them. Scores that are not numbers choose nothing."""
    mandatory_B1RM, visible_B1RM = (x.unsqueeze(1) for x in tile_limits(scores_BhRM.shape[-1], rows))
    scores_BhRM = scores_BhRM.nan_to_num(0.0).masked_fill_(~visible_B1RM, 0.0)
    needed_BhR1 = (mass_h1 * scores_BhRM.sum(-1)).nan_to_num_(0.0, posinf=torch.inf).unsqueeze(-1)
    held_BhR1 = (scores_BhRM * mandatory_B1RM).sum(-1, keepdim=True)
    scores_BhRM.masked_fill_(mandatory_B1RM, torch.inf).masked_fill_(~visible_B1RM, -torch.inf)
    best_BhRK = scores_BhRM.topk(min(width, scores_BhRM.shape[-1]), dim=-1).values
    reached_BhRK = held_BhR1 + best_BhRK.masked_fill(best_BhRK.isinf(), 0.0).cumsum(-1)
    enough_BhR = (held_BhR1 < needed_BhR1).squeeze(-1) + (reached_BhRK[..., :-1] < needed_BhR1).sum(-1)
    counts_BhR = torch.maximum(enough_BhR, mandatory_B1RM.sum(-1))
    counts_BhR = torch.minimum(torch.minimum(counts_BhR, bound_Bh1), visible_B1RM.sum(-1))
    return mark_best(scores_BhRM, best_BhRK, counts_BhR), counts_BhR
