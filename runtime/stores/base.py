"""What a KV store offers. Stores know logical token positions and physical places, and no policy.

Shapes: B batch, G KV heads, S tokens, N chosen tokens, D head size.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch

from sparsekv.kernels.decode.rows import DecodeRows
from sparsekv.plans.errors import ShapeError

_LEAST_MARGIN, _MOST_MARGIN = 256, 65_536


@dataclass(frozen=True, slots=True)
class Gathered:
    """Keys and values wherever the store found them best placed, and where in them the asked for rows lie."""

    k_BGSD: torch.Tensor
    v_BGSD: torch.Tensor
    rows: DecodeRows


class KVStore(Protocol):
    """Keys and values of one layer, of equally long batch rows."""

    @property
    def length(self) -> int:
        """Tokens held for each batch row."""

    @property
    def bytes_device(self) -> int:
        """Bytes allocated on the compute device."""

    @property
    def bytes_host(self) -> int:
        """Bytes allocated in host memory for what would otherwise be on the compute device."""

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Adds the tokens that follow those already held.

        Raises:
            ShapeError: batch, heads or head size differ from what is held.
        """

    def view(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of all tokens, [B, G, S, D] on the compute device."""

    def gather(self, rows: DecodeRows) -> Gathered:
        """Keys and values that hold at least `rows`, and `rows` counted in them."""


def grown(capacity: int, needed: int) -> int:
    """Tokens to allocate so that `needed` fit: unchanged if they do, else an eighth more, within bounds.

    One append in many then copies what is held, and a long context does not carry a long empty end.
    """
    if needed <= capacity:
        return capacity
    return needed + min(max(needed // 8, _LEAST_MARGIN), _MOST_MARGIN)


def check_rows(held: torch.Tensor | None, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
    """Raises ShapeError unless the rows fit together, and to the [B, G, *, D] of `held`."""
    if k_BGSD.dim() != 4 or k_BGSD.shape != v_BGSD.shape:
        raise ShapeError(
            f"keys and values must both be [batch, KV heads, tokens, head size]; "
            f"found {tuple(k_BGSD.shape)} and {tuple(v_BGSD.shape)}"
        )
    if held is None:
        return
    expected = (held.shape[0], held.shape[1], held.shape[3])
    found = (k_BGSD.shape[0], k_BGSD.shape[1], k_BGSD.shape[3])
    if found != expected:
        raise ShapeError(
            f"the cache holds (batch, KV heads, head size) = {expected}, the new tokens have {found}; "
            f"start a new cache for another batch"
        )
