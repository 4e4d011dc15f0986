"""Text through a multimodal model under a plan: its decoder has the caller's inputs, and those beside text are refused.

The model around a decoder embeds tokens and makes masks and positions of them, by what pictures of before have left
behind. A decoder under a plan makes its own, as it does when it is loaded alone.

Shapes: B batch, S tokens, A axes of a position.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial, wraps
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.hf.describe import decoder_of, named
from sparsekv.runtime.hf.long_inputs import replaced

_TYPES = ("token_type_ids", "mm_token_type_ids")
# What a multimodal forward takes beside the inputs of its decoder, and that is no picture: the last one is a setting.
_OF_TEXT = frozenset((*_TYPES, "labels", "vision_feature_layer"))
_DECODER_INPUTS = ("input_ids", "inputs_embeds", "attention_mask", "position_ids")


class TextInputs:
    """The inputs of a multimodal model that has a plan applied."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.module: Any = model.base_model  # around the decoder, without a head
        self._names = tuple(inspect.signature(self.module.forward).parameters)
        of_decoder = inspect.signature(decoder_of(model).forward).parameters.keys()
        self._beside = frozenset(self._names) - of_decoder - _OF_TEXT
        self._given: dict[str, Any] = {}

    def check(self, inputs: Mapping[str, Any]) -> None:
        beside = sorted(name for name in self._beside if _is_given(inputs.get(name)))
        beside += [name for name in _TYPES if _has_others(inputs.get(name))]
        if beside:
            raise UnsupportedError(
                f"expected text alone under a plan, found {beside[0]}; run such inputs without it, "
                "after `handle.suspend()`, or `handle.close()`"
            )

    def around(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """The forward of `module`, for text alone; inside it, the decoder is given the caller's inputs."""

        @wraps(forward)
        def of_text(*args: Any, **kwargs: Any) -> Any:
            inputs = named(dict(zip(self._names, args, strict=False)) | kwargs)
            self.check(inputs)
            before = self._given
            given = {name: inputs.get(name) for name in _DECODER_INPUTS}
            self._given = given | {"position_ids": _on_one_axis(given["position_ids"])}
            embed = partial(self._embed, self.module.get_input_embeddings())
            try:
                with replaced(self.module, "get_input_embeddings", lambda: embed):
                    return forward(**{name: value for name, value in inputs.items() if name not in _TYPES})
            finally:
                self._given = before

        return of_text

    def _embed(self, embedding: nn.Module, ids_BS: torch.Tensor) -> torch.Tensor:
        """Embeds ids for `module`, which has others in place of those of pictures: the decoder is given them too."""
        if self._given["input_ids"] is not None:
            self._given["input_ids"] = ids_BS
        embedded_BSE: torch.Tensor = embedding(ids_BS)
        return embedded_BSE

    def of_decoder(self, inputs: dict[str, Any]) -> dict[str, Any]:
        merged = inputs | self._given
        if self._given and merged["input_ids"] is not None:
            merged.pop("per_layer_inputs", None)  # which it makes of the ids itself
        return merged


def _is_given(value: Any) -> bool:
    return value is not None and value is not False and not (isinstance(value, dict) and not any(value.values()))


def _has_others(types_BS: torch.Tensor | None) -> bool:
    """Returns whether tokens are of another type than text. Single tokens, which follow a prompt, are not asked."""
    return types_BS is not None and types_BS.shape[1] > 1 and bool(types_BS.any())


def _on_one_axis(positions: torch.Tensor | None) -> torch.Tensor | None:
    """Positions [B, S]; on several axes, [A, B, S], those of text are equal. Single tokens are not asked."""
    if positions is None or positions.ndim == 2:
        return positions
    if positions.shape[-1] > 1 and not bool((positions == positions[:1]).all()):
        raise UnsupportedError(
            "expected position_ids of text, the same on each axis, found others; pass none, so that tokens are counted"
        )
    return positions[0]
