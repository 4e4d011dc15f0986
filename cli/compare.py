"""`sparsekv compare`: a plan beside other methods, on the same prompts and at one share or time."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import Field

from sparsekv.cli import commands
from sparsekv.cli.arguments import Subject, plan_file, settings_of
from sparsekv.cli.output import emit, tell
from sparsekv.cli.plan_files import check_writable, only_writer
from sparsekv.planner.flags import LENGTHS, MOST, Count, Flag, Key, Lengths, Names, Options, shares, text
from sparsekv.planner.options import Hardware, check_lengths
from sparsekv.plans.errors import UsageError, install_command
from sparsekv.plans.files import load_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, check_model
from sparsekv.plans.types import Share

if TYPE_CHECKING:
    from sparsekv.bench.compare_file import CompareFile, CompareRun
    from sparsekv.bench.entrants import Entrants
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.runtime.hf.load import LoadedModel


class CompareFlags(Options):
    model: Annotated[str, Flag("Alias, hub id, folder or GGUF file.", metavar="MODEL", is_argument=True)]
    plan: Annotated[
        Path | None, Flag("Ours; by default the plan in the model's folder or repository.", metavar="FILE")
    ] = None
    methods: Annotated[
        Names,
        Flag(
            "Others: names of methods, files of your own (my_rule.py, which is run), or NAME=PLAN; by default all that "
            "are built in for the phase.",
            metavar="LIST",
        ),
    ] = ()
    phase: Annotated[
        Literal["prefill", "decode", "eviction"],
        Flag("Compare methods of this phase; the other is dense.", metavar="prefill|decode|eviction"),
    ] = "prefill"
    at: Annotated[
        Literal["time"] | tuple[Share, ...],
        text(lambda given: given if given == "time" else shares(given)),
        Flag(
            "Shares of tiles, of tokens read or of bytes at which all methods run; or `time`, the plan's time for a "
            "prompt or step. By default the share of the plan.",
            metavar="SHARES|time",
        ),
    ] = ()
    suite: Annotated[Literal["ruler", "long"], Key("ruler, or long as of `sparsekv eval`.", "NAME")] = "ruler"
    lengths: Annotated[Lengths, Flag("Most tokens of a prompt and its answer; 4k by default.", *LENGTHS)] = (4096,)
    samples: Annotated[int, Field(ge=1, le=MOST), Flag("Samples a task.", metavar="N")] = 20
    out: Annotated[Path, Flag("A file of results; what is in it is not measured again.", ("--out", "-o"), "FILE")] = (
        Path("compare.jsonl")
    )
    picture: Annotated[Path | None, Key("Draw divergence against share or time into this SVG.", "FILE")] = None
    profile: Annotated[
        Path | None, Key("Ours is compiled from it at each --at; omnikv, kascade and even read it.", "FILE")
    ] = None
    tasks: Annotated[Names, Key("Some of the suite's.", "LIST")] = ()
    batch: Annotated[Count | None, Key("Prompts at once.", "N")] = None
    chunk: Annotated[Count | None, Key("Most tokens of a prompt at once.", "N")] = None
    max_seconds: Annotated[float | None, Field(gt=0), Key("After which no batch begins.", "S")] = None
    seed: int = 0


def compare(flags: CompareFlags) -> None:
    """Compare methods with a plan at one share or one time, on the same prompts.

    Prints score with paired intervals, divergence, share and time, beside dense. Without --plan, a plan is compiled
    from the profile, or the first method takes its place. The last line compares the plan with the nearest method.
    """
    with only_writer(flags.out):
        _compare(flags)


def _compare(flags: CompareFlags) -> None:
    deadline = time.monotonic() + flags.max_seconds if flags.max_seconds else float("inf")
    if flags.picture is not None:
        check_writable(flags.picture)
    subject = Subject.named(flags.model, flags.plan).checked(flags, flags.lengths)
    from sparsekv.bench.compare import Asked, compare_methods
    from sparsekv.bench.compare_file import CompareFile
    from sparsekv.bench.compare_file import text as table
    from sparsekv.bench.ruler_suite import SUITES
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.records import read_measured

    suite = SUITES[flags.suite]
    if unknown := [name for name in flags.tasks if name not in suite]:
        raise UsageError(f"tasks: expected some of {', '.join(suite)}, found {unknown[0]!r:.40}")
    tasks = flags.tasks or tuple(suite)
    profile = read_measured(Profile, flags.profile) if flags.profile else None
    names, plans = _methods(flags, subject.plan, profile is not None)

    def check(info: ModelInfo, _: str) -> None:
        check_lengths(flags.lengths, info.context_length)
        for plan in plans.values():
            check_model(plan, info)

    machine = settings_of(flags)
    loaded = subject.load(Hardware(device=machine.device, dtype=machine.dtype), check)
    entrants = _entrants(flags, loaded, names, plans, profile)
    file = CompareFile.of(_run(flags, loaded, entrants), flags.out)
    drawn: dict[str, Any] = {name: getattr(flags, name) for name in ("suite", "samples", "batch", "seed")}
    lengths, chunk = tuple(sorted(flags.lengths)), flags.chunk
    asked = Asked(lengths=lengths, tasks=tasks, chunk=chunk, deadline=deadline, **drawn)
    try:
        is_whole = compare_methods(loaded, entrants, asked, file, BarProgress())
    except BaseException as error:
        if flags.out.exists():
            error.add_note(f"what was measured until then is in {flags.out}; the same command goes on from there")
        raise
    if not is_whole:
        tell(f"time is over: the same command goes on from {flags.out}")
    if flags.picture is not None:
        _draw(file, flags.picture)
    emit(table(file))


def _methods(flags: CompareFlags, ours: Plan | None, has_profile: bool) -> tuple[tuple[str, ...], dict[str, Plan]]:
    """Registered methods, those of named files among them, and plans by their names."""
    from sparsekv.bench.entrants import BUILT_IN, KINDS, OURS, check_timed, chosen_methods
    from sparsekv.kernels.methods import register, register_file, registry
    from sparsekv.planner.evaluation import DENSE

    register(BUILT_IN)
    names, plans = list[str](), {} if ours is None else {OURS: ours}
    for one in flags.methods:
        name, _, place = one.partition("=")
        if one.endswith(".py"):
            added = register_file(Path(one))
            of_phase = [name for name in added if isinstance(registry()[name], KINDS[flags.phase])]
            if not of_phase:
                raise UsageError(f"expected a method for --phase {flags.phase} in {one}, found {', '.join(added)}")
            names += of_phase
        elif place:
            if name in plans:
                raise UsageError(f"expected a name of its own for each plan, found {name} twice; rename one")
            plans[name] = load_plan(plan_file(Path(place)))
        else:
            names.append(one)
    if taken := sorted({DENSE, *registry()} & plans.keys()):
        raise UsageError(f"expected a name of its own for each plan, found {taken[0]}, which is a method's; rename it")
    chosen = chosen_methods(flags.phase, names, has_profile) if names or not flags.methods else ()
    if flags.at == "time":
        check_timed(flags.phase, chosen)
    return chosen, plans


def _entrants(
    flags: CompareFlags, loaded: LoadedModel, names: tuple[str, ...], plans: dict[str, Plan], profile: Profile | None
) -> Entrants:
    from sparsekv.bench.entrants import Entrants
    from sparsekv.bench.ruler_suite import SUITES
    from sparsekv.planner.profile.profile_data import check_model as check_profile

    if profile is not None:
        check_profile(profile, loaded.info, weights=False)
    suite, same = SUITES[flags.suite], {name: getattr(flags, name) for name in ("phase", "seed", "chunk")}
    return Entrants(
        loaded=loaded,
        names=names,
        plans=plans,
        profile=profile,
        **same,
        shares=() if flags.at == "time" else flags.at,
        at_time=flags.at == "time",
        tasks=tuple(suite[name] for name in flags.tasks or suite),
        backend=settings_of(flags).backend,
        tell=tell,
    )


def _run(flags: CompareFlags, loaded: LoadedModel, entrants: Entrants) -> CompareRun:
    from sparsekv.bench.compare_file import CompareRun
    from sparsekv.planner.records import digest_of
    from sparsekv.runtime.model_config import device_name

    same: dict[str, Any] = {name: getattr(flags, name) for name in ("phase", "suite", "seed", "samples")}
    return CompareRun.of(
        loaded,
        reference=entrants.reference,
        prefill_chunk=flags.chunk,
        device=device_name(loaded.model.device),
        backend=entrants.backend,
        profile=digest_of(entrants.profile) if entrants.profile else None,
        **same,
    )


def _draw(file: CompareFile, path: Path) -> None:
    try:
        from sparsekv.bench.compare_picture import write_picture
    except ModuleNotFoundError as error:
        raise UsageError(
            f"expected the packages that a picture needs, found no {error.name}; install them: "
            f"{install_command('report')}; the results are in the file"
        ) from error
    tell(f"{path}: {write_picture(file, path)} points")


app = commands.app(
    compare,
    "sparsekv compare ./my-model --methods my_rule.py,minference,xattention --at 0.28 --lengths 16k",
    "sparsekv compare ./my-model --phase eviction --plan half.yaml --methods my_score.py,snapkv",
)
