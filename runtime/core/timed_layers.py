"""The rule of where sparse attention is faster, from times of one layer over random keys. Launches are timed in turn,
each with keys that no cache of the device holds, as between two layers of a model.

A rule is measured once a plan, device, driver and set of versions, and read from disk by later processes. A file that
another version wrote, or that is not whole, is measured anew and replaced. Engines that start together wait for the
first one's measurement. Without a folder to write to, every start measures.

The number of tiles and columns of a chunk follows from budgets, which random keys use up; they are scaled, head by
head, until those of a layer come to the counts of calibration prompts.

Shapes: B batch, H query heads, G KV heads, T rows of a chunk, K tokens, D head size, E numbers of a row in the heads
of a rank, F in the heads of all ranks.
"""

from __future__ import annotations

import json
import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from ctypes import CDLL, create_string_buffer
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from pathlib import Path
from statistics import median
from typing import ClassVar

import torch
from filelock import FileLock, Timeout

from sparsekv import __version__
from sparsekv.kernels.decode.selection import ALL
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk, TileIndex, computed_tiles
from sparsekv.plans.errors import SparseKVError
from sparsekv.plans.files import content_digest, executed_digest, read_text, write_bytes
from sparsekv.plans.patterns import Pattern, VerticalSlash, mandatory_density, tokens
from sparsekv.plans.schema import LayerCounts, Plan, to_data
from sparsekv.plans.types import installed_version
from sparsekv.runtime.core.pays import Clock, Gain, Pays, Thresholds, contexts, measure, measure_each, parse
from sparsekv.runtime.core.program import LayerProgram, Program

Launch = Callable[[], object]

_ROUNDS = 5
_REPLAYS = 15  # launches of some microseconds
_CYCLES_A_US = 2000  # of a device at two GHz
_WAIT_US = 5000.0  # in which the program issues launches
_ISSUE_US = 3000.0  # in which it issues an index and a sparse launch
_REPLAY_WAIT_US = 200.0  # in which it issues a graph


def launched_us(launches: Sequence[Launch], device: torch.device) -> list[float]:
    """Median time of each launch among many: the longer of the device's time and the program's, each by itself."""
    with torch.cuda.device(device):
        issued = issued_us(launches, device)
        taken = _in_turn(launches, _ROUNDS, device, 2 * max(issued))
    return [max(times) for times in zip(taken, issued, strict=True)]


def issued_us(launches: Sequence[Launch], device: torch.device) -> list[float]:
    with torch.cuda.device(device):
        return list(map(_issued_us, launches))


def device_us(launches: Sequence[Launch], device: torch.device, rounds: int = _ROUNDS) -> list[float]:
    with torch.cuda.device(device):
        return _in_turn(launches, rounds, device, _ISSUE_US)


def _issued_us(launch: Launch, rounds: int = _ROUNDS) -> float:
    """The program's time for a launch that the device does not begin meanwhile."""
    launch()  # compiles
    samples = []
    for _ in range(rounds):
        torch.cuda.synchronize()
        torch.cuda._sleep(int(_WAIT_US * _CYCLES_A_US))
        started = time.perf_counter()
        launch()
        samples.append(1e6 * (time.perf_counter() - started))
    return min(samples)


def replayed_us(launches: Sequence[Launch], device: torch.device) -> list[float]:
    """Median time of each launch as part of a captured step, which the device begins once and not for each layer."""
    graphs, small = [], torch.zeros(1, device=device)
    for launch in (*launches, small.zero_):
        launch()  # compiles; what is captured may not
        torch.cuda.synchronize(device)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            launch()
        graphs.append(graph)
    with torch.cuda.device(device):
        times = _in_turn([graph.replay for graph in graphs], _REPLAYS, device, _REPLAY_WAIT_US)
    for graph in graphs:
        graph.reset()
    return without_start(times)


def without_start(times: Sequence[float]) -> list[float]:
    """Returns the times of all graphs but the last, less the time of that one: it has one small kernel, and takes the
    start of a graph and the least of a kernel. A difference below 1 is noise; nan stays."""
    *taken, start = times
    return [max(us - start, 1.0) for us in taken]


def _in_turn(launches: Sequence[Launch], rounds: int, device: torch.device, wait_us: float) -> list[float]:
    cached = torch.cuda.get_device_properties(device).L2_cache_size
    other = torch.empty(2 * cached, dtype=torch.uint8, device=device)
    for launch in launches:
        launch()
    samples = [[_elapsed_us(launch, other, wait_us) for launch in launches] for _ in range(rounds)]
    return [median(of_launch) for of_launch in zip(*samples, strict=True)]


def _elapsed_us(launch: Launch, other: torch.Tensor, wait_us: float) -> float:
    """The device's time, behind a wait in which the program issues the launch, with `other` in its L2."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(int(wait_us * _CYCLES_A_US))
    other.zero_()
    start.record()
    launch()
    end.record()
    end.synchronize()
    return 1e3 * float(start.elapsed_time(end))


_SMALLEST_CHUNK = 128
_DECODE_ROWS = (1, 4, 16, 64)
_SCALINGS = 6
_NEAR = 0.1  # of the share on calibration prompts, over the heads of a layer
_LEAST = 1e-6  # share that is as good as none
_MARGIN = 1.02  # the noise of a measurement
_PREFILL_SHARE, _DECODE_SHARE = 0.7, 0.9  # of the time to measure, until prefill and decode are
_OWN_SHARE = 0.2  # of it, for each, however long the last measurement before took
BUSY = 2.0  # times as long as launches in a warm-up takes a step the program, beside what else the host runs
_PRODUCTS = 12  # of a layer, each of E by F weights: 4 of attention, 8 of a gated feed-forward layer of 8/3 E

UNLIMITED = 1 << 62  # tokens

HeadShares = tuple[float, float]
"""Whole tiles and single columns of a head, as shares of its causal tiles."""

Timer = Callable[[Sequence[Launch], torch.device], Sequence[float]]


@dataclass(frozen=True, slots=True)
class Timers:
    """Times launches in microseconds: as a program issues them, as part of a captured step, and the program's part."""

    launched: Timer = launched_us
    replayed: Timer = replayed_us
    issued: Timer = issued_us


@dataclass(frozen=True, slots=True)
class Place:
    """The plan and the sizes that a rule is measured for."""

    plan: str  # digest of its executed phases
    longest: int  # tokens of the longest request
    step: int  # most rows of a chunk
    rows: int  # most rows of a decode step
    computed: Mapping[int, tuple[LayerCounts, ...]]  # of calibration prompts by length, where the plan tells them
    tokens: int = UNLIMITED  # that all rows of a step have together at most

    @property
    def key(self) -> dict[str, str | int]:
        computed = content_digest({str(length): list(map(to_data, has)) for length, has in self.computed.items()})
        sizes = {"longest": self.longest, "step": self.step, "rows": self.rows, "tokens": self.tokens}
        return {"plan": self.plan, "computed": computed, **sizes}

    @classmethod
    def of(cls, plan: Plan, longest: int, step: int, rows: int, tokens: int = UNLIMITED) -> Place:
        """Tokens are rounded down: an engine finds a little more or less memory at each start."""
        predicted = plan.cost.lengths if plan.cost else ()
        computed = {entry.length: entry.computed for entry in predicted if entry.computed}
        low = max(0, tokens.bit_length() - 3)
        return cls(executed_digest(plan), longest, min(step, longest), rows, computed, tokens >> low << low)


@dataclass(frozen=True, slots=True)
class TimedLayers(ABC):
    """The layers of a program in one place; a host launches them beside its dense attention."""

    mixes: ClassVar[bool] = False  # whether decode rows also run beside prompts, where no step is captured

    program: Program
    place: Place
    timers: Timers

    @property
    def program_us(self) -> float:
        """Microseconds of the host's program for a layer but for its attention; 0 where that is not known."""
        return 0.0

    @abstractmethod
    def prefill_gain(self, layer: LayerProgram, rows: int, length: int) -> float:
        """Dense time over sparse time of a chunk of so many rows that ends a prompt, in one layer; nan where random
        keys never reach the share of calibration prompts."""

    @abstractmethod
    def decode_gain(self, rows: int, length: int) -> float:
        """Dense time over sparse time of the layers of a decode step."""

    def mixed_gain(self, rows: int, length: int) -> float:
        """The same of a step that is not captured."""
        return self.decode_gain(rows, length)

    def agreed(self, measured: float) -> float:
        """The first rank's, on all ranks: they bisect alike."""
        return measured

    def rule(self, seconds: float) -> tuple[Pays, bool]:
        """Measures, prompts for most of these seconds; and whether they sufficed, as `measure` has it. May raise
        torch.OutOfMemoryError."""
        started, reached = time.monotonic(), True

        def left(end: float) -> float:
            nonlocal reached
            seconds_left = self.agreed(end - time.monotonic())
            reached &= seconds_left > 0
            return seconds_left

        def until(share: float) -> Clock:
            return partial(left, max(started + share * seconds, time.monotonic() + _OWN_SHARE * seconds))

        layer, (rows, lengths) = self._typical, self._prefill_sizes
        prefill, decode, mixed = Thresholds(), Thresholds(), None
        if layer is not None and not self.place.computed:  # random keys would be computed at another share than prompts
            prefill = self.program.hint.prefill
        elif layer is not None:
            thresholds = partial(measure_each, bounds=layer.bounds, margin=_MARGIN, until=until(_PREFILL_SHARE))
            gain = partial(self.prefill_gain, self.program.layers[layer.layer])
            prefill = thresholds(rows, lengths, gain, hint=self.program.hint.prefill)
        if self.program.sparse:
            decode = self._decode_thresholds(self.decode_gain, until(_DECODE_SHARE))
            if self.mixes:  # mostly from times that are known
                mixed = self._decode_thresholds(self.mixed_gain, until(1.0))
        return Pays(prefill, decode, mixed), reached

    def _decode_thresholds(self, gain: Gain, until: Clock) -> Thresholds:
        """As `measure` finds them, of contexts that so many rows can have: longer ones are never timed, and end the
        search of a size alone, not of smaller ones."""
        tokens = self.place.tokens

        def timed(rows: int, length: int) -> float:
            return gain(rows, length) if rows * length <= tokens else math.inf

        found = measure(*self._decode_sizes, timed, bounds=self.program.decode_bounds, margin=_MARGIN, until=until)
        reached = [(rows, at) for rows, at in zip(found.rows, found.tokens, strict=True) if rows * at <= tokens]
        return Thresholds(tuple(rows for rows, _ in reached), tuple(at for _, at in reached))

    def compile(self) -> None:
        """Runs every size at a short, a middle and the longest context."""
        phases: list[tuple[Gain, list[int], list[int]]] = []
        if (layer := self._typical) is not None and self.place.computed:
            phases.append((partial(self.prefill_gain, self.program.layers[layer.layer]), *self._prefill_sizes))
        if self.program.sparse:
            phases.append((self.decode_gain, *self._decode_sizes))
        for gain, rows, lengths in phases:
            for size in rows:
                at = [length for length in lengths if length >= size]
                for length in sorted({at[0], at[len(at) // 2], at[-1]} if at else ()):
                    gain(size, length)

    @property
    def _typical(self) -> LayerProgram | None:
        """The layer whose budgets are the median of those that are sparse at the longest context at which one is; None
        where none is. With the heads of all ranks, or these would bisect other contexts and wait for each other."""
        layers = self.program.whole or self.program.layers
        longest = self.place.longest
        for length in sorted({min(end, longest) for end in (*layers[0].bounds, longest)}, reverse=True):
            budgets = [sum(pattern.tile_tokens(length) for pattern in layer.patterns_at(length)) for layer in layers]
            sparse = sorted((budget, at) for at, budget in enumerate(budgets) if layers[at].patterns_at(length))
            if sparse:
                return layers[sparse[len(sparse) // 2][1]]
        return None

    @property
    def _prefill_sizes(self) -> tuple[list[int], list[int]]:
        """Rows of chunks, and contexts."""
        layer, longest, step = self._typical, self.place.longest, self.place.step
        if layer is None:
            return [], []
        begins = (bound + 1 for bound in layer.bounds if bound < longest)
        lengths = {n for n in (*contexts(_SMALLEST_CHUNK, longest), *begins, longest) if layer.patterns_at(n)}
        # Between 512 and 2K rows thresholds fall most, from beyond 100K tokens to a few thousand for 8B parameters.
        rows = [_SMALLEST_CHUNK << power for power in (0, 2, 3, *range(4, 16, 2))]
        return [*(size for size in rows if size < step), step], sorted(lengths)

    @property
    def _decode_sizes(self) -> tuple[list[int], list[int]]:
        """Rows of steps, and contexts at which a layer may choose."""
        segments, longest, begins = self.program.segments, self.place.longest, self.program.decodes_from
        every = {*contexts(begins[0], longest), *(n for n in begins if n <= longest), longest}
        chosen = (n for n in every if not segments or any(part.count(n) != ALL for part in segments))
        lengths = sorted(length for length in chosen if length <= self.place.tokens)
        most = min(self.place.rows, self.place.tokens // min(lengths, default=1))
        return [rows for rows in (*_DECODE_ROWS, most) if rows <= most], lengths

    def alike(
        self, layer: LayerProgram, q_BHTD: torch.Tensor, k_BGKD: torch.Tensor, chunk: Chunk, scale: float
    ) -> LayerProgram | None:
        """The layer with budgets that random keys use up as calibration prompts do, vertical_slash head by head;
        None where they do not. Heads of other families compute as much of any keys."""
        length, wanted_H = chunk.longest, self._counts(layer, chunk)
        patterns = layer.patterns_at(length)
        nearest: list[tuple[float, Pattern]] = [(math.inf, pattern) for pattern in patterns]
        for _ in range(_SCALINGS if wanted_H else 0):
            index = build_index(patterns, q_BHTD, k_BGKD, chunk, layer.tile, scale=scale)
            heads = list(zip(patterns, wanted_H, head_shares(index, chunk), strict=True))
            apart = [(_apart(*head), head[0]) for head in heads]
            nearest = [min(pair, key=itemgetter(0)) for pair in zip(nearest, apart, strict=True)]
            lines = sum(sum(wanted) for pattern, wanted, _ in heads if isinstance(pattern, VerticalSlash))
            if sum(share for share, _ in nearest) <= _NEAR * lines:
                return replace(layer, bounds=(), patterns=(tuple(pattern for _, pattern in nearest),))
            patterns = tuple(_scaled(pattern, length, *shares) for pattern, *shares in heads)
        return None

    def _counts(self, layer: LayerProgram, chunk: Chunk) -> list[HeadShares]:
        """Of the heads of this rank, at the shortest counted length that reaches the chunk's end, or at the longest;
        none of a layer that was not counted. Tiles that every row has are a smaller share of later rows."""
        computed, first = self.place.computed, self.program.rank.index * layer.heads
        length = min((counted for counted in computed if counted >= chunk.longest), default=max(computed))
        every = [one for one in computed[length] if one.layer == layer.layer and len(one.tiles) >= first + layer.heads]
        if not every:  # of an edited plan, too
            return []
        own = slice(first, first + layer.heads)
        least = mandatory_density(length, layer.tile, "vertical_slash")
        here = mandatory_density(chunk.longest, layer.tile, "vertical_slash", chunk.past[0])
        counted = zip(every[0].tiles[own], every[0].columns[own], strict=True)
        return [(min(1.0 - columns, here + max(0.0, tiles - least)), columns) for tiles, columns in counted]

    def layer_gain(self, dense: Launch, sparse: Launch, x_TE: torch.Tensor) -> float:
        """Dense time over sparse time of a layer: attention, and products as of its projections, whose time on the
        device hides that of the program, which an index takes more of. The program has more to do for a layer, of
        which several chunks of a step share all but their attention: the smaller gain of many chunks and of one, for
        which a busy program may take longer than the device. `x_TE` has as many numbers a row as the heads."""
        rows, width = x_TE.shape
        new = partial(torch.empty, dtype=x_TE.dtype, device=x_TE.device)
        w_EF, out_TF = (new(size, width * self.program.rank.count) for size in (width, rows))
        w_EF.normal_()

        def layer(attention: Launch) -> object:
            attended = attention()
            for _ in range(_PRODUCTS):
                torch.mm(x_TE, w_EF, out=out_TF)
            return attended

        many = self.timers.launched([partial(layer, attention) for attention in (dense, sparse)], x_TE.device)
        gain = many[0] / many[1]
        if gain > 1 and self.program_us:
            issued = self.timers.issued((dense, sparse), x_TE.device)
            one = [max(us, BUSY * (self.program_us + own)) for us, own in zip(many, issued, strict=True)]
            gain = min(gain, one[0] / one[1])
        return gain

    @property
    def kinds(self) -> list[tuple[LayerProgram, int]]:
        """One layer of each kind of sparse layer, and their number; filter layers come first in their segments."""
        return [(layer, count) for layer, count in self.program.alike_in_decode if layer.role.is_sparse]

    def step_us(self, times: Sequence[float]) -> tuple[float, float]:
        """Microseconds of all layers of a step, dense and by the plan, from those of one dense layer and of one of each
        kind."""
        dense, counts = times[0], [count for _, count in self.kinds]
        ours = sum(us * count for us, count in zip(times[1:], counts, strict=True))
        layers = len(self.program.attending)
        return layers * dense, ours + (layers - sum(counts)) * dense


def head_shares(index: TileIndex, chunk: Chunk) -> list[HeadShares]:
    tiles_H, causal = index.counts_BHT[0].sum(1).double(), chunk.causal_tiles(index.tile)
    columns_H = computed_tiles(index)[0] - tiles_H
    return list(zip((tiles_H / causal).tolist(), (columns_H / causal).tolist(), strict=True))


def _apart(pattern: Pattern, wanted: HeadShares, computed: HeadShares) -> float:
    return abs(sum(computed) - sum(wanted)) if isinstance(pattern, VerticalSlash) else 0.0


def _scaled(pattern: Pattern, length: int, wanted: HeadShares, computed: HeadShares) -> Pattern:
    """The pattern with budgets for the wanted shares, by those that it computes now."""
    if not isinstance(pattern, VerticalSlash):
        return pattern
    tiles, columns = (
        tokens(min(length, max(1, round(share / max(now, _LEAST) * budget.resolve(length)))))
        for share, now, budget in zip(wanted, computed, (pattern.max_tiles, pattern.vertical), strict=True)
    )
    return pattern.model_copy(update={"max_tiles": tiles, "vertical": columns})


_LONGEST_WAIT = 60.0  # seconds for another engine's measurement
_MAX_BYTES = 1 << 16

_FORM = 11  # of a rule and of what is timed for it
_KERNEL_PACKAGES = ("triton", "flash-attn-4")

RuleKey = Mapping[str, str | int]
"""All that a rule depends on: the plan's digest and counts, the model's architecture, device, driver, versions,
precision, page and step size, ranks."""


def rule_key(
    device: torch.device, name: str, dtype: torch.dtype, backend: str, float8: bool, model: str, **of_host: str | int
) -> RuleKey:
    """The key of a plan's rule on a device; a host adds the plan's part and its own. `model` is the fingerprint of the
    architecture that runs, which an imported plan may not be of."""
    return {
        "model": model,
        "device": name,
        "driver": _driver(device),
        "dtype": str(dtype).removeprefix("torch."),
        "cache": "8 bits" if float8 else "model",
        "backend": backend,
        "cuda": str(torch.version.cuda),
        "torch": torch.__version__,
        "sparsekv": __version__,
        "form": _FORM,
        **{name: installed_version(name) or "none" for name in _KERNEL_PACKAGES},
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


@dataclass(frozen=True, slots=True)
class RuleFile:
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

    def read_or(self, measure: Callable[[], tuple[Pays, bool]]) -> tuple[Pays, bool]:
        """The rule, and whether it was measured now; one process at a time. One that is not whole is not kept."""
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = FileLock(f"{self.path}.lock", timeout=_LONGEST_WAIT)
            lock.acquire()
        except (OSError, Timeout):  # no folder to write to, or an engine that hangs
            return measure()[0], True
        try:
            known = self.read()
            if known is not None:
                return known, False
            rule, is_whole = measure()
            if is_whole:
                self.write(rule)
            return rule, True
        finally:
            lock.release()
