"""What a forward pass and `generate` may be given: equally long rows without padding, positions in a row, no custom
mask, one sequence a row, token by token. Anything else is refused before it gives wrong tokens."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import Cache, GenerationConfig

from sparsekv.plans.errors import PromptError, UnsupportedError, UsageError

_PACKED = ("cu_seq_lens_q", "cu_seq_lens_k", "seq_idx")  # rows of several sequences


def check_call(decoder: Any, inputs: dict[str, Any], tokens: torch.Tensor | None, past: int) -> None:
    """Raises a clear error for a forward pass behind `past` cached tokens that would give wrong ones. Waits for the
    device where there is a mask.

    Raises:
        UsageError: the model is in training mode.
        PromptError: there are no tokens.
        UnsupportedError: attention weights are asked for, or attention that is not causal, or packed sequences, or
            there is padding.
    """
    new = 0 if tokens is None else tokens.shape[1]
    if decoder.training:
        raise UsageError("expected a model in evaluation mode, found training mode; call model.eval()")
    if tokens is not None and new == 0:
        raise PromptError("expected at least one token, found an empty prompt; give it some text")
    if inputs.get("output_attentions", decoder.config.output_attentions):
        raise UnsupportedError("attention weights are never materialised here; leave output_attentions off")
    if inputs.get("is_causal", getattr(decoder.config, "is_causal", True)) is False:
        raise UnsupportedError("expected causal attention, found is_causal=False; close the handle to run an encoder")
    packed = [name for name in _PACKED if inputs.get(name) is not None]
    if packed:
        raise UnsupportedError(f"expected one sequence a row, found {packed[0]}; run packed sequences one by one")
    _check_mask(inputs.get("attention_mask"), past + new)
    _check_positions(inputs.get("position_ids"), past)


def _check_mask(mask: Any, length: int) -> None:
    if mask is None:
        return
    if not isinstance(mask, torch.Tensor) or mask.dim() != 2:
        found = f"a tensor of shape {tuple(mask.shape)}" if isinstance(mask, torch.Tensor) else type(mask).__name__
        raise UnsupportedError(f"expected a 2D attention_mask of ones or none, found {found}; pass no custom mask")
    if mask.shape[1] < length:
        raise UnsupportedError(
            f"expected an attention_mask of all {length} tokens, cached ones included, found one of "
            f"{mask.shape[1]}; pass the whole mask or none"
        )
    if not bool(mask.all()):
        raise UnsupportedError(
            "expected rows of equal length, found padding in the attention_mask; "
            "run prompts of different lengths one at a time, or group those of equal length"
        )


def _check_positions(positions: Any, past: int) -> None:
    """Positions of several tokens count up by one from what is cached. Single tokens are not asked: it costs a wait."""
    if positions is None or positions.shape[-1] < 2:
        return
    expected = torch.arange(past, past + positions.shape[-1], device=positions.device)
    if not bool((positions == expected).all()):
        raise UnsupportedError(
            f"expected position_ids that count up by one from the {past} cached tokens, found others; "
            f"run packed sequences one by one, and leave prefill_chunk_size unset when a prompt goes on from a cache"
        )


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


def check_generate(defaults: GenerationConfig, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Refuses the ways of generating that a sparse cache cannot follow, before anything runs.

    Raises:
        UnsupportedError: the arguments of `generate`, or the model's defaults, ask for beams, drafts, or a cache of
            another kind.
    """
    config = kwargs.get("generation_config") or (args[1] if len(args) > 1 else None)
    for name, (refused, what, instead) in _REFUSED.items():
        found = _setting(name, kwargs, config, defaults)
        if found is not None and refused(found):
            raise UnsupportedError(
                f"{what} cannot be right with a sparsekv plan applied yet (found {name}={_brief(found)}); "
                f"{instead}, or close the handle first"
            )


def _setting(name: str, kwargs: dict[str, Any], config: GenerationConfig | None, defaults: GenerationConfig) -> Any:
    if name in kwargs:  # None as well: it goes over the settings of the model
        return kwargs[name]
    given = getattr(config, name, None)
    return given if given is not None else getattr(defaults, name, None)


def _brief(found: Any) -> str:
    return repr(found) if isinstance(found, (bool, int, float, str)) else type(found).__name__


def prompt_end(args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """How many tokens are cached once `generate` with these arguments has run its prompt; 0 where it has no ids."""
    ids = args[0] if args else kwargs.get("inputs", kwargs.get("input_ids"))
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return 0
    mask, cache, tokens = kwargs.get("attention_mask"), kwargs.get("past_key_values"), ids.shape[1]
    # transformers takes the ids for those behind the cached ones alone where the mask has another length
    if isinstance(mask, torch.Tensor) and mask.shape[-1] != tokens and isinstance(cache, Cache):
        return cache.get_seq_length() + tokens
    return tokens
