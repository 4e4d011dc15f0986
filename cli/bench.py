"""`sparsekv bench`: kernels, and the prefill of a whole model, against the fastest dense kernel of the same process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekv.cli.options import (
    AllowMismatch,
    Backend,
    Chunk,
    Device,
    Dtype,
    Json,
    PlanFile,
    Seed,
    Subject,
    Tile,
    device_and_dtype,
    lengths_from,
    names_from,
    settings,
    shares_from,
    tile_from,
)
from sparsekv.cli.output import columns, emit, emit_json, size, tell
from sparsekv.plans.errors import UsageError

if TYPE_CHECKING:
    import torch

    from sparsekv.planner.bench.kernel_bench import KernelRow
    from sparsekv.planner.bench.prefill_bench import PrefillRow
    from sparsekv.planner.bench.random_model import BenchModel
    from sparsekv.planner.bench.timing import DensePeers
    from sparsekv.plans.schema import Plan

app = typer.Typer(help="Time kernels or a model's prefill against the fastest dense kernel.", no_args_is_help=True)

_LENGTHS = {"cuda": "8k,32k,128k", "cpu": "4k,8k"}
_PREFILL_LENGTHS = {"cuda": "8k,32k", "cpu": "4k"}

Lengths = Annotated[
    str | None, typer.Option(metavar="LIST", help="Tokens, such as 8k,32k; by default as fits the device.")
]
Repeats = Annotated[int, typer.Option(min=1, metavar="N", help="Samples; medians are shown.")]


@app.command("kernels")
def kernels(
    lengths: Lengths = None,
    density: Annotated[
        str, typer.Option(metavar="LIST", help="Densities to plant structure at, such as 5% or 0.05,0.2.")
    ] = "0.05",
    patterns: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help="vertical_slash, a_shape, block_sparse, adaptive, several joined by +; mixed is the first three.",
        ),
    ] = "mixed,vertical_slash",
    backend: Annotated[
        str | None, typer.Option(metavar="LIST", help="flash, triton, cpu; by default all that can run.")
    ] = None,
    builder: Annotated[Literal["auto", "torch", "triton"], typer.Option(help="What builds the indices.")] = "auto",
    last_q: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Queries that vertical-slash heads sample.")
    ] = None,
    heads: Annotated[int, typer.Option(min=1, metavar="N", help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, metavar="N", help="Heads of K and V.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, metavar="N", help="Size of a head.")] = 128,
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

    place, precision = device_and_dtype(device, dtype)
    bench = KernelBench(
        lengths=lengths_from(lengths or _default(_LENGTHS, place), "--lengths"),
        densities=shares_from(density, "--density"),
        backends=names_from(backend, "--backend") if backend else (),
        patterns=names_from(patterns, "--patterns"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tile=tile_from(tile),
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
        emit(_text(rows, _KERNEL_COLUMNS, left=3))
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
        typer.Option(metavar="LIST", help="Without a plan, of one made by hand: one, or one a length."),
    ] = None,
    patterns: Annotated[
        str | None, typer.Option(metavar="LIST", help="Of a plan made by hand, dealt out to the heads.")
    ] = None,
    tile: Tile = None,
    layers: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="With random weights: only so many layers.")
    ] = None,
    dense_layers: Annotated[
        int | None,
        typer.Option(min=1, metavar="N", help="Measure dense on N layers and multiply; rows say so."),
    ] = None,
    kv_host_layers: Annotated[
        int | None,
        typer.Option(min=0, metavar="N", help="Layers whose keys and values go to host memory."),
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
    from sparsekv.planner.bench.prefill_bench import PrefillBench, bench_prefill
    from sparsekv.planner.progress import BarProgress

    place, precision = device_and_dtype(device, dtype)
    wanted = lengths_from(lengths or _default(_PREFILL_LENGTHS, place), "--lengths")
    if layers is not None and not random_weights:
        raise UsageError("expected --layers only with --random-weights, found it alone; add --random-weights")
    given = _given_plan(model, plan, density, patterns, layers)
    _check_read(given is not None, tile, allow_mismatch)
    subject = _subject(model, random_weights, place, precision, max(wanted), layers, seed)
    used, words = (given, "given") if given else _made_by_hand(subject, wanted, density, patterns, tile)
    bench = PrefillBench(
        wanted, repeats, chunk, settings(backend=backend).backend, kv_host_layers, dense_layers, seed, allow_mismatch
    )
    rows = list(bench_prefill(subject, used, words, bench, BarProgress()))
    if as_json:
        emit_json([row.as_data() for row in rows])
    else:
        emit(f"{subject.name}, {rows[0].device}, {rows[0].dtype}; weights: {subject.weights}; plan: {words}")
        emit(_text(rows, _PREFILL_COLUMNS, left=2))
    _end(rows)


# --- what is asked for ------------------------------------------------------------------------------------------------


def _default(lengths: dict[str, str], place: torch.device) -> str:
    return lengths["cuda" if place.type == "cuda" else "cpu"]


def _given_plan(
    model: str, plan: Path | None, density: str | None, patterns: str | None, layers: int | None
) -> Plan | None:
    """The plan that is named, or the folder's own; None where one is to be made by hand."""
    by_hand = density is not None or patterns is not None
    if by_hand and plan is not None:
        raise UsageError("expected --plan, or --density and --patterns of a plan made by hand, found both; choose one")
    return None if by_hand or (layers and plan is None) else Subject.named(model, plan, None).plan


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
    from sparsekv.planner.bench.random_model import hand_plan
    from sparsekv.planner.options import density_for

    families = names_from(patterns, "--patterns") if patterns else ("vertical_slash", "a_shape")
    shares = shares_from(density, "--density") if density else tuple(density_for(length) for length in lengths)
    return hand_plan(subject.info, lengths, shares, tile_from(tile), families)


def _end(rows: Sequence[KernelRow | PrefillRow]) -> None:
    """A bench that measured nothing sparse has failed."""
    if not any(row.sparse_ms is not None for row in rows):
        tell("nothing could be measured; the notes say why")
        raise typer.Exit(1)


# --- what is printed --------------------------------------------------------------------------------------------------


def _recall(part: str) -> Callable[[KernelRow], str]:
    return lambda row: _number(getattr(row.recall, part, None), ".3f")


_KERNEL_COLUMNS: dict[str, Callable[[KernelRow], str]] = {
    "pattern": lambda row: row.name,
    "length": lambda row: _tokens(row.length),
    "backend": lambda row: row.backend,
    "density": lambda row: _number(row.density, ".3f"),
    "dense ms": lambda row: _number(row.dense_ms, ".3f"),
    "index": lambda row: _number(row.index_ms, ".3f"),
    "attention": lambda row: _number(row.attention_ms, ".3f"),
    "whole": lambda row: _number(row.sparse_ms, ".3f"),
    "speedup": lambda row: _number(row.speedup, ".2f"),
    "TFLOP/s": lambda row: _number(row.tflops, ".3g"),
    "dense": lambda row: _number(row.dense_tflops, ".3g"),
    "columns": _recall("columns"),
    "diagonals": _recall("diagonals"),
    "tiles": _recall("tiles"),
    "mass": lambda row: _number(row.mass, ".3f"),
    "error": lambda row: _number(row.error, ".1e"),
}
_PREFILL_COLUMNS: dict[str, Callable[[PrefillRow], str]] = {
    "length": lambda row: _tokens(row.length),
    "backend": lambda row: row.backend,
    "density": lambda row: _number(row.density, ".3f"),
    "dense s": lambda row: _number(row.dense_ms and row.dense_ms / 1e3, ".3f"),
    "sparse s": lambda row: _number(row.sparse_ms and row.sparse_ms / 1e3, ".3f"),
    "speedup": lambda row: _number(row.speedup, ".2f"),
    "TFLOP/s": lambda row: _number(row.tflops, ".3g"),
    "dense peak": lambda row: _bytes(row.dense_peak),
    "sparse peak": lambda row: _bytes(row.sparse_peak),
    "KV device": lambda row: _bytes(row.kv_device),
    "KV host": lambda row: _bytes(row.kv_host),
}


def _text(rows: Sequence[Any], shown: Mapping[str, Callable[[Any], str]], left: int) -> str:
    """Dense kernels, a line a case (all but the first `left` columns aligned to the right), and notes."""
    lines = [tuple(show(row) for show in shown.values()) for row in rows]
    table = columns([tuple(shown), *lines], right=range(left, len(shown)))
    notes = dict.fromkeys(f"{row.backend}: {row.note}" for row in rows if row.note)
    return "\n".join([*_dense_lines(rows), "", table, *notes])


def _dense_lines(rows: Sequence[KernelRow | PrefillRow]) -> Iterator[str]:
    """Every dense kernel, once a length; ratios are against the first named."""
    seen: dict[int, DensePeers] = {row.length: row.dense_peers for row in rows if row.dense_peers}
    for length, peers in seen.items():
        timed = sorted(peers.timed_ms.items(), key=lambda item: item[1])
        named = [f"{name} {ms:.3f} ms" for name, ms in timed]
        yield f"dense at {_tokens(length)}: {', '.join(named) or 'none ran'}"
        for name, why in peers.refused.items():
            yield f"  not {name}: {why}"


def _tokens(length: int) -> str:
    from sparsekv.plans.types import format_length

    return format_length(length)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _bytes(count: int | None) -> str:
    return "-" if count is None else size(count)
