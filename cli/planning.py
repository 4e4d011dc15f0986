"""What `plan` does around the compiler: files that go in and come out, and what an interruption leaves."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from sparsekv.plans.errors import UsageError

if TYPE_CHECKING:
    from sparsekv.planner.options import PlanOptions
    from sparsekv.planner.plan_result import PlanResult
    from sparsekv.runtime.load import LoadedModel


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """Where the plan goes, and the files between the steps: in instead of measuring, out to keep what was measured."""

    out: Path
    profile: Path | None = None
    profile_out: Path | None = None
    cost: Path | None = None
    cost_out: Path | None = None

    def check(self) -> None:
        """Finds out before hours of work whether what comes of it can be written.

        Raises:
            UsageError: a file is to be written where none can be.
        """
        for path in (self.out, self.profile_out, self.cost_out):
            if path is None:
                continue
            if path.is_dir():
                raise UsageError(f"expected a file to write, found the folder {path}; name a file in it")
            if not path.parent.is_dir():
                raise UsageError(f"expected a folder to write {path.name} in, found no {path.parent}; make it first")
            if not os.access(path.parent, os.W_OK):
                raise UsageError(f"expected a folder that can be written, found {path.parent}; choose another one")


def compile_to_file(loaded: LoadedModel, options: PlanOptions, files: PlanFiles) -> PlanResult:
    """Compiles a plan and writes it.

    Raises:
        GateError: no plan met its gate; none was written.
        SparseKVError: of the other kinds, for what cannot be planned.
    """
    from sparsekv.planner.compile import compile_plan
    from sparsekv.planner.profile_file import read_cost, read_profile
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.writer import write_plan

    profile = read_profile(files.profile, loaded.info) if files.profile else None
    cost = read_cost(files.cost) if files.cost else None
    with _telling_what_is_kept(files):
        result = compile_plan(
            loaded,
            options,
            profile_in=profile,
            cost_in=cost,
            profile_out=files.profile_out,
            cost_out=files.cost_out,
            progress=BarProgress(),
        )
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
    if profile is None:
        return f"{files.out} was not written; with --profile-out FILE, an interrupted profile is kept and goes on"
    partial = profile.with_name(f"{profile.name}.partial")
    if partial.exists():
        return f"kept what was profiled so far in {partial}; the same command goes on from there"
    if profile.exists():
        return f"kept the profile in {profile}; `--profile {profile}` in place of --profile-out goes on from there"
    return f"{files.out} was not written, and nothing was profiled yet"
