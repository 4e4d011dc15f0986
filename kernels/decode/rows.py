"""Which tokens a decoding query attends to.

Shapes: B batch, G KV heads, N listed tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from sparsekv.kernels.tiles import check_qkv
from sparsekv.plans.errors import ShapeError


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """The listed tokens and every token of [tail_start, tail_stop).

    A list holds no token twice, and none that k does not hold (nobody asks the device). A listed token that lies in
    the tail counts once.
    """

    tokens_BGN: torch.Tensor  # int32 [B, 1 or G, N], in any order; NO_TOKEN entries are skipped
    tail_start: int
    tail_stop: int

    @property
    def tail(self) -> int:
        """Tokens of the tail."""
        return self.tail_stop - self.tail_start


def check_rows(
    q_BHQD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, rows: DecodeRows, scale: float
) -> None:
    """One query row a batch row, and token lists that belong to these tensors.

    Raises:
        ShapeError: they do not fit; the message says what and how to fix it.
    """
    check_qkv(q_BHQD, k_BGSD, v_BGSD, scale)
    if q_BHQD.shape[2] != 1:
        raise ShapeError(
            f"decode attention takes one query token a call, found {q_BHQD.shape[2]}: "
            "call it once a token, or use prefill attention"
        )
    B, G = k_BGSD.shape[:2]
    tokens = rows.tokens_BGN
    if tokens.dim() != 3 or tokens.shape[0] != B or tokens.shape[1] not in (1, G):
        raise ShapeError(f"tokens must be [{B}, 1 or {G}, listed], found {tuple(tokens.shape)}")
    if tokens.dtype != torch.int32 or tokens.device != q_BHQD.device:
        raise ShapeError(f"tokens must be int32 on {q_BHQD.device}, found {tokens.dtype} on {tokens.device}")
    if tokens.shape[2] > 1 and tokens.stride(2) != 1:
        raise ShapeError(f"tokens must have stride 1 in their last dimension, found strides {tokens.stride()}")
    if not 0 <= rows.tail_start <= rows.tail_stop <= k_BGSD.shape[2]:
        raise ShapeError(
            f"need 0 <= tail_start <= tail_stop <= {k_BGSD.shape[2]} keys, found [{rows.tail_start}, {rows.tail_stop})"
        )
