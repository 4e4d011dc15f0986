"""`sparsekv plan`: profile a model and compile its plan."""

from __future__ import annotations

import os
import re
import stat
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from sparsekv.cli import arguments
from sparsekv.cli.output import emit, emit_json, quality_table, tell
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.settings import DeviceMap

if TYPE_CHECKING:
    from sparsekv.planner.plan import PlanResult

_File = Path | None


def plan(
    context: typer.Context,
    model: Annotated[str, typer.Argument(metavar="MODEL", help="Alias, hub id or folder.", show_default=False)],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="FILE", help="Where the plan goes.", show_default=False)],
    lengths: Annotated[
        str | None,
        typer.Option(
            "--lengths",
            "--length",
            metavar="LIST",
            help="Context lengths, such as 4k,16k,32k; by default 4k,8k on a CPU, and up to 128k on a GPU.",
        ),
    ] = None,
    target_density: Annotated[
        str | None, typer.Option(metavar="SHARES", help="Share of the tiles to compute: one, or one a length.")
    ] = None,
    target_speedup: Annotated[
        float | None,
        typer.Option(max=1e4, metavar="X", help="Instead of a density: how much faster prefill attention must become."),
    ] = None,
    host: Annotated[
        Literal["transformers", "vllm"],
        typer.Option(help="What will run the plan, whose prefill is timed; for vllm prefill alone is planned."),
    ] = "transformers",
    only: Annotated[Literal["prefill", "decode"] | None, typer.Option(help="Plan this phase alone.")] = None,
    no_crossover: Annotated[
        bool, typer.Option("--no-crossover", help="Sparse at every length, also where dense is faster.")
    ] = False,
    preset: Annotated[
        Literal["minference"] | None, typer.Option(help="The search of that publication, as published.")
    ] = None,
    families: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help="Patterns to search, separated by commas: a_shape, vertical_slash (the default), block_sparse.",
        ),
    ] = None,
    tile: arguments.Tile = None,
    filter_layers: Annotated[
        str | None, typer.Option(metavar="LAYERS", help="These filter layers, such as 2,8,18, instead of a search.")
    ] = None,
    decode_budget: Annotated[
        str | None, typer.Option(metavar="BUDGET", help="Tokens that filter layers choose: 2048, or a share: 10%.")
    ] = None,
    decode_loss: Annotated[
        float | None,
        typer.Option(
            min=0.0, max=1.0, metavar="SHARE", help="Most attention mass lost to the choice, instead of --decode-kl."
        ),
    ] = None,
    decode_kl: Annotated[
        float | None,
        typer.Option(min=0.0, metavar="NATS", help="Most divergence of decode from dense on calibration prompts."),
    ] = None,
    offload: Annotated[bool, typer.Option("--offload", help="Store the rows of sparse layers in host memory.")] = False,
    prompts: Annotated[_File, typer.Option(metavar="FILE", help="Own calibration prompts: JSON lines or text.")] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=1,
            max=arguments.MOST,
            metavar="N",
            help="Calibration samples a length; by default 3 on a CPU, 8 on a GPU, 5 of more than 64k.",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(
            metavar="NAMES",
            help=f"Tasks, separated by commas; by default those that the model can answer, of {arguments.TASKS}.",
        ),
    ] = None,
    max_accuracy_drop: arguments.MaxAccuracyDrop = None,
    max_kl: arguments.MaxKl = None,
    max_decode_kl: arguments.MaxDecodeKl = None,
    min_agreement: arguments.MinAgreement = None,
    min_exact: arguments.MinExact = None,
    verify_samples: Annotated[
        int | None,
        typer.Option(min=1, max=arguments.MOST, metavar="N", help=arguments.HELD_OUT),
    ] = None,
    no_verify: Annotated[bool, typer.Option("--no-verify", help="Leave the plan unverified.")] = False,
    profile_out: Annotated[
        _File,
        typer.Option(
            metavar="FILE",
            help="Save the profile. Until the plan is written, what is profiled is in FILE.partial, or without this "
            "option in PLAN.profile.partial: the same command goes on from there.",
        ),
    ] = None,
    profile: Annotated[_File, typer.Option(metavar="FILE", help="Use a saved profile.")] = None,
    cost_out: Annotated[_File, typer.Option(metavar="FILE", help="Save the measured device cost.")] = None,
    cost: Annotated[_File, typer.Option(metavar="FILE", help="Use a saved device cost.")] = None,
    seed: arguments.Seed = 0,
    batch: arguments.Batch = None,
    prefill_chunk: arguments.Chunk = None,
    device: arguments.Device = None,
    device_map: Annotated[
        DeviceMap | None,
        typer.Option(help="Spread a model that is too large for one device over all, by accelerate."),
    ] = None,
    dtype: arguments.Dtype = None,
    backend: arguments.Backend = None,
    as_json: arguments.Json = False,
) -> None:
    """Profile a model, choose what each head computes, verify it on held-out prompts, and write the plan."""
    from sparsekv.planner.conflicts import check_used
    from sparsekv.planner.options import PlanOptions

    check_used(arguments.given(context))
    resolve_model(model)  # before the files: where there is no model, a plan finds no folder of it either
    files = PlanFiles(out, profile, profile_out, cost, cost_out, prompts)
    files.check()
    from sparsekv.cli.prompts import own_prompts

    asked: dict[str, Any] = {
        "lengths": _read(arguments.lengths_from, lengths, "--lengths"),
        "target_density": _read(arguments.shares_from, target_density, "--target-density"),
        "target_speedup": target_speedup,
        "host": host,
        "phases": (only,) if only else None,
        "crossover": not no_crossover,
        "preset": preset,
        "families": _read(arguments.names_from, families, "--families"),
        "tile": arguments.tile_from(tile) if tile else None,
        "filter_layers": _read(arguments.layers_from, filter_layers, "--filter-layers"),
        "decode_budget": _read(arguments.budget_from, decode_budget, "--decode-budget"),
        "decode_loss": decode_loss,
        "decode_kl": decode_kl,
        "offload": offload,
        "prompts": own_prompts(prompts) if prompts else None,
        "samples": samples,
        "tasks": _read(arguments.tasks_from, tasks, "--tasks"),
        "gate": arguments.gate_of(
            max_accuracy_drop=max_accuracy_drop,
            max_kl=max_kl,
            max_decode_kl=max_decode_kl,
            min_agreement=min_agreement,
            min_exact=min_exact,
        ),
        "verify_samples": 0 if no_verify else verify_samples,
        "seed": seed,
        "batch": batch,
        "prefill_chunk": prefill_chunk,
        "backend": arguments.settings(device, dtype, backend).backend,
    }
    wanted = PlanOptions(**{name: value for name, value in asked.items() if value is not None})
    # Imports torch, which takes seconds: what is wrong with the options was said by now.
    from sparsekv.planner.cost.device_cost import DeviceCost
    from sparsekv.planner.data_files import read_measured
    from sparsekv.planner.plan import check_plannable, compile_files, compile_plan, for_host
    from sparsekv.planner.profile.profile_data import Profile, for_profile
    from sparsekv.planner.profile.resume import only_run
    from sparsekv.planner.progress import BarProgress
    from sparsekv.plans.files import write_plan

    profiled = read_measured(Profile, profile) if profile else None
    measured = read_measured(DeviceCost, cost) if cost else None
    if profiled is not None:
        for_profile(for_host(wanted, measured), profiled)  # says what is not in it before a model is looked for
    with nullcontext() if profiled else only_run(files.resume), files.telling_what_is_saved():
        outputs = {"profile_out": profile_out, "cost_out": cost_out}
        if profiled and measured and no_verify:
            result = compile_files(model, wanted, profiled, measured, **outputs)
        else:
            loaded = arguments.Subject(model).load(
                device,
                dtype,
                lambda info, hardware: check_plannable(info, wanted, hardware, profiled, measured),
                device_map,
            )
            result = compile_plan(
                loaded,
                wanted,
                profile_in=profiled,
                cost_in=measured,
                resume=files.resume,
                progress=BarProgress(),
                **outputs,
            )
        write_plan(result.plan, out)
        if profiled is None:
            files.resume.unlink(missing_ok=True)
    _tell(result, out, as_json)


def _read(how: Callable[[str, str], Any], text: str | None, flag: str) -> Any:
    return None if text is None else how(text, flag)


def _tell(result: PlanResult, out: Path, as_json: bool) -> None:
    from sparsekv.plans.schema import to_data
    from sparsekv.plans.show import verdict

    quality, remarks = result.plan.quality, list(result.remarks)
    unproven = quality is not None and result.plan.status != "verified"  # the first remark says why
    if as_json:
        emit_json(
            {
                "path": str(out),
                "status": result.plan.status,
                "prefill_density": result.prefill_density,
                "predicted_speedup": result.predicted_speedup,
                "filter_layers": list(result.filter_layers),
                "quality": None if quality is None else to_data(quality),
                "seconds": round(result.seconds, 3),
            }
        )
    else:
        if quality is not None:
            emit(quality_table(quality) + "\n")
        lines = verdict(result.plan, str(out), remarks.pop(0) if unproven else "")
        emit("\n".join((f"{out}: written in {result.seconds:.0f} s", *lines)))
    for remark in remarks:
        tell(remark)


# --- files ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PlanFiles:
    """Where the plan goes, and the files between the steps: in instead of measuring, out to save what was measured."""

    out: Path
    profile: Path | None = None
    profile_out: Path | None = None
    cost: Path | None = None
    cost_out: Path | None = None
    prompts: Path | None = None

    @property
    def resume(self) -> Path:
        """What has been profiled, until the plan is written; a rerun goes on from it."""
        profile = self.profile_out or self.out.with_name(f"{self.out.name}.profile")
        return profile.with_name(f"{profile.name}.partial")

    def check(self) -> None:
        """Finds out before hours of work whether the outputs can be written.

        Raises:
            UsageError: a file is to be written where none can be, over one that is read or is of another kind, or two
                to one file.
        """
        for path in (self.out, self.profile_out, self.cost_out):
            if path is not None:
                check_writable(path)
        check_writable(self.resume)
        inputs = (("--profile", self.profile), ("--cost", self.cost), ("--prompts", self.prompts))
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
