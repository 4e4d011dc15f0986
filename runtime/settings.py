"""The one place that looks at environment variables: SPARSEKV_* (flags go over them, they go over defaults), and those
that a host is preset with."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, get_args

from sparsekv.plans.errors import UsageError

PREFIX = "SPARSEKV_"
DeviceMap = Literal["auto", "balanced", "balanced_low_0", "sequential"]  # as transformers names them
DEVICE_MAPS: tuple[DeviceMap, ...] = get_args(DeviceMap)
Backend = Literal["auto", "flash", "triton", "cpu", "reference"]
Dtype = Literal["auto", "bfloat16", "float16", "float32"]
CHOICES: dict[str, tuple[str, ...]] = {"backend": get_args(Backend), "dtype": get_args(Dtype)}


@dataclass(frozen=True, slots=True)
class Settings:
    """The presets of the environment; every field is the variable SPARSEKV_<FIELD IN CAPITALS>."""

    backend: Backend = "auto"
    device: str = "auto"  # a torch device such as cpu or cuda:1
    dtype: Dtype = "auto"


def check_device(device: str) -> None:
    """Refuses what can be the name of no device here, without asking the machine."""
    if device != "auto" and device.partition(":")[0] not in ("cpu", "cuda"):
        raise UsageError(
            f"expected a device that this machine has, found {device!r:.40} (neither cpu nor cuda); try cpu"
        )


def read_settings(environment: Mapping[str, str] | None = None) -> Settings:
    """Reads the settings from `environment` (the process's own when None). Empty variables count as absent."""
    source = os.environ if environment is None else environment
    values = {field.name: source.get(PREFIX + field.name.upper(), "").strip() for field in fields(Settings)}
    given: dict[str, Any] = {name: value for name, value in values.items() if value}
    for name, value in given.items():
        if name in CHOICES and value not in CHOICES[name]:
            expected = ", ".join(CHOICES[name])
            raise UsageError(f"expected {PREFIX}{name.upper()} to be {expected}, found {value!r}; correct or unset it")
    return Settings(**given)


def threads_spin(environment: Mapping[str, str] | None = None) -> bool:
    """Returns whether OpenMP's threads spin while they wait, as by default, for all that its variables say. They are
    read when torch is loaded; what was set later is not told apart."""
    source = os.environ if environment is None else environment
    is_bounded = any(source.get(name) for name in ("GOMP_SPINCOUNT", "KMP_BLOCKTIME"))  # of libgomp, and of Intel's
    return not is_bounded and source.get("OMP_WAIT_POLICY", "").strip().lower() != "passive"


def preset_vllm() -> None:
    """Presets vLLM, before it is imported: engines run in this process, beside each other, and nothing of theirs is
    written to standard output. Variables that are set already stay."""
    given = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_STREAM": "ext://sys.stderr",
        "VLLM_NO_USAGE_STATS": "1",
    }
    for name, value in given.items():
        os.environ.setdefault(name, value)


def cache_folder() -> Path:
    """The folder of what may be measured again, as the XDG base directory specification has it."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "sparsekv"
