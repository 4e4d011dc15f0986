"""Measures how much the model's answers move with the attention output of each head and row: one gradient a prompt.

A candidate pattern changes the attention output of a head by delta. To second order, and summed over the rows as if
they were independent, that moves the next-token distributions of the answer by

    1/2 * sum over rows of (g . delta)^2

nats a token, with g the gradient of the answer's score function by that output, over the root of the answer's tokens:
the squared score function is the Fisher information, whose quadratic form is the divergence to second order. It weighs
heads, layers and rows by what they do to the output. head_errors.py estimates damage with it.

Distributions are softened by a temperature first: where the model is certain, the Fisher information vanishes, while an
error that is large enough turns the answer.

The pass holds the input of every layer (S x E a layer) and differentiates one layer at a time, from the last to the
first, so that its memory is that of one layer.

Shapes: B batch (1), H query heads, G KV heads, S rows, D head size, E hidden size, T scored rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from sparsekv.kernels.keys import PLAIN
from sparsekv.kernels.topk import blocks
from sparsekv.runtime.hf.describe import decoder_of
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.observe import AttentionCall, ObservedInput, capture_attention, captured_inputs, output_of

TEMPERATURE = 3.0
_ROWS_AT_ONCE = 4096  # of a layer with a window of its own
_FLOAT16_SCALE = 1024.0  # gradients of a float16 model underflow otherwise


@dataclass(frozen=True, slots=True, eq=False)
class Sensitivity:
    """One layer over one prompt."""

    call: AttentionCall
    out_BHSD: torch.Tensor  # the attention output
    gradient_BHSD: torch.Tensor  # of the answer's score function by that; float32


OnForward = Callable[[AttentionCall, torch.Tensor], None]
"""Sees a layer on the way up: its attention, and its input, [B, S, E]."""
OnBackward = Callable[[Sensitivity], None]
"""Sees a layer on the way down."""


def walk_layers(
    model: PreTrainedModel,
    ids_BS: torch.Tensor,
    scored: Sequence[int],
    seed: int,
    up: OnForward,
    down: OnBackward | None,
) -> None:
    """Runs a prompt through the model, and back down through its layers.

    Args:
        scored: rows whose next-token distributions count.
        seed: of the tokens that the score function is taken at.
        up: called for the layers in order.
        down: called for the layers from the last to the first; None: no gradients are wanted.
    """
    walk = _Walk(up)
    with (
        capture_attention(model, walk.observe),
        _frozen(model),
        captured_inputs(model) as walk.inputs,
        _last_output(model) as last,
    ):
        first = min(scored)  # a slice of rows: the last layer may be on another device than a tensor of indices
        logits_BTV = model(input_ids=ids_BS, use_cache=False, logits_to_keep=ids_BS.shape[1] - first).logits
        logits_BTV = logits_BTV[:, [row - first for row in scored]]
        if down is None:
            return
        check_numbers(model, "logits", logits_BTV)
        scale = _FLOAT16_SCALE if model.dtype == torch.float16 else 1.0
        (gradient_BSE,) = torch.autograd.grad(scale * _score(logits_BTV.float(), seed), last[0])
        del logits_BTV
        layers: Any = decoder_of(model).layers
        for number in reversed(range(len(layers))):
            gradient_BSE, found = walk.back(layers[number], walk.inputs.pop(number), gradient_BSE)
            if found is None:
                continue
            own_BHSD = found.gradient_BHSD.float() / (scale * len(scored) ** 0.5)
            check_numbers(model, f"gradients in layer {number}", 0.0 * own_BHSD.abs().amax())  # NaN of infinity too
            down(replace(found, gradient_BHSD=own_BHSD))


def _score(logits_BTV: torch.Tensor, seed: int) -> torch.Tensor:
    """The log-likelihood of tokens drawn from the softened distributions: its gradient by a logit is 1 - p or -p."""
    log_BTV = (logits_BTV / TEMPERATURE).log_softmax(-1)
    generator = torch.Generator().manual_seed(seed)
    drawn_T = torch.multinomial(log_BTV[0].detach().exp().cpu(), 1, generator=generator).to(log_BTV.device)
    return TEMPERATURE * log_BTV[0].gather(-1, drawn_T).sum()


class _Walk:
    def __init__(self, up: OnForward) -> None:
        self._up = up
        self.inputs: dict[int, ObservedInput] = {}
        self._down: tuple[AttentionCall, torch.Tensor] | None = None
        self._by_keys: dict[str, tuple[torch.Tensor, ...]] = {}  # gradients by keys and values of layers further down

    def observe(self, call: AttentionCall) -> torch.Tensor | None:
        if not call.q_BHSD.requires_grad:
            self._up(call, self.inputs[call.layer].hidden_BSE)
            return None
        out_BHSD = _attention(call)
        self._down = call, out_BHSD
        return out_BHSD

    def back(
        self, layer: nn.Module, given: ObservedInput, gradient_BSE: torch.Tensor
    ) -> tuple[torch.Tensor, Sensitivity | None]:
        """The gradient by the layer's input; and what its attention did, None where it has a recurrent state."""
        hidden_BSE, shared = given.hidden_BSE.detach().requires_grad_(), given.shared
        read = {kind: tuple(x.detach().requires_grad_() for x in pair) for kind, pair in (shared or {}).items()}
        if shared is not None:
            shared.update(read)
        with torch.enable_grad():
            out_BSE = given.run(layer, hidden_BSE, shared)
            if self._down is None:
                return torch.autograd.grad(out_BSE, hidden_BSE, gradient_BSE)[0], None
            call, attended_BHSD = self._down
            self._down = None
            made = [kind for kind in self._by_keys if shared[kind] is not read.get(kind)]
            out = (out_BSE, *(x for kind in made for x in shared[kind]))
            by_out = (gradient_BSE, *(x for kind in made for x in self._by_keys.pop(kind)))
            leaves = [x for pair in read.values() for x in pair]
            into_BSE, own_BHSD, *rest = torch.autograd.grad(
                out, (hidden_BSE, attended_BHSD, *leaves), by_out, allow_unused=True
            )
        self._add(read, rest)
        seen = replace(call, q_BHSD=call.q_BHSD.detach(), k_BGKD=call.k_BGKD.detach(), v_BGKD=call.v_BGKD.detach())
        return into_BSE, Sensitivity(seen, attended_BHSD.detach(), own_BHSD)

    def _add(self, read: Mapping[str, tuple[torch.Tensor, ...]], found: Sequence[torch.Tensor | None]) -> None:
        """Adds the gradients by shared keys and values, two of each kind; None where a layer reads none of them."""
        for kind, by_k, by_v in zip(read, found[::2], found[1::2], strict=True):
            if by_k is not None and by_v is not None:
                k, v = self._by_keys.get(kind, (0.0, 0.0))
                self._by_keys[kind] = k + by_k, v + by_v


def _attention(call: AttentionCall) -> torch.Tensor:
    """Dense causal attention that torch can differentiate: [B, H, S, D]."""
    q_BHSD, groups = call.q_BHSD, call.q_BHSD.shape[1] // call.k_BGKD.shape[1]
    k_BHKD, v_BHKD = (x.repeat_interleave(groups, 1) for x in (call.k_BGKD, call.v_BGKD))
    rows = q_BHSD.shape[2]
    if call.softmax is not PLAIN:
        return _by_blocks(call, k_BHKD, v_BHKD)
    if call.window is None or call.window >= rows:
        return scaled_dot_product_attention(q_BHSD, k_BHKD, v_BHKD, is_causal=True, scale=call.scale)
    parts = []
    for first in range(0, rows, _ROWS_AT_ONCE):
        end, oldest = min(first + _ROWS_AT_ONCE, rows), max(0, first + 1 - call.window)
        row_S1 = torch.arange(first, end, device=q_BHSD.device)[:, None]
        key_K = torch.arange(oldest, end, device=q_BHSD.device)
        mask_SK = (key_K <= row_S1) & (key_K > row_S1 - call.window)
        parts.append(
            scaled_dot_product_attention(
                q_BHSD[:, :, first:end], k_BHKD[:, :, oldest:end], v_BHKD[:, :, oldest:end], mask_SK, scale=call.scale
            )
        )
    return torch.cat(parts, 2)


def _by_blocks(call: AttentionCall, k_BHKD: torch.Tensor, v_BHKD: torch.Tensor) -> torch.Tensor:
    """`_attention` with the layer's own softmax: blocks of rows, whose weights are computed again for gradients."""
    rows, window = call.q_BHSD.shape[2], call.window or call.q_BHSD.shape[2]

    def attended(q_BHSD: torch.Tensor, first: int) -> torch.Tensor:
        row_S1 = torch.arange(first, first + q_BHSD.shape[2], device=q_BHSD.device)[:, None]
        key_K = torch.arange(rows, device=q_BHSD.device)
        scores_BHSK = (q_BHSD @ k_BHKD.mT).float() * call.scale
        if cap := call.softmax.cap:
            scores_BHSK = cap * torch.tanh(scores_BHSK / cap)
        hidden_SK = (key_K > row_S1) | (key_K <= row_S1 - window)
        weights_BHSK = call.softmax.weights(scores_BHSK.masked_fill(hidden_SK, -torch.inf), slice(None))
        return weights_BHSK.to(v_BHKD.dtype) @ v_BHKD

    parts = blocks(rows, call.q_BHSD.shape[1] * rows)
    found = [checkpoint(attended, call.q_BHSD[:, :, part], part.start, use_reentrant=False) for part in parts]
    return torch.cat(found, 2)


@contextmanager
def _frozen(model: PreTrainedModel) -> Iterator[None]:
    """No parameter takes part in gradients."""
    wanted = [parameter for parameter in model.parameters() if parameter.requires_grad]
    for parameter in wanted:
        parameter.requires_grad_(False)
    try:
        with torch.enable_grad():
            yield
    finally:
        for parameter in wanted:
            parameter.requires_grad_(True)


@contextmanager
def _last_output(model: PreTrainedModel) -> Iterator[list[torch.Tensor]]:
    """Gradients begin at the output of the last layer; the list gets it."""
    last: list[torch.Tensor] = []

    def after(module: nn.Module, args: tuple[Any, ...], out: Any) -> Any:
        if last:
            return None  # on the way down
        last.append(output_of(out).detach().requires_grad_())
        return (last[0], *out[1:]) if isinstance(out, tuple) else last[0]

    layers: Any = decoder_of(model).layers
    hook = layers[-1].register_forward_hook(after)
    try:
        yield last
    finally:
        hook.remove()
