"""What the kernels of one build need to know from the host, sent to the device in a single copy.

Shapes: B batch, h heads that are built, U units of a pass, P slots (heads) of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.kernels.index.call import IndexCall, ceil_div
from sparsekv.kernels.topk import on_device
from sparsekv.plans.patterns import VerticalSlash

NO_HEAD = -1
_ALIGNED = 4  # int32 numbers of 16 bytes: every field begins where Triton's usual launch expects it


@dataclass(frozen=True, slots=True)
class Budgets:
    """What each head may spend in each batch row, on the host: [B][h]."""

    sampled: list[list[int]]  # queries
    columns: list[list[int]]
    slashes: list[list[int]]
    tiles: list[list[int]]  # in any row, mandatory ones included; at least those

    def part(self, heads: slice) -> Budgets:
        """Only these heads."""
        cut = ([row[heads] for row in rows] for rows in (self.sampled, self.columns, self.slashes, self.tiles))
        return Budgets(*cut)


@dataclass(frozen=True, slots=True)
class Numbers:
    """The same and more on the device, int32."""

    past_B: torch.Tensor
    length_B: torch.Tensor
    head_h: torch.Tensor  # each head's place among all query heads
    sampled_Bh: torch.Tensor
    columns_Bh: torch.Tensor
    slashes_Bh: torch.Tensor
    tiles_Bh: torch.Tensor
    stats_UP: torch.Tensor  # the heads that a program of a pass serves; NO_HEAD where a KV head has no more
    lines_UP: torch.Tensor


def budgets_of(patterns: Sequence[VerticalSlash], call: IndexCall) -> Budgets:
    """The budgets of the patterns, resolved for this call."""
    places = [
        (rows, length, call.mandatory_tiles(phase))
        for rows, length, phase in zip(call.rows, call.chunk.lengths, call.phases, strict=True)
    ]
    # Heads mostly share a pattern, and the host is what a short prompt waits for: each is resolved once.
    known = {
        id(pattern): [_resolve(pattern, *place, call.tile.key) for place in places]
        for pattern in {id(one): one for one in patterns}.values()
    }
    found = [known[id(pattern)] for pattern in patterns]
    sampled, columns, slashes, tiles = (
        [[head[row][kind] for head in found] for row in range(call.batch)] for kind in range(4)
    )
    return Budgets(sampled, columns, slashes, tiles)


def _resolve(pattern: VerticalSlash, rows: int, length: int, mandatory: int, key: int) -> tuple[int, int, int, int]:
    """What a head may spend in one batch row, in the order of Budgets."""
    most = max(ceil_div(pattern.max_tiles.resolve(length), key), mandatory)
    return min(pattern.last_q, rows), pattern.vertical.resolve(length), pattern.slash.resolve(length), most


def largest(numbers: list[list[int]]) -> int:
    """Over heads and batch rows."""
    return max(max(row) for row in numbers)


def send(
    heads: Sequence[int], budgets: Budgets, stats_units: list[list[int]], lines_units: list[list[int]], call: IndexCall
) -> Numbers:
    """Packs the numbers into one tensor, and takes it apart again on the device."""
    past, length, own, sampled, columns, slashes, tiles, stats, lines = send_fields(
        [
            list(call.chunk.past),
            list(call.chunk.lengths),
            list(heads),
            *map(flat, (budgets.sampled, budgets.columns, budgets.slashes, budgets.tiles, stats_units, lines_units)),
        ],
        call.device,
    )
    stats_UP, lines_UP = stats.view(len(stats_units), -1), lines.view(len(lines_units), -1)
    return Numbers(past, length, own, sampled, columns, slashes, tiles, stats_UP, lines_UP)


def send_fields(fields: list[list[int]], device: torch.device) -> list[torch.Tensor]:
    """Each list as an int32 tensor on the device, all in one copy."""
    padded = [field + [0] * (-len(field) % _ALIGNED) for field in fields]
    packed = on_device(flat(padded), device, torch.int32)
    return list(packed.split([size for field in fields for size in (len(field), -len(field) % _ALIGNED)])[::2])


def units_of(heads: Sequence[int], group_size: int, slots: int) -> list[list[int]]:
    """Deals the heads into units of up to `slots` heads that share a KV head, those of one KV head side by side.

    A head is named by its position in `heads`; short units are filled with NO_HEAD.
    """
    members: dict[int, list[int]] = {}
    for position, head in enumerate(heads):
        members.setdefault(head // group_size, []).append(position)
    return [
        (own[start : start + slots] + [NO_HEAD] * slots)[:slots]
        for _, own in sorted(members.items())
        for start in range(0, len(own), slots)
    ]


def flat(rows: list[list[int]]) -> list[int]:
    """Row after row."""
    return [number for row in rows for number in row]
