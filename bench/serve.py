"""`sparsekv bench serve`: requests through vLLM's engine, by a plan and without one.

Both engines are in this process, with the same settings and half of the device each, and take turns; or, where a load
needs more memory, one after the other with nearly all of it. The dense one attends as vLLM chooses. Prompts are random
tokens without a common beginning, prefix caching is off, and answers have a fixed length.
"""

from __future__ import annotations

import random
import statistics
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sparsekv.bench.harness import Columns, Row, in_short, number, repeat_in_turn
from sparsekv.bench.random_model import stretched_config
from sparsekv.bench.vllm_engines import (
    Engine,
    EngineEndedError,
    all_accepted,
    asking_for_ours,
    by_look_up,
    captured_rows,
    engine_elsewhere,
    greedy,
)
from sparsekv.planner.progress import Progress, StageStep
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import BackendError
from sparsekv.plans.files import write_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import KVDtype, format_length
from sparsekv.runtime.hf.load import load_config
from sparsekv.runtime.model_config import describe_config, device_name, dtype_name
from sparsekv.runtime.settings import preset_vllm

Found = TypeVar("Found")
Asked = TypeVar("Asked")

COLUMNS: Columns = {
    "prompt": ("length", number("d")),
    "answer": ("answer", number("d")),
    "at once": ("at_once", number("d")),
    "requests": ("requests", number("d")),
    "a minute": ("per_minute", number("d")),
    "density": ("density", number(".3f")),
    "decoded": ("decoded", number("d")),
    "first s dense": ("dense_ms", number(".3f", 1e3)),
    "sparse": ("sparse_ms", number(".3f", 1e3)),
    "speedup": ("speedup", number(".2f")),
    "token ms dense": ("dense_token_ms", number(".2f")),
    "sparse ": ("token_ms", number(".2f")),
    "tokens/s dense": ("dense_tokens_per_second", number(".0f")),
    "sparse  ": ("tokens_per_second", number(".0f")),
}
DENSE, SPARSE, ALWAYS = "dense", "sparse", "always"
BESIDE, ALONE = 0.45, 0.9  # shares of the device: of each of two engines, of the only one
_TIMES = ("token_ms", "dense_token_ms", "tokens_per_second", "dense_tokens_per_second")
_UNTIMED = "{}: no token timed, since {} never decoded together; a longer answer or fewer at once help"
_WARM_UP = (2, 4)  # requests, and tokens of an answer
_LATE_MS = 1000.0  # a first token: who is late on average is not asked more often


@dataclass(frozen=True, slots=True)
class Load:
    """Holds what is asked of an engine.

    Attributes:
        prompt, answer: tokens of each.
        at_once: requests that the engine has at a time.
        requests: in all.
        per_minute: how many come at random (Poisson); None gives a new one as soon as one is answered. An engine whose
            median first token took more than a second is not asked more often for prompts of that length.
    """

    prompt: int
    answer: int
    at_once: int = 1
    requests: int = 1
    per_minute: int | None = None


@dataclass(frozen=True, slots=True)
class ServeBench:
    """Says how engines are set, and what is asked of them.

    Attributes:
        step_tokens: that an engine computes in a step at most (vLLM's `max_num_batched_tokens`).
        alone: one engine at a time.
        cache_bytes: of keys and values, of each engine; None takes what the device has left.
        drafted: tokens that a look-up (ngram) drafts at a time; 0 without. Beside random weights all are accepted.
        prefix_caching: whether prompts find the pages of equal beginnings.
        share: of the device, of each engine; None gives each half of it, or all.
        quantization: of weights, as vLLM names it.
        sparse: where the engine with the plan is sparse, as `additional_config` takes it.
    """

    loads: tuple[Load, ...]
    device: torch.device
    dtype: torch.dtype
    repeats: int = 3
    step_tokens: int = 8192
    backend: str = "auto"
    seed: int = 0
    alone: bool = False
    cache_bytes: int | None = None
    ranks: int = 1
    kv_dtype: KVDtype = "auto"
    drafted: int = 0
    prefix_caching: bool = False
    share: float | None = None
    quantization: str | None = None
    sparse: str = "auto"

    @property
    def longest(self) -> int:
        return max(load.prompt + load.answer for load in self.loads)

    @property
    def at_once(self) -> int:
        return max(load.at_once for load in self.loads)

    @property
    def engine(self) -> dict[str, Any]:
        own: dict[str, Any] = {
            "dtype": dtype_name(self.dtype),
            "max_model_len": self.longest,
            "max_num_batched_tokens": self.step_tokens,
            "max_num_seqs": self.at_once,
            "enable_prefix_caching": self.prefix_caching,
            "skip_tokenizer_init": True,
            "seed": self.seed,
            "tensor_parallel_size": self.ranks,
            "kv_cache_dtype": self.kv_dtype,
            "quantization": self.quantization,
        }
        share = self.share or (ALONE if self.alone else BESIDE)
        has_graphs = self.device.type == "cuda"  # a CPU has no memory to share either
        graphs = {"cudagraph_capture_sizes": captured_rows(self.at_once, self.drafted, self.step_tokens)}
        on_device = {"gpu_memory_utilization": share, "compilation_config": graphs} if has_graphs else {}
        drafter = {"speculative_config": by_look_up(self.drafted)} if self.drafted else {}
        return own | on_device | drafter | ({"kv_cache_memory_bytes": self.cache_bytes} if self.cache_bytes else {})


@dataclass(frozen=True, slots=True)
class ServedModel:
    """The model that engines load.

    Attributes:
        folder: with its config, or the id of a hub repository.
        random: weights are made by vLLM.
    """

    folder: str
    info: ModelInfo
    vocabulary: int
    name: str
    random: bool
    note: str = ""


@contextmanager
def served_model(name: str, random_weights: bool, longest: int) -> Iterator[ServedModel]:
    """A model by its name, or one of its shape: a folder with a config alone, for as long as the context lasts.

    Args:
        name: an alias, folder or hub id.
        longest: tokens that random weights must take; a shorter context is stretched, and the note says so.
    """
    if not random_weights:
        source = resolve_model(name)
        config = load_config(source)
        yield ServedModel(source.path_or_id, describe_config(config, name), config.vocab_size, name, random=False)
        return
    config, notes = stretched_config(name, longest)
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        info = describe_config(config, name)
        yield ServedModel(folder, info, config.vocab_size, name, random=True, note="; ".join(notes))


@dataclass
class Measured(Generic[Found]):
    """The runs of a load by each way, as often as it was repeated.

    Attributes:
        counted: of the engine with the plan (`serving_stats`).
        backend: of its prefill.
    """

    turns: dict[str, list[Found]] = field(default_factory=dict)
    counted: Any = None
    backend: str | None = None
    note: str = ""

    def with_dense(self, dense: Measured[Found]) -> Measured[Found]:
        note = "; ".join(filter(None, (self.note, dense.note)))
        return replace(self, turns=self.turns | dense.turns, note=note)

    def take_turns(self, engines: Mapping[str, Engine], run: Callable[[str], Found], repeats: int) -> None:
        """Runs every way, and repeats them in turn."""
        from sparsekv.runtime.vllm.engine_host import reset_stats, serving_stats

        if SPARSE in engines:
            engines[SPARSE](reset_stats)
        self.turns |= {way: [run(way)] for way in engines}
        self.note = repeat_in_turn(self.turns, run, repeats)
        if SPARSE in engines:
            self.counted, self.backend = map(engines[SPARSE], (serving_stats, _backend_of))

    def filled(self, row: Row) -> Row:
        if (stats := self.counted) is not None:
            row = row.plus(density=stats.prefill_density, decoded=stats.decode_sparse, failures=stats.failures)
        return row.plus(self.note, backend=self.backend or row.backend)


def bench_serve(
    model: ServedModel, plan: Plan, words: str, bench: ServeBench, progress: Progress | None = None
) -> Iterator[Row]:
    """Times every load, and gives its row as soon as it is known. A load that fails is a row with a note.

    `decoded` are tokens of answers that attended to a choice. `dense_ms` and `sparse_ms` are up to the first token,
    `token_ms` between steps in which every request at hand has its first token and, unless they come at random, as many
    are at hand as are to be at once (requests that are preempted count as well); all times are medians over the repeats
    of medians, all rates (of all answers together) medians over the repeats. `failures` are chunks and steps of a layer
    that were to be sparse and that vLLM's own kernel computed after an error.

    Args:
        words: what the plan is, for the rows.
    """
    preset_vllm()
    facts = {"decoded": None, "failures": 0, "cache_bytes": bench.cache_bytes} | facts_of(model, bench, words)
    with (progress or Progress()).stage("serve", total=(2 if bench.alone else 1) * len(bench.loads)) as step:
        each = partial(_each, model=model, bench=bench)
        for load, found in by_engines(model, plan, bench, bench.loads, each, step):
            own = {name: getattr(load, name) for name in ("answer", "at_once", "requests", "per_minute")}
            row = Row(
                name="serve",
                length=load.prompt,
                backend=bench.backend,
                device=device_name(bench.device),
                dtype=dtype_name(bench.dtype),
                own=own | dict.fromkeys(_TIMES) | facts,
                note=model.note,
            )
            row = _filled(row, found)
            told = "; ".join(f"{way} {_told(runs)}" for way, runs in found.turns.items())
            (progress or Progress()).say(f"{_words(load)}: {told or found.note}")
            yield row


def facts_of(model: ServedModel, bench: ServeBench, words: str) -> dict[str, Any]:
    """Host, model and plan, as every row names them."""
    from sparsekv.runtime.vllm import internals as vllm

    weights = ", ".join(filter(None, ("random" if model.random else "loaded", bench.quantization)))
    facts = {"host": f"vLLM {vllm.release}", "model": model.name, "weights": weights, "plan": words}
    return facts | {name: getattr(bench, name) for name in ("kv_dtype", "step_tokens", "ranks")}


def by_engines(
    model: ServedModel,
    plan: Plan,
    bench: ServeBench,
    loads: Sequence[Asked],
    each: Callable[[Mapping[str, Engine], StageStep], Iterator[Measured[Found]]],
    step: StageStep,
) -> Iterator[tuple[Asked, Measured[Found]]]:
    """Each load, with the runs of engines that take turns, or of one engine after the other.

    Args:
        each: measures all loads, in their order, by the engines at hand.
    """
    if not bench.alone:
        # By the plan first: that engine refuses what cannot be served.
        with served_engine(SPARSE, model, plan, bench) as sparse, served_engine(DENSE, model, plan, bench) as dense:
            yield from zip(loads, each({DENSE: dense, SPARSE: sparse}, step), strict=True)
        return
    both: list[list[Measured[Found]]] = []
    for way in (SPARSE, DENSE):
        step.advance(0, note=way)
        try:
            with served_engine(way, model, plan, bench) as engine:
                both.append([*each({way: engine}, StageStep())])
        except EngineEndedError as error:
            both.append([Measured(note=str(error)) for _ in loads])
        step.advance(len(loads))
    yield from ((load, own.with_dense(other)) for load, own, other in zip(loads, *both, strict=True))


def _each(
    engines: Mapping[str, Engine], step: StageStep, *, model: ServedModel, bench: ServeBench
) -> Iterator[Measured[Served]]:
    late: dict[tuple[str, int], int] = {}  # by prompt, the requests a minute at which an engine was late
    for load in bench.loads:
        step.advance(0, note=_words(load))
        often, found = load.per_minute or 0, Measured[Served]()
        asked = {way: one for way, one in engines.items() if often <= late.get((way, load.prompt), often)}
        with noting(found):
            _measure(asked, load, model, bench, found)
        found.note = "; ".join(filter(None, (found.note, *map(_not_asked, sorted(engines.keys() - asked.keys())))))
        late |= {
            (way, load.prompt): often for way, runs in found.turns.items() if often and _medians(runs)[0] > _LATE_MS
        }
        yield found
        step.advance()


def _not_asked(way: str) -> str:
    return f"{way} not asked: its first tokens took more than {_LATE_MS / 1e3:g} s at fewer requests a minute"


def _words(load: Load) -> str:
    often = "" if load.per_minute is None else f", {load.per_minute} a minute"
    at_once = f", {load.at_once} at once" if load.at_once > 1 and not often else ""
    return f"{load.requests} of {format_length(load.prompt)} + {load.answer} tokens{at_once}{often}"


def _told(runs: Sequence[Served]) -> str:
    first, _, rate = _medians(runs)
    return f"{first / 1e3:.2f} s to the first token, {rate:.0f} tokens/s"


@contextmanager
def noting(found: Measured[Any]) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # out of memory
        found.note = found.note or in_short(error)


@contextmanager
def served_engine(way: str, model: ServedModel, plan: Plan, bench: ServeBench) -> Iterator[Engine]:
    """An engine: DENSE without the plan; SPARSE where `bench.sparse` says; ALWAYS where it may be sparse."""
    settings = bench.engine | ({"load_format": "dummy"} if model.random else {})
    if model.random and bench.drafted:
        settings |= {"speculative_config": by_look_up(bench.drafted) | all_accepted(bench.drafted)}
    own: dict[str, Any] = {"dense": True}
    with tempfile.TemporaryDirectory() as folder:
        if way != DENSE:
            write_plan(plan, path := Path(folder) / "sparsekv.yaml")
            own = {"plan": str(path), "backend": bench.backend, "sparse": "always" if way == ALWAYS else bench.sparse}
            settings |= asking_for_ours()
        settings |= {"additional_config": {"sparsekv": own}}
        with engine_elsewhere(way, model.folder, settings) as engine:
            yield engine


def _measure(
    engines: Mapping[str, Engine], load: Load, model: ServedModel, bench: ServeBench, found: Measured[Served]
) -> None:
    prompts = _prompts(load, model.vocabulary, bench.seed)

    def run(way: str) -> Served:
        served: Served = engines[way](serve, prompts, load.answer, load.at_once, _arrivals(load, bench.seed))
        return served

    for engine in engines.values():
        engine(serve, prompts[: _WARM_UP[0]], min(_WARM_UP[1], load.answer), load.at_once)
    found.take_turns(engines, run, bench.repeats)
    untimed = [way for way, runs in found.turns.items() if load.answer > 1 and not runs[0].token_seconds]
    together = "they" if load.per_minute else f"{min(load.at_once, load.requests)} requests"
    found.note = "; ".join(filter(None, (*(_UNTIMED.format(way, together) for way in untimed), found.note)))


def _backend_of(llm: Any) -> str | None:
    """The backend of an engine's sparse prefill."""
    backend: str | None = llm.apply_model(_backend)[0]
    return backend


def _backend(model: Any) -> str | None:
    from sparsekv.runtime.vllm.engine_host import plan_host

    host = plan_host(model)
    return None if host is None else host.backend


def _filled(row: Row, found: Measured[Served]) -> Row:
    names = {DENSE: ("dense_ms", *_TIMES[1::2]), SPARSE: ("sparse_ms", *_TIMES[::2])}
    for way, runs in found.turns.items():
        row = row.plus(**dict(zip(names[way], _medians(runs), strict=True)))
    return found.filled(row)


def _prompts(load: Load, vocabulary: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1, vocabulary) for _ in range(load.prompt)] for _ in range(load.requests)]


def _arrivals(load: Load, seed: int) -> list[float] | None:
    if load.per_minute is None:
        return None
    source = random.Random(seed)
    return list(accumulate(source.expovariate(load.per_minute / 60) for _ in range(load.requests)))


def _medians(runs: Sequence[Served]) -> tuple[float, float | None, float]:
    """Milliseconds up to the first token and between tokens, and tokens a second."""
    first = statistics.median(statistics.median(run.first_seconds) for run in runs) * 1e3
    each = [statistics.median(run.token_seconds) for run in runs if run.token_seconds]
    rate = statistics.median(run.tokens_per_second for run in runs)
    return first, statistics.median(each) * 1e3 if each else None, rate


# --- requests ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Timing:
    """One request, in seconds of one clock."""

    given: float  # to the engine
    first: float  # token
    last: float


@dataclass(frozen=True, slots=True)
class Served:
    """Requests that were served together, all with answers of the same length."""

    timings: tuple[Timing, ...]
    answer: int  # tokens
    token_seconds: tuple[float, ...] = ()  # between steps in which all that are to be at once decode

    @property
    def first_seconds(self) -> tuple[float, ...]:
        """Up to the first token of each request, from when it was given to the engine."""
        return tuple(one.first - one.given for one in self.timings)

    @property
    def tokens_per_second(self) -> float:
        """Returns the tokens a second of all answers together."""
        span = max(one.last for one in self.timings) - min(one.given for one in self.timings)
        return len(self.timings) * self.answer / span


def serve(
    llm: Any, prompts: Sequence[Sequence[int]], answer: int, at_once: int, arrivals: Sequence[float] | None = None
) -> Served:
    """Serves all prompts, a new one as soon as one of `at_once` is answered, or when its time has come.

    Args:
        answer: tokens of every answer, whatever the model says.
        at_once: requests that the engine has at a time.
        arrivals: seconds from the beginning, ascending, at which each prompt is given instead.
    """
    engine, asked = llm.llm_engine, greedy(answer)
    waiting = deque((str(number), list(prompt)) for number, prompt in enumerate(prompts))
    given: dict[str, float] = {}
    first: dict[str, float] = {}
    last: dict[str, float] = {}
    between: list[float] = []
    before, start = 0.0, time.perf_counter()

    def due() -> float | None:
        """Since when the next request is due."""
        now = time.perf_counter()
        if arrivals is None:
            return now if len(given) - len(last) < at_once else None
        return at if (at := start + arrivals[len(given)]) <= now else None

    try:
        while waiting or engine.has_unfinished_requests():
            while waiting and (since := due()) is not None:
                name, prompt = waiting.popleft()
                given[name] = since
                engine.add_request(name, {"prompt_token_ids": prompt}, asked)
            if not engine.has_unfinished_requests():
                time.sleep(1e-3)
                continue
            whole = arrivals is not None or len(given) - len(last) == min(at_once, len(prompts))
            decodes = whole and given.keys() == first.keys()
            outputs, now = engine.step(), time.perf_counter()
            if decodes and outputs:
                between.append(now - before)
            before = now
            for output in outputs:
                first.setdefault(output.request_id, now)
                if output.finished:
                    last[output.request_id] = now
    except BaseException:
        engine.abort_request([name for name in given if name not in last])  # the next call uses these names again
        raise
    if given.keys() != last.keys():
        raise BackendError(f"expected {len(given)} answers of vLLM's engine, found {len(last)}; its log says why")
    return Served(tuple(Timing(given[name], first[name], last[name]) for name in given), answer, tuple(between))
