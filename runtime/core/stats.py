"""Counts what a run computed and where its KV lies, without waiting for the device."""

from __future__ import annotations

from dataclasses import dataclass, fields

import torch

_SHARES = ("prefill_density", "decode_share", "miss_share", "acceptance")


@dataclass(frozen=True, slots=True)
class RunStats:
    """Counts since the handle was made or last reset; bytes are those of the latest cache."""

    prefill_tiles_computed: float  # columns outside computed tiles count as their share of a tile
    prefill_tiles_causal: int  # of dense attention, the layers' own windows included
    decode_tokens_attended: int  # summed over layers, steps
    decode_tokens_cached: int  # what dense attention would have attended to
    kv_bytes_device: int
    kv_bytes_host: int
    host_steps: int = 0  # decode steps of layers with chosen tokens in host memory, a layer each
    host_tokens_chosen: int = 0  # tokens that lie there, as far as no whole context was read
    host_tokens_fetched: int = 0  # of these, those that were not in the hot set
    tokens_drafted: int = 0  # under `exact`, in rows that were not finished
    drafts_accepted: int = 0
    checks: int = 0  # dense passes of an answer, those without a draft among them

    def __repr__(self) -> str:
        counts = {count.name: getattr(self, count.name) for count in fields(self)}
        shares = {name: getattr(self, name) for name in _SHARES}
        shown = [f"{name}={value}" for name, value in counts.items() if value]
        shown += [f"{name}={value:.4g}" for name, value in shares.items() if value is not None]
        return f"RunStats({', '.join(shown)})"

    @property
    def acceptance(self) -> float | None:
        """Accepted drafts over drafted tokens; None before the first draft."""
        return self.drafts_accepted / self.tokens_drafted if self.tokens_drafted else None

    @property
    def prefill_density(self) -> float | None:
        """Computed tiles over those of dense attention in the same layers, over all heads; None before the first
        prefill."""
        return self.prefill_tiles_computed / self.prefill_tiles_causal if self.prefill_tiles_causal else None

    @property
    def decode_share(self) -> float | None:
        """Tokens attended to over tokens cached; None before the first decode step."""
        return self.decode_tokens_attended / self.decode_tokens_cached if self.decode_tokens_cached else None

    @property
    def miss_share(self) -> float | None:
        """Tokens fetched from host memory over tokens chosen there; None before the first such step."""
        return self.host_tokens_fetched / self.host_tokens_chosen if self.host_tokens_chosen else None


_MOST_COUNTS = 512  # tensors of a few numbers


def _total(counts: list[torch.Tensor]) -> torch.Tensor:
    return torch.cat([computed_BH.flatten().double() for computed_BH in counts]).sum()


class Meter:
    """Running counts. Tile counts of sparse layers stay on their device until they are read."""

    def __init__(self) -> None:
        self._sparse: dict[torch.device, list[torch.Tensor]] = {}
        self._dense = self._causal = self._attended = self._cached = 0
        self._drafted = self._accepted = self._checks = 0

    def add_dense_prefill(self, causal: int) -> None:
        """One layer whose heads computed all `causal` tiles."""
        self._dense += causal
        self._causal += causal

    def add_sparse_prefill(self, computed_BH: torch.Tensor, causal: int) -> None:
        counts = self._sparse.setdefault(computed_BH.device, [])
        counts.append(computed_BH)  # every sum would be a launch
        if len(counts) >= _MOST_COUNTS:
            counts[:] = [_total(counts)]
        self._causal += causal

    def add_decode(self, attended: int, cached: int) -> None:
        self._attended += attended
        self._cached += cached

    def add_cycle(self, drafted: int, accepted: int) -> None:
        self._drafted += drafted
        self._accepted += accepted
        self._checks += 1

    def read(self, kv_bytes_device: int = 0, kv_bytes_host: int = 0) -> RunStats:
        """The counts so far, beside the bytes of a cache; waits for the device."""
        return RunStats(
            prefill_tiles_computed=self._dense + sum(_total(counts).item() for counts in self._sparse.values()),
            prefill_tiles_causal=self._causal,
            decode_tokens_attended=self._attended,
            decode_tokens_cached=self._cached,
            kv_bytes_device=kv_bytes_device,
            kv_bytes_host=kv_bytes_host,
            tokens_drafted=self._drafted,
            drafts_accepted=self._accepted,
            checks=self._checks,
        )
