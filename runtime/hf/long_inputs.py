"""When a decoder layer works in pieces, and when it runs as its class has it.

Each decoder layer, and the final norm, gets a `forward` of its own for as long as something is attached. On a long
input, where nothing unknown is asked for, it works in pieces (long_layers.py); else it calls the forward of its class.
Before the first long input of a kind of layer, both are run on a few of its rows: if they disagree, say because
transformers or another library has changed what such a layer computes, all run whole and one warning says so.

Shapes: B batch, S tokens, E hidden size.
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import Cache

from sparsekv.runtime.attention import CONTEXT, Context
from sparsekv.runtime.core.prefill import attend_dense
from sparsekv.runtime.engine import Engine, LayerCall
from sparsekv.runtime.hf.cache import Bytes, SparseLayer
from sparsekv.runtime.stores.device import DeviceStore, KVStore, Layout

# How long inputs are cut so that what a layer makes on the way stays small: the one place of these numbers.
#
# Shapes: B batch, S tokens.


@dataclass(frozen=True, slots=True)
class Chunking:
    """Where row-wise work is done in pieces, and how large they are.

    At Llama-3-8B's shape 16,384 rows make at most 2 GB on the way through a layer, and fill the matrix units.

    Attributes:
        above: a call of more rows (batch x tokens) is cut; others run as the model has them.
        rows: most rows of a piece.
        output_bytes: attention output that a layer may hold beside its queries; a larger one overwrites them in
            groups of heads.
    """

    above: int = 16_384
    rows: int = 16_384
    output_bytes: int = 2 << 30

    def applies(self, batch: int, tokens: int) -> bool:
        """Whether a call of this size is cut. Decode steps are not."""
        return tokens > 1 and batch * tokens > self.above

    def pieces(self, batch: int, tokens: int) -> Iterator[slice]:
        """Which tokens each piece holds: all of them, in order, in pieces of about one size."""
        most = max(1, self.rows // batch)
        size = -(-tokens // -(-tokens // most))
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))


# Which decoder layers are those whose forward `long_layers` follows, untouched by anybody.

_OURS = "sparsekv.runtime.hf.attach"
_ASLEEP = "transformers.utils.output_capturing"  # hooks that stay behind once hidden states were asked for
_SLIDING: dict[str, Callable[[Any], int | None]] = {
    "mistral": lambda attention: getattr(attention.config, "sliding_window", None),
    "qwen2": lambda attention: attention.sliding_window,
    "qwen3": lambda attention: attention.sliding_window,
}
_KINDS = frozenset({"glm", "llama", *_SLIDING})
_PARTS = ("self_attn", "mlp", "input_layernorm", "post_attention_layernorm")


def is_known(layer: nn.Module, model_type: str) -> bool:
    """Whether the layer and all its parts but the projections are transformers' own classes of a known kind."""
    parts = [layer, *(getattr(layer, name, None) for name in _PARTS)]
    return model_type in _KINDS and all(_is_from(part, model_type) for part in parts) and "forward" not in vars(layer)


def is_known_norm(norm: nn.Module, model_type: str) -> bool:
    """Whether this is the final norm of a known kind: one that works row by row."""
    return _is_from(norm, model_type) and type(norm).__name__.endswith("RMSNorm") and "forward" not in vars(norm)


def _is_from(part: object, model_type: str) -> bool:
    return type(part).__module__ == f"transformers.models.{model_type}.modeling_{model_type}"


def is_untouched(layer: nn.Module) -> bool:
    """Whether nobody hooked anything inside the layer, where work in pieces would show, or replaced its attention."""
    if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
        return False
    inside = [module for module in layer.modules() if module is not layer]
    attention: Any = layer.self_attn
    return "forward" not in vars(attention) and not any(
        is_watched(module._forward_hooks) or is_watched(module._forward_pre_hooks) for module in inside
    )


def is_watched(hooks: dict[int, Callable[..., Any]]) -> bool:
    """Whether any of a module's hooks is somebody else's."""
    return any(getattr(hook, "__module__", None) not in (_OURS, _ASLEEP) for hook in hooks.values())


def rotary_of(attention: nn.Module) -> Callable[..., tuple[torch.Tensor, torch.Tensor]]:
    """The rotary function that the attention's own forward would call now."""
    found: Callable[..., tuple[torch.Tensor, torch.Tensor]] = sys.modules[
        type(attention).__module__
    ].apply_rotary_pos_emb
    return found


def window_of(attention: nn.Module, model_type: str) -> int | None:
    """The sliding window that the attention's own forward would hand on."""
    return _SLIDING[model_type](attention) if model_type in _SLIDING else None


# Decoder layers on long inputs: everything row-wise in pieces, attention over the whole.
#
# A Hugging Face decoder layer makes float32 copies of its whole input in each norm, several copies of the queries in
# its rotary embedding, and tensors of the MLP's width: 100 GB at 1M tokens of an 8B model. Here a layer writes
# queries, keys and values piece by piece into place, attends once, and adds the output projection and the MLP to its
# input in place, again piece by piece. It calls the model's own norms, projections, rotary function and MLP.
#
# Shapes: B batch, S tokens, E hidden size, H query heads, G KV heads, D head size.


@dataclass(frozen=True, slots=True)
class LayerInput:
    """What one decoder layer is called with."""

    model_type: str
    hidden_BSE: torch.Tensor
    cos_BSR: torch.Tensor  # R is D, or less where only a part of each head is rotated
    sin_BSR: torch.Tensor
    cache: Cache | None

    def first(self, tokens: int) -> LayerInput:
        """The first tokens alone, without a cache."""
        rows = slice(0, tokens)
        return LayerInput(self.model_type, self.hidden_BSE[:, rows], self.cos_BSR[:, rows], self.sin_BSR[:, rows], None)


def forward_in_pieces(
    layer: nn.Module, given: LayerInput, engine: Engine, pieces: Sequence[slice], into_BSE: torch.Tensor
) -> torch.Tensor:
    """What the layer's own forward returns, up to rounding of products cut by rows.

    Args:
        layer: one for which `known_layers` holds.
        engine: attends.
        pieces: which tokens are worked on together.
        into_BSE: where the result goes; may be the input itself.
    """
    parts: Any = layer
    out_BHSD = _attend(parts, given, engine, pieces)
    for rows in pieces:
        attended_BSE = out_BHSD[:, :, rows].transpose(1, 2).flatten(2)
        hidden_BSE = into_BSE[:, rows]
        torch.add(given.hidden_BSE[:, rows], parts.self_attn.o_proj(attended_BSE), out=hidden_BSE)
        hidden_BSE += parts.mlp(parts.post_attention_layernorm(hidden_BSE))
    return into_BSE


def _attend(layer: Any, given: LayerInput, engine: Engine, pieces: Sequence[slice]) -> torch.Tensor:
    """[B, H, S, D], in the memory of the queries where the engine put it there. Keys and values are let go of."""
    attention, (batch, tokens, _) = layer.self_attn, given.hidden_BSE.shape
    # Queries first: their memory is then free again as one piece when the next layer asks for as much.
    q_BSHD = given.hidden_BSE.new_empty(
        (batch, tokens, attention.config.num_attention_heads, attention.head_dim), requires_grad=False
    )
    q_BHSD = q_BSHD.transpose(1, 2)
    entry = None if given.cache is None else given.cache.layers[attention.layer_idx]
    assert entry is None or isinstance(entry, SparseLayer)
    layout = Layout(batch, attention.config.num_key_value_heads, attention.head_dim, q_BHSD.dtype, q_BHSD.device)
    k_BGSD, v_BGSD = (layout.empty(tokens), layout.empty(tokens)) if entry is None else entry.room(tokens, layout)
    for rows in pieces:
        q_BHSD[:, :, rows], k_BGSD[:, :, rows], v_BGSD[:, :, rows] = _project(layer, given, rows)
    if entry is not None:
        entry.commit(k_BGSD, v_BGSD)
    window = window_of(attention, given.model_type)
    return engine.attend(
        LayerCall(attention.layer_idx, q_BHSD, k_BGSD, v_BGSD, given.cache, attention.scaling, window, q_is_spare=True)
    )


def _project(layer: Any, given: LayerInput, rows: slice) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Rotated queries and keys, and values, of some tokens: what the attention's own forward makes of them."""
    attention, x_BSE = layer.self_attn, layer.input_layernorm(given.hidden_BSE[:, rows])
    shape = (*x_BSE.shape[:-1], -1, attention.head_dim)
    q_BSHD, k_BSGD, v_BSGD = (
        projection(x_BSE).view(shape) for projection in (attention.q_proj, attention.k_proj, attention.v_proj)
    )
    if hasattr(attention, "q_norm"):
        q_BSHD, k_BSGD = attention.q_norm(q_BSHD), attention.k_norm(k_BSGD)
    q_BHSD, k_BGSD = rotary_of(attention)(
        q_BSHD.transpose(1, 2), k_BSGD.transpose(1, 2), given.cos_BSR[:, rows], given.sin_BSR[:, rows]
    )
    return q_BHSD, k_BGSD, v_BSGD.transpose(1, 2)


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
