"""The files of a call: whether outputs can be written, found out before hours of work, and prompts that it reads."""

from __future__ import annotations

import json
import os
import stat
import tempfile
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, ClassVar

from sparsekv.planner.flags import Flag, Options
from sparsekv.planner.options import GivenPrompt
from sparsekv.plans.aliases import PLAN_NAME, holds_model, names_gguf
from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.plans.files import kind_of, read_text


class PlanFiles(Options):
    """Where the plan goes, and the files between the steps: in instead of measuring, out to save what was measured."""

    group: ClassVar = "Files"
    model: Annotated[str, Flag("Alias, hub id, folder or GGUF file.", metavar="MODEL", is_argument=True)]
    out: Annotated[
        Path | None,
        Flag(
            f"Where the plan goes; by default {PLAN_NAME} in the model's folder, or ./NAME.{PLAN_NAME} for an alias or "
            "hub id.",
            ("--out", "-o"),
            "FILE",
        ),
    ] = None
    force: Annotated[bool, Flag("Replace the plan that is there.")] = False
    prompts_file: Annotated[
        Path | None,
        Flag(
            "Own prompts: JSON lines, of which half verify the plan (copies once), or a text.", ("--prompts",), "FILE"
        ),
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

    @property
    def file(self) -> Path:
        return self.out or default_plan(self.model)

    @property
    def resume(self) -> Path:
        """The file of what has been profiled, until the plan is written; a rerun goes on from it."""
        profile = self.profile_out or self.file.with_name(f"{self.file.name}.profile")
        return profile.with_name(f"{profile.name}.partial")

    def check_files(self) -> None:
        """Refuses outputs that cannot be written, before hours of work."""
        for output in (self.file, self.profile_out or self.file):
            check_writable(output)  # before names are made of theirs: "" has none
        inputs = (("--profile", self.profile), ("--prompts", self.prompts_file))
        outputs = (
            ("--out", self.file, "plan"),
            ("--profile-out", self.profile_out, "profile"),
            ("an unfinished --profile-out", self.resume, "partial"),
            ("an unfinished test", outcomes_beside(self.file), "outcomes"),
        )
        taken = {os.path.realpath(path): f"{flag} {path}" for flag, path in inputs if path is not None}
        for flag, path, kind in outputs:
            if path is None:
                continue
            owner = taken.setdefault(os.path.realpath(path), name := f"{flag} {path}")
            if owner != name:
                raise UsageError(f"expected a file of its own for {flag}, found {owner} there; name another one")
            check_replaceable(path, flag, kind)
        check_new(self.file, self.force)

    @contextmanager
    def telling_what_is_saved(self) -> Iterator[None]:
        """Adds to an interruption, and to any failure that leaves a part of the profile, what a rerun will find."""
        try:
            yield
        except BaseException as stop:
            if self.profile is None and self.resume.exists() and self.resume.stat().st_size:
                rerun = "the same command" if isinstance(stop, KeyboardInterrupt) else "a run that profiles the same"
                stop.add_note(f"saved what was profiled in {self.resume}: {rerun} goes on from there")
            elif isinstance(stop, KeyboardInterrupt):
                stop.add_note(f"nothing was written to {self.file}")
            raise


def default_plan(model: str) -> Path:
    """The default path of a plan: beside a local model, else in the working folder, by the model's name."""
    place = Path(os.path.expanduser(model))
    if names_gguf(model) or holds_model(place):
        return (place.parent if names_gguf(model) else place) / PLAN_NAME
    return Path(f"{model.rstrip('/').rpartition('/')[2]}.{PLAN_NAME}")


def check_new(path: Path, force: bool) -> None:
    if not force and path.exists() and path.stat().st_size:
        raise UsageError(f"expected no plan yet at {path}, found one; replace it with --force, or name another -o FILE")


def outcomes_beside(plan: Path) -> Path:
    """The file of a test of a plan that is under way: beside the file itself, not beside a link to it, as the plan is
    written."""
    file = Path(os.path.realpath(plan))
    return file.with_name(f"{file.name}.outcomes")


def check_writable(path: Path) -> None:
    """Refuses a path at which no file can be written, or replaced."""
    real = Path(os.path.realpath(path))
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"expected a file to write, found {path!s:.80}: {reason}; name another one") from error
    if not stat.S_ISREG(mode):
        found = "the folder " if stat.S_ISDIR(mode) else "no regular file in "
        raise UsageError(f"expected a file to write, found {found}{path}; name another one")
    try:
        tempfile.TemporaryFile(dir=real.parent).close()  # permissions do not tell: /proc, or a read-only file system
    except OSError as error:
        raise UsageError(
            f"expected a folder to write {real.name} in, found that {real.parent} cannot be written: {error.strerror}; "
            "choose another one"
        ) from None


_HEAD = 1 << 20  # bytes of a file that tell its kind
_MARKED = 1024  # those of a page, which may show any text further down
_WHAT = {
    "plan": "a plan",
    "profile": "a profile",
    "partial": "an unfinished profile",
    "page": "a page of `sparsekv report`",
    "outcomes": "outcomes of a verification",
    "compare": "what `compare` wrote",
    "suite": "what `eval` wrote",
    "own": "figures of `bench own`",
}


def check_replaceable(path: Path, flag: str, kind: str) -> None:
    """Refuses what cannot be written, and a file that nothing of sparsekv wrote. One that is damaged, or of another
    schema, still tells its kind.
    """
    check_writable(path)
    head = _head_of(path)
    if head and _told(head) != kind:
        raise UsageError(
            f"expected {_WHAT[kind]} or no file yet in {path}, where {flag} is to be written, found another file; "
            "choose another name, or remove it first"
        )


def one_of_kinds(path: Path, kinds: Sequence[str]) -> str:
    """The kind among these that a file tells."""
    head = _head_of(path)
    if (kind := _told(head)) not in kinds:
        expected, there = " or ".join(_WHAT[kind] for kind in kinds), "another file" if head else "no such file"
        raise UsageError(f"expected {expected} in {path}, found {there}; name another one")
    return kind


def _head_of(path: Path) -> bytes:
    """The first bytes of a file; none of one that is not there."""
    try:
        with path.open("rb") as file:
            head = file.read(_HEAD)
        return zlib.decompressobj(wbits=31).decompress(head, _HEAD) if head.startswith(b"\x1f\x8b") else head
    except FileNotFoundError:
        return b""
    except zlib.error:
        return b"\x1f\x8b"
    except OSError as error:
        raise UsageError(f"{path}: cannot be read: {error.strerror}; name another one") from None


@contextmanager
def only_writer(path: Path | None) -> Iterator[None]:
    """Keeps other runs from a file that is read and added to; None is no file."""
    if path is None:
        yield
        return
    check_writable(path)
    from sparsekv.planner.records import only_run

    with only_run(path):
        yield


def tells_plan(path: Path) -> bool:
    """True of a file that names itself a plan, sound or not; False of one that cannot be read."""
    try:
        return _told(_head_of(path)) == "plan"
    except UsageError:
        return False


def _told(head: bytes) -> str:
    return "page" if b'<meta name="generator" content="sparsekv report">' in head[:_MARKED] else kind_of(head)


# --- prompts ----------------------------------------------------------------------------------------------------------

MAX_BYTES = 64 << 20  # more tokens than any model takes, and nothing that fills the memory of a machine


def own_prompts(file: Path) -> tuple[GivenPrompt, ...]:
    """Prompts to plan on: JSON lines of {"prompt", "answer"?, "task"?}. Any file not called .jsonl is one."""
    if file.suffix.lower() != ".jsonl":
        return (GivenPrompt(text_of(file)),)
    return tuple(_given(file, number, line) for number, line in _lines(file))


def answered_prompts(file: Path) -> tuple[GivenPrompt, ...]:
    """Prompts to evaluate on: JSON lines of {"prompt", "answer", "task"?}."""
    lines = tuple(_lines(file))
    unanswered = next((number for number, line in lines if not line.get("answer", "").strip()), None)
    if unanswered is not None:
        raise PromptError(f'{file}, line {unanswered}: expected an "answer" to compare with, found none')
    return tuple(_given(file, number, line) for number, line in lines)


def _given(file: Path, number: int, line: Mapping[str, str]) -> GivenPrompt:
    return GivenPrompt(**line, source=f"{file}, line {number}")


def _lines(file: Path) -> Iterator[tuple[int, dict[str, str]]]:
    lines = enumerate(text_of(file).split("\n"), start=1)
    return ((number, _fields(file, number, line)) for number, line in lines if line.strip())


def _fields(file: Path, number: int, line: str) -> dict[str, str]:
    expected = f'{file}, line {number}: expected {{"prompt": TEXT}}, with "answer": TEXT and "task": NAME if there are'
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError) as error:  # a number may be too long
        raise PromptError(f"{expected}, found no JSON") from error
    if not isinstance(data, dict):
        raise PromptError(f"{expected}, found a {type(data).__name__}")
    unknown = set(data) - {"prompt", "answer", "task"}
    if unknown:
        raise PromptError(f"{expected}, found also {', '.join(sorted(unknown))}")
    if not all(isinstance(text, str) for text in data.values()) or not data.get("prompt", "").strip():
        raise PromptError(f"{expected}, found {line.strip()[:60]}")
    if any("\ud800" <= character <= "\udfff" for text in data.values() for character in text):
        raise PromptError(f"{expected}, found half a surrogate pair (\\ud800 to \\udfff), which no tokenizer takes")
    return data


def text_of(file: Path) -> str:
    return with_text(read_text(file, MAX_BYTES, PromptError), str(file))


def with_text(text: str, source: str) -> str:
    """The text, which is not blank."""
    if not text.strip():
        raise PromptError(f"expected a prompt, found nothing but blanks in {source}; write a question")
    return text
