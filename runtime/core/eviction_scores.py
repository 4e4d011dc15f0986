"""Scores of cached tokens by which a layer evicts: the highest stay. A plan's `score` names one.

A new score is a function here, its name in `SCORES` and in the schema, and a row of its test.

Shapes: B batch, G KV heads, S cached tokens, D head size; g is 1 or G.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from sparsekv.kernels.scores import observed_attention
from sparsekv.runtime.core.state import Observed


class EvictionScore(Protocol):
    """Scores the tokens of a complete prompt."""

    def __call__(self, observed: Observed, k_BGSD: torch.Tensor, *, together: bool, backend: str) -> torch.Tensor:
        """float32 [B, g, S], higher for tokens that should stay cached.

        Args:
            observed: the last queries of the prompt, which end where the keys do, no more of them than keys.
            k_BGSD: keys of all tokens in memory.
            together: the most of all KV heads; g is 1 then, else G.
            backend: of decode; "reference" is torch on any device.
        """


def attention_sum(observed: Observed, k_BGSD: torch.Tensor, *, together: bool, backend: str) -> torch.Tensor:
    """The attention of the observed queries, summed over neighbouring tokens and query heads (SnapKV, 2024)."""
    return observed_attention(
        observed.q_BHWD, k_BGSD, scale=observed.scale, softmax=observed.softmax, together=together, backend=backend
    )


SCORES: Mapping[str, EvictionScore] = {"attention_sum": attention_sum}
