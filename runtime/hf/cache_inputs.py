"""What a forward over a cache is given beside its tokens, where the model's own forgets that others came before."""

from __future__ import annotations

from typing import Any

import torch

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.architecture import ARCHITECTURES
from sparsekv.runtime.hf.cache import CACHE_NAME
from sparsekv.runtime.hf.describe import config_of


def cache_inputs(model: Any, cache: Any, ids_BS: torch.Tensor) -> dict[str, Any]:
    """Returns what a forward is given beside the ids of tokens that follow those of a cache (None: there are none).

    Raises:
        UnsupportedError: see `check_one_piece`.
    """
    past, new, model_type = 0 if cache is None else cache.get_seq_length(), ids_BS.shape[1], config_of(model).model_type
    check_one_piece(model_type, past, new)
    positions = (
        {"position_ids": positions_after(past, new, ids_BS.device)} if past and needs_position_ids(model_type) else {}
    )
    return {CACHE_NAME: cache} | positions


def positions_after(past: int, new: int, device: torch.device) -> torch.Tensor:
    """Returns [1, new]: the positions of tokens that follow `past` others."""
    return torch.arange(past, past + new, device=device)[None]


def needs_position_ids(model_type: str) -> bool:
    """Returns whether positions have to be given."""
    return model_type in ARCHITECTURES and ARCHITECTURES[model_type].needs_position_ids


def takes_one_piece(model_type: str) -> bool:
    """Returns whether a pass of several tokens has to be the first one."""
    return model_type in ARCHITECTURES and ARCHITECTURES[model_type].one_piece


def check_one_piece(model_type: str, past: int, new: int) -> None:
    """Refuses several tokens behind a past where layers would lose their recurrent state.

    Raises:
        UnsupportedError: they are of such a model.
    """
    if past and new > 1 and takes_one_piece(model_type):
        raise UnsupportedError(
            f"expected a whole prompt at once, as in transformers the layers of {model_type!r} with a recurrent state "
            f"begin every pass of several tokens without one, found {new} tokens behind {past} cached; run the whole "
            "text over a new cache, without chunks"
        )
