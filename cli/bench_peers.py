"""`sparsekv bench peers`: published methods beside a plan, as published and at its density."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import Field, model_validator

from sparsekv.cli.arguments import Output, device_and_dtype, settings_of
from sparsekv.cli.benched import (
    Benched,
    BenchLengths,
    BenchRun,
    Timed,
    named_subject,
    print_rows,
    show_rows,
)
from sparsekv.cli.output import tell
from sparsekv.cli.plan_files import check_writable, only_writer
from sparsekv.planner.common_options import Tasks
from sparsekv.planner.flags import MOST, Flag, Names, OneShare, Tile
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.errors import UsageError, did_you_mean, install_command
from sparsekv.plans.files import executed_digest
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.bench.peers import PeersBench
    from sparsekv.bench.peers_file import PeersFile, PeersRun
    from sparsekv.plans.schema import Plan
    from sparsekv.runtime.hf.load import LoadedModel

_LENGTHS = {"cuda": (32768, 131072), "cpu": (4096,)}
_Many = Annotated[int, Field(ge=0, le=MOST)]


class PeersFlags(Benched, Timed, Output):
    """Holds what `bench peers` is asked to do."""

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

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.random_weights:
            unread = ("picture", "tasks", "samples", "ruler_samples")
            self.refuse(unread, "random weights have no quality", "random_weights")
        return self


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
    lengths, folder = flags.lengths or _LENGTHS[hardware.type], flags.originals
    if folder is not None:
        sys.path.append(str(folder.resolve()))
    from sparsekv.bench.peers import COLUMNS, METHODS, PeersBench, bench_peers, left, table_rows
    from sparsekv.bench.peers_file import PeerRow
    from sparsekv.bench.random_model import describe_named
    from sparsekv.planner.options import density_for
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
