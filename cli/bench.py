"""`sparsekv bench`: kernels, published methods, and the README's table; those of a whole model stand in bench_model."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

from pydantic import Field

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, device_and_dtype, settings_of
from sparsekv.cli.bench_model import (
    PREFILL_LENGTHS,
    Benched,
    BenchLengths,
    BenchRun,
    DecodeFlags,
    PrefillFlags,
    Timed,
    decode,
    measure_decode,
    measure_prefill,
    named_subject,
    prefill,
    print_rows,
    serve,
    show_rows,
)
from sparsekv.cli.bench_own import own
from sparsekv.cli.output import tell
from sparsekv.cli.plan_files import check_writable, only_writer
from sparsekv.planner.flags import MOST, Count, Flag, Names, OneShare, Shares, Tile, Unread
from sparsekv.planner.options import Tasks, density_for
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.errors import BackendError, UsageError, did_you_mean, install_command
from sparsekv.plans.files import executed_digest
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    import torch

    from sparsekv.bench.peers import PeersBench
    from sparsekv.bench.peers_file import PeersFile, PeersRun
    from sparsekv.bench.real_shares import RealShare
    from sparsekv.plans.schema import Plan
    from sparsekv.runtime.hf.load import LoadedModel

# --- kernels ----------------------------------------------------------------------------------------------------------

_KERNEL_LENGTHS = {"cuda": (8192, 32768, 131072), "cpu": (4096, 8192)}


class KernelFlags(Timed, Output):
    lengths: BenchLengths = ()
    density: Annotated[
        Shares,
        Flag("Densities to plant structure at, such as 5% or 0.05,0.2; by default 0.05.", metavar="SHARES"),
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
    `mass` is the share of the softmax that the computed positions hold on sampled rows, `error` the largest difference
    from float32 attention over the same index.
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


# --- peers ------------------------------------------------------------------------------------------------------------

_PEER_LENGTHS = {"cuda": (32768, 131072), "cpu": (4096,)}
_Many = Annotated[int, Field(ge=0, le=MOST)]


class PeersFlags(Benched, Timed, Output):
    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("picture", "tasks", "samples", "ruler_samples"), "random weights have no quality", ("random_weights",)),
    )

    lengths: BenchLengths = ()
    out: Annotated[
        Path,
        Flag(
            "A file of results, to which each row is added; what is in it is not measured again.",
            ("--out", "-o"),
            "FILE",
        ),
    ] = Path("peers.json")
    picture: Annotated[Path | None, Flag("Draw time against divergence into this SVG.", metavar="FILE")] = None
    originals: Annotated[
        Path | None,
        Flag(
            "Also run the authors' own code, from this folder (python -m sparsekv.bench.originals fetches it).",
            metavar="FOLDER",
        ),
    ] = None
    methods: Names = ()  # all
    density: OneShare | None = None  # of the rows at equal density; the plan's own by default
    planted: OneShare = 0.05  # of the structure in the layer that is timed
    shape: str | None = None  # time a layer of this model's shape; by default of MODEL's
    tile: Tile = None
    tasks: Tasks = ("quote_text",)  # whose samples give the divergence
    samples: _Many = 5  # of each of these tasks
    ruler_samples: _Many = 5  # of each of RULER's tasks; 0 leaves RULER out
    max_seconds: Annotated[float, Field(gt=0)] | None = None  # after which no row begins


def peers(flags: PeersFlags) -> None:
    """Published methods of sparse prefill beside a plan and dense kernels, in one process.

    MInference, XAttention, FlexPrefill and FlashPrefill run as published and at the plan's density, by their published
    algorithms on our kernels; with --originals also by their authors' code. Time is that of one layer, on planted
    structure; divergence and RULER are those of MODEL. FlashAttention-2 is the one that torch ships.
    """
    with only_writer(flags.out):
        _peers(flags)


def _peers(flags: PeersFlags) -> None:
    deadline = time.monotonic() + flags.max_seconds if flags.max_seconds else float("inf")
    if flags.picture is not None:
        check_writable(flags.picture)
    named, machine = (
        named_subject(flags, flags.lengths, flags.random_weights and flags.plan is None),
        settings_of(flags),
    )
    hardware, precision = device_and_dtype(machine)
    lengths, folder = flags.lengths or _PEER_LENGTHS[hardware.type], flags.originals
    if folder is not None:
        sys.path.append(str(folder.resolve()))
    from sparsekv.bench.peers import COLUMNS, METHODS, PeersBench, bench_peers, left, table_rows
    from sparsekv.bench.peers_file import PeerRow
    from sparsekv.bench.random_model import describe_named
    from sparsekv.planner.records import RunFile

    if unknown := [name for name in flags.methods if name not in METHODS]:
        found = f"{unknown[0]!r:.40}{did_you_mean(unknown[0], METHODS)}"
        raise UsageError(f"methods: expected some of {', '.join(METHODS)}, found {found}")
    plan, loaded = named.plan, None if flags.random_weights else named.load(flags)
    shape = describe_named(flags.shape or flags.model, flags.random_weights or flags.shape is not None)
    group = shape.attention[0]
    if plan is None:
        tell("without --plan sparsekv is timed alone, with budgets for the planted structure: no divergence")
    bench = PeersBench(
        lengths=lengths,
        heads=group.heads,
        kv_heads=group.kv_heads,
        head_dim=group.head_dim,
        device=hardware,
        dtype=loaded.model.dtype if loaded else precision,
        tile=plan.prefill.tile if plan and plan.prefill else flags.tile or TileShape(),
        planted_density=flags.planted,
        methods=flags.methods or tuple(METHODS),
        density=flags.density or (None if plan or not loaded else density_for(max(lengths))),
        tasks=flags.tasks,
        samples=flags.samples,
        ruler_samples=flags.ruler_samples,
        rounds=flags.repeats,
        seed=flags.seed,
        originals=folder,
        deadline=deadline,
    )
    file = RunFile.of(_run(bench, shape.id, loaded, plan), flags.out)

    def rows() -> BenchRun:
        title = f"{file.settings.shape}, {file.settings.device}, {file.settings.dtype}; {flags.out}"
        return BenchRun(table_rows(file, lengths), title, COLUMNS)

    try:
        bench_peers(bench, file, loaded, plan, BarProgress())
    except BaseException as error:
        if file.all(PeerRow):
            error.add_note(f"what was measured until then is in {flags.out}; the same command goes on from there")
            if not flags.as_json:  # standard output is then the error
                show_rows(rows(), as_json=False)
        raise
    if flags.picture is not None:
        _draw(file, flags.picture)
    if open_ := left(bench, file.all(PeerRow)):
        tell(f"{len(open_)} rows are left, from {open_[0].name} at {format_length(open_[0].length)} on: rerun to go on")
    print_rows(rows(), as_json=flags.as_json)


def _run(bench: PeersBench, shape: str, loaded: LoadedModel | None, plan: Plan | None) -> PeersRun:
    from sparsekv.bench.peers_file import PeersRun
    from sparsekv.planner.records import versions
    from sparsekv.runtime.model_config import device_name, dtype_name

    quality: dict[str, Any] = {}
    if loaded is not None:
        fingerprint = loaded.info.fingerprint
        quality = {"model": fingerprint.architecture, "weights": fingerprint.weights, "tasks": bench.tasks}
        quality |= {"samples": bench.samples, "ruler_samples": bench.ruler_samples}
    same = ("heads", "kv_heads", "head_dim", "planted_density", "rounds", "seed")
    return PeersRun(
        shape=shape,
        dtype=dtype_name(bench.dtype),
        device=device_name(bench.device),
        tile=str(bench.tile.key),
        plan=executed_digest(plan) if plan else None,
        versions=versions(),
        **{name: getattr(bench, name) for name in same},
        **quality,
    )


def _draw(result: PeersFile, path: Path) -> None:
    try:
        from sparsekv.bench.peers_picture import write_picture
    except ModuleNotFoundError as error:
        raise UsageError(
            f"expected the packages that --picture needs, found no {error.name}; install them: "
            f"{install_command('report')}; the rows are in the file"
        ) from error
    drawn = write_picture(result, path)
    tell(f"{path}: {drawn} points" if drawn else "no row has both a time and a divergence at one density: no picture")


# --- headline ---------------------------------------------------------------------------------------------------------

_KERNEL = 0.05  # the density of kernel rows beside those at a real plan's share
_ACCEPTED = 0.975


class HeadlineFlags(Timed, Output):
    model: Annotated[
        str,
        Flag("Alias, hub id, folder or GGUF file; llama3-8b by default.", metavar="MODEL", is_argument=True),
    ] = "llama3-8b"
    lengths: BenchLengths = ()


def headline(flags: HeadlineFlags) -> None:
    """Shapes with random weights: kernels, prefill, decode, drafts; `bench own` has the figures of a model's own plan.

    Attention of a layer and whole prompts at the share that plans of real models came to at that length, which the rows
    name; attention also at a density of 0.05. Tokens by a plan that reads such a share; and tokens that it drafts and
    dense attention checks, where 97.5% of drafts are taken to count.
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
        peers,
        "Published methods beside a plan: time, divergence, RULER.",
        "sparsekv bench peers ./my-model --lengths 32k -o peers.json --picture peers.svg",
        "sparsekv bench peers llama3-8b --random-weights --lengths 32k",
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
