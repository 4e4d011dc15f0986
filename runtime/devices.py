"""The devices of this machine by name. Nothing here takes long to import but torch."""

from __future__ import annotations

import torch

from sparsekv.plans.errors import UsageError
from sparsekv.runtime.settings import check_device


def torch_device(device: str) -> torch.device:
    """The device of that name; "auto" is the first GPU, or the CPU.

    Raises:
        UsageError: there is no such device on this machine.
    """
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
