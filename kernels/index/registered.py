"""Tiles and columns of heads whose pattern names a prefill rule from outside (kernels/methods.py).

Shapes as in layout.py; M key tiles, K keys, E entries: M tiles of all row tiles, then K columns.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.block_sparse import tile_limits
from sparsekv.kernels.index.layout import FamilyHeads, HeadIndex, IndexCall, IndexLayout
from sparsekv.kernels.methods import Layer, PrefillRule, Tiles, method_of
from sparsekv.kernels.tiles import NO_COLUMN, NO_TILE, pack_bits
from sparsekv.kernels.topk import ascending
from sparsekv.plans.errors import ShapeError


def index_registered(group: FamilyHeads, call: IndexCall) -> HeadIndex:
    """The choice of each head's rule, or the best of its scores within the budget."""
    layout, heads = call.layout, on_device(list(group.heads), call.layout.device)
    mandatory_BTM, visible_BTM = tile_limits(layout.key_tiles, layout.locate())
    shape = (layout.batch, len(group.heads))
    tiles_BhTM = torch.zeros((*shape, *visible_BTM.shape[1:]), dtype=torch.bool, device=layout.device)
    columns_BhK: torch.Tensor | None = None
    scored: dict[str, Tiles] = {}
    for number, pattern in enumerate(group.unique):
        own = on_device([at for at, one in enumerate(group.own) if one == number], layout.device)
        share = pattern.budget.resolve(layout.chunk.longest) / layout.chunk.longest
        whole = scored.get(pattern.name) or _ruled(pattern.name, pattern.budget.fraction or share, call)
        if whole.tiles_BHTM.is_floating_point():  # scores are those of every budget
            scored[pattern.name] = whole
        part = Tiles(*(None if x is None else x.index_select(1, heads[own]) for x in whole))  # type: ignore[arg-type]
        chosen = _best(part, share, mandatory_BTM, visible_BTM, layout) if part.tiles_BHTM.is_floating_point() else part
        tiles_BhTM[:, own] = (chosen.tiles_BHTM | mandatory_BTM[:, None]) & visible_BTM[:, None]
        if chosen.columns_BHK is not None:
            if columns_BhK is None:
                columns_BhK = torch.zeros((*shape, layout.chunk.longest), dtype=torch.bool, device=layout.device)
            columns_BhK[:, own] = chosen.columns_BHK
    return _listed(group.heads, tiles_BhTM, columns_BhK, visible_BTM, layout)


def _ruled(name: str, budget: float, call: IndexCall) -> Tiles:
    layout = call.layout
    layer = Layer(call.layer, layout.chunk, layout.tile, call.scale, layout.window, call.softmax)
    made = method_of(PrefillRule, name).tiles(call.q_BHSD, call.k_BGKD, layer, budget)
    tiles = Tiles(made) if isinstance(made, torch.Tensor) else made
    expected = (layout.batch, layout.heads, layout.row_tiles, layout.key_tiles)
    if tuple(tiles.tiles_BHTM.shape) != expected:
        raise ShapeError(
            f"expected tiles {list(expected)} of the prefill rule {name} (batch, heads, row tiles, key tiles), found "
            f"{list(tiles.tiles_BHTM.shape)}"
        )
    return tiles


def _best(
    scores: Tiles, share: float, mandatory_BTM: torch.Tensor, visible_BTM: torch.Tensor, layout: IndexLayout
) -> Tiles:
    """The entries with the most attention for their cost, of each head within a share of the visible tiles."""
    batch, heads, rows, tiles = scores.tiles_BHTM.shape
    values_BhTM = scores.tiles_BHTM.float().nan_to_num(0.0).masked_fill(mandatory_BTM[:, None], torch.inf)
    values_BhE = values_BhTM.masked_fill(~visible_BTM[:, None], -torch.inf).flatten(2)
    cost_BE = torch.ones_like(visible_BTM, dtype=torch.float32).flatten(1)
    if scores.columns_BHK is not None:
        keys, key = scores.columns_BHK.shape[2], layout.tile.key
        seen_BM = visible_BTM.sum(1)  # row tiles that see a key tile
        cost_BK = seen_BM.repeat_interleave(key, 1)[:, :keys] / key
        value_BhK = scores.columns_BHK.float().nan_to_num(0.0) * rows / cost_BK[:, None].clamp(min=1e-9)
        values_BhE, cost_BE = torch.cat((values_BhE, value_BhK), 2), torch.cat((cost_BE, cost_BK), 1)
    ranked_BhE = values_BhE.sort(stable=True, dim=-1, descending=True).indices
    spent_BhE = cost_BE[:, None].expand_as(values_BhE).gather(-1, ranked_BhE).cumsum(-1)
    within_BhE = spent_BhE <= share * visible_BTM.sum((1, 2))[:, None, None]
    chosen_BhE = torch.zeros_like(within_BhE).scatter_(-1, ranked_BhE, within_BhE) & (values_BhE > -torch.inf)
    split = rows * tiles
    columns = None if scores.columns_BHK is None else chosen_BhE[..., split:]
    return Tiles(chosen_BhE[..., :split].view(batch, heads, rows, tiles), columns)


def _listed(
    heads: tuple[int, ...],
    tiles_BhTM: torch.Tensor,
    columns_BhK: torch.Tensor | None,
    visible_BTM: torch.Tensor,
    layout: IndexLayout,
) -> HeadIndex:
    counts_BhT = tiles_BhTM.sum(-1, dtype=torch.int32)
    listed_BhTW = ascending(tiles_BhTM, layout.key_tiles, NO_TILE).contiguous()
    most = 0 if columns_BhK is None else int(columns_BhK.sum(-1).max())  # waits for the device
    if columns_BhK is None or not most:
        return HeadIndex.of_tiles(heads, listed_BhTW, counts_BhT)
    columns_BhC = ascending(columns_BhK, most, NO_COLUMN).contiguous()
    of_tile_BhC = columns_BhC.clamp(min=0).long() // layout.tile.key
    open_BhTM = visible_BTM[:, None] & ~tiles_BhTM
    live_BhTC = open_BhTM.gather(-1, of_tile_BhC[:, :, None].expand(-1, -1, open_BhTM.shape[2], -1))
    live_BhTC &= (columns_BhC != NO_COLUMN)[:, :, None]
    return HeadIndex(heads, listed_BhTW, counts_BhT, columns_BhC, pack_bits(live_BhTC))
