"""`sparsekv plan`: profile a model and compile its plan."""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

from pydantic import model_validator

from sparsekv.cli import options
from sparsekv.cli.arguments import Output, Subject, settings_of
from sparsekv.cli.output import emit, emit_json, quality_table, tell
from sparsekv.planner.flags import Flag, Options
from sparsekv.planner.options import DecodeSearch, Gate, Hardware, PlanOptions, Search
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import UsageError

if TYPE_CHECKING:
    from sparsekv.planner.plan import PlanResult

# --- files ------------------------------------------------------------------------------------------------------------


class PlanFiles(Options):
    """Where the plan goes, and the files between the steps: in instead of measuring, out to save what was measured."""

    out: Annotated[Path, Flag("Where the plan goes.", ("--out", "-o"), "FILE")]
    prompts_file: Annotated[
        Path | None, Flag("Own calibration prompts: JSON lines or text.", ("--prompts",), "FILE")
    ] = None
    profile_out: Annotated[
        Path | None,
        Flag(
            "Save the profile. Until the plan is written, what is profiled is in FILE.partial, or without this option "
            "in PLAN.profile.partial: the same command goes on from there.",
            metavar="FILE",
        ),
    ] = None
    profile: Annotated[Path | None, Flag("Use a saved profile.", metavar="FILE")] = None
    cost_out: Annotated[Path | None, Flag("Save the measured device cost.", metavar="FILE")] = None
    cost: Annotated[Path | None, Flag("Use a saved device cost.", metavar="FILE")] = None

    @property
    def resume(self) -> Path:
        """What has been profiled, until the plan is written; a rerun goes on from it."""
        profile = self.profile_out or self.out.with_name(f"{self.out.name}.profile")
        return profile.with_name(f"{profile.name}.partial")

    def check_files(self) -> None:
        """Finds out before hours of work whether the outputs can be written.

        Raises:
            UsageError: a file is to be written where none can be, over one that is read or is of another kind, or two
                to one file.
        """
        for path in (self.out, self.profile_out, self.cost_out):
            if path is not None:
                check_writable(path)
        check_writable(self.resume)
        inputs = (("--profile", self.profile), ("--cost", self.cost), ("--prompts", self.prompts_file))
        outputs = (
            ("--out", self.out, "plan"),
            ("--profile-out", self.profile_out, "profile"),
            ("an unfinished --profile-out", self.resume, "partial"),
            ("--cost-out", self.cost_out, "cost"),
        )
        taken = {os.path.realpath(path): f"{flag} {path}" for flag, path in inputs if path is not None}
        for flag, path, _ in outputs:
            if path is None:
                continue
            real = os.path.realpath(path)
            if real in taken:
                raise UsageError(f"expected a file of its own for {flag}, found {taken[real]} there; name another one")
            taken[real] = f"{flag} {path}"
        for flag, path, kind in outputs:
            if path is not None:
                check_replaceable(path, flag, kind)

    @contextmanager
    def telling_what_is_saved(self) -> Iterator[None]:
        """Adds to an interruption, and to any failure that leaves a part of the profile, what a rerun will find."""
        before = _version_of(self.profile_out)
        try:
            yield
        except BaseException as stop:
            if isinstance(stop, KeyboardInterrupt) or self._is_resumable():
                stop.add_note(self._saved(_version_of(self.profile_out) != before))
            raise

    def _is_resumable(self) -> bool:
        return self.profile is None and self.resume.exists()

    def _saved(self, is_complete: bool) -> str:
        if self._is_resumable():
            told = f"saved what was profiled in {self.resume}: the same command goes on from there"
            if is_complete:
                told += (
                    f"; the profile in {self.profile_out} is complete: `--profile {self.profile_out}`, without "
                    "--profile-out and what else only profiling reads, skips the trials too"
                )
            return told
        if self.profile is not None:
            return f"{self.out} was not written; the profile in {self.profile} is unchanged"
        return f"{self.out} was not written, and nothing was profiled yet"


class PlanFlags(PlanFiles, PlanOptions, Output):
    """What `plan` is asked to do."""

    model: Annotated[str, Flag("Alias, hub id or folder.", metavar="MODEL", is_argument=True)]
    no_verify: Annotated[bool, Flag("Leave the plan unverified.")] = False

    @property
    def needs_model(self) -> bool:
        """Whether anything is left to be measured."""
        return not (self.profile and self.cost and self.no_verify)

    @property
    def options(self) -> PlanOptions:
        """How to plan."""
        from sparsekv.cli.prompts import own_prompts

        given = {name: getattr(self, name) for name in self.model_fields_set & set(PlanOptions.model_fields)}
        given |= {"prompts": own_prompts(self.prompts_file)} if self.prompts_file else {}
        given |= {"verify_samples": 0} if self.no_verify else {}
        return PlanOptions(**given | {"backend": settings_of(self).backend})

    @model_validator(mode="after")
    def _every_flag_is_read(self) -> Self:
        if self.profile:
            own = ("preset", "tile", "samples", "prompts_file")
            self.refuse(own, "a profile brings what it was made with", "profile")
        if self.cost:
            self.refuse(("host",), "the device was measured already", "cost")
        if self.no_verify:
            chunk = () if self.host == "vllm" and not self.cost else ("prefill_chunk",)
            unread = (*Gate.model_fields, "verify_samples", "batch", *chunk)
            self.refuse(unread, "nothing is verified", "no_verify")
        if self.no_verify and self.profile:
            self.refuse(("tasks", "seed"), "no prompts are drawn", "profile", "no_verify")
        if self.no_verify and self.prompts_file:
            self.refuse(("tasks",), "no tasks are drawn from", "prompts_file", "no_verify")
        if not self.needs_model:
            machine = (*Hardware.model_fields, "device_map")
            self.refuse(machine, "no model runs", "profile", "cost", "no_verify")
        if self.phases == ("prefill",):
            self.refuse(DecodeSearch.model_fields, "only prefill is planned", "phases")
        if self.phases == ("decode",):
            prefill = (*Search.model_fields, "target_density", "target_speedup")
            self.refuse(prefill, "only decode is planned", "phases")
        return self


def plan(flags: PlanFlags) -> None:
    """Profile a model, choose what each head computes, verify it on held-out prompts, and write the plan."""
    resolve_model(flags.model)  # before the files: where there is no model, a plan finds no folder of it either
    flags.check_files()
    wanted = flags.options
    # Imports torch, which takes seconds: what is wrong with the options was said by now.
    from sparsekv.planner.cost.device_cost import DeviceCost
    from sparsekv.planner.data_files import read_measured
    from sparsekv.planner.plan import check_plannable, compile_files, compile_plan, for_host
    from sparsekv.planner.profile.profile_data import Profile, for_profile
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.files import write_plan

    profiled = read_measured(Profile, flags.profile) if flags.profile else None
    measured = read_measured(DeviceCost, flags.cost) if flags.cost else None
    if profiled is not None:
        for_profile(for_host(wanted, measured), profiled)  # says what is not in it before a model is looked for
    with flags.telling_what_is_saved():
        outputs = {"profile_out": flags.profile_out, "cost_out": flags.cost_out}
        if profiled and measured and flags.no_verify:
            result = compile_files(flags.model, wanted, profiled, measured, **outputs)
        else:
            loaded = Subject(flags.model).load(
                flags.typed("device"),
                flags.typed("dtype"),
                lambda info, hardware: check_plannable(info, wanted, hardware, profiled, measured),
                flags.device_map,
            )
            result = compile_plan(
                loaded,
                wanted,
                profile_in=profiled,
                cost_in=measured,
                resume=flags.resume,
                progress=BarProgress(),
                **outputs,
            )
        write_plan(result.plan, flags.out)
    if profiled is None:
        flags.resume.unlink(missing_ok=True)
    _tell(result, flags.out, flags.as_json)


def _tell(result: PlanResult, out: Path, as_json: bool) -> None:
    from sparsekv.plans.schema import to_data

    quality, density, speedup = result.plan.quality, result.prefill_density, result.predicted_speedup
    if as_json:
        emit_json(
            {
                "path": str(out),
                "status": result.plan.status,
                "prefill_density": density,
                "predicted_speedup": speedup,
                "filter_layers": list(result.filter_layers),
                "quality": None if quality is None else to_data(quality),
                "seconds": round(result.seconds, 3),
            }
        )
    else:
        if quality is not None:
            emit(quality_table(quality) + "\n")
        emit(f"{out}: {result.plan.status}, in {result.seconds:.0f} s")
        if density is not None:
            emit(f"prefill is predicted to compute {density:.3f} of the tiles at the longest length")
        if speedup is not None:
            emit(f"predicted speedup of attention there: {speedup:.2f}x")
        if result.filter_layers:
            emit(f"filter layers of decode: {', '.join(map(str, result.filter_layers))}")
    for remark in result.remarks:
        tell(remark)


def _version_of(path: Path | None) -> tuple[int, int] | None:
    """Changes when the file is written anew; None where there is none."""
    try:
        found = path.stat() if path else None
    except FileNotFoundError:
        return None
    return found and (found.st_ino, found.st_mtime_ns)


def check_writable(path: Path) -> None:
    """Finds out whether a file can be written at `path`, or in place of what is there.

    Raises:
        UsageError: it cannot.
    """
    real = Path(os.path.realpath(path))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"expected a file to write, found {path!s:.80}: {reason}; name another one") from error
    if stat.S_ISDIR(mode):
        raise UsageError(f"expected a file to write, found the folder {path}; name a file in it")
    if not stat.S_ISREG(mode):
        raise UsageError(f"expected a file to write, found {path}, which is not a regular file; name another one")
    if not real.parent.is_dir():
        raise UsageError(f"expected a folder to write {real.name} in, found no {real.parent}; make it first")
    if not os.access(real.parent, os.W_OK):
        raise UsageError(f"expected a folder that can be written, found {real.parent}; choose another one")


_HEAD = 1 << 20  # bytes of a file that tell its kind
_MARKED = 1024  # those of a page, which may show any text further down
_WHAT = {
    "plan": "a plan",
    "profile": "a profile",
    "partial": "an unfinished profile",
    "cost": "a device cost",
    "page": "a page of `sparsekv show`",
    "curve": "a curve",
}


def check_replaceable(path: Path, flag: str, kind: str) -> None:
    """Refuses a file that nothing of sparsekv wrote. One that is damaged, or of another schema, still tells its kind.

    Raises:
        UsageError: naming the file.
    """
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD).removeprefix(b"\xef\xbb\xbf")
        if head.startswith(b"\x1f\x8b"):
            head = zlib.decompressobj(wbits=31).decompress(head, _HEAD)
    except FileNotFoundError:
        return
    except zlib.error:
        head = b"\x1f\x8b"
    except OSError as error:
        raise UsageError(f"{path}: cannot be read before it is replaced: {error.strerror}; name another one") from None
    if head and not _tells(head, kind):
        raise UsageError(
            f"expected {_WHAT[kind]} or no file yet in {path}, where {flag} is to be written, found another file; "
            "choose another name, or remove it first"
        )


def _tells(head: bytes, kind: str) -> bool:
    if kind == "partial":
        return head.startswith(b"sparsekv.partial"[: len(head)])
    if kind == "curve":
        return head.startswith(b"[") and b'"method"' in head[:_MARKED]
    if kind == "page":
        return b'<meta name="generator" content="sparsekv show">' in head[:_MARKED]
    # Of YAML, fields stand from the first line on that is no comment; text around an example of a plan does not.
    lines = [line for line in head.splitlines() if line.strip() and not line.startswith((b"#", b"---"))]
    at_start = rb"" if lines and lines[0].lstrip().startswith(b"{") else rb"^"
    field = at_start + rb"""["']?kind["']?\s*:\s*["']?sparsekv\.%b\b""" % kind.encode()
    is_mapping = bool(lines) and re.match(rb"""\s*\{|["']?\w+["']?\s*:""", lines[0]) is not None
    return is_mapping and re.search(field, head, re.MULTILINE) is not None


app = options.app(options.command(plan))
