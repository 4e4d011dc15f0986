"""Defines what an index builder hands to a kernel: which key tiles and which single columns each query tile computes.

Shapes: B batch, H query heads, G KV heads, T query tiles, W most listed key tiles in a row, C most single columns of a
head, N = ceil(C / 32) words of 32 columns, S queries, K keys, D head size.

Query tile t of batch row b covers the rows past[b] + t * tile.query onwards; key tiles are counted from key 0.
The mask a kernel executes is, for row i of query tile t and key j:

    j <= i and j < lengths[b] and i - j < window          (window: the layer's own, or none)
    and (dense[h]  or  j // tile.key in tiles[b, h, t]  or  (j is column c of head h and live[b, h, t] has bit c))

Density is computed tiles over the tiles that dense attention of the same layer would compute, its window included; a
column computed singly counts 1 / tile.key of a tile. Tiles partly outside the window count whole. An index counts every
causal tile for dense heads; `spent_tiles` counts those in the window.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from sparsekv.kernels.device_cache import on_device
from sparsekv.plans.errors import ShapeError
from sparsekv.plans.patterns import MOST_SAMPLED, TileShape

NO_TILE = -1
NO_COLUMN = -1
NO_TOKEN = -1
LEAST_SAMPLED, SAMPLED_PART = 64, 32  # queries of a chunk behind a longer past: a part, and at least so many
WORD = 32  # columns in an int32 word of live bits: bit b of word n is column 32 n + b


@dataclass(frozen=True, slots=True)
class Chunk:
    """The tokens of a call's queries, known to the host, so that nothing has to ask the device. Row r of batch row b is
    token past[b] + r; the rows from lengths[b] - past[b] on are padding. Keys from lengths[b] on are not looked at,
    whatever memory holds there."""

    past: tuple[int, ...]
    lengths: tuple[int, ...]
    is_fixed: ClassVar[bool] = True

    def __post_init__(self) -> None:
        for name in ("past", "lengths"):  # lists are taken, but a chunk is a key of caches
            object.__setattr__(self, name, tuple(getattr(self, name)))
        if len(self.past) != len(self.lengths) or not self.past:
            raise ShapeError(f"past and lengths need one entry a batch row, found {self.past} and {self.lengths}")
        if any(p < 0 or n < p for p, n in zip(self.past, self.lengths, strict=True)):
            raise ShapeError(f"need 0 <= past <= lengths in every batch row, found {self.past} and {self.lengths}")

    @classmethod
    def uniform(cls, batch: int, past: int, length: int) -> Chunk:
        return cls((past,) * batch, (length,) * batch)

    def on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Past and lengths, int32 [B] each, cached: not to be written to."""
        return on_device(self.past, device, torch.int32), on_device(self.lengths, device, torch.int32)

    @property
    def longest(self) -> int:
        return max(self.lengths)

    @property
    def rows(self) -> tuple[int, ...]:
        """Query rows of each batch row that are not padding."""
        return tuple(n - p for p, n in zip(self.past, self.lengths, strict=True))

    def sampled(self, last_q: int) -> tuple[int, ...]:
        """The last queries of each batch row that an index samples of `last_q`. Behind a longer past fewer do: scores
        of 256 queries take longer than dense attention of 512."""
        return tuple(
            min(last_q, rows if past < rows else max(min(rows, LEAST_SAMPLED), rows // SAMPLED_PART))
            for past, rows in zip(self.past, self.rows, strict=True)
        )

    def query_tiles(self, tile: TileShape, queries: int) -> int:
        return -(-queries // tile.query)

    def key_tiles(self, tile: TileShape) -> int:
        return -(-self.longest // tile.key)

    def causal_tiles(self, tile: TileShape, window: int | None = None) -> int:
        """Tiles that dense causal attention computes for one head, of the layer's own window, over the batch rows."""
        return sum(tiles_of_rows(self, tile, window))


@dataclass(frozen=True, slots=True, eq=False)
class AnyChunk(Chunk):
    """The chunk of a captured call: shapes and grids follow from the largest one, `past` and `lengths`, and kernels
    read on the device which one it is. Both are such that tiles are cut as badly as they can be: past is one short of a
    multiple of 128.

    Attributes:
        numbers: past and lengths, int32 [B] each.
        budgets: int32 [4, h] of the vertical-slash heads of a layer, a row each for sampled queries, columns, slashes
            and tiles of a row.
        most_sampled: of the first ones.
    """

    numbers: tuple[torch.Tensor, torch.Tensor]
    budgets: Mapping[Any, torch.Tensor]
    most_sampled: int = MOST_SAMPLED
    is_fixed: ClassVar[bool] = False

    __eq__, __hash__ = object.__eq__, object.__hash__  # what it stands for changes

    def on_device(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        return self.numbers

    def sampled(self, last_q: int) -> tuple[int, ...]:
        return (min(last_q, self.most_sampled, *self.rows),) * len(self.past)


@lru_cache(maxsize=4096)
def tiles_of_rows(chunk: Chunk, tile: TileShape, window: int | None) -> tuple[int, ...]:
    """Tiles that dense causal attention computes for one head, of the layer's own window, in each batch row."""
    reach = window or chunk.longest

    def of_tile(first: int, length: int) -> int:
        oldest = max(0, first + 1 - reach)
        return (min(first + tile.query, length) - 1) // tile.key + 1 - oldest // tile.key

    return tuple(
        sum(of_tile(first, length) for first in range(past, length, tile.query))
        for past, length in zip(chunk.past, chunk.lengths, strict=True)
    )


@dataclass(frozen=True, slots=True)
class TileIndex:
    """Tiles and single columns of every head of one layer. Padding rows (past the length) hold nothing."""

    tile: TileShape
    tiles_BHTW: torch.Tensor  # int32, ascending, the first counts_BHT valid, the rest NO_TILE; unused by dense heads
    counts_BHT: torch.Tensor  # int32; for dense heads every causal tile of the row
    columns_BHC: torch.Tensor  # int32, ascending, padded with NO_COLUMN; C may be 0
    live_BHTN: torch.Tensor  # int32 words: bit b of word n says that column 32 n + b is computed singly in this row
    dense_H: torch.Tensor  # bool: heads that compute every causal tile
    # The heads of dense_H, on the host so that launches can be planned without asking the device; None where unknown.
    dense_heads: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True, eq=False)
class PrefillCall:
    """Causal attention of one layer, as kernels are given it; see `prefill_attention`."""

    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    v_BGKD: torch.Tensor
    chunk: Chunk
    scale: float
    window: int | None = None
    cap: float = 0.0  # soft cap of the scores

    def check(self) -> PrefillCall:
        """Itself. Raises ShapeError unless tensors and chunk fit together."""
        check_qkv(self.q_BHSD, self.k_BGKD, self.v_BGKD, self.scale)
        check_alike(self.q_BHSD, self.k_BGKD, self.v_BGKD)
        check_chunk(self.q_BHSD, self.k_BGKD, self.chunk, self.window)
        return self


@dataclass(frozen=True, slots=True)
class AttentionOutput:
    out_BHSD: torch.Tensor  # dtype of q; padding rows are 0
    lse_BHS: torch.Tensor | None  # float32 natural log-sum-exp of the scaled scores; padding rows are -inf
    scores_gT: torch.Tensor | None = None  # of decode with `Scoring`


@lru_cache
def has_triton() -> bool:
    """True where Triton, which is no dependency, can launch kernels on a GPU."""
    return find_spec("triton") is not None


def computed_tiles(index: TileIndex, *, by_torch: bool = False) -> torch.Tensor:
    """Tiles that a kernel computes, single columns included: float64 [B, H]; in one launch on NVIDIA GPUs, unless by
    torch."""
    on_gpu = not by_torch and index.counts_BHT.is_cuda and torch.version.hip is None and has_triton()
    if on_gpu and index.counts_BHT.is_contiguous() and index.live_BHTN.is_contiguous():
        from sparsekv.kernels.index.triton import spent  # it loads Triton

        return spent.computed_tiles(index)
    columns_BH = count_bits(index.live_BHTN).sum((2, 3))
    return index.counts_BHT.sum(2).double() + columns_BH.double() / index.tile.key


def spent_tiles(index: TileIndex, chunk: Chunk, window: int | None = None, *, by_torch: bool = False) -> torch.Tensor:
    """`computed_tiles` of a layer with a window of its own, whose dense heads compute what lies in it."""
    computed_BH = computed_tiles(index, by_torch=by_torch)
    if window is None:
        return computed_BH
    dense_B1 = computed_BH.new_tensor(tiles_of_rows(chunk, index.tile, window))[:, None]
    return torch.where(index.dense_H, dense_B1, computed_BH)


def density(index: TileIndex, chunk: Chunk) -> torch.Tensor:
    """float64: computed tiles over those of dense attention, over all heads and batch rows; 0 without rows."""
    dense = index.counts_BHT.shape[1] * chunk.causal_tiles(index.tile)
    return computed_tiles(index).sum() / max(1, dense)


def pack_bits(bits_XC: torch.Tensor) -> torch.Tensor:
    """bool [X, C] to int32 words [X, ceil(C / 32)]; missing bits are 0."""
    columns = bits_XC.shape[-1]
    padded_XC = torch.nn.functional.pad(bits_XC, (0, -columns % WORD))
    # Bit 31 is the sign: the sum over all bits lies within int32 and never wraps.
    weight_32 = torch.ones((), dtype=torch.int32, device=bits_XC.device) << _bits_of_word(bits_XC.device)
    return (torch.unflatten(padded_XC, -1, (-1, WORD)) * weight_32).sum(-1, dtype=torch.int32)


def unpack_bits(words_XN: torch.Tensor, columns: int) -> torch.Tensor:
    """int32 words to bool [X, columns]."""
    return ((words_XN.unsqueeze(-1) >> _bits_of_word(words_XN.device)) & 1).flatten(-2)[..., :columns].bool()


def count_bits(words_XN: torch.Tensor) -> torch.Tensor:
    """Bits set in each int32 word, by halving: pairs, nibbles, bytes, then their sum."""
    pairs = words_XN - ((words_XN >> 1) & 0x55555555)
    nibbles = (pairs & 0x33333333) + ((pairs >> 2) & 0x33333333)
    octets = (nibbles + (nibbles >> 4)) & 0x0F0F0F0F
    halves = octets + (octets >> 8)
    return (halves + (halves >> 16)) & 0x3F


def _bits_of_word(device: torch.device) -> torch.Tensor:
    return torch.arange(WORD, dtype=torch.int32, device=device)


def check_qkv(
    q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor, scale: float, any_strides: bool = False
) -> None:
    """q, k and v fit together, but for batch and dtype, and their head dimension is contiguous, but for k and v of
    `any_strides`."""
    for name, tensor in {"q": q_BHSD, "k": k_BGKD, "v": v_BGKD}.items():
        strided = tensor.shape[-1] > 1 and tensor.stride(-1) != 1 and (name == "q" or not any_strides)
        if tensor.dim() != 4 or strided:
            raise ShapeError(
                f"{name} must be [batch or pages, heads, tokens, head size] with stride 1 in its last dimension, found "
                f"shape {tuple(tensor.shape)}, strides {tensor.stride()}: call .contiguous() before attention"
            )
    check_heads(q_BHSD, k_BGKD, v_BGKD)
    if not (scale > 0 and math.isfinite(scale)):
        raise ShapeError(f"scale must be positive and finite, usually 1 / sqrt(head size), found {scale}")


def check_alike(*qkv: torch.Tensor) -> None:
    if len({(x.dtype, x.device) for x in qkv}) != 1:
        kinds = ", ".join(f"{x.dtype} on {x.device}" for x in qkv)
        raise ShapeError(f"q, k and v must have one dtype and one device, found {kinds}")


def check_heads(q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, v_BGKD: torch.Tensor) -> None:
    fits = k_BGKD.shape == v_BGKD.shape and k_BGKD.shape[3] == q_BHSD.shape[3]
    if not fits or q_BHSD.shape[1] % k_BGKD.shape[1]:
        raise ShapeError(
            f"k and v must have one shape, the head size of q, and KV heads that divide its heads; "
            f"found q {tuple(q_BHSD.shape)}, k {tuple(k_BGKD.shape)}, v {tuple(v_BGKD.shape)}"
        )


def check_chunk(q_BHSD: torch.Tensor, k_BGKD: torch.Tensor, chunk: Chunk, window: int | None) -> None:
    if not len(chunk.past) == q_BHSD.shape[0] == k_BGKD.shape[0]:
        raise ShapeError(
            f"the chunk describes {len(chunk.past)} batch rows, q has {q_BHSD.shape[0]}, k has {k_BGKD.shape[0]}"
        )
    rows = max(chunk.rows)
    if rows > q_BHSD.shape[2]:
        raise ShapeError(f"the chunk describes {rows} query rows, q has {q_BHSD.shape[2]}")
    if chunk.longest > k_BGKD.shape[2]:
        raise ShapeError(f"the chunk's longest row has {chunk.longest} keys, k holds {k_BGKD.shape[2]}")
    if window is not None and window < 1:
        raise ShapeError(f"a sliding window is at least 1 token, found {window}")
