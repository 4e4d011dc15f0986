"""Rules of where sparse attention is faster, on disk: a file for each plan on each device, driver and set of versions.

A file that another version wrote, or that is not whole, is measured anew and replaced. Engines that start together
wait for the first one's measurement. Without a folder to write to, every start measures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
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

Place = Mapping[str, str | int]
"""All that a rule depends on: the plan's digest and shares, device, versions, precision, page and step size, ranks."""


def place_of(device: torch.device, dtype: torch.dtype, backend: str, float8: bool, **of_host: str | int) -> Place:
    """The place of a plan on a device; a host adds the plan's part and its own."""
    return {
        "device": device_name(device),
        "dtype": dtype_name(dtype),
        "cache": "8 bits" if float8 else "model",
        "backend": backend,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "sparsekv": __version__,
    } | of_host


@dataclass(frozen=True, slots=True)
class RuleFile:
    """The rule of one place, in a folder of all rules."""

    place: Place
    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / f"pays-{content_digest(self.place).removeprefix('sha256:')[:24]}.json"

    def read(self) -> Pays | None:
        """The rule; None where none of this place can be read."""
        with suppress(SparseKVError, ValueError, KeyError, TypeError, RecursionError):
            content = json.loads(read_text(self.path, _MAX_BYTES))
            if content["place"] == dict(self.place):
                return parse(content["rule"])
        return None

    def write(self, rule: Pays) -> None:
        """Keeps the rule, if the folder can be written to."""
        with suppress(SparseKVError, OSError):
            self.folder.mkdir(parents=True, exist_ok=True)
            write_bytes(self.path, json.dumps({"place": dict(self.place), "rule": str(rule)}).encode())

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
