"""What a loaded model is, as a plan records it: shapes of its attention, rope, and two fingerprints."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.model import (
    AttentionGroup,
    Fingerprint,
    ModelInfo,
    architecture_fingerprint,
    is_model_id,
    weights_fingerprint,
)
from sparsekv.plans.schema import DtypeName

# Each of them calls its attention through `AttentionInterface`, passes unknown keyword arguments on to it from the
# decoder down, and has `q_proj` and `k_proj` as two modules.
SUPPORTED = ("glm", "llama", "mistral", "qwen2", "qwen3")


def check_supported(model_type: str) -> None:
    """Raises UnsupportedError for a model type that this version cannot run, naming those it can."""
    if model_type not in SUPPORTED:
        raise UnsupportedError(
            f"expected one of the supported architectures ({', '.join(SUPPORTED)}), found {model_type!r}; "
            f"choose a model of a supported architecture"
        )


def decoder_of(model: PreTrainedModel) -> PreTrainedModel:
    """The module with the decoder layers: `model` itself or what its language modelling head sits on."""
    decoder = model.base_model
    assert isinstance(decoder, PreTrainedModel)
    return decoder


def attention_modules(model: PreTrainedModel) -> list[nn.Module]:
    """The attention module of each layer, in order; module i has `layer_idx` i.

    Raises:
        UnsupportedError: a layer is not one of transformers' own.
    """
    layers: Any = decoder_of(model).layers
    for number, layer in enumerate(layers):
        if not hasattr(layer, "self_attn"):
            raise UnsupportedError(
                f"expected decoder layers with a self_attn, found a {type(layer).__name__} as layer {number}; "
                "apply the plan first, and put a module around a layer then"
            )
    return [layer.self_attn for layer in layers]


_SAMPLES = 16  # values of each tensor; enough to tell two trainings apart, and far from all of it
_TINY = 2.0**-12  # below it float16 keeps fewer bits than bfloat16, so that the digest would depend on the dtype


def describe_model(model: PreTrainedModel, source: str | None = None, revision: str | None = None) -> ModelInfo:
    """Describes `model`.

    Args:
        model: a loaded model of a supported architecture, in any dtype, on any device.
        source: where it came from: a hub id, or a folder, of which only the name is kept.
        revision: the hub revision, where one was asked for.

    Raises:
        UnsupportedError: the architecture is not supported, or weights are not in memory (offloaded by accelerate).
    """
    described = describe_config(model.config, source, revision)
    weights = weights_fingerprint(_weight_samples(model))
    return described.model_copy(
        update={"fingerprint": described.fingerprint.model_copy(update={"weights": weights})},
    )


def describe_config(config: PreTrainedConfig, source: str | None = None, revision: str | None = None) -> ModelInfo:
    """What a config alone says of a model: all but the fingerprint of its weights. See `describe_model`."""
    check_supported(config.model_type)
    groups, rope = attention_groups(config), _plain(getattr(config, "rope_parameters", None) or {})
    facts = {
        "model_type": config.model_type,
        "hidden_size": config.hidden_size,
        "attention": [group.model_dump(mode="json") for group in groups],
        "rope": rope,
    }
    return ModelInfo(
        id=_identifier(source or config.name_or_path or config.model_type),
        revision=revision,
        model_type=config.model_type,
        context_length=config.max_position_embeddings,
        rope=rope,
        attention=groups,
        fingerprint=Fingerprint(architecture=architecture_fingerprint(facts)),
    )


def attention_groups(config: PreTrainedConfig) -> tuple[AttentionGroup, ...]:
    """Layers of equal attention, as the config has them."""
    layers: dict[int | None, list[int]] = {}
    for layer in range(config.num_hidden_layers):
        layers.setdefault(_window(config, layer), []).append(layer)
    heads = config.num_attention_heads
    return tuple(
        AttentionGroup(
            layers=tuple(members),
            kind="full" if window is None else "sliding",
            heads=heads,
            kv_heads=getattr(config, "num_key_value_heads", None) or heads,
            head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
            window=window,
        )
        for window, members in layers.items()
    )


def _window(config: PreTrainedConfig, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    slides = window is not None if kinds is None else kinds[layer] == "sliding_attention"
    return int(window) if slides and window is not None else None


def _identifier(source: str) -> str:
    """A hub id as it is; of a path only the last name, so that a plan holds no path of the machine it was made on."""
    path = Path(source)
    if is_model_id(source) and not path.is_dir():
        return source
    return path.resolve().name.lstrip("~") or "model"


def _plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON data that does not depend on how a config spells a number or an absent value."""
    data: dict[str, Any] = json.loads(json.dumps(dict(rope), sort_keys=True, default=str), parse_float=_number)
    return {key: value for key, value in data.items() if value is not None}


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


def _weight_samples(model: PreTrainedModel) -> Iterator[tuple[str, bytes]]:
    """The shape of every tensor, and values at fixed positions, rounded to bfloat16.

    Of a bfloat16 or float16 checkpoint they are the same in every dtype it is loaded in; of a float32 checkpoint in
    float32 and bfloat16. In float16 those are rounded twice, and no digest of values could be the same for all three:
    the intervals that round to one bfloat16 and those that round to one float16 overlap all along the line.

    Of a tensor of a quantisation's own type, which may keep its values anywhere, only the shape and that type: other
    weights than any plan has seen.
    """
    tensors = {name: data for name, data in model.state_dict().items() if isinstance(data, torch.Tensor)}
    elsewhere = sorted(name for name, data in tensors.items() if data.is_meta)
    if elsewhere:
        raise UnsupportedError(
            f"expected all tensors of the model in memory, found {len(elsewhere)} of {len(tensors)} on the meta device "
            f"({elsewhere[0]}, ...), as offloading leaves them; load the whole model on one device"
        )
    plain = {name: data for name, data in tensors.items() if type(data) is torch.Tensor and data.numel()}
    values = dict(zip(plain, _rounded([_sampled(data) for data in plain.values()]), strict=True))
    for name, data in tensors.items():
        kind = f"{tuple(data.shape)}".encode()
        yield name, kind + values.get(name, type(data).__name__.encode())


def _sampled(tensor: torch.Tensor) -> torch.Tensor:
    # multiplicative hashing spreads the positions without a random generator
    position = (torch.arange(1, _SAMPLES + 1, device=tensor.device) * 2_654_435_761 >> 7) % tensor.numel()
    readable = tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor  # float8 cannot be indexed everywhere
    return readable.take(position).float()


def _rounded(samples: Sequence[torch.Tensor]) -> list[bytes]:
    """One copy to the host for all."""
    exact = torch.stack([values.to(samples[0].device) for values in samples])
    rounded = exact.to(torch.bfloat16)
    kept = torch.where(rounded.abs() < _TINY, 0.0, rounded)  # after rounding, which may reach the bound
    return [row.tobytes() for row in kept.view(torch.int16).cpu().numpy().astype("<i2")]


# What plans, profiles and cost files call a device and a precision. No machine names.


def device_name(device: torch.device) -> str:
    """ "NVIDIA H200", "cpu x86_64"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}".strip()


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """ "bfloat16" for torch.bfloat16, and so on."""
    return cast(DtypeName, str(dtype).removeprefix("torch."))
