"""`sparsekv bench`: kernels, published methods, and the README's table; those of a whole model stand in bench_model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, device_and_dtype, settings_of
from sparsekv.cli.bench_model import (
    PREFILL_LENGTHS,
    BenchLengths,
    BenchRun,
    DecodeFlags,
    PrefillFlags,
    Timed,
    decode,
    measure_decode,
    measure_prefill,
    prefill,
    print_rows,
    serve,
)
from sparsekv.cli.bench_own import own
from sparsekv.planner.flags import Count, Flag, Names, Shares, Tile
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.errors import BackendError
from sparsekv.plans.patterns import TileShape

if TYPE_CHECKING:
    import torch

    from sparsekv.bench.real_shares import RealShare

# --- kernels ----------------------------------------------------------------------------------------------------------

_KERNEL_LENGTHS = {"cuda": (8192, 32768, 131072), "cpu": (4096, 8192)}


class KernelFlags(Timed, Output):
    lengths: BenchLengths = ()
    density: Annotated[
        Shares, Flag("Densities to plant structure at, such as 5% or 0.05,0.2; by default 0.05.", metavar="SHARES")
    ] = (0.05,)
    patterns: Names = ("mixed", "vertical_slash")  # several joined by +, or mixed: all that can be planted
    backend: Names = ()  # all that can run
    heads: Count = 32
    kv_heads: Count = 8
    head_dim: Count = 128
    tile: Tile = None


def kernels(flags: KernelFlags) -> None:
    """Index building and sparse attention of one layer on planted structure.

    `asked` is the density asked for, `density` what was computed; `whole` is index and attention timed as one.
    `mass` is the computed positions' share of the softmax on sampled rows. `error` is the largest difference from
    float32 attention over the same index.
    """
    print_rows(measure_kernels(flags), as_json=flags.as_json)


def measure_kernels(flags: KernelFlags) -> BenchRun:
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


# --- headline ---------------------------------------------------------------------------------------------------------

_KERNEL = 0.05  # the density of kernel rows beside those at a real plan's share
_ACCEPTED = 0.975


class HeadlineFlags(Timed, Output):
    model: Annotated[
        str, Flag("Alias, hub id, folder or GGUF file; llama3-8b by default.", metavar="MODEL", is_argument=True)
    ] = "llama3-8b"
    lengths: BenchLengths = ()


def headline(flags: HeadlineFlags) -> None:
    """Shapes with random weights: kernels, prefill, decode, drafts; `bench own` has the figures of a model's own plan.

    Attention and whole prompts run at the share that plans of real models have at that length; each row names it.
    Attention also runs at density 0.05. Tokens run by a plan of that share, and with exact output, where 97.5% of
    drafts are taken as accepted.
    """
    from sparsekv.bench.random_model import describe_named
    from sparsekv.bench.real_shares import share_at

    hardware, _ = device_and_dtype(settings_of(flags))
    lengths = flags.lengths or PREFILL_LENGTHS[hardware.type]
    (group, *_) = describe_named(flags.model, True).attention
    shares = {length: share_at(length) for length in lengths}
    families = tuple(dict.fromkeys(name for share in shares.values() for name in share.families))
    timed: dict[str, Any] = {"lengths": lengths, "repeats": flags.repeats, "seed": flags.seed}
    shape: dict[str, Any] = {"heads": group.heads, "kv_heads": group.kv_heads, "head_dim": group.head_dim}
    shape |= {"patterns": ("+".join(families),)}
    model: dict[str, Any] = {"model": flags.model, "random_weights": True}
    densities = tuple(share.prefill for share in shares.values())
    drafts = {"exact": True, "acceptance": _ACCEPTED}
    parts = (
        *(_kernels_at(length, share, timed | shape) for length, share in shares.items()),
        _named(measure_prefill(PrefillFlags(**timed, **model, density=densities), families), shares),
        *(_decode_at(length, share, timed | model) for length, share in shares.items()),
        *(_decode_at(length, share, timed | model | drafts) for length, share in shares.items()),
    )
    print_rows(*parts, as_json=flags.as_json)


def _kernels_at(length: int, share: RealShare, how: dict[str, Any]) -> BenchRun:
    """Attention of a layer at the share of real plans, and at `_KERNEL`."""
    run = measure_kernels(KernelFlags(**how | {"lengths": (length,), "density": (share.prefill, _KERNEL)}))
    words = {share.prefill: f"the share {share.words}", _KERNEL: f"kernel, at {_KERNEL}"}
    return replace(run, rows=[row.plus(words[row.own["target_density"]]) for row in run.rows])


def _decode_at(length: int, share: RealShare, how: dict[str, Any]) -> BenchRun:
    """Tokens that read the share of real plans, where some are sparse at this length."""
    from sparsekv.bench.hand_plans import budget_of
    from sparsekv.bench.random_model import describe_named

    if share.decode is not None:
        how = how | {"budget": budget_of(describe_named(how["model"], True), length, share.decode)}
    run = measure_decode(DecodeFlags(**how | {"lengths": (length,)}))
    words = f"reads the share {share.words}; {share.verdicts}" if share.decode else "a budget by hand"
    return replace(run, rows=[row.plus(words) for row in run.rows])


def _named(run: BenchRun, shares: Mapping[int, RealShare]) -> BenchRun:
    return replace(run, rows=[row.plus(f"sized for the share {shares[row.length].words}") for row in run.rows])


app = commands.group(
    help="Time kernels, a model's prefill or decode, or requests through vLLM, against dense.", no_args_is_help=True
)
for run, summary, *examples in (
    (
        kernels,
        "Index building and attention of one layer, without a model.",
        "sparsekv bench kernels --lengths 32k,128k --density 5%",
        "SPARSEKV_DEVICE=cpu sparsekv bench kernels --lengths 4k",
    ),
    (
        prefill,
        "A model's prefill, by its plan and dense.",
        "sparsekv bench prefill ./my-model --lengths 32k",
        "sparsekv bench prefill llama3-8b --random-weights --lengths 128k --set density=8%",
    ),
    (
        decode,
        "A model's decode steps, by a plan and dense.",
        "sparsekv bench decode ./my-model --lengths 32k --batch 1,4",
        "sparsekv bench decode llama3-8b --random-weights --lengths 128k --set budget=2k",
    ),
    (
        serve,
        "Requests through vLLM, by a plan and dense.",
        "sparsekv bench serve ./my-model --lengths 32k --at-once 1,8",
        "sparsekv bench serve llama3-8b --random-weights --lengths 128k --set density=0.08",
        "sparsekv bench serve ./my-model --lengths 60k --turns 20 --at-once 1,8 --set answer=200",
    ),
    (
        own,
        "A model by its own plan beside dense, in transformers and vLLM.",
        "sparsekv bench own ./my-model --vllm-python ~/vllm-env/bin/python",
        "sparsekv bench own ./my-model --plan plan.yaml -o my-model.json --set half=transformers",
    ),
    (
        headline,
        "Shapes with random weights, at the shares of real plans.",
        "sparsekv bench headline",
        "sparsekv bench headline tiny-retriever --lengths 4k",
    ),
):
    commands.add(app, run, *examples, summary=summary)
