"""`sparsekv bench`: kernels, and prefill and decode of a whole model, against the fastest dense one of the process."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekv.cli import arguments
from sparsekv.cli.bench_rows import print_rows
from sparsekv.cli.bench_serve import serve
from sparsekv.cli.output import tell
from sparsekv.plans.errors import UsageError

if TYPE_CHECKING:
    import torch

    from sparsekv.bench.harness import Row
    from sparsekv.bench.random_model import BenchModel

app = typer.Typer(
    help="Time kernels, a model's prefill or decode, or requests through vLLM, against dense.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command("serve", short_help="Requests through vLLM, by a plan and dense.")(serve)

_LENGTHS = {"cuda": "8k,32k,128k", "cpu": "4k,8k"}
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
            help="vertical_slash, a_shape, block_sparse, adaptive, or several joined by +; mixed is the first three.",
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
    from sparsekv.bench.kernels import COLUMNS, PLANTED_NOTE, KernelBench, bench_kernels
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
    print_rows(rows, f"{rows[0].device}, {shape}\n{PLANTED_NOTE}", COLUMNS, as_json)


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
    from sparsekv.bench.hand_plans import FAMILIES, hand_plan
    from sparsekv.bench.prefill import COLUMNS, PrefillBench, bench_prefill
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.targets import density_for

    how = {"longest": max(wanted), "layers": layers, "seed": seed}
    subject, words = _subject(model, random_weights, hardware, precision, **how), "given"
    if used is None:
        families = FAMILIES if patterns is None else arguments.names_from(patterns, "--patterns")
        shares = tuple(map(density_for, wanted)) if density is None else arguments.shares_from(density, "--density")
        used, words = hand_plan(subject.info, wanted, shares, arguments.tile_from(tile), families)
    bench = PrefillBench(wanted, repeats, chunk, named, kv_host_layers, dense_layers, seed, allow_mismatch)
    rows = list(bench_prefill(subject, used, words, bench, BarProgress()))
    print_rows(rows, _title(subject, rows[0], words), COLUMNS, as_json)


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
    from sparsekv.bench import decode as steps
    from sparsekv.bench import offload as offloading
    from sparsekv.bench.hand_plans import HandDecode
    from sparsekv.bench.random_model import describe_named
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.patterns import tokens

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
    bench = steps.DecodeBench(wanted, batches, repeats, backend=named, seed=seed, allow_mismatch=allow_mismatch)
    plans, words = ({"plan": used}, "given") if used else hand.plans(info, max(wanted))
    steps.check_decode(info, plans, bench)
    if offload is not None and any(one.decode and one.decode.offload is None for one in plans.values()):
        raise UsageError(
            "expected a plan that permits layers to be in host memory, found one that does not; compile it with "
            "`plan --offload`, or make one by hand: --budget 2k"
        )
    if shares:
        offloading.check_miss_rate(info, plans, bench)
    # Larger cases may not fit, or only those by a plan that offloads: their rows say so.
    offloads = any(one.decode and one.decode.offload for one in plans.values())
    how = {"longest": max(wanted), "seed": seed, "cached": 0 if offloads else min(wanted) * min(batches)}
    subject = _subject(model, random_weights, hardware, precision, **how)
    if offload is not None:
        share = shares[0] if shares else None
        rows = list(offloading.bench_offload(subject, plans, words, bench, offload, share, BarProgress()))
        title = f"{_title(subject, rows[0], words)}; --offload {offload}"
        title += f"; choices swapped for lists with {share:.3g} of new tokens a step" if share else ""
        measured = "device_ms" if offload == "never" else "offloaded_ms"
        print_rows(rows, title, offloading.COLUMNS, as_json, measured)
        return
    rows = list(steps.bench_decode(subject, plans, words, bench, BarProgress()))
    if as_json:
        tell(steps.RANDOM_NOTE)
    print_rows(rows, f"{_title(subject, rows[0], words)}\n{steps.RANDOM_NOTE}", steps.COLUMNS, as_json)


def _subject(model: str, random_weights: bool, device: torch.device, dtype: torch.dtype, **how: Any) -> BenchModel:
    """Loaded, or of its shape with random weights: `random_model` says how."""
    from sparsekv.bench.random_model import BenchModel, random_model
    from sparsekv.runtime.model_config import dtype_name

    if random_weights:
        subject = random_model(model, device=device, dtype=dtype, **how)
        tell(subject.note)
        return subject
    loaded = arguments.Subject(model).load(str(device), dtype_name(dtype))
    return BenchModel(loaded.model, loaded.info, model, "loaded")


def _title(subject: BenchModel, row: Row, words: str) -> str:
    return f"{subject.name}, {row.device}, {row.dtype}; weights: {subject.weights}; plan: {words}"
