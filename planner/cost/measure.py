"""Measuring what attention costs on this device: a few timed launches at each length, and lines fitted to them.

Queries, keys and values are random: what kernels cost depends on tiles and lengths alone. Of a host that cuts prompts,
the chunk that ends at a length is timed, with its past.

Steps over rows in host memory are timed on CUDA by the kernels of captured steps, over a few layers that follow one
choice (runtime/hf/graph_stores.py), elsewhere as single launches. Choices that a captured step has no slots for are
cut to the largest that it has: the line goes on beyond. Steps on CUDA that are not captured, as with more slots, wait
for the host and take longer; they have no price of their own. Here rows are fetched beside attention alone, in a whole
step beside the rest of the layers as well, which may cost less.

Shapes: B batch (1), H query heads, G KV heads, S tokens, Q new tokens of a step, D head size, N chosen tokens,
E in and F out of a product.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain, cycle, product
from typing import cast

import numpy as np
import torch

from sparsekv.kernels.backends import choose_backend, decode_attention
from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import MOST_SLOTS
from sparsekv.kernels.keys import KeyView, stored_as_bytes
from sparsekv.planner.cost.device_cost import BATCHES, DeviceCost, HeadShape, Line, Timing
from sparsekv.planner.cost.fit import fit_errors, fit_line, free_work
from sparsekv.planner.cost.prefill_launches import PrefillLaunches
from sparsekv.planner.cost.stopwatch import Stopwatch
from sparsekv.planner.cost.timed_host import Host
from sparsekv.planner.options import FAMILIES, KNOWN_FAMILIES, Family
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.planner.records import versions
from sparsekv.plans.errors import BackendError
from sparsekv.plans.exact_gain import DRAFTS
from sparsekv.plans.patterns import TileShape, tokens
from sparsekv.plans.phases import DecodeBudget, Segment
from sparsekv.plans.schema import BackendName
from sparsekv.runtime.core.decode import Resident, decode
from sparsekv.runtime.core.program import LayerProgram, Program, Rank
from sparsekv.runtime.core.roles import Filter, Follower, Step
from sparsekv.runtime.core.segments import SegmentProgram
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.hf.graph_stores import StepStores
from sparsekv.runtime.hf.graphs import can_capture
from sparsekv.runtime.model_config import device_name, dtype_name
from sparsekv.runtime.stores.bank import HostStore
from sparsekv.runtime.stores.float8 import Float8
from sparsekv.runtime.stores.pinned import HostMemory
from sparsekv.runtime.stores.store import HostReads, Reads

# Work of the largest dense launch that is timed, in floating-point operations: a fraction of a second either way.
_MOST_WORK = {"cpu": 1.2e10, "cuda": 2e14}
_SHORTEST = 512
# Short lengths say what a launch costs, long ones what work costs. Work of an index grows with the length and with its
# square: three lengths tell these apart.
_APART = 4
_FEWEST = 3
_ROUND = 128
_MOST_ROUNDS = 3  # of further timings of prefill, where work has no price


def measure_cost(
    shape: HeadShape,
    lengths: Sequence[int],
    *,
    device: torch.device,
    dtype: torch.dtype,
    tile: TileShape,
    families: Collection[Family] = FAMILIES,
    backend: str = "auto",
    offload: bool = False,
    host: Host | None = None,
    progress: Progress | None = None,
) -> DeviceCost:
    """Times dense and sparse attention, index building and decode on this device, and fits lines to them.

    Lengths too long to time quickly are left to the fit.

    Args:
        lengths: context lengths the plan is for.
        families: whose index building is timed besides that of the default ones.
        backend: of sparse prefill, or "auto".
        offload: time decode over rows in host memory too.
        host: the program that runs the plan; None is the transformers host.

    Raises:
        BackendError: the backend cannot run here, or timings on a GPU give work no price however often they are taken.
    """
    choice = choose_backend(device, dtype, shape.head_dim, backend, tile)
    timed_families = tuple(name for name in KNOWN_FAMILIES if name in FAMILIES or name in families)
    program = host or Host()
    bench = Bench(shape, device, dtype, tile, timed_families, choice.name, offload, program)
    timed = timed_lengths(shape, lengths, device.type)
    timings = list(bench.products())
    with (progress or Progress()).stage("cost", total=sum(map(prefill_work, timed))) as step:
        for length in timed:
            timings.extend(bench.run(length))
            step.advance(prefill_work(length), f"{length} tokens")
        timings.extend(_priced(bench, timed, timings))
    return DeviceCost(
        device=device_name(device),
        host=program.name,
        chunk=program.chunk,
        kv_dtype="fp8" if program.float8 else None,
        dtype=dtype_name(dtype),
        backend=cast(BackendName, choice.name),
        shape=shape,
        tile=tile,
        processors=bench.watch.processors,
        versions=versions() | dict(program.versions),
        prefill_dense=fit_line(timings, "dense prefill"),
        prefill_sparse=fit_line(timings, "sparse prefill"),
        prefill_copy=_line_of(timings, "copy"),
        index={name: fit_line(timings, f"index {name}") for name in timed_families},
        issue_us=bench.prefill(timed[0]).issue_us(),
        decode_dense=fit_line(timings, "dense decode"),
        decode_sparse=fit_line(timings, "sparse decode"),
        decode_choose=fit_line(timings, "choose"),
        decode_choose_alone=_line_of(timings, "choose alone"),
        decode_host=_line_of(timings, "host decode"),
        decode_check=_line_of(timings, "check"),
        products=_line_of(timings, "product"),
        timings=tuple(timings),
        fits={what: fit_errors(timings, what) for what in sorted({timing.what for timing in timings})},
    )


def _priced(bench: Bench, lengths: Sequence[int], timings: Sequence[Timing]) -> list[Timing]:
    """Returns further timings of prefill, as many as it takes until all of its work has a price. None on a CPU: beside
    the calls of a query tile a tile of a short prompt takes no time there, and other programs take time slices."""
    rounds: list[list[Timing]] = []
    while bench.device.type == "cuda" and (free := free_work([*timings, *chain(*rounds)])):
        if len(rounds) == _MOST_ROUNDS:
            raise BackendError(
                f"expected timings on {device_name(bench.device)} that give each kind of work a price, found that "
                f"{free[0]}, also after {_MOST_ROUNDS} further rounds; plan again where nothing else runs (what was "
                "profiled is taken up)"
            )
        rounds.append([timing for length in lengths for timing in bench.prefill(length).timed()])
    return list(chain(*rounds))


def timed_lengths(shape: HeadShape, lengths: Sequence[int], device_type: str) -> tuple[int, ...]:
    """Returns lengths from few tokens up to the longest that is timed quickly, but not beyond the longest of the plan;
    on CUDA, where that takes no time, those of the plan too."""
    most = math.isqrt(int(_MOST_WORK.get(device_type, _MOST_WORK["cpu"]) / (2 * shape.heads * shape.head_dim)))
    longest = max(2 * _SHORTEST, min(max(lengths), most) // _SHORTEST * _SHORTEST)
    count = max(_FEWEST, 1 + round(math.log(longest / _SHORTEST, _APART)))
    spaced = np.geomspace(_SHORTEST, longest, count)
    planned = (length for length in lengths if device_type == "cuda" and length <= max(most, longest))
    return tuple(sorted({*(round(float(length) / _ROUND) * _ROUND for length in spaced), *planned}))


def _line_of(timings: Sequence[Timing], what: str) -> Line | None:
    """The line, where that was timed."""
    return fit_line(timings, what) if any(timing.what == what for timing in timings) else None


def copies_to_read_cold(read_bytes: int, cache_bytes: int) -> int:
    """Returns how many copies of keys and values steps take in turn, so that none finds in the device's cache what it
    reads.

    A step comes back to a layer after all others and their weights. Steps that read very little are mostly launch.
    """
    return min(_MOST_COPIES, max(1, -(-2 * cache_bytes // max(1, read_bytes))))


_MOST_COPIES = 16
_FETCHED = (1.0, 0.125)  # shares of chosen tokens that are not in the hot set
_FOLLOWERS = 4  # layers in host memory that follow one choice, where steps are captured
_RECENT = 2  # tokens, as few as captured steps take
_FEW = 16  # the fewest chosen tokens that are timed: one in so many
_LEAST_US = 1.0  # of a difference of two timings
_CHECKED = (DRAFTS[1] + 1, DRAFTS[-1] + 1)  # new tokens of a pass that checks a draft
_CPU_CACHE = 32 << 20  # bytes


def _segment(count: int, heads: int) -> SegmentProgram:
    part = Segment(filter=0, layers=(1,), budget=DecodeBudget(tokens=count), sink=0, recent=_RECENT)
    return SegmentProgram(0, part.sink, part.recent, "last", 1, "max", False, (), (part,), heads, 1)


def _with_others(selection: Selection, length: int, share: float) -> Selection:
    """A choice that differs in this share of its tokens, as far as there are others. Waits for the device."""
    chosen_N = selection.chosen_BgN[0, 0]
    is_free_S = torch.ones(length, dtype=torch.bool, device=chosen_N.device)
    is_free_S[: selection.sink] = is_free_S[length - selection.recent :] = is_free_S[chosen_N.long()] = False
    free_S = is_free_S.nonzero()[:, 0].int()
    count = min(round(share * len(chosen_N)), len(free_S))
    others_N = torch.cat((free_S[:: max(1, len(free_S) // max(count, 1))][:count], chosen_N[count:]))
    return replace(selection, chosen_BgN=others_N.sort().values.expand_as(selection.chosen_BgN).contiguous())


def _reads_of(selection: Selection) -> Reads:
    """Returns what a step with such a choice reads."""
    return Reads((tokens(selection.chosen_BgN.shape[2]),), selection.sink, selection.recent)


def _cut(selection: Selection, most: int) -> Selection:
    """The first of the chosen tokens."""
    chosen_BgN, counts_B = selection.chosen_BgN[:, :, :most].contiguous(), selection.counts_B.clamp(max=most)
    return replace(selection, chosen_BgN=chosen_BgN, counts_B=counts_B)


class OffloadedSteps:
    """Attention of layers in host memory that follow one choice, by what captured steps launch (Triton).

    Args:
        selection: like those to come: no row attends to everything.
        keys: contiguous; every layer has a copy of them.
        memory: where that comes from.
    """

    def __init__(self, selection: Selection, keys: KeyView, memory: HostMemory) -> None:
        self.reads = HostReads()  # of all layers
        self._segment = _segment(selection.chosen_BgN.shape[2], keys.kv_heads)
        stores = [HostStore(tokens(0), memory, _reads_of(selection)) for _ in range(_FOLLOWERS)]
        for store in stores:
            store.reserve(keys.capacity)
            store.append(*map(stored_as_bytes, (keys.k, keys.v)))
            store.prepare(keys.capacity)
        heads = keys.kv_heads  # of queries there may be more: nothing here asks for them
        layers = (LayerProgram(n, heads, keys.kv_heads, None, role=Follower(self._segment)) for n in range(_FOLLOWERS))
        program = Program(Rank(), tuple(layers))
        scales = [keys.scales] * _FOLLOWERS
        self._step = StepStores(stores, keys.capacity, program, keys.lengths_B, self.reads, scales)
        self._step.bind(stores, scales)
        self._stores = stores

    def run(self, selection: Selection, q_BH1D: torch.Tensor, *, scale: float, backend: str) -> list[torch.Tensor]:
        """One step: [B, H, 1, D] of every layer. May be captured."""
        lengths_B, found = self._step.lengths_B, []
        self._step.fetches.fetch(self._segment, selection)
        for layer in range(_FOLLOWERS):
            keys, rows, _ = self._step.new_store(layer).gather(selection, lengths_B)
            found.append(decode_attention(q_BH1D, keys, rows, scale=scale, backend=backend).out_BHSD)
        self._step.fetches.join()
        return found


@dataclass(frozen=True, slots=True)
class Bench:
    """One device, one layer's heads, one tile shape."""

    shape: HeadShape
    device: torch.device
    dtype: torch.dtype
    tile: TileShape
    families: tuple[Family, ...]
    backend: str
    offload: bool  # whether steps over rows in host memory are timed too
    host: Host

    def run(self, length: int) -> Iterator[Timing]:
        """Every timing at one length."""
        launches, scale = self.prefill(length), self.shape.head_dim**-0.5
        q_BHSD, k_BGSD, v_BGSD = launches.q_BHSD, launches.k_BGSD, launches.v_BGSD
        yield from launches.timed()
        for rows in BATCHES[self.host.name]:
            q_BH1D = q_BHSD[:, :, -1:].repeat(rows, 1, 1, 1)
            yield from self._decode(length, q_BH1D, self._views(k_BGSD, v_BGSD, rows), scale)
        if self.host.name == "transformers":
            yield from self._checks(length, q_BHSD, self._views(k_BGSD, v_BGSD, 1), scale)

    @property
    def watch(self) -> Stopwatch:
        """Returns what times launches on the device."""
        return Stopwatch(self.device)

    def prefill(self, length: int) -> PrefillLaunches:
        """Returns the launches of a prompt's attention at one length, over random queries, keys and values."""
        shape, tile, families = self.shape, self.tile, self.families
        return PrefillLaunches(shape, tile, families, self.backend, self.host, self.watch, *self._random(length))

    def products(self) -> Iterator[Timing]:
        """Returns the timings of matrices as wide as the heads together, as those of attention and of MLPs are."""
        width = self.shape.heads * self.shape.head_dim
        draw = partial(torch.randn, device=self.device, dtype=self.dtype)
        for out, new in product((width, 4 * width), (1, *_CHECKED)):
            x_TE = draw(new, width)
            size = out * width * x_TE.itemsize
            weights = [draw(out, width) for _ in range(copies_to_read_cold(size, self._cache_bytes))]
            us = self.watch.step([partial(_product, x_TE, weight) for weight in weights])
            yield _timing("product", new, (1.0, float(out * width), float(new * out * width)), us)

    def _checks(self, length: int, q_BHSD: torch.Tensor, views: Sequence[KeyView], scale: float) -> Iterator[Timing]:
        for new in _CHECKED:
            q_BHQD = q_BHSD[:, :, -new:]
            us = self.watch.step([self.host.dense_step(q_BHQD, view, scale, self.backend) for view in views])
            yield _timing("check", length, (1.0, float(length), float(new * length)), us)

    def _decode(self, length: int, q_BH1D: torch.Tensor, views: Sequence[KeyView], scale: float) -> Iterator[Timing]:
        keys, rows = views[0], len(q_BH1D)

        def step(segment: SegmentProgram, keys: KeyView) -> tuple[Callable[[], object], DecodeState]:
            """A step of a filter layer, to be run time and again, and its state."""
            layer = LayerProgram(0, segment.query_heads, keys.kv_heads, None, role=Filter(segment))
            state = DecodeState((segment,))

            def run() -> torch.Tensor:
                state.begin(keys.lengths_B, q_BH1D.device)
                return decode(layer, q_BH1D, Resident(keys), state, scale=scale, backend=self.backend)

            return run, state

        heads = self.shape.heads
        read = (1.0, float(rows * length))
        dense_us = self.watch.step([self.host.dense_step(q_BH1D, view, scale, self.backend) for view in views])
        yield _timing("dense decode", length, read, dense_us)
        idle = [one for view in views if (one := self.host.idle_step(q_BH1D, view, scale))]
        idle_us = self.watch.step(idle) if idle else 0.0
        filter_us = self.watch.step([step(_segment(length // 10, heads), view)[0] for view in views]) + idle_us
        yield _timing("choose", length, read, max(_LEAST_US, filter_us - dense_us))
        yield _timing("choose alone", length, read, self._alone_us(length // 10, q_BH1D, views, scale))
        for count in (length // _FEW, length // 4):
            segment = _segment(count, heads)
            run, state = step(segment, keys)
            run()
            selection = state.chosen(segment)
            assert selection is not None, "fewer tokens than there are"
            attend = partial(decode_attention, q_BH1D, scale=scale, backend=self.backend)
            sparse_us = self.watch.step([partial(attend, view, selection) for view in views]) + idle_us
            yield _timing("sparse decode", length, (1.0, float(rows * selection.most)), sparse_us)
            if self.offload:
                yield from self._host(selection, q_BH1D, keys, scale)

    def _alone_us(self, count: int, q_BH1D: torch.Tensor, views: Sequence[KeyView], scale: float) -> float:
        """Choosing in a filter layer that attends to its own choice."""

        segment = _segment(count, self.shape.heads)

        def choice(keys: KeyView) -> Callable[[], object]:
            state = DecodeState((segment,))
            step = Step(0, None, q_BH1D, Resident(keys), state, scale, self.backend)

            def run() -> None:
                state.begin(keys.lengths_B, q_BH1D.device)
                Filter(segment).choose(step)

            return run

        return self.watch.step([choice(view) for view in views])

    def _host(self, selection: Selection, q_BH1D: torch.Tensor, keys: KeyView, scale: float) -> Iterator[Timing]:
        """The same step over rows in host memory: most and some of them are fetched."""
        if can_capture(self.device, self.backend):
            yield from self._captured_host(selection, q_BH1D, keys, scale)
            return
        length, count = keys.capacity, selection.most
        reads = _reads_of(selection)
        for share in _FETCHED:
            store = HostStore(tokens(0), None, reads)
            store.append(*map(stored_as_bytes, (keys.k, keys.v)))
            choices = cycle((selection, _with_others(selection, length, share)))

            def step(store: HostStore = store, choices: Iterator[Selection] = choices) -> torch.Tensor:
                found, chosen, _ = store.gather(next(choices), keys.lengths_B)
                if keys.scales is not None:
                    found = Float8(keys.scales).view(found)
                return decode_attention(q_BH1D, found, chosen, scale=scale, backend=self.backend).out_BHSD

            step()
            step()
            store.counts.reset()
            (us,) = self.watch.in_turn([step])
            yield _timing("host decode", length, (1.0, float(count), store.counts.fetched / store.counts.steps), us)

    def _captured_host(
        self, selection: Selection, q_BH1D: torch.Tensor, keys: KeyView, scale: float
    ) -> Iterator[Timing]:
        selection = _cut(selection, MOST_SLOTS - selection.sink - selection.recent)
        with closing(HostMemory()) as memory:
            steps = OffloadedSteps(selection, keys, memory)
            for share in _FETCHED:
                choices = (selection, _with_others(selection, keys.capacity, share))

                def run(choices: tuple[Selection, ...] = choices) -> None:
                    for choice in choices:
                        steps.run(choice, q_BH1D, scale=scale, backend=self.backend)

                run()
                run()
                steps.reads.reset()
                run()
                found = steps.reads.collect()
                work = (1.0, float(selection.most), found.fetched / found.steps)
                us = self.watch.step([run]) / (len(choices) * _FOLLOWERS)
                yield _timing("host decode", keys.capacity, work, us)

    def _random(self, length: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        generator = torch.Generator(self.device).manual_seed(0)

        def draw(heads: int) -> torch.Tensor:
            size = (1, heads, length, self.shape.head_dim)
            return torch.randn(size, generator=generator, device=self.device, dtype=self.dtype)

        return draw(self.shape.heads), draw(self.shape.kv_heads), draw(self.shape.kv_heads)

    @property
    def _cache_bytes(self) -> int:
        if self.device.type != "cuda":
            return _CPU_CACHE
        return int(torch.cuda.get_device_properties(self.device).L2_cache_size)

    def _views(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, rows: int) -> list[KeyView]:
        copies = 1
        if self.device.type == "cuda":
            copies = copies_to_read_cold(rows * (k_BGSD.nbytes + v_BGSD.nbytes) // _FEW, self._cache_bytes)
        return self.host.views(k_BGSD, v_BGSD, rows, copies)


def _product(x_TE: torch.Tensor, weight_FE: torch.Tensor) -> torch.Tensor:
    """A product and five small kernels: a Llama layer has 34 of these (norms, rotary, activation, sums, cache) beside
    its seven products."""
    out_TF = torch.nn.functional.linear(x_TE, weight_FE)
    return out_TF * torch.rsqrt(out_TF.pow(2).mean(-1, keepdim=True) + 1e-6)


def _timing(what: str, length: int, features: Sequence[float], us: float) -> Timing:
    return Timing(what=what, length=length, features=tuple(float(value) for value in features), us=us)
