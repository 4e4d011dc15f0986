"""`sparsekv bench`: kernels, and the prefill of a whole model, against the fastest dense kernel of the same process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekv.cli.bench_text import kernel_text, prefill_text
from sparsekv.cli.options import AllowMismatch, Backend, Chunk, Device, Dtype, Json, PlanFile, Seed
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.values import lengths_from, names_from, shares_from, tile_from
from sparsekv.plans.errors import UsageError

if TYPE_CHECKING:
    import torch

    from sparsekv.planner.bench.kernel_bench import KernelRow
    from sparsekv.planner.bench.prefill_bench import PrefillRow
    from sparsekv.planner.bench.random_model import BenchModel
    from sparsekv.plans.schema import Plan

app = typer.Typer(help="Time kernels or a model's prefill against the fastest dense kernel.", no_args_is_help=True)

_LENGTHS = {"cuda": "8k,32k,128k", "cpu": "4k,8k"}
_PREFILL_LENGTHS = {"cuda": "8k,32k", "cpu": "4k"}

Lengths = Annotated[
    str | None, typer.Option("--lengths", metavar="LIST", help="Tokens, such as 8k,32k; by default as fits the device.")
]
Tile = Annotated[Literal["64", "128"] | None, typer.Option("--tile", help="Rows and columns of a tile.")]
Repeats = Annotated[int, typer.Option("--repeats", min=1, metavar="N", help="Samples; medians are shown.")]


@app.command("kernels")
def kernels(
    lengths: Lengths = None,
    density: Annotated[
        str, typer.Option("--density", metavar="LIST", help="Densities to plant structure at, such as 5% or 0.05,0.2.")
    ] = "0.05",
    patterns: Annotated[
        str,
        typer.Option(
            "--patterns", metavar="LIST", help="vertical_slash, a_shape, block_sparse, adaptive; mixed is all of them."
        ),
    ] = "mixed,vertical_slash",
    backend: Annotated[
        str | None, typer.Option("--backend", metavar="LIST", help="flash, triton, cpu; by default all that can run.")
    ] = None,
    builder: Annotated[
        Literal["auto", "torch", "triton"], typer.Option("--builder", help="What builds the indices.")
    ] = "auto",
    last_q: Annotated[
        int | None, typer.Option("--last-q", min=1, metavar="N", help="Queries that vertical-slash heads sample.")
    ] = None,
    heads: Annotated[int, typer.Option("--heads", min=1, metavar="N", help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option("--kv-heads", min=1, metavar="N", help="Heads of K and V.")] = 8,
    head_dim: Annotated[int, typer.Option("--head-dim", min=1, metavar="N", help="Size of a head.")] = 128,
    tile: Tile = "128",
    repeats: Repeats = 3,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    as_json: Json = False,
) -> None:
    """Index building and sparse attention of one layer on planted structure."""
    from sparsekv.planner.bench.kernel_bench import PLANTED_NOTE, KernelBench, bench_kernels
    from sparsekv.planner.progress import BarProgress

    place, precision = _place(device, dtype)
    bench = KernelBench(
        lengths=lengths_from(lengths or _default(_LENGTHS, place), "--lengths"),
        densities=shares_from(density, "--density"),
        backends=names_from(backend, "--backend") if backend else (),
        patterns=names_from(patterns, "--patterns"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tile=_tile(tile),
        builder=builder,
        last_q=last_q,
        device=place,
        dtype=precision,
        seed=seed,
        rounds=repeats,
    )
    rows = list(bench_kernels(bench, BarProgress()))
    if as_json:
        tell(PLANTED_NOTE)
        emit_json([row.as_data() for row in rows])
    else:
        emit(f"{rows[0].device}, {bench.shape}, {bench.tile.key} tiles\n{PLANTED_NOTE}")
        emit(kernel_text(rows))
    _end(rows)


@app.command("prefill")
def prefill(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, hub id or folder.")],
    plan: PlanFile = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights of the model's shape, made on the device.")
    ] = False,
    lengths: Lengths = None,
    density: Annotated[
        str | None,
        typer.Option("--density", metavar="LIST", help="Without a plan, of one made by hand: one, or one a length."),
    ] = None,
    patterns: Annotated[
        str | None, typer.Option("--patterns", metavar="LIST", help="Of a plan made by hand, dealt out to the heads.")
    ] = None,
    tile: Tile = None,
    layers: Annotated[
        int | None, typer.Option("--layers", min=1, metavar="N", help="With random weights: only so many layers.")
    ] = None,
    dense_layers: Annotated[
        int | None,
        typer.Option("--dense-layers", min=1, metavar="N", help="Measure dense on N layers and multiply; rows say so."),
    ] = None,
    kv_host_layers: Annotated[
        int | None,
        typer.Option("--kv-host-layers", min=0, metavar="N", help="Layers whose keys and values go to host memory."),
    ] = None,
    chunk: Chunk = None,
    repeats: Repeats = 3,
    seed: Seed = 0,
    device: Device = None,
    dtype: Dtype = None,
    backend: Backend = None,
    allow_mismatch: AllowMismatch = False,
    as_json: Json = False,
) -> None:
    """A model from its tokens to the last logits, by its plan and dense, in turn."""
    from sparsekv.cli.subject import backend_named
    from sparsekv.planner.bench.prefill_bench import PrefillBench, bench_prefill
    from sparsekv.planner.progress import BarProgress

    place, precision = _place(device, dtype)
    wanted = lengths_from(lengths or _default(_PREFILL_LENGTHS, place), "--lengths")
    if layers is not None and not random_weights:
        raise UsageError("expected --layers only with --random-weights, found it alone; add --random-weights")
    given = _given_plan(model, plan, density, patterns, layers)
    _check_read(given is not None, tile, allow_mismatch)
    subject = _subject(model, random_weights, place, precision, max(wanted), layers, seed)
    used, words = (given, "given") if given else _made_by_hand(subject, wanted, density, patterns, tile)
    bench = PrefillBench(
        wanted, repeats, chunk, backend_named(backend), kv_host_layers, dense_layers, seed, allow_mismatch
    )
    rows = list(bench_prefill(subject, used, words, bench, BarProgress()))
    if as_json:
        emit_json([row.as_data() for row in rows])
    else:
        emit(f"{subject.name}, {rows[0].device}, {rows[0].dtype}; weights: {subject.weights}; plan: {words}")
        emit(prefill_text(rows))
    _end(rows)


# --- what is asked for ------------------------------------------------------------------------------------------------


def _place(device: str | None, dtype: str | None) -> tuple[torch.device, torch.dtype]:
    """Flags over SPARSEKV_* over bfloat16 on a GPU and float32 elsewhere."""
    import torch

    from sparsekv.runtime.hf.load import torch_device
    from sparsekv.runtime.settings import read_settings

    settings = read_settings()
    place = torch_device(device or settings.device)
    name = dtype or settings.dtype
    if name == "auto":
        name = "bfloat16" if place.type == "cuda" else "float32"
    precision: torch.dtype = getattr(torch, name)
    return place, precision


def _default(lengths: dict[str, str], place: torch.device) -> str:
    return lengths["cuda" if place.type == "cuda" else "cpu"]


def _tile(side: str | None) -> Any:
    from sparsekv.plans.patterns import TileShape

    return tile_from(side) or TileShape()


def _given_plan(
    model: str, plan: Path | None, density: str | None, patterns: str | None, layers: int | None
) -> Plan | None:
    """The plan that is named, or the folder's own; None where one is to be made by hand."""
    from sparsekv.cli.subject import subject_of

    by_hand = density is not None or patterns is not None
    if by_hand and plan is not None:
        raise UsageError("expected --plan, or --density and --patterns of a plan made by hand, found both; choose one")
    return None if by_hand or (layers and plan is None) else subject_of(model, plan, None).plan


def _check_read(given: bool, tile: str | None, allow_mismatch: bool) -> None:
    """Refuses what only a plan made by hand reads, or only one that is given."""
    if given and tile is not None:
        raise UsageError(
            "expected --tile of a plan made by hand, found a plan, which has its own tiles; leave --tile out, or add "
            "--density"
        )
    if not given and allow_mismatch:
        raise UsageError("expected a plan beside --allow-mismatch, found none: one made by hand fits; leave it out")


def _subject(
    model: str,
    random_weights: bool,
    place: torch.device,
    precision: torch.dtype,
    longest: int,
    layers: int | None,
    seed: int,
) -> BenchModel:
    from sparsekv.planner.bench.random_model import BenchModel, random_model
    from sparsekv.runtime.hf.describe import dtype_name
    from sparsekv.runtime.hf.load import load_model

    if random_weights:
        made = random_model(model, device=place, dtype=precision, longest=longest, layers=layers, seed=seed)
        tell(made.note)
        return made
    return BenchModel.of(load_model(model, device=str(place), dtype=dtype_name(precision)), model)


def _made_by_hand(
    subject: BenchModel, lengths: Sequence[int], density: str | None, patterns: str | None, tile: str | None
) -> tuple[Plan, str]:
    from sparsekv.planner.bench.random_model import hand_plan, in_words
    from sparsekv.planner.bench.structure import FAMILIES
    from sparsekv.planner.options import density_for

    families = names_from(patterns, "--patterns") if patterns else ("vertical_slash", "a_shape")
    known = [family for family in FAMILIES if family in families]
    if len(known) < len(families):
        raise UsageError(f"--patterns: expected {', '.join(FAMILIES)}, found {', '.join(families)}")
    shares = shares_from(density, "--density") if density else tuple(density_for(length) for length in lengths)
    shape = _tile(tile)
    paired = sorted(zip(lengths, shares * len(lengths) if len(shares) == 1 else shares, strict=False))
    if len(shares) not in (1, len(lengths)):
        raise UsageError(f"--density: expected one, or one for each of {len(lengths)} lengths, found {len(shares)}")
    made = hand_plan(subject.info, [length for length, _ in paired], [share for _, share in paired], shape, known)
    return made, in_words(known, [share for _, share in paired], shape)


def _end(rows: Sequence[KernelRow | PrefillRow]) -> None:
    """A bench that measured nothing sparse has failed."""
    if not any(row.sparse_ms is not None for row in rows):
        tell("nothing could be measured; the notes say why")
        raise typer.Exit(1)
