"""`sparsekv bench`: kernels, and prefill and decode of a whole model, against the fastest dense one of the process."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import typer
from pydantic import Field, model_validator

from sparsekv.cli.arguments import AllowMismatch, Output, Subject, device_and_dtype, settings_of
from sparsekv.cli.bench_decode import decode
from sparsekv.cli.bench_rows import (
    Benched,
    BenchLengths,
    HandDensity,
    HandTile,
    Narrow,
    Timed,
    print_rows,
    subject_of,
    title_of,
)
from sparsekv.cli.bench_serve import serve
from sparsekv.cli.commands import command
from sparsekv.cli.output import tell
from sparsekv.planner.flags import Count, Flag, Names, Shares, Tile
from sparsekv.planner.options import Device, Hardware, Precision, PrefillChunk
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import PATTERNS, TileShape

_LENGTHS = {"cuda": (8192, 32768, 131072), "cpu": (4096, 8192)}
_PREFILL_LENGTHS = {"cuda": (8192, 32768), "cpu": (4096,)}
_PLANTED = [name for name, kind in PATTERNS.items() if kind.planting]


class KernelFlags(Timed, Device, Precision, Output):
    """What `bench kernels` is asked to do."""

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
    from sparsekv.bench.kernels import COLUMNS, PLANTED_NOTE, KernelBench, bench_kernels
    from sparsekv.planner.progress import BarProgress

    tile = flags.tile or TileShape()
    bench = KernelBench(
        lengths=flags.lengths or _LENGTHS[hardware.type],
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


class PrefillFlags(Benched, Timed, Hardware, AllowMismatch, Output):
    """What `bench prefill` is asked to do."""

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
    used = None if by_hand else Subject.named(flags.model, flags.plan, None).plan
    if used and flags.tile is not None:
        raise UsageError(
            "expected --tile of a plan made by hand, found a plan, which has its own tiles; leave --tile out, or add "
            "--density"
        )
    if not used and flags.allow_mismatch:
        raise UsageError("expected a plan beside --allow-mismatch, found none: one made by hand fits; leave it out")
    machine = settings_of(flags)
    hardware, precision = device_and_dtype(machine)
    wanted = flags.lengths or _PREFILL_LENGTHS[hardware.type]
    from sparsekv.bench.hand_plans import FAMILIES, hand_plan
    from sparsekv.bench.prefill import COLUMNS, PrefillBench, bench_prefill
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.settled import density_for

    how = {"longest": max(wanted), "layers": flags.layers, "seed": flags.seed}
    subject, words = subject_of(flags, hardware, precision, **how), "given"
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
