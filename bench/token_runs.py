"""Tokens of a whole model: unmodified, by this runtime dense, and by plans.

A token is the mean of those that `generate` adds, greedily and without an end token, once the first steps have captured
what is replayed. Nothing is prefilled: caches are filled with random keys and values.
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers import Cache, DynamicCache, GenerationConfig, PreTrainedModel, StoppingCriteria

from sparsekv.bench.harness import free_memory, once, wait_for
from sparsekv.bench.random_model import BenchModel
from sparsekv.bench.step_attention import Fillable, fill
from sparsekv.plans.brief import DRAFTS
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import KVDtype
from sparsekv.runtime.core.pays import DraftLength
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.attention import Phase
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.describe import CACHE_NAME, config_of
from sparsekv.runtime.hf.exact import Judge, Verdict
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.model_config import linear_layers
from sparsekv.runtime.stores.store import Layout

UNMODIFIED, OURS = "transformers", "sparsekv dense"  # ways to run dense
EXACT = "exact"  # a way to run in which a plan drafts, and its rows
WARM_UP_TOKENS = 3  # steps like all others, of which the first is captured
WARM_UP_EXACT = 96  # until drafts are as long as they stay
NEW_TOKENS, NEW_EXACT = 64, 256  # the mean of which is timed; rows that accept for themselves end apart
CHECKED = 7  # tokens of the check that is timed alone


@dataclass(frozen=True, slots=True)
class DecodeBench:
    """Holds what to time: every length with every batch.

    Attributes:
        lengths: tokens of a row once the last token is there.
        new_tokens: that a whole token is the mean of.
        exact: also time tokens that plans draft and dense attention checks; the unmodified model is left out.
        acceptance: the share of drafts that are taken to count, whatever the check says; None asks it.
    """

    lengths: tuple[int, ...]
    batches: tuple[int, ...] = (1,)
    repeats: int = 3
    new_tokens: int = NEW_TOKENS
    backend: str = "auto"
    seed: int = 0
    allow_mismatch: bool = False
    exact: bool = False
    acceptance: float | None = None
    kv_dtype: KVDtype = "auto"
    sparse: str = "always"

    @property
    def warm_up(self) -> int:
        """Tokens that are generated before time is taken."""
        return WARM_UP_EXACT if self.exact else WARM_UP_TOKENS

    @property
    def fewest_tokens(self) -> int:
        """That a row has at the end: one, and all that are generated behind it."""
        return 1 + self.warm_up + self.new_tokens


@dataclass(frozen=True, slots=True)
class Run:
    """Tokens generated once.

    Attributes:
        milliseconds: of one token.
        replay_ms: of the captured step alone.
        check_ms: of the captured check of `CHECKED` tokens alone.
        stats: of the generated tokens, where this runtime ran.
        why_not: why steps were not captured, on CUDA.
    """

    milliseconds: float
    replay_ms: float | None = None
    check_ms: float | None = None
    stats: RunStats | None = None
    why_not: str = ""


class _Clock(StoppingCriteria):
    """Stops nothing: begins to measure when the captured step is warm, at the first row with so many tokens."""

    def __init__(self, device: torch.device, begin: Callable[[], None], tokens: int) -> None:
        self._device = device
        self._begin = begin
        self._tokens = tokens
        self.began = 0.0

    def __call__(self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **options: Any) -> torch.BoolTensor:
        if not self.began and input_ids.shape[1] >= self._tokens:
            self._begin()
            self.began = self.latest()
        goes_on: Any = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)
        return goes_on  # type: ignore[no-any-return]

    def latest(self) -> float:
        """Seconds, once the device is done."""
        wait_for(self._device)
        return time.perf_counter()


@dataclass(frozen=True)
class DecodeRuns:
    """Tokens of one model: unmodified, by this runtime dense, and by plans."""

    subject: BenchModel
    plans: Mapping[str, Plan]
    bench: DecodeBench

    @property
    def model(self) -> PreTrainedModel:
        return self.subject.model

    @property
    def ways(self) -> tuple[str, ...]:
        """The dense ones, and the name of every plan."""
        exact = [exactly(name) for name in self.plans] if self.bench.exact else []
        return (*(() if exact else (UNMODIFIED,)), OURS, *self.plans, *exact)

    def run(self, way: str, length: int, batch: int) -> Run:
        """Generates until the rows have `length` tokens."""
        free_memory(self.model.device)
        with self.applied(way, length) as handle, greedy(self.model):
            cache = self.filled(handle, length, batch)  # grows with all that follows
            if handle is None:
                return Run(self.token_ms(cache, batch, lambda: None))
            if handle.loop is not None:
                handle.loop.paces = defaultdict(Measured)
            if handle.loop is not None and self.bench.acceptance is not None:
                judge = Forced(self.bench.acceptance, self.bench.seed)
                handle.loop.judge_of = lambda config: judge
            milliseconds = self.token_ms(cache, batch, handle.reset_stats)
            return self.result(handle, milliseconds)

    def token_ms(self, cache: Cache, batch: int, begin: Callable[[], None]) -> float:
        """Milliseconds of one more token; `begin` is called before those that are timed."""
        generator = torch.Generator().manual_seed(self.bench.seed)
        size, device = (batch, cache.get_seq_length() + 1), self.model.device
        ids_BS = torch.randint(1, self.model.config.vocab_size, size, generator=generator).to(device)
        warm_up = self.bench.warm_up
        clock, new = _Clock(device, begin, ids_BS.shape[1] + warm_up), warm_up + self.bench.new_tokens
        generate: Any = self.model.generate
        mask_BS = torch.ones_like(ids_BS)
        options = {CACHE_NAME: cache, "attention_mask": mask_BS, "max_new_tokens": new, "stopping_criteria": [clock]}
        generate(ids_BS, **options)
        return (clock.latest() - clock.began) / self.bench.new_tokens * 1e3

    def result(self, handle: Handle, milliseconds: float) -> Run:
        """The run, with the captured step and check timed alone."""
        steps, device = handle.steps, self.model.device
        captured = (steps.captured(Phase.CHECK, CHECKED), steps.latest) if steps else (None, None)
        check_ms, replay_ms = (once(one.run, device) if one else None for one in captured)
        without = "no captured steps on this device and backend" if device.type == "cuda" else ""
        return Run(milliseconds, replay_ms, check_ms, handle.stats(), steps.why_not if steps else without)

    def filled(self, handle: Handle | None, length: int, batch: int) -> Cache:
        """A cache with so many tokens that `length` are reached at the end: keys and values are random, recurrent
        states those of a first token, which alone is run. It leaves no room for what a prompt would make on its way."""
        tokens, states = length - self.bench.fewest_tokens + 1, linear_layers(config_of(self.model))
        own = {n: replace(one, batch=batch) for n, one in enumerate(layouts_of(self.model)) if n not in states}
        if handle is None:
            cache: Cache = DynamicCache(config=self.model.config)
            layers: Iterable[Fillable] = (_Appended(cache, layer) for layer in own)
        else:
            room = length + DRAFTS[-1] if handle.loop else length
            cache = handle.new_cache(room, batch, answer=room - 1)
            layers = (layer for layer in cache.layers if isinstance(layer, SparseLayer))
        if states:
            tokens -= 1
            ids_B1 = torch.ones(batch, 1, dtype=torch.long, device=self.model.device)
            with torch.no_grad():
                self.model(input_ids=ids_B1, use_cache=True, **{CACHE_NAME: cache})
        fill(layers, tokens, list(own.values()), self.bench.seed)
        return cache

    def applied(self, way: str, length: int) -> AbstractContextManager[Handle | None]:
        """The model ready to run in a way, up to this length."""
        if way == UNMODIFIED:
            return nullcontext()
        exact = {exactly(name): plan for name, plan in self.plans.items()}
        plan = self.plans.get(way) or exact.get(way) or next(iter(self.plans.values()))
        return apply(
            self.model,
            plan,
            prefill=False,
            decode=way != OURS,
            exact=way in exact,
            info=self.subject.info,
            backend=self.bench.backend,
            allow_mismatch=True,  # asked before anything was timed
            kv_dtype=self.bench.kv_dtype,
            sparse=self.bench.sparse,
        )


def exactly(name: str) -> str:
    """The way to run in which a plan drafts."""
    return f"{EXACT}, {name}"


class Forced(Judge):
    """A judge that takes drafts to count with a given chance: of random weights, whose drafts mean nothing."""

    def __init__(self, chance: float, seed: int) -> None:
        self._chance = chance
        self._seed = seed
        self._generator: torch.Generator | None = None

    def judge(self, drafts_BK: torch.Tensor, scores_BQV: torch.Tensor) -> Verdict:
        """Each draft counts by chance, behind those that count."""
        likeliest_BQ = scores_BQV.argmax(-1)
        if self._generator is None:
            self._generator = torch.Generator(drafts_BK.device).manual_seed(self._seed)
        drawn_BK = torch.rand(drafts_BK.shape, generator=self._generator, device=drafts_BK.device)
        accepted_B = (drawn_BK < self._chance).int().cumprod(1).sum(1)
        return Verdict(accepted_B, likeliest_BQ.gather(1, accepted_B[:, None])[:, 0])


class Measured(DraftLength):
    """Tries every length first, so that none is captured while time is taken."""

    def next(self, most: int) -> int:
        untried = (size for size in DRAFTS if size <= most and size not in self._seconds)
        return next(untried, None) or super().next(most)


class _Appended:
    """A layer of transformers' own cache, to be filled."""

    def __init__(self, cache: Cache, layer: int) -> None:
        self._cache = cache
        self._layer = layer

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        return layout.empty(tokens), layout.empty(tokens)

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        self._cache.update(k_BGSD, v_BGSD, self._layer)


@contextmanager
def greedy(model: PreTrainedModel) -> Iterator[None]:
    """Without what the checkpoint's own settings would have `generate` do, an end token among it."""
    own = model.generation_config
    model.generation_config = GenerationConfig(do_sample=False, pad_token_id=0)
    try:
        yield
    finally:
        model.generation_config = own


def median_ms(runs: Iterable[Run]) -> float:
    """Returns the milliseconds of a token."""
    return statistics.median(run.milliseconds for run in runs)


def median_replay_ms(runs: Iterable[Run]) -> float | None:
    """Returns the milliseconds of the captured step, where every run has one."""
    times = [run.replay_ms for run in runs if run.replay_ms is not None]
    return statistics.median(times) if times else None
