"""Other work on the cores that we compute on, which slows a CPU down by more than its share."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from functools import cache

import torch

from sparsekv.plans.errors import PlanWarning
from sparsekv.runtime.settings import threads_spin

_BESIDE = 0.5  # above the cores, that our own threads alone may fill


def overload(device: torch.device) -> str:
    """The load of the last minute where it is above the cores of this machine, as in "load 5.1 on 2 cores"; empty
    elsewhere, and for a device that is not the CPU."""
    cores = os.cpu_count() or 1
    with suppress(OSError):  # it is not told everywhere
        load = os.getloadavg()[0]
        if device.type == "cpu" and load > cores + _BESIDE:
            return f"load {load:.1f} on {cores} cores"
    return ""


def warn_of_spinning(device: torch.device) -> None:
    """Warns (`PlanWarning`), once in a process, where threads that wait keep cores from those that they wait for.

    For the calls of the Python API, in which torch is loaded before ours: the command line sets the policy first.
    """
    if torch.get_num_threads() > 1 and threads_spin() and overload(device):
        _warn_of_spinning()


@cache
def _warn_of_spinning() -> None:
    warnings.warn(
        "this machine has more to do than it has cores, and torch was loaded with threads that spin while they wait: "
        "every step takes many times as long. Set OMP_WAIT_POLICY=passive before Python starts",
        PlanWarning,
        stacklevel=4,  # the caller of apply or plan_model
    )
