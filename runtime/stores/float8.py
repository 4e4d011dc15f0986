"""Keys and values of one layer's cache in 8 bits (e4m3). Stores have their bytes; scales are found and applied here.

A scale of each KV head, for keys and for values, is fixed by the first tokens that a cache gets, so that captured steps
read it at one address and eviction, host memory and copies of rows move bytes as they are. Scales of each token would
hardly be more accurate: e4m3 has its full precision over a range of 2^15, in which a head's values lie together. The
largest of the first tokens becomes 4 to 8 of at most 448: what comes later may be 56 times as large before it is cut
off, and what is 256 times smaller still has all its bits. Scales are powers of two, under which a number rounds alike:
answers do not depend on how many of the first tokens came together, but for numbers that leave this range.

Shapes: B batch, G KV heads, S tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsekv.kernels.keys import FLOAT8, KeyView, Scales, in_8_bits, scaled
from sparsekv.runtime.stores.store import Layout

_EXPONENT = 0x7F80_0000  # bits of a float32
_AT_ONCE = 16_384  # tokens: rounding a long prompt in pieces bounds the device memory it takes
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Float8:
    """The scales of one layer; None before its first tokens."""

    scales: Scales | None = None

    @staticmethod
    def layout(layout: Layout) -> Layout:
        return replace(layout, dtype=torch.uint8)

    @torch.no_grad()
    def rounded(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> Pair:
        """The bytes of new tokens, whose first ones fix the scales."""
        if self.scales is None:
            self.scales = Scales(_power_of_two(k_BGSD), _power_of_two(v_BGSD), k_BGSD.dtype)
        return _in_pieces(k_BGSD, self.scales.k_G), _in_pieces(v_BGSD, self.scales.v_G)

    def read(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> Pair:
        assert self.scales is not None, "there are tokens"
        k_G, v_G, dtype = self.scales.k_G, self.scales.v_G, self.scales.dtype
        return scaled(k_BGSD, k_G, dtype), scaled(v_BGSD, v_G, dtype)

    def fill(self, room: Pair, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Writes tokens to a store's room, and what they were rounded to in their own place."""
        for piece in _pieces(k_BGSD.shape[2]):
            new = k_BGSD[:, :, piece], v_BGSD[:, :, piece]
            written = self.rounded(*new)
            for into, own, bytes_, read in zip(room, new, written, self.read(*written), strict=True):
                into[:, :, piece].copy_(bytes_)
                own.copy_(read)

    def view(self, keys: KeyView) -> KeyView:
        return replace(keys, k=keys.k.view(FLOAT8), v=keys.v.view(FLOAT8), scales=self.scales)


def _pieces(tokens: int) -> Iterator[slice]:
    for begin in range(0, tokens, _AT_ONCE):
        yield slice(begin, min(begin + _AT_ONCE, tokens))


def _in_pieces(x_BGSD: torch.Tensor, scale_G: torch.Tensor) -> torch.Tensor:
    stored_BGSD = torch.empty_like(x_BGSD, dtype=torch.uint8)
    for piece in _pieces(x_BGSD.shape[2]):
        stored_BGSD[:, :, piece] = in_8_bits(x_BGSD[:, :, piece], scale_G)
    return stored_BGSD


def _power_of_two(x_BGSD: torch.Tensor) -> torch.Tensor:
    """[G]: the scale by which the largest number of a head becomes 4 to 8; 1 where it is 0 or none."""
    largest_G = x_BGSD.abs().amax((0, 2, 3)).float()
    scale_G = (largest_G.view(torch.int32) & _EXPONENT).view(torch.float32) / 4
    return torch.where(scale_G.isfinite() & (scale_G > 0), scale_G, 1.0)
