"""The tokens of a complete prompt that a layer evicts: those with the lowest scores. A plan's `score` names one.

A new score is a function here, its name in `SCORES` and in the schema, and a row of its test.

Shapes: B batch, G KV heads, S cached tokens, K those that stay, D head size; g is 1 or G.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

import torch

from sparsekv.kernels.decode.selection import Scoring, choose
from sparsekv.kernels.scores import observed_attention
from sparsekv.plans.phases import Retention
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


def rows_to_cache(
    rule: Retention, length: int, observed: Observed, k_BGSD: torch.Tensor, *, backend: str,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """The rows in memory that stay cached where the others are evicted.

    Args:
        length: tokens so far, evicted ones included.
        observed: the last queries of the prompt, which end where the keys do.
        backend: of decode; "reference" is torch on any device.
        gather: gives the tensors of all ranks whose heads choose together, [ranks, ...].

    Returns:
        int64 [B, g, K] ascending; None where all stay.
    """
    (batch, _, cached, _), device = k_BGSD.shape, k_BGSD.device
    sink, recent, chosen = rule.sink or 0, rule.recent or 0, rule.chosen_tokens(length)
    if rule.kept_tokens(length) >= cached:
        return None
    score = SCORES[rule.score or ""]
    scores_BgS = score(observed.before(None, cached), k_BGSD, together=rule.heads == "max", backend=backend)
    if rule.heads == "max" and gather is not None:
        scores_BgS = gather(scores_BgS).amax(0)
    starts_B = torch.arange(batch, dtype=torch.int32, device=device) * cached
    lengths_B, counts_B = (torch.full_like(starts_B, count) for count in (cached, chosen))
    chosen_BgN = choose(
        scores_BgS.transpose(0, 1).flatten(1).contiguous(),
        Scoring(starts_B, batch * cached, scores_BgS.shape[1]),
        lengths_B,
        counts_B,
        capacity=cached,
        most=chosen,
        sink=sink,
        recent=recent,
        backend=backend,
    )
    row_S = torch.arange(cached, device=device).expand(*scores_BgS.shape)
    # where scores are no numbers fewer are chosen
    return torch.cat((row_S[..., :sink], chosen_BgN.long().clamp(min=0), row_S[..., cached - recent :]), 2)
