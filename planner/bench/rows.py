"""What the bench measured, one row a case. `as_data` is what `--json` prints; the first nine keys are relied on."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from sparsekv.planner.bench.recall import Recall


@dataclass(frozen=True, slots=True)
class DensePeers:
    """The dense kernels tried at one length: milliseconds of each that ran, and why the others did not."""

    length: int
    timed_ms: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str | None:
        """The peer that every ratio is against; None where none ran."""
        return min(self.timed_ms, key=lambda name: self.timed_ms[name]) if self.timed_ms else None


@dataclass(frozen=True, slots=True)
class KernelRow:
    """One layer's attention on planted queries and keys. A number that could not be measured is None; `note` says why.

    Attributes:
        dense_ms: of the fastest dense kernel, timed in turn with the sparse calls.
        sparse_ms: index building and attention in one call.
        speedup: dense_ms / sparse_ms.
        density: computed tiles over causal tiles, as realised.
        tflops: of the attention call, on the tiles it computes.
        recall: how much of what was planted the index holds.
        mass: share of the attention mass that the index holds, on sampled rows.
        error: largest difference of the output from float32 attention over the same index, on sampled rows.
    """

    name: str
    length: int
    backend: str
    device: str
    dtype: str
    target_density: float
    dense_ms: float | None = None
    sparse_ms: float | None = None
    density: float | None = None
    tflops: float | None = None
    index_ms: float | None = None
    attention_ms: float | None = None
    recall: Recall | None = None
    mass: float | None = None
    error: float | None = None
    dense_tflops: float | None = None
    dense_peers: DensePeers | None = None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times faster than the fastest dense kernel."""
        return _ratio(self.dense_ms, self.sparse_ms)

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        peers, recall = self.dense_peers, self.recall
        return _relied_on(self) | {
            "dtype": self.dtype,
            "target_density": self.target_density,
            "index_ms": self.index_ms,
            "attention_ms": self.attention_ms,
            "recall": None if recall is None else asdict(recall),
            "mass": self.mass,
            "error": self.error,
            "dense_kernel": peers.fastest if peers else None,
            "dense_tflops": self.dense_tflops,
            "dense_peers_ms": dict(peers.timed_ms) if peers else {},
            "dense_refused": dict(peers.refused) if peers else {},
            "planted": True,
            "note": self.note,
        }


@dataclass(frozen=True, slots=True)
class PrefillRow:
    """Prefill of a whole model, end to end, dense and by a plan.

    Attributes:
        dense_ms, sparse_ms: medians over the repeats.
        tflops: of the sparse run: matrix products of the layers, and attention on the tiles that are computed.
        dense_peak, sparse_peak: most bytes of device memory, weights included; None on a CPU.
        kv_device, kv_host: bytes of the sparse run's cache.
        weights: "random" or "loaded".
        plan: what the sparse run follows, in words.
    """

    name: str
    length: int
    backend: str
    device: str
    dtype: str
    weights: str
    plan: str
    layers: int
    dense_ms: float | None = None
    sparse_ms: float | None = None
    density: float | None = None
    tflops: float | None = None
    dense_peers: DensePeers | None = None
    dense_peak: int | None = None
    sparse_peak: int | None = None
    kv_device: int | None = None
    kv_host: int | None = None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times faster than the fastest dense run."""
        return _ratio(self.dense_ms, self.sparse_ms)

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        peers = self.dense_peers
        return _relied_on(self) | {
            "dtype": self.dtype,
            "weights": self.weights,
            "plan": self.plan,
            "layers": self.layers,
            "dense_kernel": peers.fastest if peers else None,
            "dense_peers_ms": dict(peers.timed_ms) if peers else {},
            "dense_refused": dict(peers.refused) if peers else {},
            "dense_peak_bytes": self.dense_peak,
            "sparse_peak_bytes": self.sparse_peak,
            "peak_ratio": _ratio(self.sparse_peak, self.dense_peak),
            "kv_bytes_device": self.kv_device,
            "kv_bytes_host": self.kv_host,
            "note": self.note,
        }


def _relied_on(row: KernelRow | PrefillRow) -> dict[str, Any]:
    names = ("name", "length", "dense_ms", "sparse_ms", "speedup", "density", "tflops", "backend", "device")
    return {name: getattr(row, name) for name in names}


def _ratio(over: float | None, under: float | None) -> float | None:
    return over / under if over is not None and under else None
