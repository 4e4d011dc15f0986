"""Reads a config and quantised files of a model, whichever host loads it, and names devices and precisions."""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError, safe_open

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.model import (
    AttentionGroup,
    Fingerprint,
    ModelInfo,
    architecture_fingerprint,
    is_model_id,
    weights_fingerprint,
)
from sparsekv.plans.schema import DtypeName
from sparsekv.runtime.architecture import MODALITIES, record_of, recurrence_of
from sparsekv.runtime.settings import check_device

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


def describe_config(config: PreTrainedConfig, source: str | None = None, revision: str | None = None) -> ModelInfo:
    """The facts that a config alone tells of a model, of a multimodal one its decoder's: all but the fingerprint of its
    weights. See `describe_model`."""
    source = source or config.name_or_path
    config = decoder_config(config)
    record = record_of(config.model_type)
    if getattr(config, "use_bidirectional_attention", False) not in (None, False, "vision"):  # text is causal then
        raise UnsupportedError("expected causal attention, found use_bidirectional_attention; choose a decoder")
    model_type, rope = record.text_as or config.model_type, rope_of_text(config)
    groups = attention_groups(config)
    shapes = {
        "model_type": model_type,
        "hidden_size": config.hidden_size,
        "attention": [group.model_dump(mode="json") for group in groups],
        "rope": rope,
    }
    return ModelInfo(
        id=_identifier(source or config.name_or_path or config.model_type),
        revision=revision,
        model_type=model_type,
        context_length=config.max_position_embeddings,
        rope=rope,
        attention=groups,
        fingerprint=Fingerprint(architecture=architecture_fingerprint(shapes, _settings(config))),
    )


# Settings by which the same tensors compute something else. No shapes and no layout, which the tensors tell; none that
# new tensors of a fine-tune change (vocabulary, tied embeddings), or a longer context.
_SETTINGS = (
    *("attention_multiplier", "embedding_multiplier", "logit_scale", "logits_scaling", "query_pre_attn_scalar"),
    *("residual_multiplier", "route_scale", "routed_scaling_factor", "moe_routed_scaling_factor", "mup_enabled"),
    *("router_scaling_factor", "router_jitter_noise", "moe_router_logit_softcapping", "expert_selection_fn"),
    *("shared_expert_combination_strategy", "prefix_dense_sliding_window_pattern", "time_step_min"),
    *("mamba_hidden_act", "mlp_hidden_act", "layer_norm_epsilon"),
    *("attn_logit_softcapping", "clip_qkv", "final_logit_softcapping", "swiglu_alpha", "swiglu_limit"),
    *("layer_norm_eps", "norm_eps", "norm_epsilon", "rms_norm_eps"),
    *("moe_k", "moe_norm_min", "moe_topk", "n_group", "norm_topk_prob", "num_experts_per_tok", "top_k_experts"),
    *("index_topk", "topk_group", "layer_rope_theta", "no_rope_layers", "position_embedding_type", "time_step_limit"),
)


def _settings(config: PreTrainedConfig) -> dict[str, Any]:
    values = {name: getattr(config, name, None) for name in (*_SETTINGS, "hidden_act")}
    act = getattr(config, "hidden_activation", None) or values["hidden_act"]  # where both are set, the first is read
    values["hidden_act"] = "silu" if act == "swish" else act
    return {name: _spelled(value) for name, value in values.items() if value}


def _spelled(value: Any) -> Any:
    """One spelling of 1 and 1.0, and of a number that a file of float32 had, such as GGUF."""
    if isinstance(value, (list, tuple)):
        return [_spelled(item) for item in value]
    return f"{value:.6g}" if isinstance(value, (int, float)) else str(value)


def decoder_config(config: PreTrainedConfig) -> PreTrainedConfig:
    return config.get_text_config(decoder=True) if config.model_type in MODALITIES else config


def rope_of_text(config: PreTrainedConfig) -> dict[str, Any]:
    """The rotary parameters that matter to text, whose tokens have the same position on all axes."""
    rope = _plain(getattr(config, "rope_parameters", None) or {})
    if rope.get("type") == rope.get("rope_type"):  # SGLang adds the name that it had before
        rope.pop("type", None)
    axes = _AXES if record_of(config.model_type).text_as else ()
    return {name: value for name, value in rope.items() if name not in axes}


_AXES = ("mrope_section", "mrope_interleaved")


def attention_groups(config: PreTrainedConfig) -> tuple[AttentionGroup, ...]:
    """Layers of equal attention, as the config has them; those with a recurrent state last."""
    linear = linear_layers(config)
    alike: dict[AttentionGroup, list[int]] = {}
    for layer in range(config.num_hidden_layers):
        if layer not in linear:
            alike.setdefault(_softmax_group(config, layer), []).append(layer)
    softmax = tuple(group.model_copy(update={"layers": tuple(layers)}) for group, layers in alike.items())
    return (*softmax, _linear_group(config, linear)) if linear else softmax


def _softmax_group(config: PreTrainedConfig, layer: int) -> AttentionGroup:
    """Returns the group of a layer, its number left out: equal layers have equal groups."""
    of_layer, window, heads = config_of_layer(config, layer), _window(config, layer), heads_of_layer(config, layer)
    sizes = (getattr(of_layer, name, None) for name in ("qk_head_dim", "head_dim"))  # the first is of MLA
    return AttentionGroup(
        layers=(0,),
        kind="full" if window is None else "sliding",
        heads=heads,
        kv_heads=getattr(of_layer, "num_key_value_heads", None) or heads,
        head_dim=next(filter(None, sizes), config.hidden_size // heads),
        window=window,
        keys_of=_keys_of(config, layer),
    )


def heads_of_layer(config: PreTrainedConfig, layer: int) -> int:
    by_layer = getattr(config, "num_attention_heads_per_layer", None)
    return int(by_layer[layer] if by_layer else config.num_attention_heads)


def config_of_layer(config: PreTrainedConfig, layer: int) -> PreTrainedConfig:
    """The config of one layer, where those differ in the sizes of their heads, which the whole then does not tell."""
    if getattr(config, "global_head_dim", None) is not None:
        raise UnsupportedError(
            "expected a config that says the sizes of each layer, found global_head_dim beside head_dim, as older "
            "releases of transformers have it; install transformers 5.19 or newer"
        )
    return config.per_layer_config[layer] if getattr(config, "is_heterogeneous", False) else config


def _keys_of(config: PreTrainedConfig, layer: int) -> int | None:
    """The layer whose keys and values another attends to: the last of its kind among those with their own."""
    first = config.num_hidden_layers - (getattr(config, "num_kv_shared_layers", 0) or 0)
    kinds = getattr(config, "layer_types", None)
    if layer < first or kinds is None:
        return None
    return max(earlier for earlier in range(first) if kinds[earlier] == kinds[layer])


def linear_layers(config: PreTrainedConfig) -> tuple[int, ...]:
    """The layers that transformers gives a recurrent state in its cache, in place of keys and values."""
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or ()
    if set(kinds) <= {"full_attention", "sliding_attention"}:
        return ()
    from transformers import DynamicCache  # which takes a second to import
    from transformers.cache_utils import LinearAttentionLayer

    cached = DynamicCache(config=config).layers
    return tuple(
        number
        for number, layer in enumerate(cached)
        if isinstance(layer, LinearAttentionLayer) or kinds[number] in _MLP_ALONE
    )


_MLP_ALONE = ("mlp", "moe")  # kinds of layers, which are described as those with a state: neither has keys


def _linear_group(config: PreTrainedConfig, layers: tuple[int, ...]) -> AttentionGroup:
    sizes = recurrence_of(config)
    return AttentionGroup(
        layers=layers, kind="linear", heads=sizes.heads, kv_heads=sizes.key_heads, head_dim=sizes.head_dim
    )


def rope_switch(config: PreTrainedConfig) -> int:
    """The most tokens that rotate by the short angles of a long rope, which takes one of two sets for all tokens
    (LongRoPE, arXiv 2402.13753); 0 of other ropes."""
    rope = getattr(config, "rope_parameters", None) or {}
    return int(rope["original_max_position_embeddings"]) if rope.get("rope_type") == "longrope" else 0


def soft_cap(config: PreTrainedConfig) -> float:
    """The cap of attention scores, 0 without one; see `Softmax`."""
    return getattr(config, "attn_logit_softcapping", None) or 0.0


def has_soft_cap(config: PreTrainedConfig) -> bool:
    return soft_cap(config) > 0.0


# In every layer, whatever `layer_types` says.
_ONE_WINDOW = frozenset(("ministral3", "mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"))


def _window(config: PreTrainedConfig, layer: int) -> int | None:
    window = getattr(config, "sliding_window", None)
    kinds = None if config.model_type in _ONE_WINDOW else getattr(config, "layer_types", None)
    slides = kinds is None or kinds[layer] == "sliding_attention"
    if window is None or not slides or window >= config.max_position_embeddings:  # one that reaches over every context
        return None
    return int(window)


def _identifier(source: str) -> str:
    """A hub id as it is; of a path only the last name, so that a plan holds no path of the machine it was made on."""
    path = Path(source)
    if is_model_id(source) and not path.exists():
        return source
    return path.resolve().name.lstrip("~") or "model"


def _plain(rope: Mapping[str, Any]) -> dict[str, Any]:
    """As JSON data that does not depend on how a config spells a number or an absent value."""
    data: dict[str, Any] = json.loads(json.dumps(dict(rope), sort_keys=True, default=str), parse_float=_number)
    return {key: value for key, value in data.items() if value is not None}


def _number(text: str) -> int | float:
    value = float(text)
    return int(value) if value.is_integer() else value


# The names of a device and a precision in plans, profiles and prices. No machine names.


def torch_device(device: str) -> torch.device:
    """The device of that name; "auto" is the first GPU, or the CPU."""
    check_device(device)
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        target = torch.device(device)
        torch.empty(0, device=target)
    except (RuntimeError, AssertionError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise UsageError(
            f"expected a device that this machine has, found {device!r:.40} ({reason:.120}); try cpu"
        ) from error
    return target


def device_name(device: torch.device) -> str:
    """ "NVIDIA H200", "cpu x86_64"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}".strip()


def dtype_name(dtype: torch.dtype) -> DtypeName:
    return cast(DtypeName, str(dtype).removeprefix("torch."))


_SAMPLES = 16  # bytes of each tensor; as of weights that are not quantised (describe.py)
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def quantisation_of(config: Any) -> Mapping[str, Any] | None:
    """The entry on quantised weights of a config of transformers; None where they are not."""
    entry = getattr(config, "quantization_config", None)
    return entry if entry is None or isinstance(entry, Mapping) else entry.to_dict()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Returns the safetensors files that hold the weights of a model in a folder; empty where not all are there."""
    names: set[str] = {_WHOLE}
    if (folder / _INDEX).is_file():
        names = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
    files = tuple(folder / name for name in sorted(names))
    return files if all(file.is_file() for file in files) else ()


def files_fingerprint(folder: Path) -> str | None:
    """The digest of all tensors in a model's files, by names, types, shapes and sampled bytes; None without readable
    files."""
    try:
        files = weight_files(folder)
        return weights_fingerprint(_samples(files)) if files else None
    except (SafetensorError, ValueError, KeyError):
        return None  # what loads them says what is wrong


def _samples(files: Sequence[Path]) -> Iterator[tuple[str, bytes]]:
    for file in files:
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118  it is no mapping
                data = opened.get_tensor(name)
                yield name, f"{data.dtype} {tuple(data.shape)}".encode() + _sampled(data)


def _sampled(data: torch.Tensor) -> bytes:
    if not data.numel():
        return b""
    read = data.contiguous().flatten().view(torch.uint8)
    # Multiplicative hashing spreads the positions without a random generator. vLLM calls where new tensors are a GPU's.
    position = (torch.arange(1, _SAMPLES + 1, device="cpu") * 2_654_435_761 >> 7) % len(read)
    return bytes(read[position].tolist())
