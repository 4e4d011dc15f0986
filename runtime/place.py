"""What plans, profiles and cost files call a device and a precision. No machine names."""

from __future__ import annotations

import platform
from typing import cast

import torch

from sparsekv.plans.schema import DtypeName


def device_name(device: torch.device) -> str:
    """ "NVIDIA H200", "cpu x86_64"."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}".strip()


def dtype_name(dtype: torch.dtype) -> DtypeName:
    """ "bfloat16" for torch.bfloat16, and so on."""
    return cast(DtypeName, str(dtype).removeprefix("torch."))
