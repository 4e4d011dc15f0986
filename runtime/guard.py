"""Refuses the ways of generating that a sparse cache cannot follow, before anything runs.

The cache refuses them too, but only after the prefill of what may be a very long prompt.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from transformers import GenerationConfig, PreTrainedModel

from sparsekv.plans.errors import UnsupportedError

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
