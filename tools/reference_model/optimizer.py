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


def rate_factor(recipe: Recipe, step: int, seconds: float = 0.0) -> float:
    """The share of the full learning rate at a step of the whole run: up, level, and down to zero at the end.

    `seconds` of training so far decide over the way down where stages end by time.
    """
    return min(1.0, (step + 1) / recipe.warmup_steps, _remaining(recipe, step, seconds))


def _remaining(recipe: Recipe, step: int, seconds: float) -> float:
    """What is left of the run, as a multiple of its decay."""
    last, end = recipe.stages[-1], recipe.seconds_through(len(recipe.stages) - 1)
    if end is not None and last.seconds is not None:
        return max(0.0, end - seconds) / (last.seconds * recipe.decay_share)
    return (recipe.steps - step) / max(1, round(last.steps * recipe.decay_share))
