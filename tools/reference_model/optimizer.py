"""Muon on the matrices of the layers, AdamW on embeddings and norms, one learning-rate curve for both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from reference_model.network import Retriever
from reference_model.recipe import Recipe


@dataclass(frozen=True, slots=True)
class Optimizers:
    """Both optimizers, stepped together."""

    muon: torch.optim.Muon
    adam: torch.optim.AdamW
    recipe: Recipe

    @classmethod
    def of(cls, model: Retriever, recipe: Recipe) -> Optimizers:
        """Divides the parameters."""
        matrices = [p for p in model.model.layers.parameters() if p.ndim == 2]
        chosen = {id(p) for p in matrices}
        rest = [p for p in model.parameters() if id(p) not in chosen]
        adam = torch.optim.AdamW(rest, lr=recipe.adam_lr, betas=(0.9, 0.95), weight_decay=0.0)
        return cls(torch.optim.Muon(matrices, lr=recipe.muon_lr, weight_decay=recipe.muon_decay), adam, recipe)

    def step(self, factor: float) -> None:
        """One update at `factor` times the full learning rates; clears the gradients."""
        for optimizer, rate in ((self.muon, self.recipe.muon_lr), (self.adam, self.recipe.adam_lr)):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)

    def state_dict(self) -> dict[str, Any]:
        """For a checkpoint."""
        return {"muon": self.muon.state_dict(), "adam": self.adam.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """From a checkpoint."""
        self.muon.load_state_dict(state["muon"])
        self.adam.load_state_dict(state["adam"])


def rate_factor(recipe: Recipe, step: int) -> float:
    """The share of the full learning rate at a step of the whole run: up, level, and down to zero at the end."""
    decay = max(1, round(recipe.stages[-1].steps * recipe.decay_share))
    return min(1.0, (step + 1) / recipe.warmup_steps, (recipe.steps - step) / decay)
