"""Measures the prices of this device: the launches of a layer, timed at a few shares and lengths.

Queries, keys and values are random: what kernels cost depends on tiles and lengths alone. Of prefill the time on the
device counts; a layer's other work hides the program's. Decode steps are timed as captured ones.

Shapes: B batch (1), H query heads, G KV heads, S tokens, T rows of a chunk, D head size.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import cast

import numpy as np
import torch

from sparsekv.kernels.backends import choose_backend, decode_attention, dense_prefill, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.keys import KeyView, full_view
from sparsekv.kernels.methods import PrefillRule, method_of
from sparsekv.kernels.tiles import Chunk, TileIndex, density
from sparsekv.planner.options import FAMILIES, Family
from sparsekv.planner.prices import HeadShape, Prices, StepPrices, Table
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.plans.patterns import PATTERNS, AShape, Dense, Pattern, TileShape, VerticalSlash, tokens
from sparsekv.plans.phases import DecodeBudget, Segment
from sparsekv.plans.schema import BackendName
from sparsekv.runtime.core.program import LayerProgram, decode
from sparsekv.runtime.core.roles import Filter
from sparsekv.runtime.core.segments import SegmentProgram
from sparsekv.runtime.core.state import DecodeState, Step
from sparsekv.runtime.core.timed_layers import Launch, device_us
from sparsekv.runtime.model_config import device_name
from sparsekv.runtime.stores.store import Float8, Resident

_MOST_WORK = 2e14  # floating-point operations of the largest dense launch that is timed: a fraction of a second
_SHORTEST = 512
_ROUND = 128
_TILES = (1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2)  # shares of the causal tiles
_COLUMNS = (0.0, 1 / 32, 1 / 8, 1 / 3)  # shares in single columns, beside few tiles
_FEW = 1 / 16  # of the context: these tiles
_READ = (1 / 64, 1 / 16, 1 / 4)  # shares of the cached tokens that a sparse step attends to
_MOST_COPIES = 16

_STEPS_MS = 30


def measure_prices(
    shape: HeadShape,
    lengths: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    tile: TileShape,
    families: Collection[Family] = FAMILIES,
    backend: str = "auto",
    float8: bool = False,
    progress: Progress | None = None,
) -> Prices:
    """Times dense and sparse attention, index building and decode on this GPU.

    Lengths too long to time quickly are left to the price of work at the longest.

    Args:
        families: whose index building is timed besides that of the default ones.
        float8: whether keys and values are cached in 8 bits.
    """
    choice = choose_backend(device, dtype, shape.head_dim, backend, tile)
    timed_families = tuple(dict.fromkeys((*FAMILIES, *families)))
    bench = Bench(shape, device, dtype, tile, timed_families, choice.name, float8)
    timed = timed_lengths(shape, lengths)
    with (progress or Progress()).stage("cost", total=sum(map(prefill_work, timed))) as step:
        for length in timed:
            bench.run(length)
            step.advance(prefill_work(length), f"{length} tokens")
    return bench.prices()


def timed_lengths(shape: HeadShape, lengths: Sequence[int]) -> tuple[int, ...]:
    """Returns lengths from few tokens up to the longest that is timed quickly, but not beyond the longest of the plan,
    and those of the plan."""
    most = math.isqrt(int(_MOST_WORK / (2 * shape.heads * shape.head_dim)))
    longest = max(2 * _SHORTEST, min(max(lengths), most) // _SHORTEST * _SHORTEST)
    count = 1 + math.ceil(math.log2(longest / _SHORTEST))
    spaced = np.geomspace(_SHORTEST, longest, count)
    planned = (length for length in lengths if length <= max(most, longest))
    return tuple(sorted({*(round(float(length) / _ROUND) * _ROUND for length in spaced), *planned}))


def _timed(family: Family, length: int) -> Pattern:
    return PATTERNS[family].timed(length) if family in PATTERNS else method_of(PrefillRule, family).pattern(0.25)


def step_us(launches: Sequence[Launch], device: torch.device) -> float:
    """Mean time of a launch as part of a decode step, in a CUDA graph as steps are."""

    def all_of_them() -> None:
        for launch in launches:
            launch()

    from triton.testing import do_bench_cudagraph

    with torch.cuda.device(device):
        all_of_them()
        torch.cuda.synchronize()  # the stream that times does not wait for this one
        timed_ms = do_bench_cudagraph(all_of_them, rep=_STEPS_MS, return_mode="median")
        return float(timed_ms) * 1e3 / len(launches)


@dataclass(slots=True)
class Times:
    """Timings by the table that they belong to, and their point in it."""

    us: dict[str, dict[tuple[float, int], float]] = field(default_factory=lambda: defaultdict(dict))

    def add(self, name: str, along: int, us: float, across: float = 1.0) -> None:
        self.us[name][across, along] = us

    def add_between(self, name: str, along: int, across: Sequence[float], timed: Sequence[tuple[float, float]]) -> None:
        """Takes timings up at these points across, on lines between those that a kernel has."""
        points, us = np.array(sorted(timed)).T
        for point, one in zip(across, np.interp(across, points, us).tolist(), strict=True):
            self.add(name, along, one, point)

    def table(self, name: str) -> Table:
        timed = self.us[name]
        across, along = sorted({point for point, _ in timed}), sorted({point for _, point in timed})
        return Table.measured(across, along, [[timed[x, y] for y in along] for x in across])


@dataclass(frozen=True, slots=True)
class Bench:
    """One device, one layer's heads, one tile shape."""

    shape: HeadShape
    device: torch.device
    dtype: torch.dtype
    tile: TileShape
    families: tuple[Family, ...]
    backend: str
    float8: bool
    times: Times = field(default_factory=Times)

    def prices(self) -> Prices:
        table = self.times.table
        return Prices(
            device=device_name(self.device),
            backend=cast(BackendName, self.backend),
            shape=self.shape,
            dense=table("dense"),
            tiles=table("tiles"),
            columns=table("columns"),
            index={name: table(f"index {name}") for name in self.families},
            step=StepPrices(**{name: table(f"step {name}") for name in StepPrices.model_fields}),
        )

    def run(self, length: int) -> None:
        q_BHSD, k_BGSD, v_BGSD = self._random(length)
        self._prefill(q_BHSD, k_BGSD, v_BGSD)
        views = self._views(k_BGSD, v_BGSD)
        self._decode(q_BHSD[:, :, -1:], views, length)

    def _prefill(self, q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        length, heads = k_BGSD.shape[2], self.shape.heads
        chunk, scale, backend = Chunk.uniform(1, 0, length), self._scale, self.backend

        def build(patterns: Sequence[Pattern]) -> TileIndex:
            return build_index(tuple(patterns), q_BHSD, k_BGSD, chunk, self.tile, scale=scale)

        def attend(index: TileIndex) -> None:
            prefill_attention(q_BHSD, k_BGSD, v_BGSD, index, chunk, scale=scale, backend=backend)

        points: list[tuple[str, float, Launch]] = []
        dense = partial(dense_prefill, q_BHSD, k_BGSD, v_BGSD, chunk, scale=scale, backend=backend)
        points.append(("dense", 1.0, dense))
        for family in self.families:
            pattern = _timed(family, length)
            for count in sorted({1, heads}):
                some = (pattern,) * count + (Dense(),) * (heads - count)
                points.append((f"index {family}", count, partial(build, some)))
        for name, layers in (("tiles", _layers_of_tiles(length)), ("columns", _layers_of_columns(length))):
            for even, odd in layers:
                index = build([(even, odd)[head % 2] for head in range(heads)])
                whole = float(index.counts_BHT.sum()) / (heads * chunk.causal_tiles(self.tile))
                share = whole if name == "tiles" else float(density(index, chunk)) - whole
                points.append((name, share, partial(attend, index)))
        timed: dict[str, list[tuple[float, float]]] = defaultdict(list)
        for (name, across, _), us in zip(points, device_us([run for *_, run in points], self.device), strict=True):
            timed[name].append((across, us))
        *tiles, (_, mixed_us) = timed.pop("tiles")
        dense_us = dense_heads_us(mixed_us, tiles[0][1], heads)
        self.times.add_between("tiles", length, (*_TILES, 1.0), [*tiles, (1.0, max(dense_us, tiles[-1][1]))])
        self.times.add_between("columns", length, _COLUMNS, timed.pop("columns"))
        for name, found in timed.items():
            for across, us in found:
                self.times.add(name, length, us, across)

    def _decode(self, q_BH1D: torch.Tensor, views: Sequence[KeyView], length: int) -> None:
        keys, add, step = views[0], self.times.add, partial(step_us, device=self.device)
        attend = partial(decode_attention, q_BH1D, scale=self._scale, backend=self.backend)
        add("step dense", length, step([partial(attend, view) for view in views]))
        segment = _segment(length // 10, self.shape.heads)
        chooses = [self._filter_step(segment, q_BH1D, view)[0] for view in views]
        add("step chooses", length, step(chooses))
        alone = [self._choice(segment, q_BH1D, view) for view in views]
        add("step chooses_alone", length, step(alone))
        for share in _READ:
            segment = _segment(round(length * share), self.shape.heads)
            run, state = self._filter_step(segment, q_BH1D, keys)
            run()
            selection = state.chosen(segment)
            assert selection is not None, "fewer tokens than there are"
            add("step sparse", length, step([partial(attend, view, selection) for view in views]), share)

    def _filter_step(self, segment: SegmentProgram, q_BH1D: torch.Tensor, keys: KeyView) -> tuple[Launch, DecodeState]:
        """A step of a filter layer, to be run time and again, and its state."""
        layer = LayerProgram(0, segment.query_heads, keys.kv_heads, None, role=Filter(segment))
        state = DecodeState((segment,))

        def run() -> torch.Tensor:
            state.begin(keys.lengths_B, q_BH1D.device)
            return decode(layer, q_BH1D, Resident(keys), state, scale=self._scale, backend=self.backend)

        return run, state

    def _choice(self, segment: SegmentProgram, q_BH1D: torch.Tensor, keys: KeyView) -> Launch:
        """Choosing in a filter layer that attends to its own choice."""
        state = DecodeState((segment,))
        step = Step(0, None, q_BH1D, Resident(keys), state, self._scale, self.backend)

        def run() -> None:
            state.begin(keys.lengths_B, q_BH1D.device)
            Filter(segment).choose(step)

        return run

    def _random(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(heads: int) -> torch.Tensor:
            size = (1, heads, length, self.shape.head_dim)
            return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

        return draw(self.shape.heads), draw(self.shape.kv_heads), draw(self.shape.kv_heads)

    @property
    def _scale(self) -> float:
        return float(self.shape.head_dim**-0.5)

    def _views(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> list[KeyView]:
        """The keys and values as often as steps need to read them cold."""
        read_bytes, stored = round((k_BGSD.nbytes + v_BGSD.nbytes) * _READ[0]), Float8()
        copies = copies_to_read_cold(read_bytes, cache_bytes(self.device))
        if self.float8:
            return [stored.view(full_view(*stored.rounded(k_BGSD, v_BGSD))) for _ in range(copies)]
        return [full_view(k_BGSD, v_BGSD), *(full_view(k_BGSD.clone(), v_BGSD.clone()) for _ in range(copies - 1))]


def dense_heads_us(mixed_us: float, narrow_us: float, heads: int) -> float:
    """A sparse launch of dense heads alone, by one in which every other head is dense, from the first on, beside narrow
    ones."""
    narrow = heads // 2
    return (mixed_us * heads - narrow_us * narrow) / (heads - narrow)


def _layers_of_tiles(length: int) -> Iterator[tuple[Pattern, Pattern]]:
    """The patterns of even and of odd heads: windows that come to about the shares of the table, and at last a layer
    with dense heads beside the narrowest."""
    widths = [1 - math.sqrt(1 - share) for share in _TILES]
    windows = [AShape(sink=tokens(1), window=tokens(max(64, round(length * width)))) for width in widths]
    yield from ((window, window) for window in windows)
    yield Dense(), windows[0]


def _layers_of_columns(length: int) -> Iterator[tuple[Pattern, Pattern]]:
    """The same with single columns beside few tiles."""
    few = tokens(max(64, round(length * _FEW)))
    for share in _COLUMNS:
        vertical = tokens(max(1, round(length * share)))
        lines = VerticalSlash(vertical=vertical, slash=few, last_q=64, max_tiles=few)
        yield lines, lines


def cache_bytes(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).L2_cache_size)


def copies_to_read_cold(read_bytes: int, cache_bytes: int) -> int:
    """Copies of keys and values that steps take in turn, so that none finds its own in the device's cache.

    A step comes back to a layer after all others and their weights. Steps that read very little are mostly launch.
    """
    return min(_MOST_COPIES, max(1, -(-2 * cache_bytes // max(1, read_bytes))))


def _segment(count: int, heads: int) -> SegmentProgram:
    part = Segment(filter=0, layers=(1,), budget=DecodeBudget(tokens=count), sink=0, recent=2)
    return SegmentProgram(0, part.sink, part.recent, "last", 1, "max", False, (), (part,), heads, 1)
