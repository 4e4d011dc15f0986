"""One training step: losses of text and answers, each averaged by itself and added."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from reference_model.batches import FIRST_ANSWER, TEXT, Batch
from reference_model.network import Retriever

KINDS = 256  # kinds of tokens are uint8


@dataclass(frozen=True, slots=True)
class Totals:
    """Sums by kind of token, `[KINDS]` float32 each, on the device until they are printed."""

    loss_K: torch.Tensor
    right_K: torch.Tensor
    count_K: torch.Tensor

    def __add__(self, other: Totals) -> Totals:
        return Totals(self.loss_K + other.loss_K, self.right_K + other.right_K, self.count_K + other.count_K)


def compile_model(model: Retriever) -> None:
    """Compiles one layer and the output head; all layers share the compiled code, once for each length."""
    for block in model.model.layers:
        block.compile(dynamic=False)
    model.token_losses = torch.compile(model.token_losses, dynamic=False)  # type: ignore[method-assign]


def accumulate(model: Retriever, micro_batches: Sequence[Batch], device: torch.device) -> Totals:
    """Adds up gradients over the micro-batches of one step.

    An answer token is as rare as one in a hundred at long lengths: text and answers are averaged apart, so that both
    pull alike at every length.
    """
    parts = [_forward_backward(model, batch.to(device), 1 / len(micro_batches)) for batch in micro_batches]
    return sum(parts[1:], parts[0])


def _forward_backward(model: Retriever, batch: Batch, weight: float) -> Totals:
    device = batch.ids_RT.device
    ids_RT = batch.ids_RT.long()
    kinds = batch.kinds_RT[:, 1:].long()
    with torch.autocast(device.type, torch.bfloat16):
        losses, right = model.token_losses(model.hidden(ids_RT, torch.bfloat16), ids_RT)
    text, answers = (kinds == TEXT).float(), (kinds >= FIRST_ANSWER).float()
    loss = (losses * text).sum() / text.sum().clamp(min=1) + (losses * answers).sum() / answers.sum().clamp(min=1)
    (loss * weight).backward()
    return _totals(losses.detach(), right, kinds)


def _totals(losses: torch.Tensor, right: torch.Tensor, kinds: torch.Tensor) -> Totals:
    flat = kinds.flatten()
    zeros = torch.zeros(KINDS, device=flat.device)
    return Totals(
        zeros.index_add(0, flat, losses.flatten().float()),
        zeros.index_add(0, flat, right.flatten().float()),
        zeros.index_add(0, flat, torch.ones_like(flat, dtype=torch.float32)),
    )
