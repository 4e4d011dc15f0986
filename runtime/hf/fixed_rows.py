"""The layers of a cache whose batch rows are never moved, repeated or left out."""

from __future__ import annotations

from dataclasses import dataclass

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.types import format_ids


@dataclass(frozen=True, slots=True)
class FixedRows:
    """The layers of a cache whose rows all have one length and stay as they are: none is moved, repeated or left out.

    Attributes:
        evicting: layers that evict tokens.
        in_host_memory: layers whose keys and values are there.
    """

    evicting: frozenset[int] = frozenset()
    in_host_memory: frozenset[int] = frozenset()

    def refuse(self, expected: str, found: str, instead: str) -> None:
        """Raises UnsupportedError where there are such layers; the plan can be changed, or what was asked for."""
        if self.evicting:
            why, changed = f"layers {format_ids(self.evicting)} evict tokens", "apply a plan without kv_cache"
        elif self.in_host_memory:
            why = f"layers {format_ids(self.in_host_memory)} are in host memory"
            changed = "apply the plan with offload='never'"
        else:
            return
        raise UnsupportedError(f"expected {expected}, as {why}, found {found}; {instead}, or {changed}")
