"""The model that a prefill is timed on: loaded, or of a known shape with random weights made on the device itself."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from sparsekv.planner.bench.shapes import PUBLIC_SHAPES
from sparsekv.plans.aliases import ALIASES, resolve_model
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.describe import check_supported, describe_model
from sparsekv.runtime.hf.load import LoadedModel, load_config


@dataclass(frozen=True, slots=True)
class BenchModel:
    """A model in evaluation mode on its device; no tokenizer is needed to time a prefill."""

    model: PreTrainedModel
    info: ModelInfo
    name: str
    weights: Literal["random", "loaded"]
    note: str = ""

    @classmethod
    def of(cls, loaded: LoadedModel, name: str) -> BenchModel:
        """A model with its own weights."""
        return cls(loaded.model, loaded.info, name, "loaded")


def random_model(
    name: str,
    *,
    device: torch.device,
    dtype: torch.dtype,
    longest: int,
    layers: int | None = None,
    seed: int = 0,
) -> BenchModel:
    """A model of `name`'s shape with random weights, which never exist in main memory.

    Args:
        name: an alias, folder or hub id: its config is used where it can be had, else the table in shapes.py.
        longest: tokens that it must take; a shorter context is stretched, and the note says so.
        layers: only so many layers, for what one layer costs.

    Raises:
        UsageError: no config and no known shape of that name, or it has not so many layers.
        UnsupportedError: its architecture is not supported.
    """
    config, notes = _config_of(name)
    notes = ["weights are random, so that attention is diffuse and answers mean nothing", *notes]
    if config.max_position_embeddings < longest:
        notes.append(f"context stretched from {format_length(config.max_position_embeddings)}")
        config.max_position_embeddings = longest
    if layers is not None:
        notes.append(f"{layers} of {config.num_hidden_layers} layers")
        _cut(config, layers)
    on = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=on), torch.device(device), torch.no_grad():
        torch.manual_seed(seed)
        model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, dtype=dtype).eval())
    return BenchModel(model, describe_model(model, _short(name)), _short(name), "random", "; ".join(notes))


def _config_of(name: str) -> tuple[PreTrainedConfig, list[str]]:
    source = resolve_model(name)
    try:
        return load_config(source), []
    except UsageError as error:
        alias = next((alias.name for alias in ALIASES if name.lower() in (alias.name, alias.checkpoint.lower())), "")
        if alias not in PUBLIC_SHAPES:
            error.add_note(f"Shapes known without a config: {', '.join(PUBLIC_SHAPES)}")
            raise
    shape = PUBLIC_SHAPES[alias]
    check_supported(shape.model_type)
    return AutoConfig.for_model(shape.model_type, **shape.config()), ["its shape is from a table: no config to be had"]


def _cut(config: Any, layers: int) -> None:
    if not 1 <= layers <= config.num_hidden_layers:
        raise UsageError(f"expected 1 to {config.num_hidden_layers} layers, found {layers}")
    config.num_hidden_layers = layers
    if getattr(config, "layer_types", None):
        config.layer_types = config.layer_types[:layers]


def _short(name: str) -> str:
    """A name without the folders before it."""
    return name.rstrip("/").rpartition("/")[2] if name.startswith((".", "/", "~")) else name
