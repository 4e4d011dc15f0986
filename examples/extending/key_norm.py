"""An eviction score of docs/extending.md: its function, which goes into runtime/core/select.py."""

import torch

from sparsekv.runtime.core.state import Observed


def key_norm(observed: Observed, k_BGSD: torch.Tensor, *, together: bool, backend: str) -> torch.Tensor:
    """Short keys stay (Devoto et al., 2024)."""
    score_BGS: torch.Tensor = -k_BGSD.float().norm(dim=-1)
    return score_BGS.amax(1, keepdim=True) if together else score_BGS
