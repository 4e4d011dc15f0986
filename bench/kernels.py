"""`sparsekv bench kernels`: index building and sparse attention on planted structure, against dense attention.

The index comes from the shipped builders, from patterns with budgets for what was planted. Timed are index building,
attention over that index, and both in one call, in turn with the fastest dense kernel.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import product
from statistics import fmean
from typing import Any

import torch

from sparsekv.bench.harness import (
    BenchRow,
    Call,
    DensePeers,
    dense_calls,
    dense_flops,
    free_memory,
    in_short,
    measure,
    time_dense,
)
from sparsekv.bench.planted import (
    Planted,
    Recall,
    check_plantable,
    check_rows,
    find_planted,
    plant,
    sample_rows,
)
from sparsekv.bench.structure import FAMILIES
from sparsekv.kernels.backends import BACKENDS, USE_AUTO, choose_backend, prefill_attention
from sparsekv.kernels.index.build import BuilderName, build_index, builds_by_triton
from sparsekv.kernels.tiles import AttentionOutput, TileIndex, computed_tiles, density
from sparsekv.planner.options import PRESET_FAMILIES, mandatory_density
from sparsekv.planner.progress import Progress, Step, prefill_work
from sparsekv.plans.errors import BackendError, UsageError
from sparsekv.plans.patterns import MOST_SAMPLED, PATTERNS, TileShape
from sparsekv.plans.types import format_length
from sparsekv.runtime.model_config import device_name, dtype_name

MIXED = PRESET_FAMILIES
PLANTED_NOTE = (
    "Queries and keys are planted, not taken from a model: sinks, local windows, bands of diagonals, scattered "
    "columns and hot tiles, at the stated densities. Indices come from the shipped builders."
)
# Values are of size 1: rounding to bfloat16 moves an output by a hundredth or so. A wrong output has no speed.
WRONG = 0.1
_DENSER = 1.1  # times the density asked for: from there on a row says why it computes more
_BACKENDS = tuple(name for name in BACKENDS if name != "reference")  # the oracle is not for work


@dataclass(frozen=True, slots=True)
class KernelBench:
    """What to time: every length with every mix of patterns, density and backend.

    Attributes:
        densities: that structure is planted at; what comes of it is in the rows.
        backends: those to time; empty for all that there are.
        patterns: of each case, see `families_of`.
        builder: of indices, see `build_index`.
        last_q: queries that vertical-slash heads sample; None: as the planner's own patterns.
        rounds: samples of each call.
        build, attend: what builds indices, and what attends over them.
    """

    lengths: tuple[int, ...]
    densities: tuple[float, ...] = (0.05,)
    backends: tuple[str, ...] = ()
    patterns: tuple[str, ...] = ("mixed", "vertical_slash")
    heads: int = 32
    kv_heads: int = 8
    head_dim: int = 128
    tile: TileShape = field(default_factory=TileShape)
    builder: BuilderName = "auto"
    last_q: int | None = None
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    dtype: torch.dtype = torch.float32
    seed: int = 0
    rounds: int = 3
    build: Callable[..., TileIndex] = build_index
    attend: Callable[..., AttentionOutput] = prefill_attention

    def __post_init__(self) -> None:
        for what, numbers in (("length", self.lengths), ("density", self.densities), ("pattern", self.patterns)):
            if not numbers:
                raise UsageError(f"expected at least one {what}, found none")
        unknown = [name for name in self.backends if name not in _BACKENDS]
        if unknown:
            raise UsageError(f"expected backends of {', '.join(_BACKENDS)}, found {unknown[0]!r}")
        families = {family for mix in self.patterns for family in families_of(mix, self.heads)}
        if self.last_q is not None and not 1 <= self.last_q <= MOST_SAMPLED:
            raise UsageError(f"expected --last-q of 1 to {MOST_SAMPLED} sampled queries, found {self.last_q}")
        if self.last_q is not None and not any("last_q" in PATTERNS[family].model_fields for family in families):
            raise UsageError(f"expected --last-q with heads that sample queries, found {', '.join(self.patterns)}")
        if self.builder == "triton" and not builds_by_triton(self.device):
            raise UsageError(f"expected --builder torch or auto on {self.device}, found triton, which needs a CUDA GPU")
        if self.rounds < 1:
            raise UsageError(f"expected one round or more, found {self.rounds}")
        for length in self.lengths:
            for density_ in self.densities:
                check_plantable(self.heads, self.kv_heads, self.head_dim, length, density_, self.tile)


def families_of(mix: str, heads: int) -> tuple[str, ...]:
    """The family of each query head: of one, or of several assigned to the heads in turn.

    Args:
        mix: a family, several joined by `+`, or "mixed" for the three of MInference 1.0.

    Raises:
        UsageError: it names something else.
    """
    names = MIXED if mix == "mixed" else mix.split("+")
    unknown = [name for name in names if name not in FAMILIES]
    if unknown:
        raise UsageError(f"expected patterns of {', '.join(FAMILIES)} (joined by +) or mixed, found {unknown[0]!r}")
    return tuple(names[head % len(names)] for head in range(heads))


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelRow(BenchRow):
    """One layer's attention on planted queries and keys.

    Attributes:
        sparse_ms: index building and attention in one call.
        tflops: of the attention call, on the tiles it computes.
        recall: how much of what was planted the index holds.
        mass: share of the attention mass that the index holds, on sampled rows.
        error: largest difference of the output from float32 attention over the same index, on sampled rows.
    """

    target_density: float
    dense_flops: float
    index_ms: float | None = None
    attention_ms: float | None = None
    recall: Recall | None = None
    mass: float | None = None
    error: float | None = None

    @property
    def dense_tflops(self) -> float | None:
        """Of the fastest dense kernel."""
        return None if self.dense_ms is None else self.dense_flops / self.dense_ms / 1e9

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        own = self.with_keys("target_density", "index_ms", "attention_ms", "mass", "error", "dense_tflops")
        return own | {"recall": None if self.recall is None else asdict(self.recall), "planted": True}


def bench_kernels(bench: KernelBench, progress: Progress | None = None) -> Iterator[KernelRow]:
    """Times every case, and gives one row each as soon as it is known.

    A backend that cannot run here, and a case that fails or does not fit in memory, is a row with a note.
    """
    device, dtype = device_name(bench.device), dtype_name(bench.dtype)
    cases = [
        KernelRow(
            name=mix,
            length=length,
            backend="",
            device=device,
            dtype=dtype,
            target_density=share,
            dense_flops=dense_flops(bench.heads, bench.head_dim, length),
        )
        for length, mix, share in product(bench.lengths, bench.patterns, bench.densities)
    ]
    backends = []
    for name in bench.backends or _BACKENDS:
        try:
            choose_backend(bench.device, bench.dtype, bench.head_dim, name, bench.tile)
            backends.append(name)
        except BackendError as error:
            yield replace(cases[0], backend=name, note=str(error).removesuffix(USE_AUTO))
    peers: DensePeers | None = None
    # Each case: dense, then every backend.
    total = (1 + len(backends)) * sum(prefill_work(case.length) for case in cases) if backends else 0
    with (progress or Progress()).stage("kernels", total=total) as step:
        for blank in cases if backends else ():
            for row in _case(bench, blank, backends, peers, step):
                yield row
                peers = row.dense_peers or peers
            free_memory(bench.device)


def _case(
    bench: KernelBench, blank: KernelRow, backends: Sequence[str], peers: DensePeers | None, step: Step
) -> Iterator[KernelRow]:
    what, work = f"{format_length(blank.length)}, {blank.name}, {blank.target_density:g}", prefill_work(blank.length)
    step.advance(0, note=f"{what}: dense")
    try:
        layer = _Layer.prepare(bench, blank, peers)
        index = layer.index()
    except Exception as error:  # out of memory, a pattern without a builder, a kernel that does not compile here
        for name in backends:
            yield replace(blank, backend=name, note=in_short(error))
        step.advance((1 + len(backends)) * work, note=what)
        return
    peers = layer.peers
    blank = replace(blank, dense_peers=peers, dense_ms=peers.timed_ms[peers.fastest] if peers.fastest else None)
    for name in backends:
        step.advance(work, note=f"{what}: {name}")
        try:
            yield layer.timed(replace(blank, backend=name), index)
        except Exception as error:
            yield replace(blank, backend=name, note=in_short(error))
    step.advance(work, note=what)


@dataclass(frozen=True, slots=True)
class _Layer:
    """One planted layer and the dense kernels on it."""

    bench: KernelBench
    planted: Planted
    peers: DensePeers
    dense: dict[str, Call]  # the fastest, where any ran

    @classmethod
    def prepare(cls, bench: KernelBench, blank: KernelRow, peers: DensePeers | None) -> _Layer:
        """Dense kernels are tried where they have not been at this length."""
        planted = plant(
            families_of(blank.name, bench.heads),
            kv_heads=bench.kv_heads,
            head_dim=bench.head_dim,
            length=blank.length,
            density=blank.target_density,
            tile=bench.tile,
            device=bench.device,
            dtype=bench.dtype,
            seed=bench.seed,
            last_q=bench.last_q,
        )
        tensors = (planted.q_BHSD, planted.k_BGSD, planted.v_BGSD)
        if peers is None or peers.length != blank.length:
            peers = time_dense(*tensors, bench.rounds)
        return cls(bench, planted, peers, {"dense": dense_calls(*tensors)[peers.fastest]} if peers.fastest else {})

    def index(self) -> TileIndex:
        planted = self.planted
        tensors = (planted.q_BHSD, planted.k_BGSD, planted.chunk, planted.tile)
        return self.bench.build(planted.patterns, *tensors, scale=planted.scale, builder=self.bench.builder)

    def attend(self, index: TileIndex, backend: str) -> AttentionOutput:
        planted = self.planted
        tensors = (planted.q_BHSD, planted.k_BGSD, planted.v_BGSD)
        return self.bench.attend(*tensors, index, planted.chunk, scale=planted.scale, backend=backend)

    def timed(self, blank: KernelRow, index: TileIndex) -> KernelRow:
        """The row with its numbers; a wrong output is refused before it is timed."""
        planted, backend = self.planted, blank.backend
        checked = check_rows(planted, index, sample_rows(blank.length), self.attend(index, backend).out_BHSD)
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
        notes = ("" if self.dense else "no dense kernel ran", _why_denser(blank, computed, self.bench))
        flops = 4.0 * self.bench.head_dim * planted.tile.query * planted.tile.key * float(computed_tiles(index).sum())
        return replace(
            blank,
            dense_ms=times.get("dense"),
            sparse_ms=times["whole"],
            index_ms=times["index"],
            attention_ms=times["attention"],
            density=computed,
            tflops=flops / times["attention"] / 1e9,
            recall=find_planted(planted, index),
            mass=checked.mass,
            error=checked.error,
            note="; ".join(filter(None, notes)),
        )


def _why_denser(asked: KernelRow, computed: float, bench: KernelBench) -> str:
    """A note where much more is computed than was asked for; else empty."""
    if computed <= _DENSER * asked.target_density:
        return ""
    families = families_of(asked.name, bench.heads)
    least = fmean(mandatory_density(asked.length, bench.tile, family) for family in families)
    return (
        f"{format_length(asked.length)} at {asked.target_density:g}: more is computed than was asked for, since the "
        f"tiles that every pattern computes (the first, the diagonal, the one before) are {least:.3f} of the "
        "prompt, and what is planted comes on top; time longer prompts, or ask for more"
    )
