"""Attaching an engine to a model, and taking it off again without a trace. The one way to do so.

While attached: the model's attention implementation is `sparsekv`; a hook on the decoder checks the inputs and gives
the cache our layers; a hook on every attention module hands the engine and the cache to the attention function; the
decoder layers and the final norm work in pieces on long inputs; and `generate` refuses what cannot be right.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from contextlib import ExitStack
from functools import wraps
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from sparsekv.plans.errors import PromptError, UnsupportedError, UsageError
from sparsekv.runtime.attention import CONTEXT, NAME, Context, register
from sparsekv.runtime.engine import Engine
from sparsekv.runtime.hf.cache import check_even, sparse_cache
from sparsekv.runtime.hf.describe import attention_modules, check_supported, decoder_of
from sparsekv.runtime.hf.long_inputs import PASS, Chunking, ForwardPass, LongInputs, is_watched

# What a forward pass may be given: equally long rows without padding, positions in a row, no custom mask.


def check_inputs(inputs: dict[str, Any], training: bool) -> None:
    """Raises a clear error for what would give wrong tokens.

    Raises:
        UsageError: the model is in training mode.
        PromptError: there are no tokens.
        UnsupportedError: padding, custom masks, or attention weights asked for.
    """
    if training:
        raise UsageError("expected a model in evaluation mode, found training mode; call model.eval()")
    tokens = inputs.get("input_ids")
    if tokens is None:
        tokens = inputs.get("inputs_embeds")
    if tokens is not None and tokens.shape[1] == 0:
        raise PromptError("expected at least one token, found an empty prompt; give it some text")
    _check_mask(inputs.get("attention_mask"))
    if inputs.get("output_attentions"):
        raise UnsupportedError("attention weights are never materialised here; leave output_attentions off")


def _check_mask(mask: Any) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        found = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise UnsupportedError(f"expected a 2D attention_mask of ones or none, found {found}; pass no custom mask")
    if not bool(mask.all()):
        raise UnsupportedError(
            "expected rows of equal length, found padding in attention_mask; "
            "run prompts of different lengths one at a time, or group those of equal length"
        )


def check_positions(positions: Any, past: int) -> None:
    """Positions of several tokens count up by one from what is cached. Single tokens are not asked: it costs a wait.

    Raises:
        UnsupportedError: they do not.
    """
    if positions is None or positions.shape[-1] < 2:
        return
    expected = torch.arange(past, past + positions.shape[-1], device=positions.device)
    if not bool((positions == expected).all()):
        raise UnsupportedError(
            f"expected position_ids that count up by one from the {past} cached tokens, found others; "
            f"run packed sequences one by one, and leave prefill_chunk_size unset when a prompt goes on from a cache"
        )


# Refuses the ways of generating that a sparse cache cannot follow, before anything runs.
#
# The cache refuses them too, but only after the prefill of what may be a very long prompt.

_ONE_BEAM = "generate with num_beams=1 and do_sample as you like"
_NO_DRAFTS = "generate without an assistant or prompt lookup"
_OWN_CACHE = "leave cache_implementation unset; a plan's decode.offload moves KV to the host"

_REFUSED: dict[str, tuple[Callable[[Any], bool], str, str]] = {
    "num_beams": (lambda found: found > 1, "beam search", _ONE_BEAM),
    "force_words_ids": (bool, "constrained beam search", _ONE_BEAM),
    "constraints": (bool, "constrained beam search", _ONE_BEAM),
    "assistant_model": (bool, "assisted generation", _NO_DRAFTS),
    "prompt_lookup_num_tokens": (bool, "prompt lookup", _NO_DRAFTS),
    "assistant_early_exit": (bool, "assisted generation", _NO_DRAFTS),
    "use_mtp": (bool, "multi-token prediction", _NO_DRAFTS),
    "penalty_alpha": (bool, "contrastive search", "leave penalty_alpha unset"),
    "dola_layers": (bool, "DoLa decoding", "leave dola_layers unset"),
    "output_attentions": (bool, "returning attention weights", "leave output_attentions off"),
    "cache_implementation": (lambda found: found != "dynamic", "another cache implementation", _OWN_CACHE),
}


def guarded(model: PreTrainedModel) -> Callable[..., Any]:
    """The model's `generate` behind the checks.

    Raises, when the result is called:
        UnsupportedError: the arguments ask for beams, drafts, or a cache of another kind.
    """
    generate: Any = model.generate

    @wraps(generate)
    def checked(*args: Any, **kwargs: Any) -> Any:
        config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
        for name, (refused, what, instead) in _REFUSED.items():
            found = _setting(name, kwargs, config, model.generation_config)
            if found is not None and refused(found):
                raise UnsupportedError(
                    f"{what} cannot be right with a sparsekv plan applied yet (found {name}={_brief(found)}); "
                    f"{instead}, or close the handle first"
                )
        return generate(*args, **kwargs)

    return checked


def _setting(name: str, kwargs: dict[str, Any], config: GenerationConfig | None, defaults: GenerationConfig) -> Any:
    if kwargs.get(name) is not None:
        return kwargs[name]
    given = getattr(config, name, None)
    return given if given is not None else getattr(defaults, name, None)


def _brief(found: Any) -> str:
    return repr(found) if isinstance(found, (bool, int, float, str)) else type(found).__name__


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
