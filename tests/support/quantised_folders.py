"""Quantised twins of a model on disk, in the formats' documented layouts, and the weights that they stand for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

GROUP = 32
Tensors = dict[str, torch.Tensor]
Packed = tuple[Tensors, torch.Tensor]
"""What stands in the file in place of a layer's weight, and the weight that it stands for."""


def fp8_by_blocks(weight_OI: torch.Tensor, rows: int = 128, columns: int = 128) -> Packed:
    """Each block over its largest value, the last ones smaller where they do not come out even."""
    places = [(r, c) for r in range(0, weight_OI.shape[0], rows) for c in range(0, weight_OI.shape[1], columns)]
    q_OI, exact_OI = torch.empty_like(weight_OI, dtype=torch.float8_e4m3fn), torch.empty_like(weight_OI)
    scales = []
    for r, c in places:
        block = (slice(r, r + rows), slice(c, c + columns))
        scales.append(weight_OI[block].abs().amax() / 448)
        q_OI[block] = (weight_OI[block] / scales[-1]).to(torch.float8_e4m3fn)
        exact_OI[block] = q_OI[block].float() * scales[-1]
    scale = torch.stack(scales).view(-(-weight_OI.shape[0] // rows), -1)
    return {"weight": q_OI, "weight_scale_inv": scale}, exact_OI


def fp8_by_tensor(weight_OI: torch.Tensor) -> Packed:
    """One scale, and one of activations, by the names of AutoFP8."""
    scale = weight_OI.abs().amax() / 448
    q_OI = (weight_OI / scale).to(torch.float8_e4m3fn)
    return {"weight": q_OI, "weight_scale": scale, "input_scale": torch.tensor(0.1)}, q_OI.float() * scale


def gptq(
    weight_OI: torch.Tensor,
    bits: int = 4,
    v2: bool = False,
    symmetric: bool = False,
    group: int = GROUP,
    of_words: bool = False,
) -> Packed:
    """Inputs in an order of their own, as by activations, where it is not symmetric, and a zero of 0.

    Args:
        of_words: as GPTQModel writes the first version: each word of zeros less a word of ones.
    """
    group_I = torch.arange(weight_OI.shape[1]) // group
    group_I = group_I if symmetric else group_I.flip(0)
    if not symmetric:
        weight_OI = torch.cat((weight_OI[:1].abs(), weight_OI[1:]))  # no negative numbers: a zero of 0
    (q_IO, zero_QO, scale_QO), exact_OI = _rounded(weight_OI, group_I, bits, symmetric)
    less = torch.full_like(zero_QO, int(not v2))
    zeros = _words(zero_QO, bits) - _words(less, bits) if of_words else _words((zero_QO - less) % 2**bits, bits)
    words = {"qweight": _words(q_IO.T, bits).T, "qzeros": zeros, "scales": scale_QO}
    return words | {"g_idx": group_I.int()}, exact_OI


def awq(weight_OI: torch.Tensor, group: int = GROUP) -> Packed:
    """Eight outputs to a word, the even ones of them first."""
    (q_IO, zero_QO, scale_QO), exact_OI = _rounded(weight_OI, torch.arange(weight_OI.shape[1]) // group, 4)
    order = (0, 2, 4, 6, 1, 3, 5, 7)
    q_IN, zero_QN = (_words(x.unflatten(1, (-1, 8))[..., order].flatten(1), 4) for x in (q_IO, zero_QO))
    return {"qweight": q_IN, "qzeros": zero_QN, "scales": scale_QO}, exact_OI


def _rounded(
    weight_OI: torch.Tensor, group_I: torch.Tensor, bits: int, symmetric: bool = False
) -> tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]:
    """Integers [I, O], zeros and scales of each group [Q, O], and the weight that they stand for."""
    w_IO, top = weight_OI.T, 2**bits - 1
    groups = [w_IO[group_I == group] for group in range(int(group_I.max()) + 1)]
    low_QO = torch.stack([one.amin(0) for one in groups]).clamp(max=0)
    high_QO = torch.stack([one.amax(0) for one in groups]).clamp(min=0)
    if symmetric:
        high_QO = torch.maximum(high_QO, -low_QO)
        low_QO = -high_QO
    scale_QO = ((high_QO - low_QO) / top).clamp(min=1e-6).half()
    zero_QO = (-low_QO / scale_QO).round().clamp(0, top)
    zero_QO = torch.full_like(zero_QO, 2 ** (bits - 1)) if symmetric else zero_QO
    q_IO = (w_IO / scale_QO.float()[group_I] + zero_QO[group_I]).round().clamp(0, top)
    exact_IO = (q_IO - zero_QO[group_I]) * scale_QO.float()[group_I]
    return (q_IO.int(), zero_QO.int(), scale_QO), exact_IO.T


def _words(x_XN: torch.Tensor, bits: int) -> torch.Tensor:
    shift = torch.arange(0, 32, bits)
    words_XN = (x_XN.long().unflatten(1, (-1, len(shift))) << shift).sum(-1)
    return torch.where(words_XN >= 2**31, words_XN - 2**32, words_XN).int()


def quantise(folder: Path, config: Mapping[str, Any], pack: Callable[[torch.Tensor], Packed]) -> tuple[Path, Path]:
    """Quantises the projections of a saved model's layers.

    Returns:
        The folder of the quantised model; and of one with the weights that it stands for, in float32.
    """
    twin, exact = (folder.with_name(f"{folder.name}-{name}") for name in ("quantised", "exact"))
    shutil.copytree(folder, twin)
    shutil.copytree(folder, exact)
    packed, plain = load_file(folder / "model.safetensors"), load_file(folder / "model.safetensors")
    for name in [name for name in packed if name.endswith("_proj.weight")]:
        parts, plain[name] = pack(packed.pop(name).float())
        packed |= {f"{name.removesuffix('weight')}{part}": data.contiguous() for part, data in parts.items()}
    for place, tensors in ((twin, packed), (exact, plain)):
        save_file({name: data.contiguous() for name, data in tensors.items()}, place / "model.safetensors", _FORMAT)
    whole = json.loads((folder / "config.json").read_text()) | {"quantization_config": dict(config)}
    (twin / "config.json").write_text(json.dumps(whole))
    return twin, exact


def compress(folder: Path, groups: Mapping[str, Sequence[str]]) -> Path:
    """The same by compressed-tensors' own tools, without calibration.

    Args:
        groups: which layers each of its schemes is of.
    """
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import QuantizationConfig, apply_quantization_config, preset_name_to_scheme
    from compressed_tensors.quantization.utils import calculate_qparams

    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    schemes = {name: preset_name_to_scheme(name, list(targets)) for name, targets in groups.items()}
    apply_quantization_config(model, QuantizationConfig(config_groups=schemes, ignore=["lm_head"]))
    for module in model.modules():
        if (scheme := getattr(module, "quantization_scheme", None)) is not None:
            size = {"tensor": module.weight.numel(), "channel": module.weight.shape[1]}.get(scheme.weights.strategy)
            groups_GN = module.weight.detach().float().view(-1, size or scheme.weights.group_size)
            scale_G, _ = calculate_qparams(groups_GN.amin(1), groups_GN.amax(1), scheme.weights)
            module.weight_scale.data.copy_(scale_G.view_as(module.weight_scale))
            if hasattr(module, "input_scale"):
                module.input_scale.data.fill_(0.01)
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    twin = folder.with_name(f"{folder.name}-compressed")
    shutil.copytree(folder, twin)
    model.save_pretrained(twin)
    compressor.update_config(str(twin))
    return twin


_FORMAT = {"format": "pt"}
