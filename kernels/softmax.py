"""Says how the scaled scores of a layer become attention weights, where that is not their softmax alone.

Shapes: B batch, H query heads, S queries, K keys.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, eq=False)
class Softmax:
    """Holds what a layer's softmax has besides its scores.

    Attributes:
        cap: scores are cap * tanh(scaled score / cap); 0 where they are the scaled scores (Gemma-2).
        sinks_H: a learned logit of each query head, which takes part in the softmax of all its queries and gives no
            value (gpt-oss).
    """

    cap: float = 0.0
    sinks_H: torch.Tensor | None = None

    def kept(self, lse_BHS: torch.Tensor) -> torch.Tensor:
        """The share of the weights that sinks leave to keys with this log-sum-exp, float32 [B, H, S]."""
        assert self.sinks_H is not None
        return torch.sigmoid(lse_BHS - self.sinks_H.float()[:, None])

    def weights(self, scores_BHSK: torch.Tensor, heads: slice) -> torch.Tensor:
        """Returns the weights of capped scores of these query heads, -inf where hidden; not those of the sinks."""
        weights_BHSK = scores_BHSK.softmax(-1)
        if self.sinks_H is None:
            return weights_BHSK
        return weights_BHSK * self.heads(heads).kept(scores_BHSK.logsumexp(-1))[..., None]

    def heads(self, queries: slice) -> Softmax:
        """Returns the softmax of neighbouring query heads alone."""
        return self if self.sinks_H is None else Softmax(self.cap, self.sinks_H[queries])


def capped_(scores: torch.Tensor, cap: float) -> torch.Tensor:
    """Scaled scores under a soft cap, in place."""
    return scores.div_(cap).tanh_().mul_(cap) if cap else scores


PLAIN = Softmax()
