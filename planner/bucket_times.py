"""Timing what a plan comes to, before it is decided whether a length runs dense: the launches of a few layers.

Lines (cost/measure.py) price tiles and columns of random keys. A plan's own layers have others: heads mixed in one
launch, tiles where the model attends. So, once the lines have made a bucket of a length, some of its layers attend to a
prompt of the model, by the plan and dense, and both are timed as a prompt runs them: index building included, as fast
as the program issues them. The timings go into the device cost, beside a digest of the bucket.

Shapes: B batch (1), H query heads, G KV heads, S rows of the prompt, T of its last chunk, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.keys import PLAIN
from sparsekv.kernels.tiles import Chunk, TileIndex, density
from sparsekv.planner.allocate import BucketChoice, candidates
from sparsekv.planner.cost.device_cost import BucketTiming, DeviceCost, LayerWork
from sparsekv.planner.cost.predict import ABSENT, Triangle, heads_by_pattern, shares_at, work_of
from sparsekv.planner.cost.stopwatch import Launch, Stopwatch
from sparsekv.planner.cost.timed_host import Host
from sparsekv.planner.job import Job
from sparsekv.planner.options import Settled
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.plans.patterns import Dense, Pattern
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention

_LAYERS = 4


def time_buckets(
    job: Job, measured: Profile, cost: DeviceCost, options: Settled, progress: Progress | None = None
) -> DeviceCost:
    """Times the candidates of a plan that the device cost has no timing of.

    Args:
        job: with the model.
        options: what is planned.

    Returns:
        The device cost with their timings.

    Raises:
        UsageError, GateError: see `allocate`.
    """
    missing = [one for one in candidates(measured, cost, options) if cost.timed(one.digest, one.length) is None]
    if not missing:
        return cost
    found = []
    with (progress or Progress()).stage("timing", total=sum(prefill_work(one.length) for one in missing)) as step:
        for one in missing:
            found.append(_timed(job, cost, one))
            step.advance(prefill_work(one.length), f"{one.length} tokens")
    return cost.model_copy(update={"buckets": (*cost.buckets, *found)})


def _timed(job: Job, cost: DeviceCost, candidate: BucketChoice) -> BucketTiming:
    model = job.subject.model
    (prompt, *_) = job.calibration_prompts(candidate.length, 1)
    ids_1S = torch.from_numpy(prompt.ids.astype(np.int64)).to(model.device)[None]
    times = _BucketTimes(candidate, cost, job.host or Host())
    with capture_attention(model, times.observe), torch.no_grad():
        model(input_ids=ids_1S, use_cache=False, logits_to_keep=1)
    return times.found(ids_1S.shape[1])


@dataclass(frozen=True, slots=True)
class _LayerTimes:
    dense_us: float
    sparse_us: float
    density: float


class _BucketTimes:
    """Sees the layers of a forward pass, and times some of them."""

    def __init__(self, candidate: BucketChoice, cost: DeviceCost, host: Host) -> None:
        self._candidate, self._cost, self._host = candidate, cost, host
        numbers = [scores.layer for scores in candidate.tables.entry.layers]
        self._rows = {numbers[row]: row for row in _spread(candidate, _LAYERS)}
        self._times: dict[int, _LayerTimes] = {}

    def observe(self, call: AttentionCall) -> None:
        """Times a layer that was chosen; all keep their dense output."""
        if call.layer not in self._rows or call.layer in self._times:
            return
        patterns = self._candidate.bucket.patterns(call.layer, call.q_BHSD.shape[1])
        length = call.chunk.longest
        chunk = Chunk.uniform(1, length - min(length, self._host.chunk or length), length)
        build = partial(_index_of, call, chunk, patterns, self._cost)
        sparse = _sparse(call, chunk, build, self._cost, self._host)
        dense_us, sparse_us = Stopwatch(call.q_BHSD.device).queued([self._dense(call, chunk), sparse])
        share = float(density(build(), chunk))
        self._times[call.layer] = _LayerTimes(dense_us, sparse_us, share)

    def found(self, length: int) -> BucketTiming:
        """The sums over the layers, of a prompt of that length."""
        times = list(self._times.values())
        dense_line_us, sparse_line_us = self._lines(length, self._rows.values())
        return BucketTiming(
            length=self._candidate.length,
            bucket=self._candidate.digest,
            layers=tuple(sorted(self._times)),
            dense_us=sum(one.dense_us for one in times),
            sparse_us=sum(one.sparse_us for one in times),
            dense_line_us=dense_line_us,
            sparse_line_us=sparse_line_us,
            density=sum(one.density for one in times) / len(times),
        )

    def _dense(self, call: AttentionCall, chunk: Chunk) -> Launch:
        if call.softmax is PLAIN:
            q_BHTD = call.q_BHSD[:, :, chunk.past[0] :]
            return self._host.dense(q_BHTD, call.k_BGKD, call.v_BGKD, chunk, call.scale, self._cost.backend)
        build = partial(_index_of, call, chunk, (Dense(),) * call.q_BHSD.shape[1], self._cost)
        return _sparse(call, chunk, build, self._cost, self._host)

    def _lines(self, length: int, rows: Collection[int]) -> tuple[float, float]:
        """Returns what the lines come to, dense and sparse, for these profiled layers."""
        tables, choice, cost = self._candidate.tables, self._candidate.choice, self._cost
        shares = shares_at(tables, choice, cost.tile, length, as_shares=cost.cuts_prompts)
        past = length - min(length, cost.chunk or length)
        last, key_tiles = Chunk.uniform(1, past, length).causal_tiles(cost.tile), cost.tile.key_tiles(length)
        causal, dense_us, sparse_us = Triangle(key_tiles, past // cost.tile.key), 0.0, 0.0
        for row in rows:
            tiles_H, columns_H = (share_LH[row] * last for share_LH in shares)
            heads, families = float((choice[row] != ABSENT).sum()), heads_by_pattern(tables, row, choice[row])
            dense_us += cost.last_chunk_us(LayerWork(0.0, 0.0, heads * last, key_tiles, {}), length)
            sparse_us += cost.last_chunk_us(work_of(choice[row], tiles_H, columns_H, causal, families), length)
        return dense_us, sparse_us


def _sparse(call: AttentionCall, chunk: Chunk, build: Callable[[], TileIndex], cost: DeviceCost, host: Host) -> Launch:
    """Attention of a layer's last chunk by patterns, as the host runs it."""
    copy = host.copy(call.k_BGKD, call.v_BGKD) if chunk.past[0] or host.float8 else None
    attend = partial(
        prefill_attention, call.q_BHSD[:, :, chunk.past[0] :], call.k_BGKD, call.v_BGKD,
        chunk=chunk, scale=call.scale, backend=cost.backend, softmax=call.softmax,
    )  # fmt: skip

    def run() -> None:
        index = build()
        if copy is not None:
            copy()
        host.take(attend(index=index).out_BHSD)

    return run


def _index_of(call: AttentionCall, chunk: Chunk, patterns: tuple[Pattern, ...], cost: DeviceCost) -> TileIndex:
    q_BHTD = call.q_BHSD[:, :, chunk.past[0] :]
    return build_index(patterns, q_BHTD, call.k_BGKD, chunk, cost.tile, scale=call.scale, cap=call.softmax.cap)


def _spread(candidate: BucketChoice, most: int) -> tuple[int, ...]:
    """Profiled layers with sparse heads, so many at most: the sparsest, the densest, and some between them."""
    tables, choice = candidate.tables, candidate.choice
    rows = np.flatnonzero((choice >= 0).any(1))
    density_L = tables.take(tables.density_LCH, choice, 1.0)[rows].mean(1)
    order = rows[np.argsort(density_L, kind="stable")]
    picked = np.unique(np.linspace(0, len(order) - 1, min(most, len(order))).round().astype(int))
    return tuple(order[picked].tolist())
