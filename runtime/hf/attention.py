"""The attention function that Hugging Face models call by name, its mask function, and the engine behind both.

The names are registered when something is attached to a model, and do nothing to models that do not ask for them. The
engine, the cache and the phase arrive as a keyword argument, which a hook on each attention module adds.

Shapes: B batch, H query heads, G KV heads, S tokens of this call, K past + S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.keys import KeyView
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.core.program import Program, Rank
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.hf.cache import CacheOwner, SparseLayer
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.store import Bytes, KVStore

NAME = "sparsekv"
CONTEXT = "sparsekv_context"


class Phase(Enum):
    """What a forward pass is: decided once, where it enters the model."""

    PREFILL = "prefill"
    DECODE = "decode"


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's attention in one forward pass. The cache, if there is one, has the new tokens already."""

    layer: int
    phase: Phase
    q_BHSD: torch.Tensor
    k_BGSD: torch.Tensor  # the new tokens only
    v_BGSD: torch.Tensor
    cache: Cache | None
    scale: float
    window: int | None
    q_is_spare: bool = False  # nobody reads q after the call: the output may take its place

    @property
    def entry(self) -> SparseLayer | None:
        """This layer of the cache."""
        if self.cache is None:
            return None
        entry = self.cache.layers[self.layer]
        assert isinstance(entry, SparseLayer)
        return entry

    @property
    def chunk(self) -> Chunk:
        """Where the rows lie, the same in every batch row."""
        queries, entry = self.q_BHSD.shape[2], self.entry
        length = queries if entry is None else entry.store.length
        return Chunk.uniform(self.q_BHSD.shape[0], length - queries, length)

    def keys(self, chunk: Chunk) -> KeyView:
        """All keys so far, the chunk's included. Without a past the new rows are all there is, wherever the store has
        its copy."""
        lengths_B = on_device(chunk.lengths, self.q_BHSD.device, torch.int32)
        if self.entry is None or chunk.past[0] == 0:
            return KeyView(self.k_BGSD, self.v_BGSD, lengths_B)
        return self.entry.store.view(lengths_B)


class Executor(Protocol):
    """Runs some forward passes of a decoder in place of its own forward."""

    def takes(self, decoder: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether it runs a pass with these inputs, the context of the hook among them."""

    def run(self, decoder: nn.Module, inputs: dict[str, Any]) -> Any:
        """What the decoder's own forward returns."""


class Engine(CacheOwner, Protocol):
    """Computes the attention of every layer of the model it is attached to.

    Attributes:
        differentiable: whether autograd may look into `attend`.
    """

    differentiable: bool

    def executors(self) -> Sequence[Executor]:
        """What runs its forward passes, besides that of long inputs."""

    def begin_step(self, cache: Cache, lengths: tuple[int, ...], device: torch.device) -> None:
        """Starts a decode step at which the rows have these lengths, the new tokens included."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """The attention output, [B, H, S, D], before the output projection. May be q itself where that is spare."""


class DenseEngine:
    """Dense causal attention in every layer; the base of what only watches a model."""

    differentiable = False

    def __init__(self) -> None:
        self.open = True
        self.bytes: list[Bytes] = []

    def new_store(self, layer: int) -> KVStore:
        """Always on the device."""
        return DeviceStore()

    def new_state(self) -> DecodeState:
        """Decode steps share nothing."""
        return DecodeState(Program(Rank(), ()))

    def executors(self) -> Sequence[Executor]:
        """None."""
        return ()

    def begin_step(self, cache: Cache, lengths: tuple[int, ...], device: torch.device) -> None:
        """Nothing to start."""

    def attend(self, call: LayerCall) -> torch.Tensor:
        """[B, H, S, D]."""
        chunk = call.chunk
        k_BGKD, v_BGKD = call.keys(chunk).contiguous(chunk.longest)
        return dense_attention(call.q_BHSD, k_BGKD, v_BGKD, chunk, scale=call.scale, window=call.window).out_BHSD


@dataclass(frozen=True, slots=True)
class Context:
    """What a hook hands to the attention function of one layer."""

    engine: Engine
    cache: Cache | None
    phase: Phase


def register() -> None:
    """Makes the attention and its mask known to transformers by the name `sparsekv`."""
    AttentionInterface.register(NAME, attention_forward)
    AttentionMaskInterface.register(NAME, no_mask)


def no_mask(*args: Any, **kwargs: Any) -> None:
    """No mask at all: kernels work from positions. Without this, chunked prefill would see no mask and no past."""
    return None


def attention_forward(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float,
    sliding_window: int | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as `AttentionInterface` wants it: q [B, H, S, D], new k and v [B, G, S, D], output [B, S, H, D].

    Raises:
        UsageError: the model shares its config with one that a plan was applied to, or its hooks were removed, or a
            layer was called by itself.
        UnsupportedError: a mask was handed in.
    """
    context: Context | None = kwargs.get(CONTEXT)
    if context is None:
        raise UsageError(
            "expected a forward pass of a model that sparsekv was applied to, found a layer called by itself, or a "
            "model that shares its config object, or whose hooks were removed; call the model, load two models "
            "separately (or give one a copy.deepcopy of the config), and close the handle before removing hooks"
        )
    if attention_mask is not None:
        raise UnsupportedError(
            f"expected no prepared attention mask, found one of shape {tuple(attention_mask.shape)}; "
            f"custom masks are not supported, pass none"
        )
    layer: Any = module.layer_idx
    call = LayerCall(layer, context.phase, query, key, value, context.cache, scaling, sliding_window)
    if torch.is_grad_enabled() and not context.engine.differentiable:
        past = query.new_zeros((), requires_grad=True) if call.entry is not None and call.entry.needs_grad else None
        out_BHSD = _ForwardOnly.apply(context.engine, call, query, key, value, past)  # type: ignore[no-untyped-call]
    else:
        out_BHSD = context.engine.attend(call)
    return out_BHSD.transpose(1, 2).contiguous(), None


class _ForwardOnly(torch.autograd.Function):
    """Runs the engine outside autograd, and says so when someone asks for gradients of its inputs: of queries, keys
    and values, and of `past`, which stands for cached keys and values that needed one."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, call: LayerCall, *inputs: torch.Tensor | None) -> torch.Tensor:
        return engine.attend(call)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise UnsupportedError(
            "expected no gradient through sparsekv attention, found one asked for; close the handle before training, "
            "or train nothing before the last attention layer"
        )
