"""`sparsekv bench`: kernels, and prefill and decode of a whole model, against the fastest dense one of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal, Self

import typer
from pydantic import Field, model_validator

from sparsekv.cli.arguments import AllowMismatch, Output, device_and_dtype, settings_of
from sparsekv.cli.bench_peers import peers
from sparsekv.cli.bench_serve import serve
from sparsekv.cli.benched import (
    BUDGET,
    FILTERS,
    LENGTHS,
    Benched,
    BenchLengths,
    BenchRun,
    HandDensity,
    HandTile,
    Narrow,
    Timed,
    named_subject,
    print_rows,
    subject_of,
    title_of,
)
from sparsekv.cli.commands import command
from sparsekv.planner.flags import Count, Counts, Flag, Layers, Lengths, Names, OneShare, Shares, Tile, TokenBudget
from sparsekv.planner.options import Device, Hardware, KVPrecision, Precision, PrefillChunk
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.errors import BackendError, UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import TileShape, tokens
from sparsekv.plans.schema import Plan

if TYPE_CHECKING:
    from collections.abc import Mapping

    import torch

    from sparsekv.bench.random_model import BenchModel
    from sparsekv.bench.token_runs import DecodeBench

# --- kernels and prefill ----------------------------------------------------------------------------------------------

_KERNEL_LENGTHS = {"cuda": (8192, 32768, 131072), "cpu": (4096, 8192)}
_PREFILL_LENGTHS = {"cuda": (8192, 32768), "cpu": (4096,)}


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
            "a_shape, vertical_slash, block_sparse, several joined by +, or mixed: all of them; by default mixed and "
            "vertical_slash.",
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
    print_rows(measure_kernels(flags), as_json=flags.as_json)


def measure_kernels(flags: KernelFlags) -> BenchRun:
    """Returns the rows of `bench kernels`."""
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
    shape = f"{flags.heads}/{flags.kv_heads} heads of size {flags.head_dim}, {rows[0].dtype}, {tile.key} tiles"
    return BenchRun(rows, f"{rows[0].device}, {shape}\n{PLANTED_NOTE}", COLUMNS, note=PLANTED_NOTE)


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


class CutModel(Benched):
    """Holds how much of a model with random weights is timed."""

    layers: Annotated[Narrow | None, Flag("With random weights: only so many layers.", metavar="N")] = None

    @model_validator(mode="after")
    def _layers_are_of_random_weights(self) -> Self:
        if self.layers is not None and not self.random_weights:
            raise UsageError("expected --layers only with --random-weights, found it alone; add --random-weights")
        return self


class PrefillFlags(CutModel, Timed, Hardware, AllowMismatch, Output):
    """Holds what `bench prefill` is asked to do."""

    lengths: BenchLengths = ()
    density: HandDensity = ()
    patterns: Annotated[Names, Flag("Of a plan made by hand, dealt out to the heads.", metavar="LIST")] = ()
    tile: HandTile = None
    dense_layers: Annotated[
        Narrow | None, Flag("Measure dense on N layers and multiply; rows say so.", metavar="N")
    ] = None
    kv_host_layers: Annotated[
        int | None,
        Field(ge=0, le=1024),
        Flag("Layers whose keys and values go to host memory; on a CPU it saves nothing.", metavar="N"),
    ] = None
    prefill_chunk: PrefillChunk = None

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        self.refuse(("density", "patterns") if self.plan else (), "each says what the plan is", "plan")
        return self


def prefill(flags: PrefillFlags) -> None:
    """A model from its tokens to the last logits, by its plan and dense, in turn."""
    print_rows(measure_prefill(flags), as_json=flags.as_json)


def measure_prefill(flags: PrefillFlags) -> BenchRun:
    """Returns the rows of `bench prefill`."""
    by_hand = flags.density or flags.patterns or (flags.layers and flags.plan is None)
    named, machine = named_subject(flags, flags.lengths, bool(by_hand)), settings_of(flags)
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
    return BenchRun(rows, title_of(subject, rows[0], words), COLUMNS)


# --- decode -----------------------------------------------------------------------------------------------------------

_DECODE_LENGTHS = {"cuda": (8192, 32768, 131072, 524288), "cpu": (8192,)}
_DECODE_BY_HAND = ("budget", "filters", "selector", "window")


class DecodeFlags(CutModel, Timed, Hardware, AllowMismatch, Output):
    """Holds what `bench decode` is asked to do."""

    lengths: Annotated[
        Lengths,
        Flag("Cached tokens a row, such as 8k,512k; by default as fits model and device.", *LENGTHS),
    ] = ()
    batch: Annotated[Counts, Flag("Rows decoded at once, such as 1,4; 1 by default.", metavar="LIST")] = (1,)
    budget: Annotated[
        TokenBudget, Flag("Without a plan: tokens that a filter layer chooses; 2k by default.", *BUDGET)
    ] = tokens(2048)
    filters: Annotated[
        Layers,
        Flag("Without a plan: filter layers; three by depth by default.", *FILTERS),
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

    kv_dtype: KVPrecision = "auto"

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        self.refuse(_DECODE_BY_HAND if self.plan else (), "each says what the plan is", "plan")
        if self.acceptance is not None and not self.exact:
            raise UsageError("expected --acceptance beside --exact, found it alone; add --exact")
        if self.exact:
            self.refuse(("offload",), "checks read all keys and values", "exact")
        if self.offload is not None:
            self.refuse(("kv_dtype",), "both sides have keys and values as the model makes them", "offload")
        if self.miss_rate is not None and self.offload is None:
            raise UsageError("expected --miss-rate beside --offload, found it alone; add --offload always")
        return self


def decode(flags: DecodeFlags) -> None:
    """Attention of one step, and whole tokens, by a plan and dense, in turn."""
    print_rows(measure_decode(flags), as_json=flags.as_json)


def measure_decode(flags: DecodeFlags) -> BenchRun:
    """Returns the rows of `bench decode`."""
    named, machine = named_subject(flags, flags.lengths, any(map(flags.is_given, _DECODE_BY_HAND))), settings_of(flags)
    used = named.plan
    hardware, precision = device_and_dtype(machine)
    if flags.miss_rate is not None and hardware.type != "cuda":
        raise UsageError(f"expected a GPU for --miss-rate, whose kernel runs there, found {hardware}; leave it out")
    from sparsekv.bench.decode import COLUMNS, RANDOM_NOTE, bench_decode, check_decode
    from sparsekv.bench.hand_plans import HandDecode
    from sparsekv.bench.offload import check_offload
    from sparsekv.bench.random_model import describe_named
    from sparsekv.bench.token_runs import NEW_EXACT, NEW_TOKENS, DecodeBench

    info = describe_named(flags.model, flags.random_weights, flags.layers)
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
        kv_dtype=flags.kv_dtype,
    )
    hand = HandDecode(flags.budget, flags.filters, flags.selector, flags.window, flags.offload is not None)
    plans, words = ({"plan": used}, "given") if used else hand.plans(info, max(wanted))
    check_decode(info, plans, bench)
    if flags.offload is not None:
        check_offload(info, plans, bench, flags.miss_rate)
    # Larger cases may not fit, or only those by a plan that offloads: their rows say so.
    offloads = any(one.decode and one.decode.offload for one in plans.values())
    room = 0 if offloads else min(wanted) * min(flags.batch)
    how = {"longest": max(wanted), "layers": flags.layers, "seed": flags.seed, "cached": room}
    subject = subject_of(flags, named, hardware, precision, **how)
    if flags.offload is not None:
        return _offloaded(flags, subject, plans, words, bench)
    rows = list(bench_decode(subject, plans, words, bench, BarProgress()))
    return BenchRun(rows, f"{title_of(subject, rows[0], words)}\n{RANDOM_NOTE}", COLUMNS, note=RANDOM_NOTE)


def _decode_lengths(flags: DecodeFlags, info: ModelInfo, usual: tuple[int, ...]) -> tuple[tuple[int, ...], ModelInfo]:
    """Those to time, and the model with room for them where its weights are random."""
    if flags.random_weights:
        wanted = flags.lengths or usual
        return wanted, info.model_copy(update={"context_length": max(*wanted, info.context_length)})
    fitting = tuple(length for length in usual if length <= info.context_length)
    return flags.lengths or fitting or (info.context_length,), info


def _offloaded(
    flags: DecodeFlags, subject: BenchModel, plans: Mapping[str, Plan], words: str, bench: DecodeBench
) -> BenchRun:
    from sparsekv.bench.offload import COLUMNS, bench_offload

    assert flags.offload is not None
    share = flags.miss_rate
    rows = list(bench_offload(subject, plans, words, bench, flags.offload, share, BarProgress()))
    title = f"{title_of(subject, rows[0], words)}; --offload {flags.offload}"
    title += f"; choices swapped for lists with {share:.3g} of new tokens a step" if share else ""
    return BenchRun(rows, title, COLUMNS, "device_ms" if flags.offload == "never" else "offloaded_ms")


# --- headline ---------------------------------------------------------------------------------------------------------

_README = {32768: 0.20, 131072: 0.08, 524288: 0.04, 1048576: 0.03}  # densities of whole prompts
_ACCEPTED = 0.975


class HeadlineFlags(Timed, Device, Output):
    """Holds what `bench headline` is asked to do."""

    model: Annotated[str, Flag("Alias, hub id, folder or GGUF file: random weights of its shape.")] = "llama3-8b"
    lengths: BenchLengths = ()


def headline(flags: HeadlineFlags) -> None:
    """The README's table but for vLLM's rows (`bench serve`): kernels, prefill, decode, drafts, with random weights.

    Attention of a layer at a density of 0.05; whole prompts; tokens by a plan; and tokens that a plan drafts and dense
    attention checks, where 97.5% of drafts are taken to count.
    """
    from sparsekv.bench.random_model import describe_named
    from sparsekv.planner.settled import density_for

    hardware, _ = device_and_dtype(settings_of(flags))
    lengths = flags.lengths or _PREFILL_LENGTHS[hardware.type]
    (group, *_) = describe_named(flags.model, True).attention
    timed: dict[str, Any] = {"lengths": lengths, "repeats": flags.repeats, "seed": flags.seed, "device": flags.device}
    shape: dict[str, Any] = {"heads": group.heads, "kv_heads": group.kv_heads, "head_dim": group.head_dim}
    model: dict[str, Any] = {"model": flags.model, "random_weights": True}
    shares = tuple(_README.get(length) or density_for(length) for length in lengths)
    parts = (
        measure_kernels(KernelFlags(**timed, **shape, patterns=("vertical_slash",))),
        measure_prefill(PrefillFlags(**timed, **model, density=shares)),
        measure_decode(DecodeFlags(**timed, **model)),
        measure_decode(DecodeFlags(**timed, **model, exact=True, acceptance=_ACCEPTED)),
    )
    print_rows(*parts, as_json=flags.as_json)


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
    (peers, "Published methods beside a plan: time, divergence, RULER."),
    (headline, "The README's table, in one go."),
):
    app.command(run.__name__, short_help=summary)(command(run))
