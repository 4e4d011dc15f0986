"""Says what layers with a recurrent state have, by their config: a gated delta rule, a state space (Mamba and Mamba-2),
or a short convolution alone. Such layers run as they are; memory estimates and descriptions read this.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from sparsekv.plans.errors import UnsupportedError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

_CHUNK = 64  # tokens that torch computes together in a gated delta rule


@dataclass(frozen=True, slots=True)
class Recurrence:
    """Holds the sizes of a layer with a recurrent state.

    Attributes:
        heads: of its state.
        key_heads: heads or groups of what is written to it.
        head_dim: numbers of a head that a token adds.
        state_bytes: of a row, whatever its length.
        token_bytes: of a token while a prompt runs through the layer, as torch computes it; fast kernels, where
            transformers has them, take less.
    """

    heads: int
    key_heads: int
    head_dim: int
    state_bytes: int
    token_bytes: int


def recurrence_of(config: PreTrainedConfig) -> Recurrence:
    """Returns what the recurrent layers of a model with this config have.

    Raises:
        UnsupportedError: they are of another kind.
    """
    for name, of_kind in _KINDS.items():
        if getattr(config, name, None) is not None:
            return of_kind(config)
    raise UnsupportedError(
        f"expected layers with a gated delta rule, a state space or a short convolution, found others in "
        f"{config.model_type!r}; choose a model of a supported architecture"
    )


def _gated_delta(config: PreTrainedConfig) -> Recurrence:
    """In float32: a matrix a head, and in chunks of tokens."""
    heads, size = config.linear_num_value_heads, config.linear_value_head_dim
    token = 4 * heads * (14 * size + 5 * _CHUNK)
    return Recurrence(heads, config.linear_num_key_heads, size, 4 * heads * size**2, token)


def _mamba_2(config: PreTrainedConfig) -> Recurrence:
    """In float32: a matrix a head, one for every chunk of tokens, and every pair of tokens of a chunk."""
    heads, size, state = config.mamba_n_heads, config.mamba_d_head, config.mamba_d_state
    chunk: int = config.mamba_chunk_size
    token = 4 * heads * (8 * size + 6 * state + 4 * chunk + -(-4 * size * state // chunk))
    return Recurrence(heads, config.mamba_n_groups, size, 4 * heads * size * state, token)


def _mamba_1(config: PreTrainedConfig) -> Recurrence:
    """In float32: the state of every token at once."""
    width, state = config.mamba_expand * config.hidden_size, config.mamba_d_state
    return Recurrence(1, 1, width, 4 * width * (state + config.mamba_d_conv), 4 * width * (4 * state + 8))


def _short_convolution(config: PreTrainedConfig) -> Recurrence:
    """The last inputs of a convolution: no state beside them."""
    width = config.hidden_size
    return Recurrence(1, 1, width, 4 * width * config.conv_L_cache, 4 * 10 * width)


_KINDS = {
    "linear_num_value_heads": _gated_delta,
    "mamba_n_heads": _mamba_2,
    "mamba_d_state": _mamba_1,
    "conv_L_cache": _short_convolution,
}
