"""Weights of quantised checkpoints as plain numbers: FP8, GPTQ, AWQ and compressed-tensors; and headers of GGUF files.

transformers needs a package and a GPU for most of these, and gradients, which planning takes, do not go through its
layers. What is read is what the files hold; activations are not quantised.

Shapes: I inputs of a layer, O outputs, Q groups of inputs that share a scale, N words of P integers.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeGuard

import torch
from safetensors import safe_open
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from sparsekv.plans.errors import UnsupportedError, UsageError, install_command
from sparsekv.runtime.model_config import quantisation_of

Parts = Mapping[str, torch.Tensor]
"""The tensors of one layer, by the last part of their names."""
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # the place in a word of each of eight columns


def is_dequantised(config: Mapping[str, Any] | None) -> TypeGuard[Mapping[str, Any]]:
    """Returns whether `dense_tensors` reads such weights; transformers reads others as it can."""
    return config is not None and config.get("quant_method") in _METHODS


def stays_packed(config: Any) -> bool:
    """Returns whether a model's weights are quantised in memory too; their size there is not known beforehand."""
    quantisation = quantisation_of(config)
    return quantisation is not None and not is_dequantised(quantisation)


def check_quantisation(config: Mapping[str, Any]) -> None:
    method = config["quant_method"]
    if method == "compressed-tensors" and importlib.util.find_spec("compressed_tensors") is None:
        raise UsageError(
            "expected compressed-tensors, by which such weights are read, found it missing; "
            f"{install_command('compressed')}"
        )
    if config.get("transform_config"):
        raise _unread(method, "rotations of activations (transform_config)", "no transforms")
    bits, forms = _KINDS.get(method, ((), ()))
    form = _form(config) or "".join(forms[:1])
    if forms and (config.get("bits") not in bits or form not in forms):
        expected = f"{' or '.join(map(str, bits))} bits in the form {' or '.join(forms)}"
        raise _unread(method, f"{config.get('bits')} bits in the form {form}", expected)


def _form(config: Mapping[str, Any]) -> str:
    """Returns in which form GPTQ or AWQ were written; empty where the config leaves that out."""
    return str(config.get("checkpoint_format") or config.get("version") or config.get("format") or "").lower()


def _unread(method: str, found: str, expected: str) -> UnsupportedError:
    return UnsupportedError(
        f"expected {method} weights with {expected}, found {found}; plan and run the model that was quantised: vLLM "
        "runs its plan on these weights"
    )


def dense_tensors(files: Sequence[Path], config: Mapping[str, Any], dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors of a checkpoint by name, quantised layers multiplied out, by a checked config."""
    with ExitStack() as opened:
        places = {
            name: file
            for file in (opened.enter_context(safe_open(path, "pt")) for path in files)
            for name in file.keys()  # noqa: SIM118  it is no mapping
        }
        layers: dict[str, list[str]] = {}
        for name in places:
            prefix, _, part = name.rpartition(".")
            layers.setdefault(prefix, []).append(part)
        dense: dict[str, torch.Tensor] = {}
        for prefix, names in layers.items():
            parts = {part: places[f"{prefix}.{part}"].get_tensor(f"{prefix}.{part}") for part in names}
            dense |= {f"{prefix}.{part}": data for part, data in _dense(prefix, parts, config, dtype)}
        return dense


def _dense(
    prefix: str, parts: Parts, config: Mapping[str, Any], dtype: torch.dtype
) -> Iterator[tuple[str, torch.Tensor]]:
    if not _PACKED.isdisjoint(parts):
        try:
            weight_OI = _METHODS[config["quant_method"]](prefix, parts, config)
        except (KeyError, RuntimeError, StopIteration) as error:
            raise ValueError(
                f"{prefix} holds {', '.join(sorted(parts))}, which is no layer of {config['quant_method']} ({error!r})"
            ) from error
        yield "weight", weight_OI.to(dtype).contiguous()  # unpacked, inputs came first
        parts = {part: data for part, data in parts.items() if part == "bias"}
    for part, data in parts.items():
        if part in _OF_CACHE:
            continue
        if data.dtype not in _FLOATS:
            raise ValueError(f"{prefix}.{part} is of {data.dtype}, without a scale that is known")
        yield part, data


_PACKED = frozenset(("weight_scale_inv", "weight_scale", "weight_packed", "qweight"))
_OF_CACHE = ("k_scale", "v_scale", "q_scale", "k_zero_point", "v_zero_point")  # which stays as it is
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _fp8(prefix: str, parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    """Scales of blocks, of rows, or one: as transformers and DeepSeek name them, or AutoFP8."""
    scale = parts["weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"].float()
    weight_OI = parts["weight"].float()
    if scale.numel() == 1:
        return weight_OI * scale
    outputs, inputs = weight_OI.shape
    rows, columns = config.get("weight_block_size") or (1, inputs)
    scale_OI = scale.view(-(-outputs // rows), -(-inputs // columns))
    scale_OI = scale_OI.repeat_interleave(rows, 0)[:outputs].repeat_interleave(columns, 1)[:, :inputs]
    return weight_OI * scale_OI


def _gptq(prefix: str, parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    """Inputs are packed, and zeros over outputs, less one but in a checkpoint of the second version. GPTQModel takes
    the ones off whole words, so that a zero of 0 borrows from the next one; others off each number."""
    bits, less = config["bits"], int(_form(config) != "gptq_v2")
    of_words = "gptqmodel" in str(config.get("meta"))
    ones = sum(less << shift for shift in range(0, 32, bits)) if of_words else 0
    q_IO = _unpacked(parts["qweight"].T, bits).T
    zero_QO = (_unpacked(parts["qzeros"] + ones, bits) + (0 if of_words else less)) & (2**bits - 1)
    group_I = parts["g_idx"].long() if "g_idx" in parts else _groups(q_IO, config["group_size"])
    return _scaled(q_IO, zero_QO, parts["scales"], group_I)


def _awq(prefix: str, parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    """Outputs are packed, in an order of their own."""
    q_IO, zero_QO = (
        _unpacked(parts[name], config["bits"]).unflatten(1, (-1, len(_AWQ_ORDER)))[..., _AWQ_ORDER].flatten(1)
        for name in ("qweight", "qzeros")
    )
    group_I = _groups(q_IO, config["group_size"])
    return _scaled(q_IO, zero_QO, parts["scales"], group_I)


def _scaled(q_IO: torch.Tensor, zero_QO: torch.Tensor, scale_QO: torch.Tensor, group_I: torch.Tensor) -> torch.Tensor:
    weight_IO: torch.Tensor = (q_IO - zero_QO[group_I]) * scale_QO.float()[group_I]
    return weight_IO.T


def _groups(q_IO: torch.Tensor, size: int) -> torch.Tensor:
    """Returns the group of each input; a size of -1 is one group."""
    inputs = len(q_IO)
    return torch.arange(inputs, device=q_IO.device) // (inputs if size == -1 else size)


def _unpacked(words_XN: torch.Tensor, bits: int) -> torch.Tensor:
    """The unsigned integers in each word, lowest bits first, side by side."""
    shift = torch.arange(0, 32, bits, dtype=torch.int32, device=words_XN.device)
    parts_XNP: torch.Tensor = (words_XN[..., None] >> shift) & (2**bits - 1)
    return parts_XNP.flatten(1)


def _compressed(prefix: str, parts: Parts, config: Mapping[str, Any]) -> torch.Tensor:
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization import QuantizationScheme
    from compressed_tensors.utils.match import is_match

    linear, ignored = nn.Linear(1, 1, device="meta"), config.get("ignore") or ()
    groups = map(QuantizationScheme.model_validate, config["config_groups"].values())
    scheme = next(group for group in groups if is_match(prefix, linear, group.targets, ignored))
    form = scheme.format or config["format"]
    exact = {part: data.float() if data.dtype in _FLOATS else data for part, data in parts.items() if part != "bias"}
    weight_OI: torch.Tensor = BaseCompressor.get_value_from_registry(form).decompress(exact, scheme)["weight"]
    return weight_OI


_METHODS: dict[str, Callable[[str, Parts, Mapping[str, Any]], torch.Tensor]] = {
    "fp8": _fp8,
    "gptq": _gptq,
    "awq": _awq,
    "compressed-tensors": _compressed,
}
# Bits of a number, and forms of a checkpoint, that are read.
_KINDS = {"gptq": ((2, 4, 8), ("gptq", "gptq_v2")), "awq": ((4,), ("gemm",))}


_MAGIC = b"GGUF"
_ROPE_FACTORS = "rope_"  # rope_freqs.weight, rope_factors_long.weight: the tensors that scaled RoPE comes as
_SCALING = ".rope.scaling.type"
_READ = ("general.architecture", "split.count")


@dataclass(frozen=True, slots=True)
class GGUFHeader:
    """Metadata of a GGUF file that we look at, and the names of its tensors."""

    path: Path
    values: dict[str, Any]
    tensors: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> GGUFHeader:
        """Reads a file of this machine; its vocabulary takes seconds."""
        _check_packages(path)
        from gguf import GGUFReader

        try:
            with path.open("rb") as file:
                if file.read(len(_MAGIC)) != _MAGIC:
                    raise UsageError(f"expected a GGUF file, found other data in {path}; get the file again")
            reader = GGUFReader(path)
        except OSError as error:
            raise UsageError(f"expected a readable GGUF file at {path}, found: {error.strerror}") from error
        except (ValueError, IndexError, KeyError) as error:  # whatever reading behind its end comes to
            raise UsageError(f"expected a whole GGUF file at {path}, found: {error}; get it again") from error
        kept = {name: field for name, field in reader.fields.items() if name in _READ or name.endswith(_SCALING)}
        values = {name: field.contents() for name, field in kept.items()}
        if values.get("split.count", 0) > 1:
            raise UsageError(
                f"expected a whole GGUF file, found one of {values['split.count']} parts in {path}; join them with "
                "llama-gguf-split, and name the result"
            )
        return cls(path, values, tuple(tensor.name for tensor in reader.tensors))

    def check_rope(self, config: PreTrainedConfig) -> None:
        """Refuses a file of scaled RoPE where `config`, which transformers made of it, has none."""
        kind = self.values.get(f"{self.values.get('general.architecture')}{_SCALING}", "none")
        factors = next((name for name in self.tensors if name.startswith(_ROPE_FACTORS)), None)
        if (kind != "none" or factors) and config.rope_parameters.get("rope_type", "default") == "default":
            raise UnsupportedError(
                f"expected plain RoPE in {self.path}, found scaled ({factors or kind}), which transformers leaves out "
                "of a GGUF file: long prompts would go wrong; use the model as safetensors"
            )

    def check_tensors(self, model: PreTrainedModel) -> None:
        """Refuses a file of more tensors than `model`, which transformers loaded from it, has."""
        count = sum(1 for _ in model.parameters())  # tied ones once, as in the file
        if len(self.tensors) > count:
            raise UnsupportedError(
                f"expected {count} tensors in {self.path}, as many as its architecture has in transformers, found "
                f"{len(self.tensors)}, of which some are left out; use the model as safetensors"
            )


def _check_packages(path: Path) -> None:
    missing = [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]
    if missing:
        raise UsageError(
            f"expected {' and '.join(missing)}, by which transformers reads the GGUF file {path}, found none "
            f"installed; {install_command('gguf')}"
        )
