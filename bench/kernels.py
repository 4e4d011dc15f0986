"""`sparsekv bench kernels`: index building and sparse attention on planted structure, against dense attention.

The index comes from the shipped builders, from patterns with budgets for what was planted. Timed are index building,
attention over that index, and both in one call, in turn with the fastest dense kernel.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import product
from statistics import fmean
from typing import Any

import torch

from sparsekv.bench.dense_kernels import dense_calls, dense_flops, time_dense
from sparsekv.bench.harness import Call, Columns, DensePeers, Row, free_memory, in_short, measure, number
from sparsekv.bench.planted import Planted, check_plantable, check_rows, plant, sample_rows
from sparsekv.bench.structure import FAMILIES
from sparsekv.kernels.backends import BACKENDS, USE_AUTO, choose_backend, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import AttentionOutput, TileIndex, computed_tiles, density
from sparsekv.planner.progress import Progress, StageStep, prefill_work
from sparsekv.plans.errors import BackendError, UsageError
from sparsekv.plans.patterns import TileShape, mandatory_density
from sparsekv.plans.types import format_length
from sparsekv.runtime.model_config import device_name, dtype_name

PLANTED_NOTE = (
    "Queries and keys are planted, not taken from a model: sinks, local windows, bands of diagonals, scattered "
    "columns and hot tiles, at the stated densities. Indices come from the shipped builders."
)
# Values are of size 1: rounding to bfloat16 moves an output by a hundredth or so. A wrong output has no speed.
WRONG = 0.1
_DENSER = 1.1  # times the density asked for: from there on a row says why it computes more
_BACKENDS = tuple(name for name in BACKENDS if name != "reference")  # the oracle is not for work


COLUMNS: Columns = {
    "pattern": ("name", str),
    "length": ("length", format_length),
    "backend": ("backend", str),
    "asked": ("target_density", number(".3g")),
    "density": ("density", number(".3f")),
    "dense ms": ("dense_ms", number(".3f")),
    "index ms": ("index_ms", number(".3f")),
    "attention ms": ("attention_ms", number(".3f")),
    "whole ms": ("sparse_ms", number(".3f")),
    "speedup": ("speedup", number(".2f")),
    "TFLOP/s": ("tflops", number(".3g")),
    "dense TFLOP/s": ("dense_tflops", number(".3g")),
    "mass": ("mass", number(".3f")),
    "error": ("error", number(".1e")),
}


@dataclass(frozen=True, slots=True)
class KernelBench:
    """Holds what to time: every length with every mix of patterns, density and backend.

    Attributes:
        densities: that structure is planted at; what comes of it is in the rows.
        backends: those to time; empty for all that there are.
        patterns: of each case, see `families_of`.
    """

    lengths: tuple[int, ...]
    densities: tuple[float, ...] = (0.05,)
    backends: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ("mixed", "vertical_slash")
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tile: TileShape = field(default_factory=TileShape)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    seed: int = 0
    rounds: int = 3

    def __post_init__(self) -> None:
        for what, numbers in (("length", self.lengths), ("density", self.densities), ("pattern", self.patterns)):
            if not numbers:
                raise UsageError(f"expected at least one {what}, found none")
        unknown = [name for name in self.backends if name not in _BACKENDS]
        if unknown:
            raise UsageError(f"expected backends of {', '.join(_BACKENDS)}, found {unknown[0]!r}")
        for mix in self.patterns:
            families_of(mix, self.heads)  # refused before anything is planted
        if self.rounds < 1:
            raise UsageError(f"expected one round or more, found {self.rounds}")
        for length in self.lengths:
            for density_ in self.densities:
                check_plantable(self.heads, self.kv_heads, self.head_dim, length, density_, self.tile)


def families_of(mix: str, heads: int) -> tuple[str, ...]:
    """The family of each query head: of one, or of several assigned to the heads in turn.

    Args:
        mix: a family, several joined by `+`, or "mixed" for all.
    """
    names = FAMILIES if mix == "mixed" else mix.split("+")
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise UsageError(f"expected patterns of {', '.join(FAMILIES)} (joined by +) or mixed, found {unknown[0]!r}")
    return tuple(names[head % len(names)] for head in range(heads))


def bench_kernels(bench: KernelBench, progress: Progress | None = None) -> Iterator[Row]:
    """Times every case, and gives one row each as soon as it is known.

    A backend that cannot run here, and a case that fails or does not fit in memory, is a row with a note. Of a row's
    own: `index_ms` and `attention_ms` (`sparse_ms` is both in one call; `tflops` is attention's, on the tiles that it
    computes), and on sampled rows `mass` (share of the attention mass that the index holds) and `error` (largest
    difference of the output from float32 attention over it).
    """
    blank: dict[str, Any] = {"index_ms": None, "attention_ms": None, "mass": None, "error": None, "dense_tflops": None}
    cases = [
        Row(
            name=mix,
            length=length,
            device=device_name(bench.device),
            dtype=dtype_name(bench.dtype),
            own={"target_density": share, "planted": True} | blank,
        )
        for length, mix, share in product(bench.lengths, bench.patterns, bench.densities)
    ]
    backends = []
    for name in bench.backends or _BACKENDS:
        try:
            choose_backend(bench.device, bench.dtype, bench.head_dim, name, bench.tile)
            backends.append(name)
        except BackendError as error:
            yield cases[0].plus(str(error).removesuffix(USE_AUTO), backend=name)
    peers: DensePeers | None = None
    # Each case: dense, then every backend.
    total = (1 + len(backends)) * sum(prefill_work(case.length) for case in cases) if backends else 0
    with (progress or Progress()).stage("kernels", total=total) as step:
        for case in cases if backends else ():
            for row in _case(bench, case, backends, peers, step):
                yield row
                peers = row.peers or peers
            free_memory(bench.device)


def _case(
    bench: KernelBench, row: Row, backends: Sequence[str], peers: DensePeers | None, step: StageStep
) -> Iterator[Row]:
    what = f"{format_length(row.length)}, {row.name}, {row.own['target_density']:g}"
    work = prefill_work(row.length)
    step.advance(0, note=f"{what}: dense")
    try:
        layer = _Layer.prepare(bench, row, peers)
        index = layer.index()
    except Exception as error:  # out of memory, a pattern without a builder, a kernel that does not compile here
        yield from (row.plus(in_short(error), backend=name) for name in backends)
        step.advance((1 + len(backends)) * work, note=what)
        return
    row = row.plus(peers=layer.peers, dense_ms=layer.peers.least_ms)
    for name in backends:
        step.advance(work, note=f"{what}: {name}")
        try:
            yield layer.timed(row.plus(backend=name), index)
        except Exception as error:
            yield row.plus(in_short(error), backend=name)
    step.advance(work, note=what)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One planted layer and the dense kernels on it."""

    bench: KernelBench
    planted: Planted
    peers: DensePeers
    dense: dict[str, Call]  # the fastest, where any ran

    @classmethod
    def prepare(cls, bench: KernelBench, row: Row, peers: DensePeers | None) -> _Layer:
        """Dense kernels are tried where they have not been at this length."""
        planted = plant(
            families_of(row.name, bench.heads),
            kv_heads=bench.kv_heads,
            head_dim=bench.head_dim,
            length=row.length,
            density=row.own["target_density"],
            tile=bench.tile,
            device=bench.device,
            dtype=bench.dtype,
            seed=bench.seed,
        )
        if peers is None or peers.length != row.length:
            peers = time_dense(*planted.tensors, bench.rounds)
        return cls(
            bench, planted, peers, {"dense": dense_calls(*planted.tensors)[peers.fastest]} if peers.fastest else {}
        )

    def index(self) -> TileIndex:
        """By the shipped builders."""
        tensors = (self.planted.q_BHSD, self.planted.k_BGSD, self.planted.chunk, self.planted.tile)
        return build_index(self.planted.patterns, *tensors, scale=self.planted.scale)

    def attend(self, index: TileIndex, backend: str) -> AttentionOutput:
        planted = self.planted
        return prefill_attention(*planted.tensors, index, planted.chunk, scale=planted.scale, backend=backend)

    def timed(self, row: Row, index: TileIndex) -> Row:
        """The row with its numbers; a wrong output is refused before it is timed."""
        planted, backend = self.planted, row.backend
        checked = check_rows(planted, index, sample_rows(row.length), self.attend(index, backend).out_BHSD)
        if checked.error is not None and checked.error > WRONG:
            raise BackendError(f"its output is wrong by {checked.error:.3g} and was not timed")
        calls: dict[str, Call] = self.dense | {
            "index": self.index,
            "attention": lambda: self.attend(index, backend),
            "whole": lambda: self.attend(self.index(), backend),
        }
        times = measure(calls, self.bench.device, self.bench.rounds)
        # Computed tiles count whole, single columns as their share of one.
        computed = float(density(index, planted.chunk))
        flops = 4.0 * self.bench.head_dim * planted.tile.query * planted.tile.key * float(computed_tiles(index).sum())
        of_dense = dense_flops(self.bench.heads, self.bench.head_dim, row.length)
        return row.plus(
            "" if self.dense else "no dense kernel ran",
            _why_denser(row, computed, self.bench),
            dense_ms=times.get("dense"),
            dense_tflops=of_dense / times["dense"] / 1e9 if self.dense else None,
            sparse_ms=times["whole"],
            index_ms=times["index"],
            attention_ms=times["attention"],
            density=computed,
            tflops=flops / times["attention"] / 1e9,
            mass=checked.mass,
            error=checked.error,
        )


def _why_denser(asked: Row, computed: float, bench: KernelBench) -> str:
    """A note where much more is computed than was asked for; else empty."""
    share = asked.own["target_density"]
    if computed <= _DENSER * share:
        return ""
    families = families_of(asked.name, bench.heads)
    least = fmean(mandatory_density(asked.length, bench.tile, family) for family in families)
    return (
        f"{format_length(asked.length)} at {share:g}: the tiles that every pattern computes are {least:.3f} of the "
        "prompt, and what is planted comes on top; time longer prompts, or ask for more"
    )
