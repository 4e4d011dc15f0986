"""A model and its tokenizer from an alias, a hub id, a folder or a GGUF file, with errors that say what to do."""

from __future__ import annotations

import importlib.util
import json
import logging
import os
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from torch.nn import Parameter
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from sparsekv.plans.aliases import ModelSource, resolve_model
from sparsekv.plans.errors import UsageError, install_command
from sparsekv.plans.model import ModelInfo
from sparsekv.runtime.architecture import MODALITIES, record_of
from sparsekv.runtime.hf.dequantise import GGUFHeader, check_quantisation, dense_tensors, is_dequantised
from sparsekv.runtime.hf.describe import describe_by_files, describe_model
from sparsekv.runtime.hub import needs_cache, without_model
from sparsekv.runtime.model_config import (
    config_of_layer,
    decoder_config,
    heads_of_layer,
    quantisation_of,
    rope_of_text,
    torch_device,
    weight_files,
)
from sparsekv.runtime.settings import DEVICE_MAPS, DeviceMap

_NAMED = 3  # tensors that a message names
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model in evaluation mode on its device, or spread over several, and what it is."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    info: ModelInfo

    def __repr__(self) -> str:
        return f"LoadedModel({self.info.id}, {self.model.dtype}, {self.model.device})"


def load_model(
    source: ModelSource | str | os.PathLike[str],
    *,
    device: str | torch.device = "auto",
    dtype: str | torch.dtype = "auto",
    device_map: DeviceMap | None = None,
    revision: str | None = None,
    local_files_only: bool = False,
    config: PreTrainedConfig | None = None,
) -> LoadedModel:
    """Loads a model; an unsupported architecture is named before its weights are downloaded.

    Args:
        source: an alias, hub id, folder or GGUF file, resolved or not. The weights of a GGUF file are dequantised, and
            those of FP8, GPTQ, AWQ and compressed-tensors.
        device: a torch device; "auto" is the first GPU, or the CPU.
        dtype: bfloat16, float16 or float32. "auto" is the checkpoint's half precision on a GPU (else bfloat16), and
            float32 on a CPU, where it is faster.
        device_map: spreads the layers over several devices by accelerate; the first layer has to fit on one of them.
        revision: of a hub model.
        local_files_only: do not ask the hub.
        config: its transformers config; None reads it from `source`.

    Returns:
        The model, its tokenizer, and its description, which `apply` takes as `info`.

    Raises:
        UsageError: there is no such model, device or dtype, no access to it, or both a device and a device map. Its
            config or tokenizer cannot be read, or its tensors do not fit its config or are not finite.
        UnsupportedError: its architecture is not supported.
    """
    origin = source if isinstance(source, ModelSource) else resolve_model(source)
    target = torch_device(str(device))
    if device_map is not None:
        _check_device_map(device_map, str(device))
    options = _options(origin, revision, local_files_only)
    config = config or _read_config(origin, options)
    precision = torch_dtype(str(dtype).removeprefix("torch."), config, target)
    tokenizer = _read_tokenizer(origin, options, config.vocab_size)
    placed = {} if device_map is None else {"device_map": device_map}
    folder = _quantised_folder(origin, config, options)
    model: Any = _read_weights(origin, options | placed | {"config": config, "dtype": precision}, folder)
    model = (model.to(target) if device_map is None else model).eval()
    _check_finite(origin, model)
    if folder is not None:
        describe_by_files(model, folder)
    return LoadedModel(model, tokenizer, describe_model(model, origin.path_or_id, options.get("revision")))


def _check_device_map(device_map: str, device: str) -> None:
    if device_map not in DEVICE_MAPS:
        raise UsageError(f"expected a device map of {', '.join(DEVICE_MAPS)}, found {device_map!r:.40}")
    if device != "auto":
        raise UsageError(f"expected a device or a device map, found {device} and {device_map}; leave one out")
    if importlib.util.find_spec("accelerate") is None:
        raise UsageError(
            "expected accelerate, by which transformers spreads a model over devices, found it missing; "
            f"{install_command('spread')}"
        )


def load_config(source: ModelSource | str | os.PathLike[str]) -> PreTrainedConfig:
    """The config of a model, without its weights."""
    origin = source if isinstance(source, ModelSource) else resolve_model(source)
    return _read_config(origin, _options(origin))


def load_tokenizer(source: ModelSource | str | os.PathLike[str]) -> PreTrainedTokenizerBase:
    """The tokenizer of a model, without its weights."""
    origin = source if isinstance(source, ModelSource) else resolve_model(source)
    options = _options(origin)
    return _read_tokenizer(origin, options, _read_config(origin, options).vocab_size)


def _options(origin: ModelSource, revision: str | None = None, local_files_only: bool = False) -> dict[str, Any]:
    if origin.is_gguf:  # transformers looks for a relative name in the working directory first
        return {"gguf_file": os.path.abspath(origin.path_or_id)}
    if origin.is_local:
        return {}
    return {"revision": revision, "local_files_only": needs_cache(origin, revision, local_files_only)}


def torch_dtype(dtype: str, config: PreTrainedConfig, target: torch.device) -> torch.dtype:
    """The dtype in which `load_model` loads a model of this config: "auto" depends on the type of the device."""
    if dtype in _DTYPES:
        return _DTYPES[dtype]
    if dtype != "auto":
        raise UsageError(f"expected a dtype of auto, {', '.join(_DTYPES)}, found {dtype!r}")
    if target.type == "cpu":
        return torch.float32
    of_config = getattr(config, "dtype", None)
    return of_config if of_config in (torch.bfloat16, torch.float16) else torch.bfloat16


def _read_config(origin: ModelSource, options: dict[str, Any]) -> PreTrainedConfig:
    if origin.is_gguf:
        return _read_gguf_config(origin, options)
    data, _ = _guarded(origin, "its config.json", PreTrainedConfig.get_config_dict, options)
    if not isinstance(data, dict):
        raise _unreadable(origin, "its config.json", TypeError(f"it holds a {type(data).__name__}, no object"))
    kind: str = data.get("model_type") or "none"
    if kind not in MODALITIES:
        record_of(kind)
    config: PreTrainedConfig = _guarded(origin, "its config.json", AutoConfig.from_pretrained, options)
    if is_dequantised(quantisation := quantisation_of(config)):
        check_quantisation(quantisation)
    config = _of_decoder_alone(config) if kind in MODALITIES else config
    _check_config(config, f"in the config.json of {origin.path_or_id}")
    if not _is_object(Path(origin.path_or_id, "generation_config.json")):  # transformers goes on without: no end tokens
        raise _unreadable(origin, "its generation_config.json", ValueError("it holds no JSON object"))
    return config


def _of_decoder_alone(config: PreTrainedConfig) -> PreTrainedConfig:
    """The config by which transformers loads a multimodal checkpoint's decoder. The whole's says where the head is."""
    text = decoder_config(config)
    record = record_of(text.model_type)
    if record.text_as:
        data = text.to_dict() | {"rope_parameters": rope_of_text(text), "model_type": record.text_as}
        text = AutoConfig.for_model(**data)
    text.tie_word_embeddings = config.tie_word_embeddings
    if (quantisation := quantisation_of(config)) is not None:
        text.quantization_config = quantisation
    text.name_or_path = config.name_or_path
    return text


def _read_gguf_config(origin: ModelSource, options: dict[str, Any]) -> PreTrainedConfig:
    header = GGUFHeader.read(Path(origin.path_or_id))
    data, _ = _guarded(origin, "its metadata", PreTrainedConfig.get_config_dict, options)
    record_of(data["model_type"])
    config: PreTrainedConfig = AutoConfig.for_model(**data)  # reading the file once more takes seconds
    _check_config(config, f"in the metadata of {origin.path_or_id}")
    header.check_rope(config)
    return config


_COUNTS = ("num_hidden_layers", "hidden_size", "num_attention_heads", "max_position_embeddings", "vocab_size")
_COUNTS_IF_ANY = ("num_key_value_heads", "head_dim")


def _check_config(config: PreTrainedConfig, where: str) -> None:
    kinds = getattr(config, "layer_types", None)
    windows = ("sliding_window",) if kinds is None or "sliding_attention" in kinds else ()  # else it may be 0
    _check_counts(config, (*_COUNTS, *windows), where)
    for layer in range(config.num_hidden_layers):
        of_layer = config_of_layer(config, layer)
        _check_counts(of_layer, _COUNTS_IF_ANY, where)
        heads, kv_heads = heads_of_layer(config, layer), getattr(of_layer, "num_key_value_heads", None)
        if kv_heads and heads % kv_heads:
            raise UsageError(f"expected {heads} attention heads {where} to be a multiple of {kv_heads} key-value heads")
    rope = getattr(config, "rope_parameters", None)
    try:
        json.dumps(rope, allow_nan=False, default=str)
    except ValueError:
        raise UsageError(f"expected finite rope parameters {where}, found {rope!r:.200}") from None


def _check_counts(config: PreTrainedConfig, names: Iterable[str], where: str) -> None:
    for name in names:
        count = getattr(config, name, None)
        if (count is None and name in _COUNTS) or (count is not None and not (isinstance(count, int) and count >= 1)):
            raise UsageError(f"expected {name} of 1 or more {where}, found {count!r:.40}")


def _read_tokenizer(origin: ModelSource, options: dict[str, Any], vocabulary: int) -> PreTrainedTokenizerBase:
    folder = Path(origin.path_or_id)
    missing = folder.is_dir() and not (folder / "tokenizer.json").exists()
    files = "its metadata" if origin.is_gguf else "tokenizer.json, tokenizer_config.json"
    what = f"its tokenizer ({'it has no tokenizer.json' if missing else files})"
    tokenizer: PreTrainedTokenizerBase = _guarded(origin, what, AutoTokenizer.from_pretrained, options)
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:  # transformers makes an empty one of no files at all
        raise _unreadable(origin, what, ValueError("it is empty"))
    # Tokens added to it, for padding say, may never be used; those that start every prompt are.
    entries = max(tokenizer.vocab_size, *(number + 1 for number in tokenizer("a")["input_ids"]))
    if entries > vocabulary:
        raise UsageError(
            f"expected a tokenizer of at most {vocabulary} entries, the vocabulary of {origin.path_or_id}, found "
            f"{entries}; get the tokenizer that belongs to the model"
        )
    return tokenizer


def _quantised_folder(origin: ModelSource, config: PreTrainedConfig, options: dict[str, Any]) -> Path | None:
    if origin.is_gguf or not is_dequantised(quantisation_of(config)):
        return None
    if origin.is_local:
        return Path(origin.path_or_id)
    kept = options | {"allow_patterns": ["model*.safetensors", "*.json"]}
    return Path(_guarded(origin, "its weights", snapshot_download, kept))


def _read_weights(origin: ModelSource, options: dict[str, Any], quantised: Path | None) -> PreTrainedModel:
    """The model with its weights. Without the report, transformers would fill what is missing with random numbers."""
    reported = {"output_loading_info": True, "ignore_mismatched_sizes": True}  # into the report as well, by name
    load = AutoModelForCausalLM.from_pretrained if quantised is None else partial(_dequantised, quantised)
    with _without_table():
        model, report = _guarded(origin, "its weights", load, options | reported | _RENAMED)
    unknown = [name for name in report["unexpected_keys"] if not name.removeprefix("model.").startswith(_OF_IMAGES)]
    reshaped = {f"{name}: {tuple(of)} in place of {tuple(to)}" for name, of, to in report["mismatched_keys"]}
    faults = {
        "missing": report["missing_keys"],
        "that its config.json knows nothing of": _with_files(origin, unknown),
        "of another shape": reshaped,
    }
    lines = [f"{len(names)} {what} ({_first(names)})" for what, names in faults.items() if names]
    if lines:
        raise UsageError(
            f"expected the tensors that its config.json describes in {origin.path_or_id}, found {' and '.join(lines)}; "
            "get the model again, with the config.json that belongs to its weights"
            + ("" if report["missing_keys"] or reshaped else _WITHOUT_THEM)
        )
    if origin.is_gguf:
        GGUFHeader.read(Path(origin.path_or_id)).check_tensors(model)
    return model  # type: ignore[no-any-return]


def _dequantised(folder: Path, place: str, *, config: Any, **options: Any) -> Any:
    files = weight_files(folder)
    if not files:
        raise ValueError("its safetensors files are missing")
    tensors = dense_tensors(files, quantisation_of(config) or {}, options["dtype"])
    plain = copy(config)
    del plain.quantization_config
    causal: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(plain)]
    loaded = causal.from_pretrained(
        None, config=plain, state_dict=tensors, **{name: options[name] for name in options.keys() - _OF_HUB}
    )
    model = loaded[0]
    model.name_or_path = model.config.name_or_path = place
    if (folder / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(folder)
    return loaded


_OF_HUB = {"revision", "local_files_only"}
# Tensors of a multimodal checkpoint, by the names that they have in the decoder alone.
_RENAMED = {
    "key_mapping": {
        r"^language_model\.model\.": "model.",
        r"^model\.language_model\.": "model.",
        r"^language_model\.lm_head": "lm_head",
    }
}
_OF_IMAGES = ("vision_tower.", "multi_modal_projector.", "visual.", "embed_vision.", "audio_tower.", "embed_audio.")
_WITHOUT_THEM = (
    "; or, where the model is complete without them, remove them from its files, or load it with transformers, which "
    "ignores them (`AutoModelForCausalLM.from_pretrained`), and pass it to `sparsekv.plan_model` and `sparsekv.apply`"
)


def _with_files(origin: ModelSource, names: Collection[str]) -> set[str]:
    """Names of tensors, with the file of each where the model is a folder."""
    whole = Path(origin.path_or_id, "model.safetensors")
    index = Path(origin.path_or_id, "model.safetensors.index.json")
    files: Mapping[str, str] = {}
    if whole.exists():
        files = dict.fromkeys(names, whole.name)
    elif index.exists():
        files = json.loads(index.read_bytes())["weight_map"]
    return {f"{name} in {files[name]}" if name in files else name for name in names}


@contextmanager
def _without_table() -> Iterator[None]:
    """Without the table that transformers logs of what it reports: it says that random weights may be fine."""

    def keep(record: logging.LogRecord) -> bool:
        return "LOAD REPORT" not in record.getMessage()

    logger = logging.getLogger("transformers.modeling_utils")
    logger.addFilter(keep)
    try:
        yield
    finally:
        logger.removeFilter(keep)


def _check_finite(origin: ModelSource, model: PreTrainedModel) -> None:
    # quantised tensors are types of their own, and what accelerate has offloaded is not here
    named = [(name, data) for name, data in model.named_parameters() if type(data) is Parameter and _is_real(data)]
    bounds = [torch.stack(data.detach().aminmax()).float() for _, data in named]
    finite: list[bool] = []
    for _, alike in groupby(bounds, lambda bound: bound.device):
        finite += torch.stack(list(alike)).isfinite().all(1).tolist()  # waits for a device once, in turn
    names = {name for (name, _), whole in zip(named, finite, strict=True) if not whole}
    if names:
        raise UsageError(
            f"expected finite weights in {origin.path_or_id}, found NaN or infinity in {len(names)} of {len(named)} "
            f"tensors ({_first(names)}); get the model again, or where a narrower dtype overflows, load it in float32"
        )


def _is_real(data: torch.Tensor) -> bool:
    return data.dtype in _DTYPES.values() and data.numel() > 0 and not data.is_meta


def _first(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join((*ordered[:_NAMED], "...")[: len(ordered)])


def _guarded(origin: ModelSource, what: str, load: Any, options: dict[str, Any]) -> Any:
    try:
        return load(origin.place, **options)
    except Exception as error:  # transformers, safetensors, tokenizers and the hub each have their own
        raise _unreadable(origin, what, error) from error


def _unreadable(origin: ModelSource, what: str, error: Exception) -> UsageError:
    reason = " ".join(str(error).split())[:_REASON] or type(error).__name__
    folder = Path(origin.path_or_id)
    if origin.is_gguf:
        return UsageError(
            f"expected a GGUF file that transformers reads, cannot read {what} in {folder}: {reason}; get the file "
            "again, or use the model as safetensors"
        )
    if folder.is_dir():
        broken = next((f"its {name}" for name in _OBJECTS if not _is_object(folder / name)), what)
        return UsageError(f"expected a Hugging Face model in {folder}, cannot read {broken}: {reason}")
    return UsageError(without_model(origin.path_or_id, f"{what} cannot be had ({reason})"))


_REASON = 300  # characters of another library's message
_OBJECTS = (
    "config.json",
    "generation_config.json",
    "tokenizer_config.json",
    "tokenizer.json",
    "model.safetensors.index.json",
)


def _is_object(path: Path) -> bool:
    """Returns whether a file holds a JSON object, or is not there at all."""
    try:
        return not path.exists() or isinstance(json.loads(path.read_bytes()), dict)
    except (OSError, ValueError, RecursionError):
        return False
