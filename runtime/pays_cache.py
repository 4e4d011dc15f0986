"""Rules of where sparse attention is faster, on disk: a file for each plan on each device, driver and set of versions.

A file that another version wrote, or that is not whole, is measured anew and replaced. Engines that start together
wait for the first one's measurement. Without a folder to write to, every start measures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from ctypes import CDLL, create_string_buffer
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch
from filelock import FileLock, Timeout

from sparsekv import __version__
from sparsekv.plans.errors import SparseKVError
from sparsekv.plans.files import content_digest, read_text, write_bytes
from sparsekv.runtime.core.pays import Pays, parse
from sparsekv.runtime.model_config import device_name, dtype_name

_LONGEST_WAIT = 60.0  # seconds for another engine's measurement
_MAX_BYTES = 1 << 16

_KERNEL_PACKAGES = ("triton", "flash-attn-4")

RuleKey = Mapping[str, str | int]
"""All that a rule depends on: the plan's digest and shares, the model's architecture, device, driver, versions,
precision, page and step size, ranks."""


def rule_key(
    device: torch.device, dtype: torch.dtype, backend: str, float8: bool, model: str, **of_host: str | int
) -> RuleKey:
    """The key of a plan's rule on a device; a host adds the plan's part and its own.

    Args:
        model: fingerprint of the architecture that runs, which an imported plan may not be of.
    """
    return {
        "model": model,
        "device": device_name(device),
        "driver": _driver(device),
        "dtype": dtype_name(dtype),
        "cache": "8 bits" if float8 else "model",
        "backend": backend,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "sparsekv": __version__,
        **{name: _installed(name) for name in _KERNEL_PACKAGES},
    } | of_host


def _driver(device: torch.device) -> str:
    """The release of NVIDIA's driver, such as 580.159.04, which torch does not tell."""
    release = create_string_buffer(80)
    with suppress(OSError):  # another maker's device
        if device.type == "cuda":
            library = CDLL("libnvidia-ml.so.1")
            library.nvmlInit_v2()
            library.nvmlSystemGetDriverVersion(release, len(release))
    return release.value.decode()


def _installed(package: str) -> str:
    with suppress(PackageNotFoundError):
        return version(package)
    return "none"


@dataclass(frozen=True, slots=True)
class RuleFile:
    """The rule of one key, in a folder of all rules."""

    key: RuleKey
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"pays-{content_digest(self.key).removeprefix('sha256:')[:24]}.json"

    def read(self) -> Pays | None:
        """The rule; None where none of this key can be read."""
        with suppress(SparseKVError, ValueError, KeyError, TypeError, RecursionError):
            content = json.loads(read_text(self.path, _MAX_BYTES))
            if content["key"] == dict(self.key):
                return parse(content["rule"])
        return None

    def write(self, rule: Pays) -> None:
        """Keeps the rule, if the folder can be written to."""
        with suppress(SparseKVError, OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, json.dumps({"key": dict(self.key), "rule": str(rule)}).encode())

    def read_or(self, measure: Callable[[], Pays]) -> tuple[Pays, bool]:
        """The rule, and whether it was measured now; one process at a time."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{self.path}.lock", timeout=_LONGEST_WAIT)
            lock.acquire()
        except (OSError, Timeout):  # no folder to write to, or an engine that hangs
            return measure(), True
        try:
            known = self.read()
            rule = measure() if known is None else known
            if known is None:
                self.write(rule)
            return rule, known is None
        finally:
            lock.release()
