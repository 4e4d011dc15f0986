"""What a forward pass may be given: equally long rows without padding, positions in a row, no custom mask."""

from __future__ import annotations

from typing import Any

import torch

from sparsekv.plans.errors import PromptError, UnsupportedError, UsageError


def check_inputs(inputs: dict[str, Any], training: bool) -> None:
    """Raises a clear error for what would give wrong tokens.

    Raises:
        UsageError: the model is in training mode.
        PromptError: there are no tokens.
        UnsupportedError: padding, custom masks, or attention weights asked for.
    """
    if training:
        raise UsageError("expected a model in evaluation mode, found training mode; call model.eval()")
    tokens = inputs.get("input_ids")
    if tokens is None:
        tokens = inputs.get("inputs_embeds")
    if tokens is not None and tokens.shape[1] == 0:
        raise PromptError("expected at least one token, found an empty prompt; give it some text")
    _check_mask(inputs.get("attention_mask"))
    if inputs.get("output_attentions"):
        raise UnsupportedError("attention weights are never materialised here; leave output_attentions off")


def _check_mask(mask: Any) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        found = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise UnsupportedError(f"expected a 2D attention_mask of ones or none, found {found}; pass no custom mask")
    if not bool(mask.all()):
        raise UnsupportedError(
            "expected rows of equal length, found padding in attention_mask; "
            "run prompts of different lengths one at a time, or group those of equal length"
        )


def check_positions(positions: Any, past: int) -> None:
    """Positions of several tokens count up by one from what is cached. Single tokens are not asked: it costs a wait.

    Raises:
        UnsupportedError: they do not.
    """
    if positions is None or positions.shape[-1] < 2:
        return
    expected = torch.arange(past, past + positions.shape[-1], device=positions.device)
    if not bool((positions == expected).all()):
        raise UnsupportedError(
            f"expected position_ids that count up by one from the {past} cached tokens, found others; "
            f"run packed sequences one by one, and leave prefill_chunk_size unset when a prompt goes on from a cache"
        )
