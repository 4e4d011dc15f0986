"""Where a run is, and everything needed to go on from there."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

import torch

from reference_model.network import Retriever
from reference_model.optimizer import Optimizers

FILE_NAME = "checkpoint.pt"


@dataclass(frozen=True, slots=True)
class Position:
    """Steps done: `step` of stage number `stage`, and the seconds of training they took."""

    stage: int = 0
    step: int = 0
    seconds: float = 0.0


def save(work: Path, model: Retriever, optimizers: Optimizers, position: Position) -> None:
    """Replaces the checkpoint as a whole, so that a run that is killed leaves the one before."""
    state = {
        "model": model.state_dict(),
        "optimizers": optimizers.state_dict(),
        "rng": torch.get_rng_state(),
        "position": (position.stage, position.step, position.seconds),
    }
    temporary = work / (FILE_NAME + ".new")
    torch.save(state, temporary)
    os.replace(temporary, work / FILE_NAME)


def load(work: Path, model: Retriever, optimizers: Optimizers) -> Position:
    """Restores what `save` wrote; the beginning of the run where there is none."""
    if not (work / FILE_NAME).exists():
        return Position()
    state = torch.load(work / FILE_NAME, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    optimizers.load_state_dict(state["optimizers"])
    torch.set_rng_state(state["rng"])
    return Position(*state["position"])


def load_model(work: Path, model: Retriever) -> Position:
    """Restores the weights only.

    Raises:
        FileNotFoundError: nothing was trained in this folder.
    """
    state = torch.load(work / FILE_NAME, map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    return Position(*state["position"])
