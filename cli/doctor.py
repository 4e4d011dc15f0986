"""`sparsekv doctor`: what is installed, what this machine has, and which backend runs on it."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from typing import TYPE_CHECKING, Any

from sparsekv.cli import arguments
from sparsekv.cli.output import emit, emit_json, size

if TYPE_CHECKING:
    import torch

_PACKAGES = ("sparsekv", "torch", "triton", "transformers", "flash-attn-4", "pydantic", "safetensors")
_HEAD_DIM = 128


def doctor(
    device: arguments.Device = None,
    dtype: arguments.Dtype = None,
    backend: arguments.Backend = None,
    as_json: arguments.Json = False,
) -> None:
    """Print what is installed, what the device can do, which kernel backend runs on it and why not the others."""
    hardware, precision = arguments.device_and_dtype(device, dtype)
    report = {
        "versions": {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES},
        "device": _device(hardware),
        "backend": _backend(hardware, precision, arguments.settings(backend=backend).backend),
    }
    if as_json:
        emit_json(report)
    else:
        emit(_text(report))


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _device(hardware: torch.device) -> dict[str, Any]:
    import torch

    if hardware.type != "cuda":
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        cores = len(os.sched_getaffinity(0))
        return {"type": hardware.type, "name": platform.machine(), "cores": cores, "memory_bytes": memory}
    free, total = torch.cuda.mem_get_info(hardware)
    return {
        "type": hardware.type,
        "name": torch.cuda.get_device_name(hardware),
        "count": torch.cuda.device_count(),
        "capability": ".".join(map(str, torch.cuda.get_device_capability(hardware))),
        "cuda": torch.version.cuda,
        "memory_bytes": total,
        "free_bytes": free,
    }


def _backend(hardware: torch.device, dtype: torch.dtype, requested: str) -> dict[str, Any]:
    from sparsekv.kernels.backends import choose_backend

    choice = choose_backend(hardware, dtype, _HEAD_DIM, requested)
    name = str(dtype).removeprefix("torch.")
    return {"name": choice.name, "reason": choice.reason, "dtype": name, "rejected": dict(choice.rejected)}


def _text(report: dict[str, Any]) -> str:
    versions = [(name, found or "not installed") for name, found in report["versions"].items()]
    device, backend = report["device"], report["backend"]
    facts = [f"{device['name']} ({device['type']})"]
    if "capability" in device:
        facts += [f"{device['count']} of them", f"compute capability {device['capability']}", f"CUDA {device['cuda']}"]
        facts.append(f"{size(device['free_bytes'])} of {size(device['memory_bytes'])} free")
    else:
        facts += [f"{device['cores']} cores", size(device["memory_bytes"])]
    rows = [*versions, ("", ""), ("device", ", ".join(facts)), ("backend", f"{backend['name']}: {backend['reason']}")]
    rows += [("", f"not {name}: {why}") for name, why in backend["rejected"].items()]
    return "\n".join(f"{name:<13} {value}".rstrip() for name, value in rows)
