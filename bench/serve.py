"""`sparsekv bench serve`: requests through vLLM's engine, by a plan and without one, in turn.

Both engines are in this process, with the same settings and half of the device each; the dense one attends as vLLM
chooses. Prompts are random tokens without a common beginning, prefix caching is off, and answers have a fixed length.
"""

from __future__ import annotations

import random
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from sparsekv.bench.harness import BenchRow, in_short, repeat_in_turn
from sparsekv.bench.random_model import hand_plan
from sparsekv.bench.structure import diffuse_pattern
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import Chunk
from sparsekv.kernels.tiles import density as found_density
from sparsekv.planner.progress import Progress
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.files import write_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import PrefillBucket
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.load import load_config
from sparsekv.runtime.hf.public_shapes import config_of
from sparsekv.runtime.model_config import describe_config, device_name, dtype_name
from sparsekv.runtime.settings import preset_vllm

DENSE, SPARSE = "dense", "sparse"
MEMORY_SHARE = 0.45  # of the device, for each of the two engines
_FAMILIES = ("vertical_slash", "a_shape")  # of plans made by hand
_WARM_UP = (2, 4)  # requests, and tokens of an answer


@dataclass(frozen=True, slots=True)
class Load:
    """What is asked of an engine.

    Attributes:
        prompt, answer: tokens of each.
        at_once: requests that the engine has at a time.
        requests: in all.
    """

    prompt: int
    answer: int
    at_once: int = 1
    requests: int = 1


@dataclass(frozen=True, slots=True)
class ServeBench:
    """How engines are set, and what is asked of them.

    Attributes:
        repeats: of each load, in turn.
        step_tokens: that an engine computes in a step at most (vLLM's `max_num_batched_tokens`).
        backend: of the kernels that prefill sparse, or "auto".
        settings: more of vLLM's own.
    """

    loads: tuple[Load, ...]
    device: torch.device
    dtype: torch.dtype
    repeats: int = 3
    step_tokens: int = 8192
    backend: str = "auto"
    seed: int = 0
    settings: tuple[tuple[str, Any], ...] = ()

    @property
    def longest(self) -> int:
        """Tokens of the longest request."""
        return max(load.prompt + load.answer for load in self.loads)

    @property
    def engine(self) -> dict[str, Any]:
        """The settings of both engines."""
        own: dict[str, Any] = {
            "dtype": dtype_name(self.dtype),
            "max_model_len": self.longest,
            "max_num_batched_tokens": self.step_tokens,
            "max_num_seqs": max(load.at_once for load in self.loads),
            "enable_prefix_caching": False,
            "skip_tokenizer_init": True,
            "seed": self.seed,
        }
        on_device = {"gpu_memory_utilization": MEMORY_SHARE} if self.device.type == "cuda" else {}
        return own | on_device | dict(self.settings)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRow(BenchRow):
    """One load. `dense_ms` and `sparse_ms` are up to the first token; all times are medians over the repeats of medians
    over the requests, all rates medians over the repeats.

    Attributes:
        token_ms, dense_token_ms: between two tokens of an answer.
        tokens_per_second, dense_tokens_per_second: of all answers together.
        failures: chunks of a layer that were to be sparse and that vLLM's own kernel computed after an error.
    """

    host: str
    model: str
    weights: str
    plan: str
    answer: int
    at_once: int
    requests: int
    step_tokens: int
    token_ms: float | None = None
    dense_token_ms: float | None = None
    tokens_per_second: float | None = None
    dense_tokens_per_second: float | None = None
    failures: int = 0

    def as_data(self) -> dict[str, Any]:
        """As JSON data."""
        times = ("token_ms", "dense_token_ms", "tokens_per_second", "dense_tokens_per_second")
        case = ("answer", "at_once", "requests", "step_tokens")
        return self.with_keys(*case, *times, "failures", "host", "model", "weights", "plan")


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

    Raises:
        UsageError: no config and no known shape of that name.
        UnsupportedError: its architecture is not supported.
    """
    if not random_weights:
        source = resolve_model(name)
        config = load_config(source)
        yield ServedModel(source.path_or_id, describe_config(config, name), config.vocab_size, name, random=False)
        return
    config, notes = config_of(name)
    if config.max_position_embeddings < longest:
        notes.append(f"context stretched from {format_length(config.max_position_embeddings)}")
        config.max_position_embeddings = longest
    config.architectures = [MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[config.model_type]]
    with tempfile.TemporaryDirectory() as folder:
        config.save_pretrained(folder)
        info = describe_config(config, name)
        yield ServedModel(folder, info, config.vocab_size, name, random=True, note="; ".join(notes))


def dummy_plan(
    info: ModelInfo, lengths: Sequence[int], densities: Sequence[float], tile: TileShape
) -> tuple[Plan, str]:
    """A plan made by hand that has these densities with vLLM's dummy weights; and in words.

    Those are so small that all scores are nearly equal. The best diagonals are then neighbours, which every row sees,
    and not scattered ones: a plan sized for scattered ones would be far denser, whether prompts are cut or not.

    Args:
        densities: one for all lengths, or one for each.

    Raises:
        UsageError: lengths and densities do not pair up.
    """
    each = tuple(densities) * len(lengths) if len(densities) == 1 else tuple(densities)
    asked = tuple(map(partial(_asked, tile=tile), lengths, each)) if len(each) == len(lengths) else each
    plan, _ = hand_plan(info, lengths, asked, tile, _FAMILIES)
    shares = ", ".join(f"{share:g}" for _, share in sorted(zip(lengths, each, strict=True)))
    words = f"made by hand: {' and '.join(_FAMILIES)} in turn, sized for a density of {shares} with equal scores"
    return plan, f"{words}, {tile.key} tiles"


def _asked(length: int, density: float, tile: TileShape) -> float:
    """The density to size patterns for so that equal scores give `density`."""
    generator, shape = torch.Generator().manual_seed(0), (1, 2, length, 16)
    q_BHSD, k_BGSD = (1e-4 * torch.randn(shape, generator=generator) for _ in range(2))
    chunk, least, most = Chunk.uniform(1, 0, length), 0.0, density
    for _ in range(7):
        middle = (least + most) / 2
        patterns = tuple(diffuse_pattern(family, length, middle, tile) for family in _FAMILIES)
        index = build_index(patterns, q_BHSD, k_BGSD, chunk, tile, scale=0.25, window=None, builder="torch")
        least, most = (middle, most) if found_density(index, chunk) < density else (least, middle)
    return most


def dense_up_to(plan: Plan, length: int) -> Plan:
    """A plan made by hand that is dense up to a length: where a sparse tile costs more than it saves."""
    assert plan.prefill is not None, "plans made by hand have a prefill phase"
    longer = [bucket for bucket in plan.prefill.lengths if bucket.up_to is None or bucket.up_to > length]
    lengths = (PrefillBucket(up_to=length, dense=True), *longer)
    return plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"lengths": lengths})})


@dataclass(frozen=True)
class Engines:
    """Two engines of vLLM that differ in the plan alone."""

    dense: Any
    sparse: Any
    release: str

    def __getitem__(self, way: str) -> Any:
        return self.dense if way == DENSE else self.sparse


@contextmanager
def start_engines(model: ServedModel, plan: Plan, bench: ServeBench) -> Iterator[Engines]:
    """Both engines.

    Raises:
        PlanMismatchError: the plan is another model's.
        UnsupportedError: the engine cannot run the plan.
    """
    preset_vllm()
    from sparsekv.runtime.vllm import internals as vllm

    settings = bench.engine | ({"load_format": "dummy"} if model.random else {})
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "sparsekv.yaml"
        write_plan(plan, path)
        ours = vllm.asking_for_ours() | {
            "additional_config": {"sparsekv": {"plan": str(path), "backend": bench.backend}}
        }
        sparse = vllm.make_engine(model.folder, **settings, **ours)  # first: it refuses what cannot be served
        dense = vllm.make_engine(model.folder, **settings, additional_config={"sparsekv": {"dense": True}})
        yield Engines(dense, sparse, vllm.release)


def bench_serve(
    engines: Engines, model: ServedModel, words: str, bench: ServeBench, progress: Progress | None = None
) -> Iterator[ServeRow]:
    """Times every load, and gives its row as soon as it is known. A load that fails is a row with a note.

    Args:
        words: what the plan is, for the rows.
    """
    with (progress or Progress()).stage("serve", total=len(bench.loads)) as step:
        for load in bench.loads:
            row = ServeRow(
                name="serve",
                length=load.prompt,
                backend=bench.backend,
                host=f"vLLM {engines.release}",
                device=device_name(bench.device),
                dtype=dtype_name(bench.dtype),
                model=model.name,
                weights="random" if model.random else "loaded",
                plan=words,
                answer=load.answer,
                at_once=load.at_once,
                requests=load.requests,
                step_tokens=bench.step_tokens,
                note=model.note,
            )
            step.advance(0, note=f"{load.requests} of {format_length(load.prompt)} + {load.answer} tokens")
            try:
                yield _timed(row, engines, _prompts(load, model.vocabulary, bench.seed), bench.repeats)
            except Exception as error:  # out of memory
                yield replace(row, note="; ".join(filter(None, (row.note, in_short(error)))))
            step.advance()


def _timed(row: ServeRow, engines: Engines, prompts: Sequence[Sequence[int]], repeats: int) -> ServeRow:
    from sparsekv.bench.serving import Served, serve
    from sparsekv.runtime.vllm.counters import reset_stats, serving_backend, serving_stats

    def run(way: str) -> Served:
        return serve(engines[way], prompts, row.answer, row.at_once)

    for way in (DENSE, SPARSE):
        serve(engines[way], prompts[: _WARM_UP[0]], min(_WARM_UP[1], row.answer), row.at_once)
    reset_stats(engines.sparse)
    turns: dict[str, list[Served]] = {way: [run(way)] for way in (DENSE, SPARSE)}
    failed = repeat_in_turn(turns, run, repeats)
    stats = serving_stats(engines.sparse)
    (dense_ms, dense_token_ms, dense_rate), (sparse_ms, token_ms, rate) = (
        _medians(turns[way]) for way in (DENSE, SPARSE)
    )
    return replace(
        row,
        backend=serving_backend(engines.sparse) or row.backend,
        dense_ms=dense_ms,
        sparse_ms=sparse_ms,
        density=stats.prefill_density,
        token_ms=token_ms,
        dense_token_ms=dense_token_ms,
        tokens_per_second=rate,
        dense_tokens_per_second=dense_rate,
        failures=stats.failures,
        note="; ".join(filter(None, (row.note, failed))),
    )


def _prompts(load: Load, vocabulary: int, seed: int) -> list[list[int]]:
    source = random.Random(seed)
    return [[source.randrange(1, vocabulary) for _ in range(load.prompt)] for _ in range(load.requests)]


def _medians(runs: Sequence[Any]) -> tuple[float, float | None, float]:
    """Milliseconds up to the first token and between tokens, and tokens a second."""
    first = statistics.median(statistics.median(run.first_seconds) for run in runs) * 1e3
    each = [statistics.median(run.token_seconds) for run in runs if run.token_seconds]
    return (
        first,
        statistics.median(each) * 1e3 if each else None,
        statistics.median(run.tokens_per_second for run in runs),
    )
