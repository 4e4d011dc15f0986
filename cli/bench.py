"""`sparsekv bench`: kernels, and prefill and decode of a whole model, against the fastest dense one of the process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer
from pydantic import Field, model_validator

from sparsekv.cli.arguments import AllowMismatch, Output, Subject, check_machine, device_and_dtype, settings_of
from sparsekv.cli.commands import command
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.planner.flags import (
    Count,
    Counts,
    Flag,
    Layers,
    Lengths,
    Names,
    OneLength,
    OneShare,
    Options,
    Shares,
    Size,
    Tile,
    TokenBudget,
)
from sparsekv.planner.options import Device, Hardware, Kernels, Precision, PrefillChunk, Seed
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.errors import BackendError, UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import PATTERNS, TileShape, tokens
from sparsekv.plans.schema import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from sparsekv.bench.harness import Columns, Row
    from sparsekv.bench.random_model import BenchModel
    from sparsekv.bench.token_runs import DecodeBench

Narrow = Annotated[int, Field(ge=1, le=1024)]  # heads, their size, layers: as in a plan
_LENGTHS = (("--lengths", "--length"), "LIST")
_BUDGET = (("--budget", "--decode-budget"), "N")
_FILTERS = (("--filters", "--filter-layers"), "LAYERS")
HandDensity = Annotated[
    Shares,
    Flag("Without a plan, of one made by hand: one, or one a length.", ("--density", "--densities"), "LIST"),
]
HandTile = Annotated[Tile, Flag("Rows and columns of a tile, of a plan made by hand.", reads=Literal["64", "128"])]
BenchLengths = Annotated[Lengths, Flag("Tokens, such as 8k,32k; by default as fits the device.", *_LENGTHS)]


class Timed(Options):
    """Says how often, and on what."""

    repeats: Annotated[Count, Flag("How often each is timed; medians are shown.", metavar="N")] = 3
    seed: Seed = 0


class Benched(Options):
    """Which model."""

    model: Annotated[str, Flag("Alias, hub id, folder or GGUF file.", metavar="MODEL", is_argument=True)]
    plan: Annotated[
        Path | None, Flag("The plan; by default that in the model's folder or repository.", metavar="FILE")
    ] = None
    random_weights: Annotated[bool, Flag("Random weights of the model's shape, made on the device.")] = False


def named_subject(flags: PrefillFlags | DecodeFlags | ServeFlags, by_hand: bool) -> Subject:
    """The model and its plan, unless one is made by hand; random weights take any length, of a model that need not be
    there."""
    named = Subject(flags.model) if by_hand else Subject.named(flags.model, flags.plan, None)
    if not named.plan and isinstance(flags, AllowMismatch) and flags.allow_mismatch:
        raise UsageError("expected a plan beside --allow-mismatch, found none: one made by hand fits; leave it out")
    if not flags.random_weights:
        return named.checked(flags, flags.lengths)
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
    """Returns what stands above the rows."""
    return f"{subject.name}, {row.device}, {row.dtype}; weights: {subject.weights}; plan: {words}"


def print_rows(rows: Sequence[Row], title: str, columns: Columns, as_json: bool, measured: str = "sparse_ms") -> None:
    """The rows, as JSON or for people.

    Raises:
        typer.Exit: no row has the number that is to be measured, which is a failure.
    """
    from sparsekv.bench.harness import report

    if as_json:
        emit_json([row.data() for row in rows])
    else:
        emit(report(rows, title, columns))
    if all(row.data()[measured] is None for row in rows):
        tell("nothing could be measured; the notes say why")
        raise typer.Exit(1)


# --- kernels and prefill ----------------------------------------------------------------------------------------------

_KERNEL_LENGTHS = {"cuda": (8192, 32768, 131072), "cpu": (4096, 8192)}
_PREFILL_LENGTHS = {"cuda": (8192, 32768), "cpu": (4096,)}
_PLANTED = [name for name, kind in PATTERNS.items() if kind.planting]


class KernelFlags(Timed, Device, Precision, Output):
    """Holds what `bench kernels` is asked to do."""

    lengths: BenchLengths = ()
    density: Annotated[
        Shares,
        Flag(
            "Densities to plant structure at, such as 5% or 0.05,0.2; by default 0.05.",
            ("--density", "--densities"),
            "LIST",
        ),
    ] = (0.05,)
    patterns: Annotated[
        Names,
        Flag(
            f"{', '.join(_PLANTED)}, several joined by +, or mixed: all of them; by default mixed and vertical_slash.",
            metavar="LIST",
        ),
    ] = ("mixed", "vertical_slash")
    backend: Annotated[Names, Flag("flash, triton, cpu; by default all that can run.", metavar="LIST")] = ()
    builder: Annotated[Literal["auto", "torch", "triton"], Flag("What builds the indices.")] = "auto"
    last_q: Annotated[Count | None, Flag("Queries that vertical-slash heads sample.", metavar="N")] = None
    heads: Annotated[Narrow, Flag("Query heads.", metavar="N")] = 32
    kv_heads: Annotated[Narrow, Flag("Heads of K and V.", metavar="N")] = 8
    head_dim: Annotated[Narrow, Flag("Size of a head.", metavar="N")] = 128
    tile: Annotated[Tile, Flag("Rows and columns of a tile; 128 by default.", reads=Literal["64", "128"])] = None


def kernels(flags: KernelFlags) -> None:
    """Index building and sparse attention of one layer on planted structure.

    `asked` is the density asked for, `density` what was computed; `whole` is index and attention timed as one.
    `mass` is the share of the softmax that the computed positions hold on sampled rows, `error` the largest difference
    from float32 attention over the same index.
    """
    hardware, precision = device_and_dtype(settings_of(flags))
    _check_backends(flags, hardware)
    from sparsekv.bench.kernels import COLUMNS, PLANTED_NOTE, KernelBench, bench_kernels

    tile = flags.tile or TileShape()
    bench = KernelBench(
        lengths=flags.lengths or _KERNEL_LENGTHS[hardware.type],
        densities=flags.density,
        backends=flags.backend,
        patterns=flags.patterns,
        heads=flags.heads,
        kv_heads=flags.kv_heads,
        head_dim=flags.head_dim,
        tile=tile,
        builder=flags.builder,
        last_q=flags.last_q,
        device=hardware,
        dtype=precision,
        seed=flags.seed,
        rounds=flags.repeats,
    )
    rows = list(bench_kernels(bench, BarProgress()))
    if flags.as_json:
        tell(PLANTED_NOTE)
    shape = f"{flags.heads}/{flags.kv_heads} heads of size {flags.head_dim}, {rows[0].dtype}, {tile.key} tiles"
    print_rows(rows, f"{rows[0].device}, {shape}\n{PLANTED_NOTE}", COLUMNS, flags.as_json)


def _check_backends(flags: KernelFlags, device: torch.device) -> None:
    """Refuses backends none of which runs here; beside one that runs, the row of another one says why it does not."""
    from sparsekv.kernels.backends import check_backend

    for name in flags.backend:
        try:
            check_backend(name, device)
        except BackendError:
            if name == flags.backend[-1]:
                raise
        else:
            return


class PrefillFlags(Benched, Timed, Hardware, AllowMismatch, Output):
    """Holds what `bench prefill` is asked to do."""

    lengths: BenchLengths = ()
    density: HandDensity = ()
    patterns: Annotated[Names, Flag("Of a plan made by hand, dealt out to the heads.", metavar="LIST")] = ()
    tile: HandTile = None
    layers: Annotated[Narrow | None, Flag("With random weights: only so many layers.", metavar="N")] = None
    dense_layers: Annotated[
        Narrow | None, Flag("Measure dense on N layers and multiply; rows say so.", metavar="N")
    ] = None
    kv_host_layers: Annotated[
        int | None, Field(ge=0, le=1024), Flag("Layers whose keys and values go to host memory.", metavar="N")
    ] = None
    prefill_chunk: PrefillChunk = None

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.layers is not None and not self.random_weights:
            raise UsageError("expected --layers only with --random-weights, found it alone; add --random-weights")
        self.refuse(("density", "patterns") if self.plan else (), "each says what the plan is", "plan")
        return self


def prefill(flags: PrefillFlags) -> None:
    """A model from its tokens to the last logits, by its plan and dense, in turn."""
    by_hand = flags.density or flags.patterns or (flags.layers and flags.plan is None)
    named, machine = named_subject(flags, bool(by_hand)), settings_of(flags)
    used = named.plan
    if used and flags.tile is not None:
        raise UsageError(
            "expected --tile of a plan made by hand, found a plan, which has its own tiles; leave --tile out, or add "
            "--density"
        )
    hardware, precision = device_and_dtype(machine)
    wanted = flags.lengths or _PREFILL_LENGTHS[hardware.type]
    from sparsekv.bench.hand_plans import FAMILIES, hand_plan
    from sparsekv.bench.prefill import COLUMNS, PrefillBench, bench_prefill
    from sparsekv.planner.settled import density_for

    how = {"longest": max(wanted), "layers": flags.layers, "seed": flags.seed}
    subject, words = subject_of(flags, named, hardware, precision, **how), "given"
    if used is None:
        shares = flags.density or tuple(map(density_for, wanted))
        used, words = hand_plan(subject.info, wanted, shares, flags.tile or TileShape(), flags.patterns or FAMILIES)
    bench = PrefillBench(
        wanted,
        flags.repeats,
        flags.prefill_chunk,
        machine.backend,
        flags.kv_host_layers,
        flags.dense_layers,
        flags.seed,
        flags.allow_mismatch,
    )
    rows = list(bench_prefill(subject, used, words, bench, BarProgress()))
    print_rows(rows, title_of(subject, rows[0], words), COLUMNS, flags.as_json)


# --- decode -----------------------------------------------------------------------------------------------------------

_DECODE_LENGTHS = {"cuda": (8192, 32768, 131072, 524288), "cpu": (8192,)}
_DECODE_BY_HAND = ("budget", "filters", "selector", "window")


class DecodeFlags(Benched, Timed, Hardware, AllowMismatch, Output):
    """Holds what `bench decode` is asked to do."""

    lengths: Annotated[
        Lengths,
        Flag("Cached tokens a row, such as 8k,512k; by default as fits model and device.", *_LENGTHS),
    ] = ()
    batch: Annotated[Counts, Flag("Rows decoded at once, such as 1,4; 1 by default.", metavar="LIST")] = (1,)
    budget: Annotated[
        TokenBudget, Flag("Without a plan: tokens that a filter layer chooses; 2k by default.", *_BUDGET)
    ] = tokens(2048)
    filters: Annotated[
        Layers,
        Flag("Without a plan: filter layers; three by depth by default.", *_FILTERS),
    ] = ()
    selector: Annotated[Names, Flag("Without a plan: last, uniform, exponential; last by default.", metavar="LIST")] = (
        "last",
    )
    window: Annotated[Narrow | None, Flag("Queries that uniform and exponential selectors weigh.", metavar="N")] = None
    offload: Annotated[
        Literal["auto", "always", "never"] | None,
        Flag(
            "In place of dense: the plan with layers in host memory (as `run --offload`) against the plan with "
            "everything on the device."
        ),
    ] = None
    exact: Annotated[
        bool,
        Flag("Also tokens that the plan drafts and dense attention checks, as `run --exact`, over our dense steps."),
    ] = False
    acceptance: Annotated[
        OneShare | None,
        Flag(
            "With --exact: take this share of drafts to count. Those of random weights mean nothing.", metavar="SHARE"
        ),
    ] = None
    miss_rate: Annotated[
        OneShare | None,
        Flag(
            "With --offload on a GPU: the share of the chosen tokens that is new in each step. Random weights choose "
            "at random.",
            metavar="SHARE",
        ),
    ] = None

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        self.refuse(_DECODE_BY_HAND if self.plan else (), "each says what the plan is", "plan")
        if self.acceptance is not None and not self.exact:
            raise UsageError("expected --acceptance beside --exact, found it alone; add --exact")
        if self.exact:
            self.refuse(("offload",), "checks read all keys and values", "exact")
        if self.miss_rate is not None and self.offload is None:
            raise UsageError("expected --miss-rate beside --offload, found it alone; add --offload always")
        return self


def decode(flags: DecodeFlags) -> None:
    """Attention of one step, and whole tokens, by a plan and dense, in turn."""
    named, machine = named_subject(flags, any(map(flags.is_given, _DECODE_BY_HAND))), settings_of(flags)
    used = named.plan
    hardware, precision = device_and_dtype(machine)
    if flags.miss_rate is not None and hardware.type != "cuda":
        raise UsageError(f"expected a GPU for --miss-rate, whose kernel runs there, found {hardware}; leave it out")
    from sparsekv.bench.decode import COLUMNS, RANDOM_NOTE, bench_decode, check_decode
    from sparsekv.bench.hand_plans import HandDecode
    from sparsekv.bench.offload import check_offload
    from sparsekv.bench.random_model import describe_named
    from sparsekv.bench.token_runs import NEW_EXACT, NEW_TOKENS, DecodeBench

    info = describe_named(flags.model, flags.random_weights)
    wanted, info = _decode_lengths(flags, info, _DECODE_LENGTHS[hardware.type])
    bench = DecodeBench(
        wanted,
        flags.batch,
        flags.repeats,
        NEW_EXACT if flags.exact else NEW_TOKENS,
        backend=machine.backend,
        seed=flags.seed,
        allow_mismatch=flags.allow_mismatch,
        exact=flags.exact,
        acceptance=flags.acceptance,
    )
    hand = HandDecode(flags.budget, flags.filters, flags.selector, flags.window, flags.offload is not None)
    plans, words = ({"plan": used}, "given") if used else hand.plans(info, max(wanted))
    check_decode(info, plans, bench)
    if flags.offload is not None:
        check_offload(info, plans, bench, flags.miss_rate)
    # Larger cases may not fit, or only those by a plan that offloads: their rows say so.
    offloads = any(one.decode and one.decode.offload for one in plans.values())
    how = {"longest": max(wanted), "seed": flags.seed, "cached": 0 if offloads else min(wanted) * min(flags.batch)}
    subject = subject_of(flags, named, hardware, precision, **how)
    if flags.offload is not None:
        _offloaded(flags, subject, plans, words, bench)
        return
    rows = list(bench_decode(subject, plans, words, bench, BarProgress()))
    if flags.as_json:
        tell(RANDOM_NOTE)
    print_rows(rows, f"{title_of(subject, rows[0], words)}\n{RANDOM_NOTE}", COLUMNS, flags.as_json)


def _decode_lengths(flags: DecodeFlags, info: ModelInfo, usual: tuple[int, ...]) -> tuple[tuple[int, ...], ModelInfo]:
    """Those to time, and the model with room for them where its weights are random."""
    if flags.random_weights:
        wanted = flags.lengths or usual
        return wanted, info.model_copy(update={"context_length": max(*wanted, info.context_length)})
    fitting = tuple(length for length in usual if length <= info.context_length)
    return flags.lengths or fitting or (info.context_length,), info


def _offloaded(
    flags: DecodeFlags, subject: BenchModel, plans: Mapping[str, Plan], words: str, bench: DecodeBench
) -> None:
    from sparsekv.bench.offload import COLUMNS, bench_offload

    assert flags.offload is not None
    share = flags.miss_rate
    rows = list(bench_offload(subject, plans, words, bench, flags.offload, share, BarProgress()))
    title = f"{title_of(subject, rows[0], words)}; --offload {flags.offload}"
    title += f"; choices swapped for lists with {share:.3g} of new tokens a step" if share else ""
    print_rows(rows, title, COLUMNS, flags.as_json, "device_ms" if flags.offload == "never" else "offloaded_ms")


# --- serve ------------------------------------------------------------------------------------------------------------

_SERVE_LENGTHS = {"cuda": (32768, 131072), "cpu": (4096,)}
_SERVE_BY_HAND = ("density", "crossover", "tile", "budget", "filters", "keep", "generated")


class ServeFlags(Benched, Timed, Precision, Kernels, Output):
    """Holds what `bench serve` is asked to do."""

    lengths: Annotated[
        Lengths,
        Flag("Tokens of a prompt, such as 4k,32k; by default as fits the device.", *_LENGTHS),
    ] = ()
    answer: Annotated[Count, Flag("Tokens of an answer.", metavar="N")] = 64
    at_once: Annotated[Count, Flag("Requests that the engine has at a time.", metavar="N")] = 1
    requests: Annotated[Count | None, Flag("In all; as many as at once by default.", metavar="N")] = None
    step_tokens: Annotated[OneLength, Flag("Of a step at most: vLLM's max_num_batched_tokens.", metavar="N")] = 8192
    density: HandDensity = ()
    crossover: Annotated[OneLength, Flag("Without a plan: lengths up to N are dense.", metavar="N")] = 8192
    tile: HandTile = None
    budget: Annotated[
        TokenBudget | None, Flag("Without a plan: decode by filter layers that choose so many tokens.", *_BUDGET)
    ] = None
    filters: Annotated[Layers, Flag("These filter layers; three by depth by default.", *_FILTERS)] = ()
    keep: Annotated[
        Count | None,
        Flag("Without a plan: all layers but three keep so many tokens of a prompt, and 132 more.", metavar="N"),
    ] = None
    generated: Annotated[Count, Flag("With --keep: the newest tokens of an answer that they keep.", metavar="N")] = 256
    dense_decode: Annotated[bool, Flag("Decode without the plan.")] = False
    alone: Annotated[bool, Flag("One engine at a time, for loads that do not fit the device twice.")] = False
    per_minute: Annotated[Counts, Flag("Requests that come at random in a minute; each is a row.", metavar="LIST")] = ()
    cache_memory: Annotated[
        Size | None, Flag("For keys and values, of each engine (vLLM's kv_cache_memory_bytes).", metavar="SIZE")
    ] = None

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.budget is None:
            self.refuse(("filters",), "decode is dense without --budget")
        if self.keep is None:
            self.refuse(("generated",), "layers keep everything without --keep")
        else:
            self.refuse(("budget",), "an evicting layer is in no segment", "keep")
            self.refuse(("dense_decode",), "decode without the plan reads all tokens", "keep")
        self.refuse(_SERVE_BY_HAND if self.plan else (), "each says what the plan is", "plan")
        return self


def serve(flags: ServeFlags) -> None:
    """Requests through two engines of vLLM in this process, by a plan and dense, in turn."""
    machine = settings_of(flags)
    from sparsekv.runtime.vllm.engine_facts import check_installed

    check_installed()
    used = named_subject(flags, any(map(flags.is_given, _SERVE_BY_HAND))).plan
    from sparsekv.bench.hand_plans import HandDecode, dense_up_to, dummy_plan, hand_plan, kept_by_hand
    from sparsekv.bench.serve import COLUMNS, Load, ServeBench, bench_serve, served_model
    from sparsekv.planner.settled import density_for

    hardware, precision = device_and_dtype(machine)
    wanted = flags.lengths or _SERVE_LENGTHS[hardware.type]
    asked = (flags.answer, flags.at_once, flags.requests or flags.at_once)
    loads = tuple(Load(length, *asked, rate) for length in wanted for rate in flags.per_minute or (None,))
    drawn = (flags.repeats, flags.step_tokens, machine.backend, flags.seed)
    bench = ServeBench(loads, hardware, precision, *drawn, flags.alone, flags.cache_memory)
    words = "given"
    with served_model(flags.model, flags.random_weights, bench.longest) as subject:
        if used is None:
            shares = flags.density or tuple(map(density_for, wanted))
            make = dummy_plan if flags.random_weights else hand_plan
            used, words = make(subject.info, wanted, shares, flags.tile or TileShape())
            if flags.budget is not None:
                plans, chosen = HandDecode(flags.budget, flags.filters).plans(subject.info, bench.longest)
                used, words = used.model_copy(update={"decode": plans["last"].decode}), f"{words}; {chosen}"
            used, words = dense_up_to(used, flags.crossover), f"{words}, dense up to {flags.crossover}"
            if flags.keep is not None:
                rules, kept = kept_by_hand(subject.info, flags.keep, flags.generated)
                used, words = used.model_copy(update={"kv_cache": rules}), f"{words}; {kept}"
        if flags.dense_decode:
            used = used.model_copy(update={"decode": None, "kv_cache": None})
        if subject.note:
            tell(subject.note)
        rows = list(bench_serve(subject, used, words, bench, BarProgress()))
    own = rows[0].data()
    what = ", ".join(str(own[name]) for name in ("model", "device", "dtype", "host"))
    what += f", {own['backend']} kernels, steps of {flags.step_tokens}"
    print_rows(rows, f"{what}; weights: {own['weights']}; plan: {words}", COLUMNS, flags.as_json)
    if failures := sum(row.own["failures"] for row in rows):
        tell(f"{failures} chunks of a layer ran dense after an error: the log says why, and the times mean nothing")
        raise typer.Exit(1)


app = typer.Typer(
    help="Time kernels, a model's prefill or decode, or requests through vLLM, against dense.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
for run, summary in (
    (kernels, "Index building and attention of one layer, without a model."),
    (prefill, "A model's prefill, by its plan and dense."),
    (decode, "A model's decode steps, by a plan and dense."),
    (serve, "Requests through vLLM, by a plan and dense."),
):
    app.command(run.__name__, short_help=summary)(command(run))
