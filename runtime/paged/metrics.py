"""Counts what an engine computed by a plan, and reports it, for Prometheus too.

They are made where the model runs, in another process than the one that answers /metrics. A server shows them where
Prometheus collects from several processes: with several API servers, for which engines arrange that, and with
PROMETHEUS_MULTIPROC_DIR, which names an empty folder, in the environment of the server.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

from sparsekv.runtime.core.pays import Pays
from sparsekv.runtime.core.stats import Meter, RunStats

REPORT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ServingStats:
    """Counts since the engine started or the last reset."""

    tiles_computed: float  # of prefill, over all heads and layers
    tiles_causal: int  # what dense prefill would have computed
    sparse_tokens: int  # of chunks that the plan computes sparse; again after a preemption counts again
    dense_tokens: int  # of chunks that it leaves dense
    failures: int  # chunks of a layer that were to be sparse, and that the engine's own kernel computed after an error
    decode_sparse: int = 0  # decoded tokens that attended to a choice in all layers of segments
    decode_dense: int = 0  # that attended to everything in some
    decode_left: int = 0  # of these, those that the score scratch had no room for

    @property
    def prefill_density(self) -> float | None:
        """Computed tiles over those of dense attention in the same layers; None before the first prompt."""
        return self.tiles_computed / self.tiles_causal if self.tiles_causal else None

    def since(self, before: ServingStats) -> ServingStats:
        return ServingStats(*(new - old for new, old in zip(astuple(self), astuple(before), strict=True)))

    def __str__(self) -> str:
        density = "none" if self.prefill_density is None else f"{self.prefill_density:.3f}"
        failed = f", {self.failures:,} chunks of a layer dense after an error" if self.failures else ""
        prompts = f"{self.sparse_tokens:,} prompt tokens sparse, {self.dense_tokens:,} dense{failed}"
        if not (self.decode_sparse or self.decode_dense):
            return f"prefill density {density}, {prompts}"
        left = f" ({self.decode_left:,} for want of scratch)" if self.decode_left else ""
        decoded = f"{self.decode_sparse:,} decoded tokens sparse, {self.decode_dense:,} dense{left}"
        return f"prefill density {density}, {prompts}; {decoded}"

    @property
    def tokens(self) -> int:
        return self.sparse_tokens + self.dense_tokens + self.decode_sparse + self.decode_dense


_NONE = ServingStats(0.0, 0, 0, 0, 0)


class Counters:
    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        self.meter = Meter()
        self.sparse_tokens = self.dense_tokens = self.failures = 0
        self.decode_sparse = self.decode_dense = self.decode_left = 0
        self._reported = _NONE
        self._reported_at = -math.inf
        self._waiting_since: float | None = None

    def read(self) -> ServingStats:
        """The counts so far; waits for the device."""
        run: RunStats = self.meter.read()
        return ServingStats(
            run.prefill_tiles_computed, run.prefill_tiles_causal, self.sparse_tokens, self.dense_tokens, self.failures,
            self.decode_sparse, self.decode_dense, self.decode_left,
        )  # fmt: skip

    def report(self, now: float, prefilling: bool) -> ServingStats | None:
        """The counts since the last report, where it is time for one: at most once in REPORT_SECONDS, after prompts and
        among decoded tokens, and while prompts go on without end. Waits for the device. `now` never goes back."""
        decoded = self.decode_sparse + self.decode_dense
        if self.sparse_tokens + self.dense_tokens + decoded == self._reported.tokens:
            return None
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if now - (self._waiting_since if prefilling else self._reported_at) < REPORT_SECONDS:
            return None
        stats = self.read()
        new = stats.since(self._reported)
        self._reported, self._reported_at, self._waiting_since = stats, now, None
        return new


@dataclass(slots=True)
class Drafted:
    drafted: int = 0
    accepted: int = 0


@cache  # of a process, whatever engines it has: so Prometheus counts, and takes a name once
def _metric(kind: str, name: str, meaning: str, *labels: str) -> Any:
    import prometheus_client  # which engines bring

    options = {"multiprocess_mode": "max"} if kind == "Gauge" else {}
    return getattr(prometheus_client, kind)(name, meaning, labels, **options)


def _add(name: str, meaning: str, label: str, **counts: float) -> None:
    for value, count in counts.items():
        _metric("Counter", name, meaning, label).labels(value).inc(count)


def publish(new: ServingStats, rule: Pays) -> None:
    """Adds the counts that came since the last report, by an engine that is sparse where `rule` says."""
    meaning = "1 for the rule by which an engine is sparse: context x rows, of chunks and decode steps."
    _metric("Gauge", "sparsekv_rule", meaning, "prefill", "decode").labels(str(rule.prefill), str(rule.decode)).set(1)
    meaning = "Prompt tokens prefilled, by whether the plan is sparse at their length."
    _add("sparsekv_prompt_tokens", meaning, "plan", sparse=new.sparse_tokens, dense=new.dense_tokens)
    meaning = "Attention tiles of prefill over all heads and layers: computed, and causal, which dense computes."
    _add("sparsekv_prefill_tiles", meaning, "kind", computed=new.tiles_computed, causal=new.tiles_causal)
    meaning = "Chunks of a layer that were to be sparse and ran dense after an error."
    _metric("Counter", "sparsekv_prefill_failures", meaning).inc(new.failures)
    meaning = "Decoded tokens: sparse in all layers of segments, dense in some, dense for want of scratch (of these)."
    decoded = {"sparse": new.decode_sparse, "dense": new.decode_dense, "no_scratch": new.decode_left}
    _add("sparsekv_decode_tokens", meaning, "plan", **decoded)


def publish_drafts(new: Mapping[str, Drafted]) -> None:
    meaning = "Tokens that the plan drafted, and those that counted, by context length."
    tokens = _metric("Counter", "sparsekv_draft_tokens", meaning, "kind", "length")
    for length, counts in new.items():
        tokens.labels("drafted", length).inc(counts.drafted)
        tokens.labels("accepted", length).inc(counts.accepted)
