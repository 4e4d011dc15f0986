"""Attaching an engine to a model, and taking it off again without a trace. The one way to do so.

While attached: the model's attention implementation is `sparsekv`; a hook on the decoder checks the inputs and gives
the cache our layers; a hook on every attention module hands the engine and the cache to the attention function; and
`generate` refuses what cannot be right.
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
from sparsekv.runtime.cache import sparse_cache
from sparsekv.runtime.engine import Engine
from sparsekv.runtime.guard import guarded
from sparsekv.runtime.inputs import check_inputs, check_positions


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


def attach(model: PreTrainedModel, engine: Engine) -> Callable[[], None]:
    """Attaches `engine` and returns what undoes it, any number of times, exceptions or not.

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
        if model.can_generate():
            _shadow_generate(model, undo)
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

    def prepare(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
        inputs = dict(zip(names, args, strict=False)) | kwargs
        config: Any = module.config
        check_inputs({"output_attentions": config.output_attentions} | inputs, module.training)
        cache = inputs.get("past_key_values")
        use_cache = inputs.get("use_cache")
        if cache is not None or (config.use_cache if use_cache is None else use_cache):
            cache = inputs["past_key_values"] = sparse_cache(cache, engine, layers)
        check_positions(inputs.get("position_ids"), 0 if cache is None else cache.get_seq_length())
        return (), inputs

    return prepare


def _attention_hook(engine: Engine) -> Callable[..., Any]:
    def hand_over(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        return args, kwargs | {CONTEXT: Context(engine, kwargs.get("past_key_values"))}

    return hand_over


def _shadow_generate(model: PreTrainedModel, undo: ExitStack) -> None:
    """An attribute of this one object, in front of the method of its class."""
    former = model.__dict__.get("generate")
    model.__dict__["generate"] = guarded(model)

    def restore() -> None:
        if former is None:
            model.__dict__.pop("generate", None)
        else:
            model.__dict__["generate"] = former

    undo.callback(restore)
