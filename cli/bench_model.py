"""`sparsekv bench prefill`, `decode` and `serve`: a whole model by its plan, or one made by hand, and dense."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import typer
from pydantic import Field

from sparsekv.cli.arguments import Output, Subject, check_machine, device_and_dtype, settings_of
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.planner.flags import (
    LENGTHS,
    Count,
    Counts,
    Flag,
    Key,
    Lengths,
    OneLength,
    OneShare,
    Options,
    Shares,
    Size,
    TokenBudget,
    Unread,
)
from sparsekv.planner.options import Hardware, KVPrecision, density_for
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import TileShape

if TYPE_CHECKING:
    import torch

    from sparsekv.bench.harness import Columns, Row
    from sparsekv.bench.random_model import BenchModel
    from sparsekv.bench.serve import Load
    from sparsekv.bench.turns import SessionLoad

BenchLengths = Annotated[Lengths, Flag("Tokens, such as 8k,32k; by default as fits the device.", *LENGTHS)]
Quantization = Annotated[str | None, Flag("Quantise weights, by vLLM's name: fp8_per_channel.", metavar="NAME")]

_BY_HAND = ("density", "budget", "keep")  # options of plans made by hand


class Timed(Options):
    repeats: Count = 3
    seed: int = 0


class Benched(Options):
    unread: ClassVar[tuple[Unread, ...]] = (Unread(_BY_HAND, "each says what the plan is", ("plan",)),)

    model: Annotated[str, Flag("Alias, hub id, folder or GGUF file.", metavar="MODEL", is_argument=True)]
    plan: Annotated[
        Path | None, Flag("The plan; by default that in the model's folder or repository.", metavar="FILE")
    ] = None
    random_weights: Annotated[bool, Flag("Random weights of the model's shape, made on the device.")] = False


class HandPrefill(Options):
    density: Annotated[Shares, Key("Without a plan, of one made by hand: one, or one a length.", "SHARES")] = ()


class HandDecode(Options):
    """The budget of a decode plan made by hand, whose filter layers are three by depth."""

    budget: Annotated[
        TokenBudget | None, Key("Without a plan: what a filter layer chooses; of `bench decode` 10%.", "BUDGET")
    ] = None


def named_subject(flags: Benched, lengths: Sequence[int]) -> Subject:
    """The model and its plan, unless one is made by hand; random weights take any length, of a model that need not be
    there."""
    named = Subject(flags.model) if any(map(flags.is_given, _BY_HAND)) else Subject.named(flags.model, flags.plan)
    if not flags.random_weights:
        return named.checked(flags, tuple(lengths))
    check_machine(flags)
    return named


def subject_of(flags: Benched, named: Subject, device: torch.device, dtype: torch.dtype, **how: Any) -> BenchModel:
    """The model, for a run of which `random_model` says `how`."""
    from sparsekv.bench.random_model import BenchModel, random_model
    from sparsekv.runtime.model_config import dtype_name

    if flags.random_weights:
        subject = random_model(flags.model, device=device, dtype=dtype, **how)
        tell(subject.note)
        return subject
    loaded = named.load(Hardware(device=str(device), dtype=dtype_name(dtype)))
    return BenchModel(loaded.model, loaded.info, flags.model, "loaded")


def title_of(subject: BenchModel, row: Row, words: str) -> str:
    return f"{subject.name}, {row.device}, {row.dtype}; weights: {subject.weights}; plan: {words}"


@dataclass(frozen=True, slots=True)
class BenchRun:
    """Rows of one bench, and how they are shown.

    Attributes:
        note: beside rows in JSON, which have no title.
    """

    rows: Sequence[Row]
    title: str
    columns: Columns
    note: str = ""


def print_rows(*parts: BenchRun, as_json: bool) -> None:
    from sparsekv.bench.harness import report

    if as_json:
        for note in dict.fromkeys(part.note for part in parts if part.note):
            tell(note)
        emit_json([row.data() for part in parts for row in part.rows])
    else:
        emit("\n".join(report(part.rows, part.title, part.columns) for part in parts))
    if any(all(row.sparse_ms is None for row in part.rows) for part in parts):
        tell("nothing could be measured; the notes say why")
        raise typer.Exit(1)


# --- prefill ----------------------------------------------------------------------------------------------------------

PREFILL_LENGTHS = {"cuda": (8192, 32768), "cpu": (4096,)}


class PrefillFlags(Benched, HandPrefill, Timed, Output):
    lengths: BenchLengths = ()
    dense_layers: Annotated[Count | None, Key("Measure dense on N layers and multiply; rows say so.", "N")] = None
    kv_host_layers: Annotated[
        int | None, Field(ge=0, le=1024), Key("Layers whose keys and values go to host memory.", "N")
    ] = None


def prefill(flags: PrefillFlags) -> None:
    """A model from its tokens to the last logits, by its plan and dense, in turn."""
    print_rows(measure_prefill(flags), as_json=flags.as_json)


def measure_prefill(flags: PrefillFlags, families: Sequence[str] = ()) -> BenchRun:
    """Times prompts; `families` are those of the heads of a plan made by hand."""
    named, machine = named_subject(flags, flags.lengths), settings_of(flags)
    used = named.plan
    hardware, precision = device_and_dtype(machine)
    lengths = flags.lengths or PREFILL_LENGTHS[hardware.type]
    from sparsekv.bench.hand_plans import FAMILIES, hand_plan
    from sparsekv.bench.prefill import COLUMNS, PrefillBench, bench_prefill

    subject, words = subject_of(flags, named, hardware, precision, longest=max(lengths), seed=flags.seed), "given"
    if used is None:
        shares = flags.density or tuple(map(density_for, lengths))
        used, words = hand_plan(subject.info, lengths, shares, TileShape(), families or FAMILIES)
    bench = PrefillBench(
        lengths,
        flags.repeats,
        None,
        machine.backend,
        flags.kv_host_layers,
        flags.dense_layers,
        flags.seed,
        flags.random_weights,
    )
    rows = list(bench_prefill(subject, used, words, bench, BarProgress()))
    return BenchRun(rows, title_of(subject, rows[0], words), COLUMNS)


# --- decode -----------------------------------------------------------------------------------------------------------

_DECODE_LENGTHS = {"cuda": (8192, 32768, 131072, 524288), "cpu": (8192,)}


class DecodeFlags(Benched, HandDecode, Timed, Output):
    unread: ClassVar[tuple[Unread, ...]] = ()

    lengths: Annotated[
        Lengths, Flag("Cached tokens a row, such as 8k,512k; by default as fits model and device.", *LENGTHS)
    ] = ()
    batch: Annotated[Counts, Flag("Rows decoded at once, such as 1,4; 1 by default.", metavar="LIST")] = (1,)
    exact: bool = False  # also tokens that the plan drafts and dense attention checks
    acceptance: OneShare | None = None  # share of drafts that is taken to count
    kv_dtype: KVPrecision = "auto"


def decode(flags: DecodeFlags) -> None:
    """Attention of one step, and whole tokens, by a plan and dense, in turn."""
    print_rows(measure_decode(flags), as_json=flags.as_json)


def measure_decode(flags: DecodeFlags) -> BenchRun:
    named, machine = named_subject(flags, flags.lengths), settings_of(flags)
    used = named.plan
    hardware, precision = device_and_dtype(machine)
    from sparsekv.bench.decode import COLUMNS, RANDOM_NOTE, bench_decode, check_decode
    from sparsekv.bench.hand_plans import decode_by_hand
    from sparsekv.bench.random_model import describe_named
    from sparsekv.bench.token_runs import NEW_EXACT, NEW_TOKENS, DecodeBench

    info = describe_named(flags.model, flags.random_weights)
    lengths, info = _decode_lengths(flags, info, _DECODE_LENGTHS[hardware.type])
    bench = DecodeBench(
        lengths,
        flags.batch,
        flags.repeats,
        NEW_EXACT if flags.exact else NEW_TOKENS,
        backend=machine.backend,
        seed=flags.seed,
        allow_mismatch=flags.random_weights,
        exact=flags.exact,
        acceptance=flags.acceptance,
        kv_dtype=flags.kv_dtype,
    )
    plan, words = used, "given"
    if plan is None:
        plan, words = decode_by_hand(info, max(lengths), flags.budget)
    plans = {"plan" if used else "last": plan}
    check_decode(info, plans, bench)
    # Larger cases may not fit, or only those by a plan that offloads: their rows say so.
    offloads = any(plan.decode and plan.decode.offload for plan in plans.values())
    room = 0 if offloads else min(lengths) * min(flags.batch)
    subject = subject_of(flags, named, hardware, precision, longest=max(lengths), seed=flags.seed, cached=room)
    rows = list(bench_decode(subject, plans, words, bench, BarProgress()))
    return BenchRun(rows, f"{title_of(subject, rows[0], words)}\n{RANDOM_NOTE}", COLUMNS, note=RANDOM_NOTE)


def _decode_lengths(flags: DecodeFlags, info: ModelInfo, usual: tuple[int, ...]) -> tuple[tuple[int, ...], ModelInfo]:
    """Those to time, and the model with room for them where its weights are random."""
    if flags.random_weights:
        lengths = flags.lengths or usual
        return lengths, info.model_copy(update={"context_length": max(*lengths, info.context_length)})
    fitting = tuple(length for length in usual if length <= info.context_length)
    return flags.lengths or fitting or (info.context_length,), info


# --- requests ---------------------------------------------------------------------------------------------------------

_SERVE_LENGTHS = {"cuda": (32768, 131072), "cpu": (4096,)}


class ServeFlags(Benched, HandPrefill, HandDecode, Timed, Output):
    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("budget",), "an evicting layer is in no segment", ("keep",)),
        Unread(("requests", "per_minute"), "an agent gives its next prompt by itself", ("turns",)),
        Unread(("requests", "per_minute", "lengths", "turns", "answer"), "a trace has its own", ("turns_file",)),
        Unread(("turn_tokens",), "it is of --turns", without=("turns",)),
        Unread(("think",), "it is of --turns-file", without=("turns_file",)),
    )

    lengths: Annotated[
        Lengths, Flag("Tokens of a prompt, such as 4k,32k; by default as fits the device.", *LENGTHS)
    ] = ()
    at_once: Annotated[
        Counts, Flag("Requests that the engine has at a time, each a row; 1 by default.", metavar="LIST")
    ] = (1,)
    turns: Annotated[
        Count | None,
        Flag("Turns of agents (--at-once) behind their first prompts, which are of --lengths.", metavar="N"),
    ] = None
    turns_file: Annotated[
        Path | None,
        Flag("Replay captured sessions of agents: traces with hash_ids (kv-cache-tester, AIPerf).", metavar="FILE"),
    ] = None
    quantization: Quantization = None
    turn_tokens: Annotated[Lengths, Key("New tokens of a turn, each a row; 2k by default.", "LIST")] = (2048,)
    think: Annotated[
        float, Field(ge=0), Key("Most seconds of an agent between turns of a trace; 1 by default.", "S")
    ] = 1.0
    answer: Annotated[Count, Key("Tokens of an answer; 64 by default.", "N")] = 64
    requests: Annotated[Count | None, Key("In all; as many as at once by default.", "N")] = None
    per_minute: Annotated[Counts, Key("Requests that come at random in a minute; each is a row.", "LIST")] = ()
    step_tokens: Annotated[OneLength, Key("Most tokens of a step (max_num_batched_tokens); 8k by default.", "N")] = 8192
    alone: Annotated[bool, Key("One engine at a time, for loads that do not fit the device twice.", "true")] = False
    tensor_parallel: Annotated[Count, Key("GPUs of each engine, one engine at a time; 1 by default.", "N")] = 1
    kv_dtype: KVPrecision = "auto"
    cache_memory: Annotated[Size | None, Key("For keys and values, of each engine.", "SIZE")] = None
    drafted: Annotated[Count | None, Key("Tokens that a look-up (ngram) drafts, in both engines.", "N")] = None
    keep: Annotated[Count | None, Key("Without a plan: tokens that all layers but three keep.", "N")] = None


def loads_of(flags: ServeFlags, lengths: Sequence[int]) -> tuple[Load, ...]:
    from sparsekv.bench.serve import Load

    return tuple(
        Load(length, flags.answer, at_once, flags.requests or at_once, rate)
        for length, at_once, rate in product(lengths, flags.at_once, flags.per_minute or (None,))
    )


def sessions_of(flags: ServeFlags, lengths: Sequence[int]) -> tuple[SessionLoad, ...]:
    """Sessions of agents, where a call asks for them."""
    from sparsekv.bench.agent_traces import TraceLoad, read_traces
    from sparsekv.bench.turns import TurnLoad

    if flags.turns_file is not None:
        traces = read_traces(flags.turns_file)
        return tuple(TraceLoad(traces, agents, flags.think) for agents in flags.at_once)
    if flags.turns is None:
        return ()
    return tuple(
        TurnLoad(length, new, flags.turns, flags.answer, agents)
        for length, agents, new in product(lengths, flags.at_once, flags.turn_tokens)
    )


def serve(flags: ServeFlags) -> None:
    """Requests through two engines of vLLM, by a plan and dense, in turn.

    With --turns or --turns-file prefixes are cached: a turn computes its new tokens behind the prompt and answer before
    it. `turn` is the time to its first token, `gain` dense over sparse of turns in pairs, with the 95% interval of its
    mean.
    """
    machine = settings_of(flags)
    from sparsekv.bench.vllm_engines import check_installed

    check_installed()
    hardware, precision = device_and_dtype(machine)
    lengths = flags.lengths or _SERVE_LENGTHS[hardware.type]
    sessions = sessions_of(flags, lengths)
    most = max(flags.turn_tokens)
    planned = tuple(sorted({load.longest for load in sessions if load.new in (None, most)})) or lengths
    used = named_subject(flags, planned if sessions else flags.lengths).plan
    from sparsekv.bench.hand_plans import dummy_plan, hand_plan, serve_by_hand
    from sparsekv.bench.serve import COLUMNS, ServeBench, bench_serve, served_model
    from sparsekv.bench.turns import COLUMNS as OF_TURNS
    from sparsekv.bench.turns import bench_turns

    loads = loads_of(flags, planned)
    drawn = (flags.repeats, flags.step_tokens, machine.backend, flags.seed)
    alone = flags.alone or flags.tensor_parallel > 1  # ranks are processes, and so is each of two engines then
    engines = (flags.cache_memory, flags.tensor_parallel, flags.kv_dtype, flags.drafted or 0)
    bench = ServeBench(loads, hardware, precision, *drawn, alone, *engines, quantization=flags.quantization)
    words = "given"
    with served_model(flags.model, flags.random_weights, bench.longest) as subject:
        if used is None:
            make = dummy_plan if flags.random_weights else hand_plan
            made = make(subject.info, planned, flags.density or tuple(map(density_for, planned)), TileShape())
            used, words = serve_by_hand(*made, bench.longest, flags.budget, flags.keep)
        if subject.note:
            tell(subject.note)
        progress = BarProgress()
        if sessions:
            rows, shown = list(bench_turns(subject, used, words, sessions, bench, progress)), OF_TURNS
        else:
            rows, shown = list(bench_serve(subject, used, words, bench, progress)), COLUMNS
    data = rows[0].data()
    what = ", ".join(str(data[name]) for name in ("model", "device", "dtype", "host"))
    what += f", {data['backend']} kernels, steps of {flags.step_tokens}"
    what += f", {flags.tensor_parallel} ranks" if flags.tensor_parallel > 1 else ""
    what += f", keys and values in {flags.kv_dtype}" if flags.kv_dtype != "auto" else ""
    title = f"{what}; weights: {data['weights']}; plan: {words}"
    print_rows(BenchRun(rows, title, shown), as_json=flags.as_json)
    if failures := sum(row.own["failures"] for row in rows):
        tell(f"{failures} chunks of a layer ran dense after an error: the log says why, and the times mean nothing")
        raise typer.Exit(1)
