"""Checks whether a plan may run on a model: what every host refuses, and what it warns of, before anything runs; other
work on the cores that we compute on, which slows a CPU down by more than its share, included."""

from __future__ import annotations

import os
import warnings
from contextlib import suppress
from functools import cache

import torch

from sparsekv.plans.errors import PlanWarning, UnsupportedError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import HostName, Plan, check_model, cut_text, unsupported
from sparsekv.runtime.settings import threads_spin


def check_plan(plan: Plan, found: ModelInfo, allow_mismatch: bool = False, option: str = "") -> None:
    """Refuses a plan that would run wrongly, and warns (`PlanWarning`) of one whose quality was measured elsewhere.

    Args:
        option: see `check_model`.

    Raises:
        PlanMismatchError: `found` is of another architecture and `allow_mismatch` is off, or lacks layers or heads.
        UnsupportedError: the plan has a field that this version does not execute.
    """
    for line in check_model(plan, found, allow_mismatch, option):
        warnings.warn(line, PlanWarning, stacklevel=3)
    refused = unsupported(plan)
    if refused:
        listed = "\n".join(f"  {line}" for line in refused)
        raise UnsupportedError(
            f"expected a plan that this version executes in full, found:\n{listed}\nMake a plan without it."
        )


def check_target(
    plan: Plan, device: str, backend: str, dtype: str, host: HostName = "transformers", step: int | None = None,
    float8: bool = False,
) -> None:  # fmt: skip
    """Warns (`PlanWarning`) where the plan's cost was measured on another device: sparse may be slower than dense here;
    and where its quality was measured with other keys and values.

    Args:
        plan: the plan; one without targets (an import) claims nothing.
        device: where it is going to run, by its name.
        backend: of its kernels.
        dtype: of the model.
        host: the program that runs it.
        step: most tokens that it prefills at once; compared with targets that were measured in such chunks.
        float8: whether keys and values are stored in 8 bits.
    """
    stored = {target.kv_dtype or target.dtype for target in plan.targets}
    if stored and (own := "fp8" if float8 else dtype) not in stored and "fp8" in (own, *stored):
        warnings.warn(
            f"quality and cost of this plan were measured with keys and values in {' and '.join(sorted(stored))}, not "
            f"in {own}: answers may differ from it; plan with --set kv_dtype={'fp8' if float8 else 'auto'} for these",
            PlanWarning,
            stacklevel=3,
        )
    measured = [
        f"{target.device} ({target.host}, {target.backend}, {target.dtype}{_chunks(target.chunk)}"
        f"{_devices(target.count)})"
        for target in plan.targets
    ]
    here = f"{device} ({host}, {backend}, {dtype}{_chunks(step if any(t.chunk for t in plan.targets) else None)})"
    if measured and here not in measured:
        again = "" if host == "transformers" else f" --host {host}"
        warnings.warn(
            f"cost and crossover of this plan were measured on {', '.join(measured)}, not on {here}: sparse may be "
            f"slower than dense here. `sparsekv plan MODEL --dtype {dtype} --set backend={backend}{again}` plans "
            "for this, in seconds with --profile FILE where --profile-out saved one",
            PlanWarning,
            stacklevel=3,
        )


def check_cut(plan: Plan, chunk: int | None, tokens: int) -> None:
    """Warns (`PlanWarning`), of each cut once, where a plan was verified on prompts that were cut in another way.

    Args:
        chunk: most tokens of a prompt that run at once here; None is all of it.
        tokens: of the prompt, or of the longest.
    """
    if plan.status != "verified" or plan.quality is None or plan.prefill is None:
        return
    length = min(tokens, max(max(measured.lengths) for measured in plan.quality.phases.values()))
    known, here = (cut if cut and cut < length else None for cut in (plan.quality.chunk, chunk))
    if known != here and not plan.prefill.bucket(length).dense:
        again = "" if here is None else f" --prefill-chunk {here}"
        warnings.warn(
            f"this plan was verified with prompts {cut_text(known)}, and here they run {cut_text(here)}: nothing is "
            f"proven of that; `sparsekv verify --plan PLAN --write{again}` does",
            PlanWarning,
            stacklevel=1,  # one place for all callers, so that nobody is told twice
        )


def _chunks(tokens: int | None) -> str:
    return "" if tokens is None else f", chunks of {tokens}"


def _devices(count: int) -> str:
    return "" if count == 1 else f", {count} devices"


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
