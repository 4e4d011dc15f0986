"""Rules of where sparse attention is faster, on disk: a file for each plan on each device, driver and set of versions.

A file that another version wrote, or that is not whole, is measured anew and replaced. Engines that start together
wait for the first one's measurement. Without a folder to write to, every start measures.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

from filelock import FileLock, Timeout

from sparsekv.plans.errors import SparseKVError
from sparsekv.plans.files import content_digest, read_text, write_bytes
from sparsekv.runtime.core.pays import Pays, parse

_LONGEST_WAIT = 60.0  # seconds for another engine's measurement
_MAX_BYTES = 1 << 16


def measured_once(place: Mapping[str, str | int], measure: Callable[[], Pays], folder: Path) -> tuple[Pays, bool]:
    """The rule of a place, measured unless an earlier start did that.

    Args:
        place: all that the rule depends on: the plan's digest, device, driver, versions, precision, page and step size,
            ranks.
        measure: takes seconds.
        folder: of the rules.

    Returns:
        The rule, and whether it was measured now.
    """
    path = folder / f"pays-{content_digest(place).removeprefix('sha256:')[:24]}.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{path}.lock", timeout=_LONGEST_WAIT):
            return _read_or_measure(path, place, measure)
    except (OSError, Timeout):  # no folder to write to, or an engine that hangs
        return measure(), True


def _read_or_measure(path: Path, place: Mapping[str, str | int], measure: Callable[[], Pays]) -> tuple[Pays, bool]:
    with suppress(SparseKVError, ValueError, KeyError, TypeError, RecursionError):
        content = json.loads(read_text(path, _MAX_BYTES))
        if content["place"] == dict(place):
            return parse(content["rule"]), False
    rule = measure()
    with suppress(SparseKVError):  # a full disk
        write_bytes(path, json.dumps({"place": dict(place), "rule": str(rule)}).encode())
    return rule, True
