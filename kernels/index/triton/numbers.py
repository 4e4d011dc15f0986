"""What the kernels of one build need to know from the host, sent to the device in a single copy.

Shapes: B batch, h heads that are built, U units of a pass, P slots (heads) of a unit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from sparsekv.kernels.device_cache import kept_on_device, on_device
from sparsekv.kernels.index.layout import Layout, ceil_div
from sparsekv.plans.patterns import VerticalSlash

NO_HEAD = -1
Fields = tuple[tuple[int, ...], ...]
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
    stats_units: torch.Tensor  # [U * P] heads that a program of a pass serves; NO_HEAD where a KV head has no more
    lines_units: torch.Tensor


def budgets_of(patterns: Sequence[VerticalSlash], call: Layout) -> Budgets:
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


def fields_of(
    heads: Sequence[int], budgets: Budgets, stats_units: list[list[int]], lines_units: list[list[int]], layout: Layout
) -> Fields:
    """What Numbers holds, in its order."""
    spent = (budgets.sampled, budgets.columns, budgets.slashes, budgets.tiles)
    return (layout.chunk.past, layout.chunk.lengths, tuple(heads), *map(flat, (*spent, stats_units, lines_units)))


@kept_on_device(most=256)
def send_fields(device: torch.device, fields: Fields) -> tuple[torch.Tensor, ...]:
    """Each field as an int32 tensor on the device, all in one copy; not to be written to."""
    packed = on_device([number for field in fields for number in _padded(field)], device, torch.int32)
    sizes = [size for field in fields for size in (len(field), -len(field) % _ALIGNED)]
    return tuple(packed.split_with_sizes(sizes)[::2])


def _padded(field: tuple[int, ...]) -> tuple[int, ...]:
    return field + (0,) * (-len(field) % _ALIGNED)


@kept_on_device(most=256)
def send(device: torch.device, fields: Fields) -> Numbers:
    """The fields of `fields_of` on the device; not to be written to."""
    return Numbers(*send_fields(device, fields))


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


def flat(rows: list[list[int]]) -> tuple[int, ...]:
    """Row after row."""
    return tuple(number for row in rows for number in row)
