"""What `plan` does around the compiler: files that go in and come out, and what an interruption leaves."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.plans.errors import UsageError

if TYPE_CHECKING:
    from sparsekv.planner.cost.device_cost import DeviceCost
    from sparsekv.planner.options import PlanOptions
    from sparsekv.planner.plan import PlanResult
    from sparsekv.planner.profile.profile_data import Profile
    from sparsekv.runtime.hf.load import LoadedModel


@dataclass(frozen=True, slots=True)
class Measured:
    """What an earlier call kept, in memory."""

    profile: Profile | None = None
    cost: DeviceCost | None = None


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """Where the plan goes, and the files between the steps: in instead of measuring, out to keep what was measured."""

    out: Path
    profile: Path | None = None
    profile_out: Path | None = None
    cost: Path | None = None
    cost_out: Path | None = None
    prompts: Path | None = None

    def check(self) -> None:
        """Finds out before hours of work whether what comes of it can be written.

        Raises:
            UsageError: a file is to be written where none can be, over one that is read, or two at one place.
        """
        taken = {_place(path): f"{flag} {path}" for flag, path in self._inputs() if path is not None}
        for flag, path in self._outputs():
            if path is None:
                continue
            place = _place(path)
            if place in taken:
                raise UsageError(f"expected a file of its own for {flag}, found {taken[place]} there; name another one")
            _check_writable(place, path)
            taken[place] = f"{flag} {path}"

    def read(self) -> Measured:
        """Reads what goes in.

        Raises:
            UsageError: there is no such file.
            PlanError: it is not what it should be.
        """
        from sparsekv.planner.data_files import read_cost, read_profile

        return Measured(
            read_profile(self.profile) if self.profile else None, read_cost(self.cost) if self.cost else None
        )

    def _inputs(self) -> tuple[tuple[str, Path | None], ...]:
        return ("--profile", self.profile), ("--cost", self.cost), ("--prompts", self.prompts)

    def _outputs(self) -> tuple[tuple[str, Path | None], ...]:
        kept = partial_of(self.profile_out) if self.profile_out else None
        unfinished = "an unfinished --profile-out"
        return (
            ("--out", self.out),
            ("--profile-out", self.profile_out),
            (unfinished, kept),
            ("--cost-out", self.cost_out),
        )


def partial_of(profile: Path) -> Path:
    """Where profiling keeps what it has found until the profile is whole."""
    return profile.with_name(f"{profile.name}.partial")


def _place(path: Path) -> Path:
    return Path(os.path.realpath(path))


def _check_writable(place: Path, path: Path) -> None:
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"expected a file to write, found {path!s:.80}: {reason}; name another one") from error
    if mode is not None and stat.S_ISDIR(mode):
        raise UsageError(f"expected a file to write, found the folder {path}; name a file in it")
    if mode is not None and not stat.S_ISREG(mode):
        raise UsageError(f"expected a file to write, found {path}, which is not a regular file; name another one")
    if not place.parent.is_dir():
        raise UsageError(f"expected a folder to write {place.name} in, found no {place.parent}; make it first")
    if not os.access(place.parent, os.W_OK):
        raise UsageError(f"expected a folder that can be written, found {place.parent}; choose another one")


def compile_to_file(loaded: LoadedModel, options: PlanOptions, files: PlanFiles, measured: Measured) -> PlanResult:
    """Compiles a plan and writes it.

    Raises:
        GateError: no plan met its gate; none was written.
        SparseKVError: of the other kinds, for what cannot be planned.
    """
    from sparsekv.planner.plan import compile_plan
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.files import write_plan

    with _telling_what_is_kept(files):
        result = compile_plan(
            loaded,
            options,
            profile_in=measured.profile,
            cost_in=measured.cost,
            profile_out=files.profile_out,
            cost_out=files.cost_out,
            progress=BarProgress(),
        )
    write_plan(result.plan, files.out)
    return result


def recompile_to_file(
    model: str, options: PlanOptions, files: PlanFiles, profile: Profile, cost: DeviceCost
) -> PlanResult:
    """Compiles a plan from what was measured, without the model's weights, and writes it.

    Raises:
        SparseKVError: see `planner.recompile.compile_files`.
    """
    from sparsekv.planner.plan import compile_files
    from sparsekv.plans.files import write_plan

    result = compile_files(model, options, profile, cost, profile_out=files.profile_out, cost_out=files.cost_out)
    write_plan(result.plan, files.out)
    return result


@contextmanager
def _telling_what_is_kept(files: PlanFiles) -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt as stop:
        stop.add_note(_kept(files))
        raise


def _kept(files: PlanFiles) -> str:
    profile = files.profile_out
    if profile is None and files.profile is not None:
        return f"{files.out} was not written; the profile in {files.profile} is unchanged"
    if profile is None:
        return f"{files.out} was not written; with --profile-out FILE, an interrupted profile is kept and goes on"
    if partial_of(profile).exists():
        return f"kept what was profiled so far in {partial_of(profile)}; the same command goes on from there"
    if profile.exists():
        instead = "in place of --profile-out and of what only profiling reads"
        return f"kept the profile in {profile}; `--profile {profile}` {instead} goes on from there"
    return f"{files.out} was not written, and nothing was profiled yet"
