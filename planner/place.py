"""Where something was measured: device, precision, versions. No machine names, no paths, no times."""

from __future__ import annotations

import platform
from importlib.metadata import version
from typing import cast

import torch

from sparsekv import __version__
from sparsekv.plans.records import DtypeName


def device_name(device: torch.device) -> str:
    """What plans and cost files call a device: "NVIDIA H200", "cpu x86_64"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}".strip()


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """ "bfloat16" for torch.bfloat16, and so on."""
    return cast(DtypeName, str(dtype).removeprefix("torch."))


def versions() -> dict[str, str]:
    """Versions of what measurements depend on."""
    return {"sparsekv": __version__, **{name: version(name) for name in ("torch", "transformers")}}
