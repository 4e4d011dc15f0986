"""Attaching an engine to a model, and taking it off again without a trace. The one way to do so.

While attached: the model's attention implementation is `sparsekv`; a hook on the decoder checks the inputs and gives
the cache our layers; a hook on every attention module hands the engine and the cache to the attention function; the
decoder layers and the final norm work in pieces on long inputs; and `generate` refuses what cannot be right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.architectures import attention_modules, check_supported, decoder_of
from sparsekv.runtime.attention import CONTEXT, NAME, Context, register
from sparsekv.runtime.cache import check_even, sparse_cache
from sparsekv.runtime.chunking import Chunking
from sparsekv.runtime.engine import Engine
from sparsekv.runtime.guard import guarded
from sparsekv.runtime.inputs import check_inputs, check_positions
from sparsekv.runtime.known_layers import is_watched
from sparsekv.runtime.long_inputs import PASS, ForwardPass, LongInputs


def check_attachable(model: PreTrainedModel) -> None:
    """Raises a clear error when nothing can be attached to `model`.

    Raises:
        UsageError: not a Hugging Face model, in training mode, or something is attached already.
        UnsupportedError: an architecture that is not supported, or a model split by tensor parallelism.
    """
    if not isinstance(model, PreTrainedModel):
        raise UsageError(
            f"expected a Hugging Face PreTrainedModel, found {type(model).__name__}; load it with load_model"
        )
    check_supported(model.config.model_type)
    if model.config._attn_implementation == NAME:
        raise UsageError("a plan is applied to this model already; close that handle before applying another")
    if model.training:
        raise UsageError("expected a model in evaluation mode, found training mode; call model.eval()")
    if (model.tp_size or 1) > 1:
        raise UnsupportedError(
            f"expected a model on its own, found one split over {model.tp_size} tensor-parallel ranks; "
            f"load it without tp_plan"
        )


def attach(model: PreTrainedModel, engine: Engine, chunking: Chunking | None = None) -> Callable[[], None]:
    """Attaches `engine` and returns what undoes it, any number of times, exceptions or not.

    Args:
        chunking: how long inputs are cut, where not as usual.

    Raises:
        UsageError, UnsupportedError: see `check_attachable`.
    """
    check_attachable(model)
    register()
    with ExitStack() as undo:
        undo.callback(_restore_implementations, _implementations(model))
        model.set_attn_implementation(NAME)
        hook = _decoder_hook(engine, decoder_of(model), len(attention_modules(model)))
        undo.callback(decoder_of(model).register_forward_pre_hook(hook, with_kwargs=True).remove)
        for module in attention_modules(model):
            undo.callback(module.register_forward_pre_hook(_attention_hook(engine), with_kwargs=True).remove)
        _shadow_forwards(decoder_of(model), LongInputs(engine, chunking or Chunking(), model.config.model_type), undo)
        if model.can_generate():
            _shadow(model, "generate", guarded(model), undo)
        undo.callback(setattr, engine, "open", False)
        return undo.pop_all().close
    raise AssertionError("unreachable")


def _implementations(model: PreTrainedModel) -> list[tuple[PreTrainedConfig, str | None]]:
    configs: dict[int, PreTrainedConfig] = {}
    waiting = [module.config for module in model.modules() if isinstance(module, PreTrainedModel)]
    while waiting:
        config = waiting.pop(0)
        if id(config) not in configs:
            configs[id(config)] = config
            waiting.extend(sub for name in config.sub_configs if (sub := getattr(config, name, None)) is not None)
    return [(config, config._attn_implementation) for config in configs.values()]


def _restore_implementations(saved: list[tuple[PreTrainedConfig, str | None]]) -> None:
    for config, implementation in saved:  # outer before inner: setting one sets those below it
        config._attn_implementation = implementation


def _decoder_hook(engine: Engine, decoder: PreTrainedModel, layers: int) -> Callable[..., Any]:
    names = tuple(inspect.signature(decoder.forward).parameters)

    def prepare(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        inputs = dict(zip(names, args, strict=False)) | kwargs
        config: Any = module.config
        check_inputs({"output_attentions": config.output_attentions} | inputs, module.training)
        cache = inputs.get("past_key_values")
        use_cache = inputs.get("use_cache")
        if cache is not None or (config.use_cache if use_cache is None else use_cache):
            cache = inputs["past_key_values"] = sparse_cache(cache, engine, layers)
            check_even(cache, config.num_hidden_layers)
        check_positions(inputs.get("position_ids"), 0 if cache is None else cache.get_seq_length())
        if not (inputs.get("output_hidden_states") or config.output_hidden_states):  # else each layer's is kept
            inputs[PASS] = ForwardPass(_makes_embeddings(module, inputs), module.layers)
        return (), inputs

    return prepare


def _attention_hook(engine: Engine) -> Callable[..., Any]:
    def hand_over(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, {CONTEXT: Context(engine, kwargs.get("past_key_values"))} | kwargs

    return hand_over


def _makes_embeddings(decoder: Any, inputs: dict[str, Any]) -> bool:
    """Whether the first layer's input is made in this pass and seen by nobody else."""
    embedding = decoder.get_input_embeddings()
    return (
        inputs.get("inputs_embeds") is None
        and type(embedding) is nn.Embedding
        and "forward" not in vars(embedding)
        and not is_watched(embedding._forward_hooks)
        and "forward" not in vars(decoder)  # somebody else's may yet put embeddings in, and so may a hook behind ours
        and not is_watched(decoder._forward_pre_hooks)
    )


def _shadow_forwards(decoder: Any, long: LongInputs, undo: ExitStack) -> None:
    for layer in decoder.layers:
        _shadow(layer, "forward", long.layer_forward(layer), undo)
    _shadow(decoder.norm, "forward", long.norm_forward(decoder.norm), undo)


def _shadow(thing: Any, name: str, function: Callable[..., Any] | None, undo: ExitStack) -> None:
    """An attribute of this one object, in front of the method of its class."""
    if function is None:
        return
    attributes: dict[str, Any] = thing.__dict__
    former = attributes.get(name)
    attributes[name] = function

    def restore() -> None:
        if attributes.get(name) is not function:
            return  # somebody put another one in front since
        if former is None:
            del attributes[name]
        else:
            attributes[name] = former

    undo.callback(restore)
