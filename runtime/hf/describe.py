"""Describes a loaded model as a plan records it: facts of its config, and a fingerprint of its weights."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import Cache, GenerationConfig, PreTrainedConfig, PreTrainedModel
from transformers.modeling_outputs import MoeModelOutputWithPast

from sparsekv.kernels.keys import capped_
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.model import ModelInfo, weights_fingerprint
from sparsekv.runtime.architecture import ARCHITECTURES, architecture_of
from sparsekv.runtime.model_config import attention_groups, describe_config, files_fingerprint, linear_layers

_OLD_NAME = "past_key_values"
CACHE_NAME = "cache" if "cache" in MoeModelOutputWithPast.__dataclass_fields__ else _OLD_NAME
"""The name of the cache among a model's inputs and outputs: "cache" from transformers 5.24 on."""


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module with the decoder layers: below the language modelling head, and of a multimodal model the one
    inside."""
    decoder = getattr(model.base_model, "language_model", model.base_model)
    assert isinstance(decoder, PreTrainedModel)
    return decoder


def config_of(model: PreTrainedModel) -> PreTrainedConfig:
    return decoder_of(model).config


def last_norm_of(model: PreTrainedModel) -> nn.Module:
    norm: nn.Module = getattr(decoder_of(model), architecture_of(config_of(model).model_type).last_norm)
    return norm


def logits_of(model: PreTrainedModel, hidden_XE: torch.Tensor) -> torch.Tensor:
    """[X, vocabulary]: the head's, of the decoder's output. Granite and Cohere scale it, Gemma-2 caps it."""
    config: Any = config_of(model)
    scale = getattr(config, "logit_scale", None) or 1.0 / getattr(config, "logits_scaling", 1.0)
    logits_XV: torch.Tensor = model.get_output_embeddings()(hidden_XE) * scale
    return capped_(logits_XV, getattr(config, "final_logit_softcapping", None) or 0.0)


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The softmax attention module of each layer that has one, in order."""
    layers, config = cast(Any, decoder_of(model)).layers, config_of(model)
    name, linear = architecture_of(config.model_type).attention, linear_layers(config)
    for number, layer in enumerate(layers):
        if number not in linear and not hasattr(layer, name):
            raise UnsupportedError(
                f"expected decoder layers with a {name}, found a {type(layer).__name__} as layer {number}; "
                "apply the plan first, and put a module around a layer then"
            )
    return [getattr(layer, name) for number, layer in enumerate(layers) if number not in linear]


def check_shared_keys(model: PreTrainedModel) -> None:
    """Raises UnsupportedError where a layer and the one whose keys it attends to are on different devices."""
    layers: Any = cast(Any, decoder_of(model)).layers
    for group in attention_groups(config_of(model)):
        for layer in group.layers if group.keys_of is not None else ():
            mine, owners = (next(layers[number].parameters()).device for number in (layer, group.keys_of))
            if mine != owners:
                raise UnsupportedError(
                    f"expected layers {group.keys_of} and {layer}, which share keys and values, on one device, found "
                    f"them on {owners} and {mine}; load the model on one device"
                )


_SAMPLES = 16  # values of each tensor; enough to tell two trainings apart, and far from all of it
_TINY = 2.0**-12  # below it float16 keeps fewer bits than bfloat16, so that the digest would depend on the dtype


def describe_model(model: PreTrainedModel, source: str | None = None, revision: str | None = None) -> ModelInfo:
    """Describes `model`; of a multimodal one the decoder, as if it were loaded alone.

    Args:
        source: where it came from: a hub id, or a folder, of which only the name is kept.
    """
    described = describe_config(model.config, source, revision)
    weights = weights_fingerprint(_weight_samples(model))
    of_files: dict[str, str] = getattr(model, _OF_FILES, {})
    weights = of_files.get(weights, weights)
    return described.model_copy(update={"fingerprint": described.fingerprint.model_copy(update={"weights": weights})})


def describe_by_files(model: PreTrainedModel, folder: Path) -> None:
    """Has `describe_model` know the weights of a model by the quantised files that they stand for, in every host."""
    if weights := files_fingerprint(folder):
        setattr(model, _OF_FILES, {weights_fingerprint(_weight_samples(model)): weights})


_OF_FILES = "sparsekv_weights_of_files"  # an attribute of a model: other weights that it gets are not the files'


def _weight_samples(model: PreTrainedModel) -> Iterator[tuple[str, bytes]]:
    """The shape of every tensor, and values at fixed positions, rounded to bfloat16.

    Of a bfloat16 or float16 checkpoint they are the same in every dtype it is loaded in; of a float32 checkpoint in
    float32 and bfloat16. In float16 those are rounded twice, and no digest of values could be the same for all three:
    the intervals that round to one bfloat16 and those that round to one float16 overlap all along the line.

    Of a tensor of a quantisation's own type, which may keep its values anywhere, only the shape and that type: other
    weights than any plan has seen.
    """
    tensors = {name: data for name, data in model.state_dict().items() if isinstance(data, torch.Tensor)}
    tensors = {name: data for name, data in tensors.items() if _of_text(model, name)}
    values = _offloaded_samples(model, [name for name, data in tensors.items() if data.is_meta])
    plain = {name: data for name, data in tensors.items() if type(data) is torch.Tensor and data.numel()}
    values |= {name: _sampled(data) for name, data in plain.items() if not data.is_meta}
    digests = dict(zip(values, _rounded(list(values.values())), strict=True)) if values else {}
    for name, data in tensors.items():
        kind = f"{tuple(data.shape)}".encode()
        yield name.replace(_INSIDE, "", 1), kind + digests.get(name, type(data).__name__.encode())


_INSIDE = "language_model."  # in the names of tensors of the decoder inside a multimodal model


def _of_text(model: PreTrainedModel, name: str) -> bool:
    """Returns whether a tensor is part of the decoder or its head: of a multimodal model, not all are."""
    if decoder_of(model) is model.base_model:
        return True
    prefix = "" if model is model.base_model else f"{model.base_model_prefix}."
    return name.startswith(f"{prefix}{_INSIDE}") or not name.startswith(prefix)


def _offloaded_samples(model: PreTrainedModel, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Samples of tensors that accelerate keeps on the host or on disk; it brings those of a module at a time."""
    samples: dict[str, torch.Tensor] = {}
    for module_name, tensors in groupby(names, lambda name: name.rpartition(".")[0]):
        module = model.get_submodule(module_name)
        if not hasattr(module, "_hf_hook"):
            raise UnsupportedError(
                f"expected all tensors of the model in memory, or offloaded by accelerate, found {len(names)} on the "
                f"meta device ({names[0]}, ...); load the model with its weights"
            )
        from accelerate.utils import align_module_device  # optional; what has a hook was loaded with it

        with align_module_device(module, torch.device("cpu")):
            data = {name: getattr(module, name.rpartition(".")[2]).detach() for name in tensors}
            samples |= {
                name: _sampled(values)
                for name, values in data.items()
                if type(values) is torch.Tensor and values.numel()
            }
    return samples


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    # multiplicative hashing spreads the positions without a random generator
    position = (torch.arange(1, _SAMPLES + 1, device=tensor.device) * 2_654_435_761 >> 7) % tensor.numel()
    readable = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # float8 cannot be indexed everywhere
    return readable.take(position).float()


def _rounded(samples: Sequence[torch.Tensor]) -> list[bytes]:
    exact = torch.stack([values.to(samples[0].device) for values in samples])
    rounded = exact.to(torch.bfloat16)
    kept = torch.where(rounded.abs() < _TINY, 0.0, rounded)  # after rounding, which may reach the bound
    return [row.tobytes() for row in kept.view(torch.int16).cpu().numpy().astype("<i2")]


def cache_inputs(model: Any, cache: Any, ids_BS: torch.Tensor) -> dict[str, Any]:
    """Returns what a forward is given beside the ids of tokens that follow those of a cache (None: there are none)."""
    past, new, model_type = 0 if cache is None else cache.get_seq_length(), ids_BS.shape[1], config_of(model).model_type
    check_one_piece(model_type, past, new)
    return {CACHE_NAME: cache} | position_inputs(model_type, past, new, ids_BS.device)


def position_inputs(model_type: str, past: int, new: int, device: torch.device) -> dict[str, torch.Tensor]:
    """`position_ids` [1, new] of tokens behind `past` others, where a model would begin at 0."""
    is_asked = past and model_type in ARCHITECTURES and ARCHITECTURES[model_type].needs_position_ids
    return {"position_ids": torch.arange(past, past + new, device=device)[None]} if is_asked else {}


def takes_one_piece(model_type: str) -> bool:
    """Returns whether a pass of several tokens has to be the first one."""
    return model_type in ARCHITECTURES and ARCHITECTURES[model_type].one_piece


def check_one_piece(model_type: str, past: int, new: int) -> None:
    """Refuses several tokens behind a past where layers would lose their recurrent state."""
    if past and new > 1 and takes_one_piece(model_type):
        raise UnsupportedError(
            f"expected a whole prompt at once, as in transformers the layers of {model_type!r} with a recurrent state "
            f"begin every pass of several tokens without one, found {new} tokens behind {past} cached; run the whole "
            "text over a new cache, without chunks"
        )


def prompt_end(given: dict[str, Any]) -> int:
    """Tokens that are cached once `generate` with these arguments has run its prompt; 0 without ids."""
    ids = given.get("inputs", given.get("input_ids"))
    if not isinstance(ids, torch.Tensor) or ids.dim() != 2:
        return 0
    mask, cache, tokens = given.get("attention_mask"), named(given).get(CACHE_NAME), ids.shape[1]
    # transformers takes the ids for those behind the cached ones alone where the mask has another length
    if isinstance(mask, torch.Tensor) and mask.shape[-1] != tokens and isinstance(cache, Cache):
        return cache.get_seq_length() + tokens
    return tokens


def generate_setting(name: str, given: dict[str, Any], defaults: GenerationConfig) -> Any:
    """Returns a setting of `generate`: its argument, else that of the configuration given to it, else of the model."""
    if name in given:  # None as well: it goes over the settings of the model
        return given[name]
    setting = getattr(given.get("generation_config"), name, None)
    return setting if setting is not None else getattr(defaults, name, None)


def named(given: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a model with the cache under `CACHE_NAME`; newer releases take the old name too, and prefer the new
    one."""
    by_old = {CACHE_NAME: given[_OLD_NAME]} if _OLD_NAME in given else {}
    return by_old | {name: value for name, value in given.items() if name != _OLD_NAME}
