"""Quantised checkpoints as files: what a config says of them, and the fingerprint of what they hold, whichever host
reads them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from sparsekv.plans.model import weights_fingerprint

_SAMPLES = 16  # bytes of each tensor; as of weights that are not quantised (describe.py)
_WHOLE, _INDEX = "model.safetensors", "model.safetensors.index.json"


def quantisation_of(config: Any) -> Mapping[str, Any] | None:
    """Returns what a config of transformers says of quantised weights; None where they are not."""
    found = getattr(config, "quantization_config", None)
    return found if found is None or isinstance(found, Mapping) else found.to_dict()


def weight_files(folder: Path) -> tuple[Path, ...]:
    """Returns the safetensors files that hold the weights of a model in a folder; empty where not all are there."""
    names: set[str] = {_WHOLE}
    if (folder / _INDEX).is_file():
        names = set(json.loads((folder / _INDEX).read_bytes())["weight_map"].values())
    files = tuple(folder / name for name in sorted(names))
    return files if all(file.is_file() for file in files) else ()


def files_fingerprint(folder: Path) -> str | None:
    """Returns the digest of all tensors in a model's files, by their names, types, shapes and sampled bytes; None where
    files are missing or cannot be read."""
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
