"""Which tokens a layer keeps of a complete prompt (SnapKV, 2024; PyramidKV, 2024).

Shapes: B batch, H query heads, G KV heads, W observed queries, S tokens in memory, K kept ones, D head size; g is 1 or
G.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from sparsekv.kernels.decode.choose import choose
from sparsekv.kernels.decode.selection import Scoring
from sparsekv.kernels.observed import observed_attention
from sparsekv.kernels.softmax import Softmax
from sparsekv.plans.phases import Retention


@dataclass(frozen=True, slots=True, eq=False)
class Observed:
    """The newest queries of a prompt in one layer, and how they attend."""

    q_BHWD: torch.Tensor
    scale: float
    softmax: Softmax

    def before(self, older: Observed | None, most: int) -> Observed:
        """These queries behind older ones, at most so many."""
        q_BHWD = self.q_BHWD if older is None else torch.cat((older.q_BHWD, self.q_BHWD), 2)
        return replace(self, q_BHWD=q_BHWD[:, :, -most:])


def kept_rows(
    rule: Retention, length: int, observed: Observed, k_BGSD: torch.Tensor, *, backend: str,
    gather: Callable[[torch.Tensor], torch.Tensor] | None = None,
) -> torch.Tensor | None:  # fmt: skip
    """The rows that a layer keeps of those in memory.

    Args:
        rule: of the layer; it drops tokens.
        length: tokens so far, dropped ones included.
        observed: the last queries of the prompt, which end where the keys do.
        k_BGSD: keys of all rows in memory.
        backend: of decode; "reference" is torch on any device.
        gather: gives the tensors of all ranks whose heads choose together, [ranks, ...].

    Returns:
        int64 [B, g, K] ascending; None where all are kept.
    """
    (batch, _, held, _), device = k_BGSD.shape, k_BGSD.device
    kept, sink, recent, chosen = rule.kept_tokens(length), rule.sink or 0, rule.recent or 0, rule.chosen_tokens(length)
    if kept >= held:
        return None
    q_BHWD = observed.q_BHWD[:, :, -held:]
    scores_BgS = observed_attention(
        q_BHWD, k_BGSD, scale=observed.scale, softmax=observed.softmax, together=rule.heads == "max", backend=backend
    )
    if rule.heads == "max" and gather is not None:
        scores_BgS = gather(scores_BgS).amax(0)
    starts_B = torch.arange(batch, dtype=torch.int32, device=device) * held
    lengths_B, counts_B = (torch.full_like(starts_B, count) for count in (held, chosen))
    chosen_BgN = choose(
        scores_BgS.transpose(0, 1).flatten(1).contiguous(),
        Scoring(starts_B, batch * held, scores_BgS.shape[1]),
        lengths_B,
        counts_B,
        capacity=held,
        most=chosen,
        sink=sink,
        recent=recent,
        backend=backend,
    )
    row_S = torch.arange(held, device=device).expand(*scores_BgS.shape)
    # where scores are no numbers fewer are chosen
    return torch.cat((row_S[..., :sink], chosen_BgN.long().clamp(min=0), row_S[..., held - recent :]), 2)
