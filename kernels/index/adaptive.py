"""Adaptive: the fewest tiles of each row tile that hold a given share of its estimated attention.

The rule is FlexPrefill's cumulative-attention index selection and XAttention's threshold block selection, row by row
over the scores of tile_scores.py; the tiles that every pattern computes count towards the share.

Shapes as in call.py; R row tiles of one block, M key tiles, K candidates of a row.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.layout import HeadIndex, IndexCall, RowTiles, empty_tiles, without_columns
from sparsekv.kernels.index.tile_scores import ScoreKind, TileScores, tile_scores
from sparsekv.kernels.tiles import NO_TILE
from sparsekv.kernels.topk import ascending, mark_best
from sparsekv.plans.patterns import Adaptive


def index_adaptive(patterns: Sequence[Adaptive], heads: Sequence[int], call: IndexCall, rows: RowTiles) -> HeadIndex:
    """The smallest set of tiles a row whose scores reach `mass` of the row's total, mandatory tiles included.

    Best first, among equals the lower tile. Never more than `max_tiles`, or the mandatory tiles of a whole row tile
    where these are more; a mass of 1 keeps all that a row sees, as far as `max_tiles` allows.
    """
    bounds = call.tile_bounds([pattern.max_tiles for pattern in patterns])
    width = call.most_tiles(max(max(row) for row in bounds))
    bound_Bh1 = on_device(bounds, call.device).unsqueeze(-1)
    mass_h1 = on_device([_share(pattern) for pattern in patterns], call.device, torch.float32)[:, None]
    tiles_BhTW, counts_BhT = empty_tiles(call, len(heads), width)
    for kind, own in _by_score(patterns).items() if width else ():
        for found in _scores(kind, [heads[place] for place in own], call, rows):
            into = on_device([own[place] for place in found.places], call.device)
            part = rows.part(found.rows)
            chosen, counts = _choose(found.scores_BhRM, mass_h1[into], bound_Bh1[:, into], width, part)
            tiles_BhTW[:, into, found.rows] = ascending(chosen, width, NO_TILE)
            counts_BhT[:, into, found.rows] = counts.to(torch.int32)
    return without_columns(call, tiles_BhTW, counts_BhT)


def _scores(kind: ScoreKind, heads: Sequence[int], call: IndexCall, rows: RowTiles) -> Iterator[TileScores]:
    if call.by_triton and kind == "antidiagonal":
        from sparsekv.kernels.index.triton.adaptive import takes, tile_scores_by_triton

        if takes(call):
            return tile_scores_by_triton(heads, call)
    return tile_scores(kind, heads, call, rows)


def _by_score(patterns: Sequence[Adaptive]) -> dict[ScoreKind, list[int]]:
    kinds: dict[ScoreKind, list[int]] = {}
    for place, pattern in enumerate(patterns):
        kinds.setdefault(pattern.score, []).append(place)
    return kinds


def _share(pattern: Adaptive) -> float:
    # Rounding must not decide whether the whole of a row has been reached.
    return pattern.mass if pattern.mass < 1.0 else float("inf")


def _choose(
    scores_BhRM: torch.Tensor, mass_h1: torch.Tensor, bound_Bh1: torch.Tensor, width: int, rows: RowTiles
) -> tuple[torch.Tensor, torch.Tensor]:
    """Marks the tiles of each row, and counts them. Scores that are not numbers choose nothing."""
    mandatory_B1RM, visible_B1RM = (x.unsqueeze(1) for x in _limits(scores_BhRM.shape[-1], rows))
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


def _limits(tiles: int, rows: RowTiles) -> tuple[torch.Tensor, torch.Tensor]:
    """Which tiles a row must take, and which it may: bool [B, R, M]."""
    tile_M = torch.arange(tiles, device=rows.base_BT.device)
    base_BR1, end_BR1, seen_BR1 = (x.unsqueeze(-1) for x in (rows.base_BT, rows.end_BT, rows.seen_BT))
    visible_BRM = (tile_M >= seen_BR1) & (tile_M <= end_BR1)
    return ((tile_M == 0) | (tile_M >= base_BR1 - 1)) & visible_BRM, visible_BRM
