"""The model that is timed, loaded or of a known shape with random weights made on the device itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sparsekv.bench.harness import free_memory
from sparsekv.bench.public_shapes import config_of
from sparsekv.bench.step_attention import kv_bytes
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import load_config
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.model_config import describe_config, linear_layers
from sparsekv.runtime.stores.pinned import available_bytes, has_room


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model in evaluation mode on its device; no tokenizer is needed to time it."""

    model: PreTrainedModel
    info: ModelInfo
    name: str
    weights: Literal["random", "loaded"]
    note: str = ""


def available_on(device: torch.device) -> int | None:
    """Bytes that a device has left; None where nobody tells."""
    if device.type != "cuda":
        return available_bytes()
    free_memory(device)
    return torch.cuda.mem_get_info(device)[0]


def stretched_config(name: str, longest: int) -> tuple[Any, list[str]]:
    """The config of a model, or of its shape, with a context of at least `longest` tokens; and notes on both."""
    config, notes = config_of(name)
    if config.max_position_embeddings < longest:
        notes.append(f"context stretched from {format_length(config.max_position_embeddings)}")
        config.max_position_embeddings = longest
    return config, notes


def random_model(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    longest: int,
    layers: int | None = None,
    seed: int = 0,
    cached: int = 0,
) -> BenchModel:
    """A model of `name`'s shape with random weights, which never exist in main memory.

    Args:
        name: an alias, folder or hub id: its config is used where it can be had, else its public shape.
        longest: tokens that it must take; a shorter context is stretched, and the note says so.
        layers: only so many layers, for what one layer costs.
        cached: tokens whose keys and values must fit beside the weights.
    """
    config, notes = stretched_config(name, longest)
    notes = ["weights are random, so that attention is diffuse and answers mean nothing", *notes]
    if layers is not None:
        notes.append(f"{layers} of {config.num_hidden_layers} layers")
        _cut(config, layers)
    _check_room(config, dtype, cached, available_on(device))
    on = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on), torch.device(device), torch.no_grad():
        torch.manual_seed(seed)
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype).eval())
    return BenchModel(model, describe_model(model, _short(name)), _short(name), "random", "; ".join(notes))


def _cut(config: Any, layers: int) -> None:
    """Leaves the first layers of a model alone."""
    if not 1 <= layers <= config.num_hidden_layers:
        raise UsageError(f"expected 1 to {config.num_hidden_layers} layers, found {layers}")
    if shared := getattr(config, "num_kv_shared_layers", 0):  # the last ones
        config.num_kv_shared_layers = max(0, layers - config.num_hidden_layers + shared)
    config.num_hidden_layers = layers
    for name in ("layer_types", "mlp_layer_types"):
        if getattr(config, name, None):
            setattr(config, name, getattr(config, name)[:layers])


def _check_room(config: Any, dtype: torch.dtype, cached: int, available: int | None) -> None:
    with torch.device("meta"):
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype))
    weights = sum(weight.nbytes for weight in model.parameters())
    states = linear_layers(config)
    kv = cached * kv_bytes(layout for layer, layout in enumerate(layouts_of(model)) if layer not in states)
    if available is None or has_room(weights + kv, available):
        return
    ways = ["a smaller model"]
    ways += ["--dtype bfloat16"] if dtype.itemsize > 2 else []
    ways += ["shorter --lengths"] if has_room(weights, available) else ["fewer layers"]
    raise UsageError(
        f"expected {weights / 2**30:.1f} GiB of memory for {str(dtype).removeprefix('torch.')} weights"
        + (f", {kv / 2**30:.1f} GiB for keys and values" if cached else "")
        + f" and 1 GiB to spare, found {available / 2**30:.1f} GiB available; choose {' or '.join(ways)}"
    )


def describe_named(name: str, random_weights: bool) -> ModelInfo:
    """The description of a model before its weights are loaded or made."""
    return describe_config(config_of(name)[0] if random_weights else load_config(name), _short(name))


def _short(name: str) -> str:
    """A name without the folders before it."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith((".", "/", "~")) else name
