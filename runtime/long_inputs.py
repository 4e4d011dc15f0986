"""When a decoder layer works in pieces, and when it runs as its class has it.

Each decoder layer, and the final norm, gets a `forward` of its own for as long as something is attached. On a long
input, where nothing unknown is asked for, it works in pieces (long_layers.py); else it calls the forward of its class.
Before the first long input of a kind of layer, both are run on a few of its rows: if they disagree, say because
transformers or another library has changed what such a layer computes, all run whole and one warning says so.

Shapes: B batch, S tokens, E hidden size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn

from sparsekv.runtime.attention import CONTEXT, Context
from sparsekv.runtime.cache import Bytes
from sparsekv.runtime.chunking import Chunking
from sparsekv.runtime.engine import Engine, LayerCall
from sparsekv.runtime.known_layers import is_known, is_known_norm, is_untouched, is_watched
from sparsekv.runtime.long_layers import LayerInput, forward_in_pieces
from sparsekv.runtime.prefill import attend_dense
from sparsekv.runtime.stores.base import KVStore
from sparsekv.runtime.stores.device import DeviceStore

PASS = "sparsekv_pass"
_UNDERSTOOD = {"attention_mask", "position_ids", "past_key_values", "use_cache", "position_embeddings", PASS}
_PROBED_ROWS = 16
_TOLERANCE = 0.02  # of what the layer adds to its input


@dataclass(slots=True)
class ForwardPass:
    """What the layers of one forward pass tell each other."""

    own_embeddings: bool  # the first layer's input was made in this pass, and nobody else holds it
    layers: Sequence[nn.Module] = ()  # those the decoder calls itself, and so lets go of their inputs
    own_hidden_BSE: torch.Tensor | None = None  # the same of the layer that ran last


class LongInputs:
    """The forwards of one attached model.

    Args:
        engine: attends.
        chunking: what is long, and how it is cut.
        model_type: the model's.
    """

    def __init__(self, engine: Engine, chunking: Chunking, model_type: str) -> None:
        self._engine = engine
        self._chunking = chunking
        self._model_type = model_type
        self._agree: dict[type, bool] = {}

        def forward(layer: nn.Module, hidden_states: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            return self._run_layer(layer, hidden_states, args, kwargs)

        self._forward = forward

    def layer_forward(self, layer: nn.Module) -> Callable[..., Any] | None:
        """A forward for this decoder layer; None for one of a kind that is not known."""
        # bound, so that a copy of the model gets a forward of its own
        return MethodType(self._forward, layer) if is_known(layer, self._model_type) else None

    def norm_forward(self, norm: nn.Module) -> Callable[..., Any] | None:
        """A forward for the final norm; None for one of a kind that is not known."""

        def forward(norm: nn.Module, hidden_states: torch.Tensor) -> Any:
            return self._run_norm(norm, hidden_states)

        return MethodType(forward, norm) if is_known_norm(norm, self._model_type) else None

    def _run_norm(self, norm: nn.Module, hidden_BSE: torch.Tensor) -> torch.Tensor:
        whole: Callable[..., torch.Tensor] = type(norm).forward
        if not self._is_long(hidden_BSE):
            return whole(norm, hidden_BSE)
        out_BSE = torch.empty_like(hidden_BSE)
        for rows in self._chunking.pieces(*hidden_BSE.shape[:2]):
            out_BSE[:, rows] = whole(norm, hidden_BSE[:, rows])
        return out_BSE

    def _run_layer(
        self, layer: nn.Module, hidden_BSE: torch.Tensor, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        found: ForwardPass | None = kwargs.get(PASS)
        if found is None or args or not self._is_long(hidden_BSE) or not self._can_cut(layer, hidden_BSE, kwargs):
            if found is not None:
                found.own_embeddings, found.own_hidden_BSE = False, None
            return type(layer).forward(layer, hidden_BSE, *args, **kwargs)
        bare = self._is_called_by_decoder(layer, found)
        into_BSE = hidden_BSE if bare and _is_own_input(layer, hidden_BSE, found) else torch.empty_like(hidden_BSE)
        found.own_embeddings = False
        pieces = list(self._chunking.pieces(*hidden_BSE.shape[:2]))
        forward_in_pieces(layer, self._input(hidden_BSE, kwargs), self._engine, pieces, into_BSE)
        found.own_hidden_BSE = into_BSE if bare and not is_watched(layer._forward_hooks) else None
        return into_BSE

    def _is_long(self, hidden_BSE: torch.Tensor) -> bool:
        return (
            self._engine.open
            and hidden_BSE.dim() == 3
            and self._chunking.applies(*hidden_BSE.shape[:2])
            and not torch.is_grad_enabled()
            and not torch.compiler.is_compiling()
            and not torch.is_autocast_enabled(hidden_BSE.device.type)
        )

    def _can_cut(self, layer: nn.Module, hidden_BSE: torch.Tensor, kwargs: dict[str, Any]) -> bool:
        if any(value is not None and value is not False for name, value in kwargs.items() if name not in _UNDERSTOOD):
            return False
        if kwargs.get("attention_mask") is not None or kwargs.get("position_embeddings") is None:
            return False
        if not is_untouched(layer):
            return False
        kind = type(layer)
        if kind not in self._agree:
            self._agree[kind] = _agrees(layer, self._input(hidden_BSE, kwargs).first(_PROBED_ROWS))
        return self._agree[kind]

    def _is_called_by_decoder(self, layer: nn.Module, found: ForwardPass) -> bool:
        """Whether nobody has put something around the layer, or over its forward, since we were attached: that may
        still look at the layer's input, and keep its output."""
        ours = getattr(vars(layer).get("forward"), "__func__", None) is self._forward
        return ours and any(layer is one for one in found.layers)

    def _input(self, hidden_BSE: torch.Tensor, kwargs: dict[str, Any]) -> LayerInput:
        cos_BSR, sin_BSR = kwargs["position_embeddings"]
        return LayerInput(self._model_type, hidden_BSE, cos_BSR, sin_BSR, kwargs.get("past_key_values"))


def _is_own_input(layer: nn.Module, hidden_BSE: torch.Tensor, found: ForwardPass) -> bool:
    """Whether the pass itself made the layer's input, and no hook has seen it."""
    parts: Any = layer
    own = hidden_BSE is found.own_hidden_BSE or (found.own_embeddings and parts.self_attn.layer_idx == 0)
    return own and not is_watched(layer._forward_pre_hooks)


def _agrees(layer: nn.Module, given: LayerInput) -> bool:
    """Whether work in pieces gives what the layer's own forward gives. Waits for the device."""
    plain, tokens = _Plain(), given.hidden_BSE.shape[1]
    expected = type(layer).forward(
        layer,
        given.hidden_BSE,
        attention_mask=None,
        position_embeddings=(given.cos_BSR, given.sin_BSR),
        **{CONTEXT: Context(plain, None)},
    )
    pieces = [slice(0, tokens // 2), slice(tokens // 2, tokens)]
    found = forward_in_pieces(layer, given, plain, pieces, torch.empty_like(given.hidden_BSE))
    if _is_close(found, expected, given.hidden_BSE):
        return True
    warnings.warn(
        f"expected {type(layer).__name__} to compute what the tested versions of transformers do, found another "
        f"result; long inputs run in one piece, which takes more memory (close the handle before changing a model)",
        RuntimeWarning,
        stacklevel=2,
    )
    return False


def _is_close(found: torch.Tensor, expected: Any, given: torch.Tensor) -> bool:
    if not isinstance(expected, torch.Tensor) or (expected.shape, expected.dtype) != (found.shape, found.dtype):
        return False
    added, difference = expected.float() - given.float(), found.float() - expected.float()
    rounding = 2 * torch.finfo(expected.dtype).eps * torch.linalg.vector_norm(expected.float())
    bound = _TOLERANCE * torch.linalg.vector_norm(added) + rounding
    return bool(torch.linalg.vector_norm(difference) <= bound)


class _Plain:
    """Dense attention to the rows given, for the comparison."""

    def __init__(self) -> None:
        self.open = True
        self.bytes: list[Bytes] = []

    def new_store(self, layer: int) -> KVStore:
        return DeviceStore()

    def attend(self, call: LayerCall) -> torch.Tensor:
        return attend_dense(call, *call.keys_values())
