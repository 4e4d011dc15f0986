"""The attention function that Hugging Face models call by name, its mask function, and the engine behind both.

The names are registered when something is attached to a model, and do nothing to models that do not ask for them. What
is attached stands in each attention module, under the same name, and knows the forward pass under way.

Shapes: B batch, H query heads, G KV heads, S tokens of this call, K past + S keys, D head size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from enum import Enum
from itertools import islice
from typing import Any, Protocol

import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.keys import PLAIN, KeyView, Softmax
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.model import AttentionGroup
from sparsekv.runtime.core.prefill import DenseLayers, prefill
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.hf.cache import CacheOwner, SparseLayer, attention_dtype, is_autocast
from sparsekv.runtime.stores.device import DeviceStore

NAME = "sparsekv"
PACKED = "sparsekv_flash"  # its name in continuous batching, whose scheduler tells masked implementations by theirs


class Phase(Enum):
    """The kind of a forward pass: decided once, where it enters the model."""

    PREFILL = "prefill"
    DECODE = "decode"
    DENSE = "dense decode"  # a decode step of which all tokens attend to everything, where that is faster
    CHECK = "check"  # a few tokens behind a past, dense, as decode steps of dense attention compute them


@dataclass(frozen=True, slots=True)
class LayerCall:
    """One layer's attention in one forward pass. Its cache, if there is one, has the new tokens already."""

    layer: int
    phase: Phase
    q_BHSD: torch.Tensor
    k_BGSD: torch.Tensor  # the new tokens only; of the layer whose keys it attends to
    v_BGSD: torch.Tensor
    entry: SparseLayer | None  # this layer of the cache
    scale: float
    window: int | None
    softmax: Softmax = PLAIN
    q_is_spare: bool = False  # nobody reads q after the call: the output may take its place
    new_B: torch.Tensor | None = None  # as of the pass
    ends_prompt: bool = False  # known to be the last of a prompt

    @property
    def chunk(self) -> Chunk:
        batch, _, queries, _ = self.q_BHSD.shape
        lengths = (self.k_BGSD.shape[2],) * batch if self.entry is None else self.entry.cached
        return Chunk(tuple(length - queries for length in lengths), lengths)

    @property
    def is_cut(self) -> bool:
        """Returns whether only the last new tokens attend: in layers without keys of their own, the others are not
        read."""
        return self.q_BHSD.shape[2] < self.k_BGSD.shape[2]

    def keys(self, chunk: Chunk) -> KeyView:
        """All keys so far, the chunk's included. Without a past the new rows are all there is."""
        lengths = chunk.lengths if self.entry is None else self.entry.store.lengths
        lengths_B = on_device(lengths, self.q_BHSD.device, torch.int32)
        if self.entry is None or not any(chunk.past):
            return KeyView(self.k_BGSD, self.v_BGSD, lengths_B, softmax=self.softmax)
        return self.seen(self.entry.store.view(lengths_B))

    def seen(self, keys: KeyView) -> KeyView:
        if self.entry is not None and self.entry.float8 is not None:
            keys = self.entry.float8.view(keys)
        return replace(keys, softmax=self.softmax)


@dataclass(slots=True)
class Pass:
    engine: Engine
    phase: Phase
    cache: Cache | None
    shapes: Mapping[int, AttentionGroup]  # what each layer that attends is, in order
    attended: int = 0  # layers that have
    new_B: torch.Tensor | None = None  # of a CHECK: int32, tokens of each row that count, the first ones; else all do
    projects: bool = False  # the layers are asked for queries, keys and values alone
    ends_prompt: bool = False  # it is known to be the last of a prompt
    rows: tuple[slice, ...] | None = None  # the columns with each row's tokens, where rows have different lengths
    dense: DenseLayers | None = None  # of a prompt's tokens over the cache

    def attend(
        self,
        layer: int,
        qkv: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
        scale: float,
        softmax: Softmax = PLAIN,
        q_is_spare: bool = False,
    ) -> torch.Tensor:
        """[B, H, S, D]: the attention of the next layer, in the dtype of the cache; under autocast the output has its
        dtype, else that of q. Raises UsageError in another layer's turn."""
        if self.projects:
            raise Projected(*qkv, scale, softmax)
        check_layer(self.next_layer, layer)
        self.attended += 1
        entry, dense = self.entry(layer), self.dense
        if dense is not None and softmax is PLAIN and not q_is_spare and not torch.is_grad_enabled():
            assert entry is not None, "dense layers of a pass without a cache"
            store, alike = entry.store, entry.dtype is qkv[0].dtype
            if layer in dense.layers and alike and isinstance(store, DeviceStore):
                k_BGKD, v_BGKD = store.tensors if dense.chunk.past[0] else qkv[1:]
                return dense.attend(layer, qkv[0], k_BGKD, v_BGKD, scale)
        given = attention_dtype(qkv[0])
        dtype = given if entry is None else entry.dtype_for(qkv[0])
        q_BHSD, k_BGSD, v_BGSD = (x.to(dtype) for x in qkv)
        window = self.shapes[layer].window
        call = LayerCall(
            layer, self.phase, q_BHSD, k_BGSD, v_BGSD, entry, scale, window, softmax, q_is_spare, self.new_B,
            self.ends_prompt,
        )  # fmt: skip
        kind = q_BHSD.device.type  # kernels get the dtypes that they ask for: scores in float32 above all
        with torch.autocast(kind, enabled=False) if is_autocast(kind) else nullcontext():
            return self._attend(call).to(given)

    @property
    def next_layer(self) -> int | None:
        """The one that attends next; None behind the last."""
        return next(islice(self.shapes, self.attended, None), None)

    def _attend(self, call: LayerCall) -> torch.Tensor:
        if not torch.is_grad_enabled() or self.engine.differentiable:
            return self.engine.attend(call)
        entry, qkv = call.entry, (call.q_BHSD, call.k_BGSD, call.v_BGSD)
        past = call.q_BHSD.new_zeros((), requires_grad=True) if entry is not None and entry.needs_grad else None
        out_BHSD: torch.Tensor = _ForwardOnly.apply(self.engine, call, *qkv, past)  # type: ignore[no-untyped-call]
        return out_BHSD

    def entry(self, layer: int) -> SparseLayer | None:
        """The layer of the cache that a layer attends to: its own, or that of an earlier one."""
        if self.cache is None:
            return None
        owner = self.shapes[layer].keys_of
        entry = self.cache.layers[layer if owner is None else owner]
        assert isinstance(entry, SparseLayer)
        return entry


class Projected(Exception):  # noqa: N818 - how a part of a forward ends, no error
    """Leaves an attention module where it would attend, with its queries, keys, values, scale and softmax as `args`."""


def check_layer(expected: int | None, found: int | None) -> None:
    """Raises UsageError where the layers that attend are not those of the attached model, in their order."""
    if expected != found:
        raise UsageError(
            f"expected attention of layer {expected}, found {'none' if found is None else f'that of layer {found}'}: "
            "the layers, or their attention implementation, are not those that a plan was applied to; close the handle "
            "before changing the model"
        )


class Attachment(Protocol):
    """An engine attached to a model, for whoever runs its forward passes: see `Attached` in attach.py."""

    model: PreTrainedModel
    decoder: PreTrainedModel
    shapes: Mapping[int, AttentionGroup]
    under_way: Pass | None

    def run(self, under_way: Pass, inputs: dict[str, Any]) -> Any:
        """The output of the decoder's own forward, by an executor where one takes the pass."""

    def run_own(self, under_way: Pass, inputs: dict[str, Any]) -> Any:
        """The decoder's own forward, whose layers attend as the pass says."""

    def stepping(self, phase: Phase, new_B: torch.Tensor | None = None) -> AbstractContextManager[None]:
        """Inside it, every pass over a cache is a step of this phase."""


class Executor(Protocol):
    """Runs some forward passes of a decoder in place of its own forward."""

    def takes(self, attached: Attachment, under_way: Pass, inputs: dict[str, Any]) -> bool:
        """Returns whether it runs this pass."""

    def run(self, attached: Attachment, under_way: Pass, inputs: dict[str, Any]) -> Any:
        """The output of the decoder's own forward."""


class Engine(CacheOwner):
    """Computes the attention of every layer of the model it is attached to: dense, where a class of its own does not
    say otherwise."""

    differentiable = False  # whether autograd may look into `attend`
    sees_all = True  # whether it is to see the queries of all rows, also in layers where nobody asks for their output

    def taking_over(self, attached: Attachment, given: dict[str, Any]) -> dict[str, Any]:
        """The arguments of `generate` with which it runs the engine's loop."""
        return given

    def executors(self) -> Sequence[Executor]:
        """Executors of its forward passes, besides long inputs'."""
        return ()

    def step_phase(self, cache: Cache, lengths: tuple[int, ...]) -> Phase:
        """The phase of a pass of one token behind a past of so many tokens in each row."""
        return Phase.DECODE

    def check_cut(self, chunk: int | None, tokens: int) -> None:
        """Warns where a prompt of so many tokens is to run in chunks of another size than was verified, or whole."""

    def begin(self, cache: Cache, phase: Phase, lengths: tuple[int, ...], device: torch.device) -> DenseLayers | None:
        """Starts a pass at which the rows have these lengths, the new tokens included. Returns the layers that attend
        without `attend`."""
        return None

    def attend(self, call: LayerCall) -> torch.Tensor:
        """The attention output, [B, H, S, D], before the output projection. May be q itself where that is spare."""
        chunk, q_BHSD = call.chunk, call.q_BHSD
        keys = call.keys(chunk)
        layer = LayerProgram(call.layer, q_BHSD.shape[1], keys.kv_heads, call.window)
        backend = "cpu" if q_BHSD.device.type == "cpu" else "triton"
        return prefill(layer, q_BHSD, keys, chunk, scale=call.scale, fallback=Fallback(backend))


def register() -> None:
    for name in (NAME, PACKED):
        AttentionInterface.register(name, attention_forward)
        AttentionMaskInterface.register(name, no_mask)


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
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    cache: Any = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention as `AttentionInterface` wants it: q [B, H, S, D], new k and v [B, G, S, D], output [B, S, H, D].
    Windows are those of the config: not every architecture hands them in."""
    attached: Attachment | None = vars(module).get(NAME)
    if attached is None or attached.under_way is None:
        raise UsageError(
            "expected a forward pass of a model that sparsekv was applied to, found a layer called by itself, or put "
            "into the model since, or a model that shares its config object; call the model, close the handle before "
            "changing it, and load two models separately (or give one a copy.deepcopy of the config)"
        )
    if attention_mask is not None:
        raise UnsupportedError(
            f"expected no prepared attention mask, found one of shape {tuple(attention_mask.shape)}; "
            f"custom masks are not supported, pass none"
        )
    layer: Any = module.layer_idx
    if cache is not None:  # of continuous batching, which layers fill themselves from transformers 5.24 on
        key, value = cache.update(key_states=key, value_states=value, layer_idx=layer, kwargs=kwargs)
    softmax = Softmax(softcap or 0.0, s_aux) if softcap or s_aux is not None else PLAIN
    out_BHSD = attached.under_way.attend(layer, (query, key, value), scaling, softmax)
    return out_BHSD.transpose(1, 2).contiguous(), None


class _ForwardOnly(torch.autograd.Function):
    """Runs the engine outside autograd, and refuses gradients of its inputs: of queries, keys and values, and of
    `past`, which stands for cached keys and values that needed one."""

    @staticmethod
    def forward(ctx: Any, engine: Engine, call: LayerCall, *inputs: torch.Tensor | None) -> torch.Tensor:
        return engine.attend(call)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        raise UnsupportedError(
            "expected no gradient through sparsekv attention, found one asked for; close the handle before training, "
            "or train nothing before the last attention layer"
        )
