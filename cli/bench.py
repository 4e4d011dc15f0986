"""`sparsekv bench`: kernels, and prefill and decode of a whole model, against the fastest dense one of the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekv.cli import arguments
from sparsekv.cli.output import columns, emit, emit_json, size, tell
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import PATTERNS

if TYPE_CHECKING:
    from sparsekv.bench.decode import DecodeRow
    from sparsekv.bench.harness import DensePeers
    from sparsekv.bench.kernels import KernelRow
    from sparsekv.bench.offload import OffloadRow
    from sparsekv.bench.prefill import PrefillRow

app = typer.Typer(
    help="Time kernels, a model's prefill or decode, or requests through vLLM, against dense.", no_args_is_help=True
)

_LENGTHS = {"cuda": "8k,32k,128k", "cpu": "4k,8k"}
_PLANTED = [name for name, kind in PATTERNS.items() if kind.planting]
_WIDEST = 1024  # heads, their size, layers: as in a plan
_PREFILL_LENGTHS = {"cuda": "8k,32k", "cpu": "4k"}
_DECODE_LENGTHS = {"cuda": "8k,32k,128k,512k", "cpu": "8k"}

Lengths = Annotated[
    str | None,
    typer.Option(
        "--lengths", "--length", metavar="LIST", help="Tokens, such as 8k,32k; by default as fits the device."
    ),
]


@app.command("kernels", short_help="Index building and attention of one layer, without a model.")
def kernels(
    lengths: Lengths = None,
    density: Annotated[
        str,
        typer.Option(
            "--density", "--densities", metavar="LIST", help="Densities to plant structure at, such as 5% or 0.05,0.2."
        ),
    ] = "0.05",
    patterns: Annotated[
        str,
        typer.Option(
            metavar="LIST",
            help=f"{', '.join(_PLANTED)}, or several joined by +; mixed is the three of MInference 1.0.",
        ),
    ] = "mixed,vertical_slash",
    backend: Annotated[
        str | None, typer.Option(metavar="LIST", help="flash, triton, cpu; by default all that can run.")
    ] = None,
    builder: Annotated[Literal["auto", "torch", "triton"], typer.Option(help="What builds the indices.")] = "auto",
    last_q: Annotated[
        int | None,
        typer.Option(min=1, max=arguments.MOST, metavar="N", help="Queries that vertical-slash heads sample."),
    ] = None,
    heads: Annotated[int, typer.Option(min=1, max=_WIDEST, metavar="N", help="Query heads.")] = 32,
    kv_heads: Annotated[int, typer.Option(min=1, max=_WIDEST, metavar="N", help="Heads of K and V.")] = 8,
    head_dim: Annotated[int, typer.Option(min=1, max=_WIDEST, metavar="N", help="Size of a head.")] = 128,
    tile: arguments.Tile = "128",
    repeats: arguments.Repeats = 3,
    seed: arguments.Seed = 0,
    device: arguments.Device = None,
    dtype: arguments.Dtype = None,
    as_json: arguments.Json = False,
) -> None:
    """Index building and sparse attention of one layer on planted structure.

    `asked` is the density asked for, `density` what was computed; `whole` is index and attention timed as one.
    `columns`, `diagonals` and `tiles` are the shares of what was planted that the index found, `mass` the share of the
    softmax that the computed positions hold on sampled rows, `error` the largest difference from float32 attention over
    the same index.
    """
    given = None if lengths is None else arguments.lengths_from(lengths, "--lengths")
    densities = arguments.shares_from(density, "--density")
    hardware, precision = arguments.device_and_dtype(device, dtype)
    from sparsekv.bench.kernels import PLANTED_NOTE, KernelBench, bench_kernels
    from sparsekv.planner.progress import BarProgress

    bench = KernelBench(
        lengths=given or arguments.lengths_from(_LENGTHS[hardware.type], "--lengths"),
        densities=densities,
        backends=() if backend is None else arguments.names_from(backend, "--backend"),
        patterns=arguments.names_from(patterns, "--patterns"),
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        tile=arguments.tile_from(tile),
        builder=builder,
        last_q=last_q,
        device=hardware,
        dtype=precision,
        seed=seed,
        rounds=repeats,
    )
    rows = list(bench_kernels(bench, BarProgress()))
    if as_json:
        tell(PLANTED_NOTE)
    shape = f"{heads}/{kv_heads} heads of size {head_dim}, {rows[0].dtype}, {tile} tiles"
    _print(rows, f"{rows[0].device}, {shape}\n{PLANTED_NOTE}", _KERNEL_COLUMNS, 3, as_json)


@app.command("prefill", short_help="A model's prefill, by its plan and dense.")
def prefill(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, hub id or folder.")],
    plan: arguments.PlanFile = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights of the model's shape, made on the device.")
    ] = False,
    lengths: Lengths = None,
    density: arguments.HandDensity = None,
    patterns: Annotated[
        str | None, typer.Option(metavar="LIST", help="Of a plan made by hand, dealt out to the heads.")
    ] = None,
    tile: arguments.Tile = None,
    layers: Annotated[
        int | None, typer.Option(min=1, max=_WIDEST, metavar="N", help="With random weights: only so many layers.")
    ] = None,
    dense_layers: Annotated[
        int | None,
        typer.Option(min=1, max=_WIDEST, metavar="N", help="Measure dense on N layers and multiply; rows say so."),
    ] = None,
    kv_host_layers: Annotated[
        int | None,
        typer.Option(min=0, max=_WIDEST, metavar="N", help="Layers whose keys and values go to host memory."),
    ] = None,
    chunk: arguments.Chunk = None,
    repeats: arguments.Repeats = 3,
    seed: arguments.Seed = 0,
    device: arguments.Device = None,
    dtype: arguments.Dtype = None,
    backend: arguments.Backend = None,
    allow_mismatch: arguments.AllowMismatch = False,
    as_json: arguments.Json = False,
) -> None:
    """A model from its tokens to the last logits, by its plan and dense, in turn."""
    given = None if lengths is None else arguments.lengths_from(lengths, "--lengths")
    named = arguments.settings(device, dtype, backend).backend
    if layers is not None and not random_weights:
        raise UsageError("expected --layers only with --random-weights, found it alone; add --random-weights")
    by_hand = density is not None or patterns is not None
    if by_hand and plan is not None:
        raise UsageError("expected --plan, or --density and --patterns of a plan made by hand, found both; choose one")
    used = None if by_hand or (layers and plan is None) else arguments.Subject.named(model, plan, None).plan
    if used and tile is not None:
        raise UsageError(
            "expected --tile of a plan made by hand, found a plan, which has its own tiles; leave --tile out, or add "
            "--density"
        )
    if not used and allow_mismatch:
        raise UsageError("expected a plan beside --allow-mismatch, found none: one made by hand fits; leave it out")
    hardware, precision = arguments.device_and_dtype(device, dtype)
    wanted = given or arguments.lengths_from(_PREFILL_LENGTHS[hardware.type], "--lengths")
    from sparsekv.bench.prefill import PrefillBench, bench_prefill
    from sparsekv.bench.random_model import BenchModel, hand_plan, random_model
    from sparsekv.planner.options import density_for
    from sparsekv.planner.progress import BarProgress
    from sparsekv.runtime.model_config import dtype_name

    if random_weights:
        subject = random_model(model, device=hardware, dtype=precision, longest=max(wanted), layers=layers, seed=seed)
        tell(subject.note)
    else:
        loaded = arguments.Subject(model).load(str(hardware), dtype_name(precision))
        subject = BenchModel(loaded.model, loaded.info, model, "loaded")
    words = "given"
    if used is None:
        families = ("vertical_slash", "a_shape") if patterns is None else arguments.names_from(patterns, "--patterns")
        shares = tuple(map(density_for, wanted)) if density is None else arguments.shares_from(density, "--density")
        used, words = hand_plan(subject.info, wanted, shares, arguments.tile_from(tile), families)
    bench = PrefillBench(wanted, repeats, chunk, named, kv_host_layers, dense_layers, seed, allow_mismatch)
    rows = list(bench_prefill(subject, used, words, bench, BarProgress()))
    title = f"{subject.name}, {rows[0].device}, {rows[0].dtype}; weights: {subject.weights}; plan: {words}"
    _print(rows, title, _PREFILL_COLUMNS, 2, as_json)


@app.command("decode", short_help="A model's decode steps, by a plan and dense.")
def decode(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, hub id or folder.")],
    plan: arguments.PlanFile = None,
    random_weights: Annotated[
        bool, typer.Option("--random-weights", help="Random weights of the model's shape, made on the device.")
    ] = False,
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            "--length",
            metavar="LIST",
            help="Cached tokens a row, such as 8k,512k; by default as fits model and device.",
        ),
    ] = None,
    batch: Annotated[str, typer.Option(metavar="LIST", help="Rows decoded at once, such as 1,4.")] = "1",
    budget: Annotated[
        str | None,
        typer.Option(
            "--budget",
            "--decode-budget",
            metavar="N",
            help="Without a plan: tokens that a filter layer chooses; 2k by default.",
        ),
    ] = None,
    filters: Annotated[
        str | None,
        typer.Option(
            "--filters",
            "--filter-layers",
            metavar="LAYERS",
            help="Without a plan: filter layers; three by depth by default.",
        ),
    ] = None,
    selector: Annotated[
        str | None, typer.Option(metavar="LIST", help="Without a plan: last, uniform, exponential; last by default.")
    ] = None,
    window: Annotated[
        int | None,
        typer.Option(min=1, max=_WIDEST, metavar="N", help="Queries that uniform and exponential selectors weigh."),
    ] = None,
    offload: Annotated[
        Literal["auto", "always", "never"] | None,
        typer.Option(
            help="In place of dense: the plan with layers in host memory (as `run --offload`) against the plan with "
            "everything on the device."
        ),
    ] = None,
    miss_rate: Annotated[
        str | None,
        typer.Option(
            metavar="SHARE",
            help="With --offload on a GPU: the share of the chosen tokens that is new in each step. Random weights "
            "choose at random.",
        ),
    ] = None,
    repeats: arguments.Repeats = 3,
    seed: arguments.Seed = 0,
    device: arguments.Device = None,
    dtype: arguments.Dtype = None,
    backend: arguments.Backend = None,
    allow_mismatch: arguments.AllowMismatch = False,
    as_json: arguments.Json = False,
) -> None:
    """Attention of one step, and whole tokens, by a plan and dense, in turn."""
    given = None if lengths is None else arguments.lengths_from(lengths, "--lengths")
    batches = arguments.counts_from(batch, "--batch")
    named = arguments.settings(device, dtype, backend).backend
    by_hand = any(option is not None for option in (budget, filters, selector, window))
    if by_hand and plan is not None:
        raise UsageError(
            "expected --plan, or --budget, --filters, --selector and --window of a plan made by hand, found both; "
            "choose one"
        )
    used = None if by_hand else arguments.Subject.named(model, plan, None).plan
    if not used and allow_mismatch:
        raise UsageError("expected a plan beside --allow-mismatch, found none: one made by hand fits; leave it out")
    hardware, precision = arguments.device_and_dtype(device, dtype)
    from sparsekv.bench.decode import RANDOM_NOTE, DecodeBench, bench_decode, check_decode
    from sparsekv.bench.random_model import BenchModel, HandDecode, describe_named, random_model
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.patterns import tokens
    from sparsekv.runtime.model_config import dtype_name

    if miss_rate is not None and offload is None:
        raise UsageError("expected --miss-rate beside --offload, found it alone; add --offload always")
    shares = () if miss_rate is None else arguments.shares_from(miss_rate, "--miss-rate")
    if len(shares) > 1:
        raise UsageError(f"expected one share for --miss-rate, found {miss_rate!r:.40}")
    if shares and hardware.type != "cuda":
        raise UsageError(f"expected a GPU for --miss-rate, whose kernel runs there, found {hardware}; leave it out")
    hand = HandDecode(
        tokens(2048) if budget is None else arguments.budget_from(budget, "--budget"),
        () if filters is None else arguments.layers_from(filters, "--filters"),
        ("last",) if selector is None else arguments.names_from(selector, "--selector"),
        window,
        offload is not None,
    )
    info = describe_named(model, random_weights)
    usual = arguments.lengths_from(_DECODE_LENGTHS[hardware.type], "--lengths")
    if random_weights:
        wanted = given or usual
        info = info.model_copy(update={"context_length": max(*wanted, info.context_length)})
    else:
        wanted = given or tuple(n for n in usual if n <= info.context_length) or (info.context_length,)
    bench = DecodeBench(wanted, batches, repeats, backend=named, seed=seed, allow_mismatch=allow_mismatch)
    plans, words = ({"plan": used}, "given") if used else hand.plans(info, max(wanted))
    check_decode(info, plans, bench)
    if offload is not None and any(one.decode and one.decode.offload is None for one in plans.values()):
        raise UsageError(
            "expected a plan that permits layers to be in host memory, found one that does not; compile it with "
            "`plan --offload`, or make one by hand: --budget 2k"
        )
    if shares:
        from sparsekv.bench.offload import check_miss_rate

        check_miss_rate(info, plans, bench)
    if random_weights:
        # Larger cases may not fit, or only those by a plan that offloads: their rows say so.
        offloads = any(one.decode and one.decode.offload for one in plans.values())
        least = 0 if offloads else min(wanted) * min(batches)
        subject = random_model(model, device=hardware, dtype=precision, longest=max(wanted), seed=seed, cached=least)
        tell(subject.note)
    else:
        loaded = arguments.Subject(model).load(str(hardware), dtype_name(precision))
        subject = BenchModel(loaded.model, loaded.info, model, "loaded")
    if offload is not None:
        from sparsekv.bench.offload import bench_offload

        found = list(bench_offload(subject, plans, words, bench, offload, shares[0] if shares else None, BarProgress()))
        _print_offload(found, as_json)
        return
    rows = list(bench_decode(subject, plans, words, bench, BarProgress()))
    if as_json:
        tell(RANDOM_NOTE)
    title = f"{subject.name}, {rows[0].device}, {rows[0].dtype}; weights: {subject.weights}; plan: {words}"
    _print(rows, f"{title}\n{RANDOM_NOTE}", _DECODE_COLUMNS, 3, as_json)


# --- what is printed --------------------------------------------------------------------------------------------------


def _recall(part: str) -> Callable[[KernelRow], str]:
    return lambda row: _number(getattr(row.recall, part, None), ".3f")


_KERNEL_COLUMNS: dict[str, Callable[[KernelRow], str]] = {
    "pattern": lambda row: row.name,
    "length": lambda row: _tokens(row.length),
    "backend": lambda row: row.backend,
    "asked": lambda row: _number(row.target_density, ".3g"),
    "density": lambda row: _number(row.density, ".3f"),
    "dense ms": lambda row: _number(row.dense_ms, ".3f"),
    "index ms": lambda row: _number(row.index_ms, ".3f"),
    "attention ms": lambda row: _number(row.attention_ms, ".3f"),
    "whole ms": lambda row: _number(row.sparse_ms, ".3f"),
    "speedup": lambda row: _number(row.speedup, ".2f"),
    "TFLOP/s": lambda row: _number(row.tflops, ".3g"),
    "dense TFLOP/s": lambda row: _number(row.dense_tflops, ".3g"),
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
    "dense peak": lambda row: _bytes(row.dense_peak_bytes),
    "sparse peak": lambda row: _bytes(row.sparse_peak_bytes),
    "KV device": lambda row: _bytes(row.kv_bytes_device),
    "KV host": lambda row: _bytes(row.kv_bytes_host),
}


_DECODE_COLUMNS: dict[str, Callable[[DecodeRow], str]] = {
    "of one": lambda row: row.name,
    "selector": lambda row: row.selector if row.window == 1 else f"{row.selector} {row.window}",
    "backend": lambda row: row.backend,
    "length": lambda row: _tokens(row.length),
    "batch": lambda row: str(row.batch),
    "tokens read": lambda row: _number(row.density, ".4f"),
    "dense ms": lambda row: _number(row.dense_ms, ".3f"),
    "sparse ms": lambda row: _number(row.sparse_ms, ".3f"),
    "speedup": lambda row: _number(row.speedup, ".2f"),
    "GB/s": lambda row: _number(row.gbytes_per_second, ".4g"),
    "dense GB/s": lambda row: _number(row.dense_gbytes_per_second, ".4g"),
    "unmodified ms": lambda row: _number(row.unmodified_ms, ".3f"),
    "replay ms": lambda row: _number(row.replay_ms, ".3f"),
    "dense replay ms": lambda row: _number(row.dense_replay_ms, ".3f"),
}


_OFFLOAD_COLUMNS: dict[str, Callable[[OffloadRow], str]] = {
    "length": lambda row: _tokens(row.length),
    "batch": lambda row: str(row.batch),
    "host layers": lambda row: str(row.host_layers),
    "device ms": lambda row: _number(row.device_ms, ".3f"),
    "offloaded ms": lambda row: _number(row.offloaded_ms, ".3f"),
    "ratio": lambda row: _number(row.slowdown, ".3f"),
    "device replay": lambda row: _number(row.device_replay_ms, ".3f"),
    "offloaded replay": lambda row: _number(row.offloaded_replay_ms, ".3f"),
    "ratio of replays": lambda row: _number(row.replay_slowdown, ".3f"),
    "misses": lambda row: _number(row.misses, ".1f"),
    "share": lambda row: _number(row.miss_share, ".3f"),
    "MB a step": lambda row: _number(row.fetched_bytes and row.fetched_bytes / 1e6, ".2f"),
    "link GB/s": lambda row: _number(row.link.gbytes_per_second if row.link else None, ".1f"),
    "200 tokens us": lambda row: _number(row.link.few_us if row.link else None, ".1f"),
}


def _print_offload(rows: Sequence[OffloadRow], as_json: bool) -> None:
    """As `_print`."""
    if as_json:
        emit_json([row.as_data() for row in rows])
    else:
        first = rows[0]
        title = f"{first.model}, {first.device}, {first.dtype}; weights: {first.weights}; --offload {first.mode}"
        if first.miss_rate is not None:
            title += f"; choices swapped for lists with {first.miss_rate:.3g} of new tokens a step"
        lines = [tuple(show(row) for show in _OFFLOAD_COLUMNS.values()) for row in rows]
        table = columns([tuple(_OFFLOAD_COLUMNS), *lines], right=range(len(_OFFLOAD_COLUMNS)))
        plans = dict.fromkeys(f"plan: {row.plan}" for row in rows)
        notes = dict.fromkeys(f"{_tokens(row.length)}, batch {row.batch}: {row.note}" for row in rows if row.note)
        emit("\n".join([title, *plans, "", table, *notes]))
    if not any(row.measured for row in rows):
        tell("nothing could be measured; the notes say why")
        raise typer.Exit(1)


def _print(
    rows: Sequence[Any], title: str, shown: Mapping[str, Callable[[Any], str]], left: int, as_json: bool
) -> None:
    """The rows: as JSON, or dense kernels, a line a case (only the first `left` columns are words), and notes.

    Raises:
        typer.Exit: nothing sparse was measured, which is a failure.
    """
    if as_json:
        emit_json([row.as_data() for row in rows])
    else:
        lines = [tuple(show(row) for show in shown.values()) for row in rows]
        table = columns([tuple(shown), *lines], right=range(left, len(shown)))
        notes = dict.fromkeys(f"{row.backend}: {row.note}" for row in rows if row.note)
        emit("\n".join([title, *_dense_lines(rows), "", table, *notes]))
    if not any(row.sparse_ms is not None for row in rows):
        tell("nothing could be measured; the notes say why")
        raise typer.Exit(1)


def _dense_lines(rows: Sequence[KernelRow | PrefillRow | DecodeRow]) -> Iterator[str]:
    """Every dense kernel, once a length; ratios are against the first named."""
    seen: dict[str, DensePeers] = {row.dense_case: row.dense_peers for row in rows if row.dense_peers}
    for case, peers in seen.items():
        timed = sorted(peers.timed_ms.items(), key=lambda item: item[1])
        named = [f"{name} {ms:.3f} ms" for name, ms in timed]
        yield f"dense at {case}: {', '.join(named) or 'none ran'}"
        for name, why in peers.refused.items():
            yield f"  not {name}: {why}"


def _tokens(length: int) -> str:
    from sparsekv.plans.types import format_length

    return format_length(length)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)


def _bytes(count: int | None) -> str:
    return "-" if count is None else size(count)
