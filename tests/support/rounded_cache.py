"""A plan over keys and values that are rounded to 8 bits before they are cached in the model's own precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from tiny_models import steps

from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf import cache as caches
from sparsekv.runtime.hf import graphs
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.stores.float8 import Float8


class Rounded(caches.SparseLayer):
    """Has what a cache in 8 bits stands for."""

    def update(self, key_states: Any, value_states: Any, *args: Any, **kwargs: Any) -> Any:
        self.rounding = getattr(self, "rounding", None) or Float8()
        both = self.rounding.rounded(key_states, value_states)
        return super().update(*self.rounding.read(*both))

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        self.rounding = getattr(self, "rounding", None) or Float8()
        room = torch.empty((2, *k_BGSD.shape), dtype=torch.uint8, device=k_BGSD.device)
        self.rounding.fill(room, k_BGSD, v_BGSD)
        super().commit(k_BGSD, v_BGSD)


def expected(model: Any, plan: Plan, prompt: torch.Tensor, new: torch.Tensor, **options: Any) -> torch.Tensor:
    """The logits of `steps`."""
    with pytest.MonkeyPatch.context() as patch, apply(model, plan, **options):
        patch.setattr(caches, "SparseLayer", Rounded)
        patch.setattr(graphs.StepGraphs, "takes", lambda *_: False)  # which would write past `update`
        return steps(model, prompt, new)[0]
