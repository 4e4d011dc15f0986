"""Long forward passes by an executor of our own: everything row-wise in chunks of rows, attention over the whole.

A Hugging Face decoder layer makes float32 copies of its whole input in each norm, several copies of the queries in its
rotary embedding, and tensors of the MLP's width: 100 GB at 1M tokens of an 8B model. Here a layer writes queries, keys
and values chunk by chunk into preallocated tensors, attends once, and adds the output projection and the MLP to its
input in place, again chunk by chunk. It calls the model's own norms, attention (up to where that attends), output
projection and MLP.

The executor runs the decoder's own forward, with such a forward in place of that of its layers and of its last norm,
where the input is long and nothing unknown is asked for. A layer that is not as transformers made it (another forward,
other parts, hooks) is called whole, and what it has seen is not overwritten.

Shapes: B batch, S tokens, E hidden size, H query heads, G KV heads, D head size, R rotated part of a head.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from torch import nn
from torch.nn.modules import module as torch_modules

from sparsekv.runtime.architecture import Architecture, architecture_of
from sparsekv.runtime.hf.attention import Attachment, Pass, Projected
from sparsekv.runtime.hf.describe import CACHE_NAME
from sparsekv.runtime.stores.store import Layout

_DORMANT = "transformers.utils.output_capturing"  # hooks that stay behind once hidden states were asked for
_OWN = str(Path(transformers.__file__).parent)
_INPUTS = {"input_ids", "inputs_embeds", "attention_mask", "position_ids", CACHE_NAME, "use_cache", "logits_to_keep"}


@dataclass(frozen=True, slots=True)
class Chunking:
    """The cut of the work of a long input into rows and heads.

    Args:
        above: inputs of more tokens, over all batch rows, are cut.
        rows: tokens worked on together, over all batch rows. Fewer bound memory, more keep matrix products large.
        output_bytes: attention output that a layer may hold beside its queries; a larger one overwrites them in
            groups of heads.
    """

    above: int = 16_384
    rows: int = 16_384
    output_bytes: int = 2 << 30

    def applies(self, batch: int, tokens: int) -> bool:
        """Returns whether a call of this size is cut. Decode steps are not."""
        return tokens > 1 and batch * tokens > self.above

    def pieces(self, batch: int, tokens: int) -> Iterator[slice]:
        """All tokens, in order, in chunks of about one size."""
        most = max(1, self.rows // batch)
        size = -(-tokens // -(-tokens // most))
        for start in range(0, tokens, size):
            yield slice(start, min(start + size, tokens))


class LongInputs:
    def __init__(self, chunking: Chunking, model_type: str) -> None:
        self._chunking = chunking
        self._architecture = architecture_of(model_type)

    def takes(self, attached: Attachment, under_way: Pass, inputs: dict[str, Any]) -> bool:
        """Returns whether the pass is long, asks for nothing unknown, and the decoder is of a known class."""
        given = [inputs[name] for name in ("input_ids", "inputs_embeds") if inputs.get(name) is not None]
        if len(given) != 1 or not self._chunking.applies(*given[0].shape[:2]):
            return False
        plain = not (
            torch.is_grad_enabled()
            or torch.compiler.is_compiling()
            or torch.is_autocast_enabled(given[0].device.type)
            or torch_modules._global_forward_hooks
            or torch_modules._global_forward_pre_hooks
        )
        return plain and self._is_own(attached.decoder) and not asks_for_more(attached.decoder, inputs)

    def _is_own(self, *parts: object) -> bool:
        """Returns whether these modules are of transformers' classes for this model type, or torch's norm."""
        return all(type(part) is nn.LayerNorm or type(part).__module__ == self._architecture.home for part in parts)

    def run(self, attached: Attachment, under_way: Pass, inputs: dict[str, Any]) -> Any:
        decoder: Any = attached.decoder
        embed = decoder.get_input_embeddings()
        is_known = type(embed) is nn.Embedding or self._is_own(embed)
        spare = inputs.get("input_ids") is not None and is_known and not is_touched(embed)  # nobody else has the input
        rows = _Rows(self._architecture, under_way, self._chunking)
        with ExitStack() as undo:
            for layer in decoder.layers[: decoder.config.num_hidden_layers]:
                if is_cut := self._can_cut(layer):
                    undo.enter_context(replaced(layer, "forward", partial(rows.layer, layer, spare)))
                spare = is_cut
            norm = getattr(decoder, self._architecture.last_norm)
            if self._is_own(norm) and not is_touched(norm):
                undo.enter_context(replaced(norm, "forward", partial(rows.norm, norm, spare)))
            return attached.run_own(under_way, inputs)

    def _can_cut(self, layer: nn.Module) -> bool:
        record: Any = self._architecture
        if not record.has_parts(layer) or any(map(is_touched, layer.modules())):
            return False
        names = (record.attention, record.mlp, *record.norms, *record.norms_after)
        parts = [layer, *(getattr(layer, name) for name in names if name)]
        beside = getattr(layer, record.beside) if record.beside else None
        is_known = self._is_own(*parts, *([] if beside is None else [beside]))
        return is_known and all(_has_own_forward(part) for part in parts[:2])


@contextmanager
def replaced(module: nn.Module, name: str, method: Callable[..., Any]) -> Iterator[None]:
    """Inside it, the module has another method of this name."""
    former = {name: vars(module)[name]} if name in vars(module) else {}
    vars(module)[name] = method
    try:
        yield
    finally:
        del vars(module)[name]
        vars(module).update(former)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The forwards of a pass in pieces of rows; a `spare` input is overwritten."""

    architecture: Architecture
    under_way: Pass
    chunking: Chunking

    def layer(self, layer: nn.Module, spare: bool, hidden_BSE: torch.Tensor, **given: Any) -> torch.Tensor:
        pieces = list(self.chunking.pieces(*hidden_BSE.shape[:2]))
        rotary, position_BS = given.get("position_embeddings"), given.get("position_ids")
        cut = _CutLayer(layer, self.architecture, self.under_way, pieces, hidden_BSE, rotary, position_BS)
        return cut.forward(hidden_BSE if spare else torch.empty_like(hidden_BSE))

    def norm(self, norm: nn.Module, spare: bool, hidden_BSE: torch.Tensor) -> torch.Tensor:
        out_BSE = hidden_BSE if spare else torch.empty_like(hidden_BSE)
        for rows in self.chunking.pieces(*hidden_BSE.shape[:2]):
            out_BSE[:, rows] = type(norm).forward(norm, hidden_BSE[:, rows])
        return out_BSE


def _has_own_forward(module: nn.Module) -> bool:
    """Returns whether the forward of a module's class is transformers', and nobody else's in its place."""
    code = getattr(type(module).forward, "__code__", None)
    return code is not None and code.co_filename.startswith(_OWN)


def asks_for_more(decoder: Any, inputs: dict[str, Any]) -> bool:
    """Returns whether a forward pass wants anything but the last hidden state of tokens and their cache."""
    extra = {name: value for name, value in inputs.items() if name not in _INPUTS}
    recorded = decoder.config.output_hidden_states or getattr(decoder.config, "output_router_logits", False)
    plain = extra.pop("return_dict", None) is not False and not recorded
    return not plain or any(value is not None and value is not False for value in extra.values())


def is_touched(module: nn.Module) -> bool:
    """Returns whether somebody has a hook on a module, or a forward of their own."""
    hooks = (*module._forward_hooks.values(), *module._forward_pre_hooks.values())
    return "forward" in vars(module) or any(getattr(hook, "__module__", None) != _DORMANT for hook in hooks)


@dataclass(frozen=True, slots=True, eq=False)
class _CutLayer:
    layer: nn.Module
    architecture: Architecture
    under_way: Pass
    pieces: Sequence[slice]
    hidden_BSE: torch.Tensor
    rotary: tuple[torch.Tensor, torch.Tensor] | None  # cosines and sines, [B, S, R] each; None of layers without
    position_BS: torch.Tensor | None

    def forward(self, into_BSE: torch.Tensor) -> torch.Tensor:
        """The output of the layer's own forward, up to rounding of products cut by rows; into its input, if given."""
        record, layer = self.architecture, self.layer
        project, mlp = getattr(getattr(layer, record.attention), record.output), self._mlp()
        first, norm, after_attention, after_mlp = map(self._part, (*record.norms, *record.norms_after))
        scale = getattr(layer, record.residual) if record.residual else 1
        out_BHSD = self._attend()
        for rows in self.pieces:
            attended_BSE = out_BHSD[:, :, rows].transpose(1, 2).flatten(2)
            read_BSE, hidden_BSE = self.hidden_BSE[:, rows], into_BSE[:, rows]
            added_BSE = mlp(first(read_BSE)) if record.parallel else None  # before its input is overwritten
            torch.add(read_BSE, after_attention(project(attended_BSE)) * scale, out=hidden_BSE)
            hidden_BSE += after_mlp(mlp(norm(hidden_BSE)) if added_BSE is None else added_BSE) * scale
        return into_BSE

    def _mlp(self) -> Callable[[torch.Tensor], torch.Tensor]:
        mlp = getattr(self.layer, self.architecture.mlp)
        beside = getattr(self.layer, self.architecture.beside) if self.architecture.beside else None

        def made(x_BSE: torch.Tensor) -> torch.Tensor:
            output = mlp(x_BSE)
            out_BSE: torch.Tensor = output[0] if isinstance(output, tuple) else output  # some give their routing too
            return out_BSE if beside is None else out_BSE + beside(x_BSE)

        return made

    def _part(self, name: str) -> Callable[[torch.Tensor], torch.Tensor]:
        """A norm of the layer; what it is given, in one piece of memory, where it has none there."""
        return getattr(self.layer, name) if name else lambda x_BSE: x_BSE.contiguous()

    def _attend(self) -> torch.Tensor:
        """[B, H, S, D], in the memory of the queries where the engine put it there. Keys and values are let go of."""
        attention, (batch, tokens, _) = getattr(self.layer, self.architecture.attention), self.hidden_BSE.shape
        number, config, size = attention.layer_idx, attention.config, attention.head_dim
        # Queries first: their memory is then free again in one block when the next layer asks for as much.
        q_BSHD = self.hidden_BSE.new_empty((batch, tokens, config.num_attention_heads, size), requires_grad=False)
        q_BHSD = q_BSHD.transpose(1, 2)
        entry = self.under_way.entry(number)
        dtype = q_BHSD.dtype if entry is None else entry.dtype_for(q_BHSD)
        layout = Layout(batch, config.num_key_value_heads, size, dtype, q_BHSD.device)
        k_BGSD, v_BGSD = (layout.empty(tokens), layout.empty(tokens)) if entry is None else entry.room(tokens, layout)
        norm = self._part(self.architecture.norms[0])
        for rows in self.pieces:
            *qkv, scale, softmax = self._projected(attention, norm(self.hidden_BSE[:, rows]), rows)
            q_BHSD[:, :, rows], k_BGSD[:, :, rows], v_BGSD[:, :, rows] = qkv
        if entry is not None:
            entry.commit(k_BGSD, v_BGSD)
        return self.under_way.attend(number, (q_BHSD, k_BGSD, v_BGSD), scale, softmax, q_is_spare=True)

    def _projected(self, attention: nn.Module, x_BSE: torch.Tensor, rows: slice) -> tuple[Any, ...]:
        """Queries and keys as they attend, values, scale and softmax, by the attention's own forward."""
        rotary = None if self.rotary is None else tuple(angles_BSR[:, rows] for angles_BSR in self.rotary)
        position_BS = None if self.position_BS is None else self.position_BS[:, rows]
        self.under_way.projects = True
        try:
            attention(hidden_states=x_BSE, position_embeddings=rotary, attention_mask=None, position_ids=position_BS)
        except Projected as found:
            return found.args
        finally:
            self.under_way.projects = False
        raise AssertionError("expected an attention that calls its interface")
