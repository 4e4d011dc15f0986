"""Files on disk: read whole up to a bound, written whole or not at all; and plan files: checked, sealed.

Plan files are read strictly: every field known and of its type, each fault named by its line. `integrity` is the
sha256 of the canonical JSON of everything else in the file. It shows that a plan was changed by hand after it was
measured; it does not protect against forgery.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import re
import select
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sparsekv.plans.errors import ConflictError, PlanError, SparseKVError, UsageError
from sparsekv.plans.quality import without_old
from sparsekv.plans.schema import KIND, SCHEMA_FILE, SCHEMA_VERSION, Plan, to_data
from sparsekv.plans.types import canonical_json
from sparsekv.plans.yaml_io import Tree, plan_error, read_tree, to_yaml

MAX_BYTES = 8 << 20
_PIECE = 1 << 20
_PIPE_SECONDS = 2.0  # until something is written to a pipe
_URL = re.compile(r"[a-z][a-z0-9+.-]+:/", re.ASCII | re.IGNORECASE)  # one slash: a path joins several
_SAYS_KIND = rb"""["']?kind["']?\s*:\s*["']?sparsekv\.(\w+)"""
NAME_A_PLAN = "name a plan file, or a folder or hub repository (ORG/NAME) with a sparsekv.yaml in it"


def read_text(path: str | os.PathLike[str], limit: int = MAX_BYTES, wrong: type[SparseKVError] = PlanError) -> str:
    """The UTF-8 text of a file of at most `limit` bytes.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        PlanError: it is longer, or it is not text; or what `wrong` says.
    """
    return as_text(read_bytes(path, limit), str(path), limit, wrong)


def read_bytes(path: str | os.PathLike[str], limit: int) -> bytes:
    """The first `limit` bytes of a file, and one more of a longer one."""
    try:
        with open(path, "rb", opener=_open_input) as file:
            return b"".join(pieces(file.read, limit + 1))
    except IsADirectoryError:
        raise UsageError(f"{path}: expected a file, found a folder; name the file in it") from None
    except FileNotFoundError:
        found = "a URL; download what is there" if _URL.match(os.fspath(path)) else "none; check the path"
        raise UsageError(f"{path}: expected a file, found {found}") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {_reason(error)}") from None


def _open_input(path: str, flags: int) -> int:
    """Opens a file, or a pipe that somebody writes to: on any other, a reader would wait without end."""
    descriptor = os.open(path, flags | os.O_NONBLOCK)
    mode = os.fstat(descriptor).st_mode
    is_pipe = stat.S_ISFIFO(mode)
    if stat.S_ISCHR(mode) or (is_pipe and not _is_written(descriptor)):
        os.close(descriptor)
        found = "a pipe that nobody writes to" if is_pipe else "a device"
        raise OSError(errno.ENODATA, f"expected a file, found {found}")
    os.set_blocking(descriptor, True)
    return descriptor


def _is_written(pipe: int) -> bool:
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    if poll.poll(1e3 * _PIPE_SECONDS):
        return True
    try:
        os.read(pipe, 1)
    except BlockingIOError:  # only where somebody has the other end open
        return True
    return False


def pieces(read: Callable[[int], bytes], most: int) -> Iterator[bytes]:
    """Yields the pieces that `read` returns, at most `most` bytes together."""
    while most > 0 and (piece := read(min(most, _PIECE))):
        most -= len(piece)
        yield piece


def kind_of(data: bytes) -> str:
    """The kind that a file of sparsekv tells of itself, sound or not, such as "plan"; empty of any other file."""
    # Of YAML, fields stand from the first line on that is no comment; text around an example of a plan does not.
    data = data.removeprefix(b"\xef\xbb\xbf")
    lines = [line for line in data.splitlines() if line.strip() and not line.startswith((b"#", b"---"))]
    if not lines or not re.match(rb"""\s*\{|["']?\w+["']?\s*:""", lines[0]):
        return ""
    at_start = b"" if lines[0].lstrip().startswith(b"{") else b"^"
    told = re.search(at_start + _SAYS_KIND, data, re.MULTILINE)
    return told[1].decode() if told else ""


def as_text(data: bytes, source: str, limit: int = MAX_BYTES, wrong: type[SparseKVError] = PlanError) -> str:
    """`data` as UTF-8 text."""
    if len(data) > limit:
        raise wrong(f"{source}: expected at most {limit:,} bytes, found more; give less, or another file")
    if b"\0" in data:
        raise wrong(f"{source}: expected text, found binary data")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise wrong(f"{source}, line {line}: expected UTF-8 text, found other bytes; save it as UTF-8") from None


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Writes `data` to `path` through a temporary file beside it; the mode of an older file stays.

    After any failure, Ctrl-C included, `path` is as it was before or holds all of `data`, and no temporary file is
    left.

    Raises:
        UsageError: it cannot be written there; what was there before is unchanged.
    """
    target = Path(os.path.realpath(path))
    try:
        _write(target, data)
    except OSError as error:
        unchanged = "the file there before is unchanged" if target.exists() else "nothing was left there"
        raise UsageError(f"{path}: cannot be written: {_reason(error)}; {unchanged}") from None


def _write(target: Path, data: bytes) -> None:
    mode = _mode(target)
    temporary = target.with_name(f".{target.name[:200]}.{os.getpid()}-{os.urandom(4).hex()}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        with open(descriptor, "wb") as file:
            if mode is not None:
                os.fchmod(file.fileno(), mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    # Some file systems cannot sync folders; the file itself has been written.
    with contextlib.suppress(OSError), contextlib.ExitStack() as stack:
        folder = os.open(target.parent, os.O_RDONLY)
        stack.callback(os.close, folder)
        os.fsync(folder)


def _mode(target: Path) -> int | None:
    if not target.exists():
        return None
    mode = target.stat().st_mode
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(21, "it is a folder; name a file in it")
    if not stat.S_ISREG(mode):
        raise OSError(22, "it is not a regular file")
    return stat.S_IMODE(mode)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)


_INTEGRITY = "integrity"


def _check_version(document: dict[str, Any], source: str) -> None:
    version = document.get("schema_version")
    if type(version) is not int or version < 1:
        found = "none" if version is None else repr(version)[:40]
        raise PlanError(
            f"{source}: expected `schema_version`, a whole number from 1 to {SCHEMA_VERSION}, found {found}"
        )
    if version > SCHEMA_VERSION:
        raise PlanError(
            f"{source}: expected schema_version {SCHEMA_VERSION} or older, which this sparsekv reads, found {version}; "
            "install a newer sparsekv, or plan the model again with this one"
        )


def _as_now(data: Mapping[str, Any]) -> dict[str, Any]:
    """A document of version 1 without what nothing reads any more."""
    now: dict[str, Any] = _without(_without(data, "provenance", "command"), "cost", "lengths", "step")
    if "quality" in now:
        now["quality"] = without_old(now["quality"])
    return now


def _without(data: Any, *path: str) -> Any:
    """The data without the field at `path`, in each item of lists on the way."""
    if isinstance(data, list):
        return [_without(item, *path) for item in data]
    if not isinstance(data, dict):
        return data
    first, *rest = path
    kept = {name: value for name, value in data.items() if rest or name != first}
    return {name: _without(value, *rest) if name == first else value for name, value in kept.items()}


def content_digest(data: Mapping[str, Any]) -> str:
    """The digest of a document's data, whatever its layout, order and comments; its own `integrity` is left out."""
    rest = {key: value for key, value in data.items() if key != _INTEGRITY}
    return "sha256:" + hashlib.sha256(canonical_json(rest)).hexdigest()


def executed_digest(plan: Plan) -> str:
    """Returns the digest of what a plan executes, whatever is known of it."""
    executed = ("prefill", "decode", "kv_cache", "index_sharing")
    return content_digest({name: data for name, data in to_data(plan).items() if name in executed})


def with_digest(plan: Plan) -> Plan:
    return plan.model_copy(update={_INTEGRITY: content_digest(to_data(plan))})


def check_integrity(data: Mapping[str, Any], source: str) -> None:
    """Passes when the digest fits the rest of the data."""
    if _is_sealed(data):
        return
    found = "that of another content: the file was changed after it was written. If the change is meant"
    if data.get(_INTEGRITY) is None:
        found = "none: its line is the last one, so that the file may be cut off. If it is whole"
    raise PlanError(
        f"{source}: expected an integrity digest that fits the content, found {found}, `sparsekv seal "
        f"{shlex.quote(source)}` renews it, and the plan is unverified then; otherwise restore it or plan again."
    )


def _is_sealed(data: Mapping[str, Any]) -> bool:
    return bool(data.get(_INTEGRITY) == content_digest(data))


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        PlanError: it is no plan, contradicts itself, or its integrity does not fit.
    """
    if not isinstance(path, str | os.PathLike):
        raise UsageError(f"expected the path of a plan file, found {path!r:.80}")
    return parse_plan(read_bytes(path, MAX_BYTES), os.fspath(path))


def parse_plan(text: str | bytes, source: str = "plan", *, sealed: bool = True) -> Plan:
    """The plan in `text`; `source` names it in messages. `sealed=False` reads one whose integrity does not fit.

    Raises:
        PlanError: it is no plan, contradicts itself, or (when `sealed`) its integrity does not fit.
    """
    data = text.encode(errors="surrogatepass") if isinstance(text, str) else text
    try:
        tree = read_tree(as_text(data, source), source)
    except PlanError as error:
        if kind_of(data) == "plan":
            raise
        raise _no_plan(source, f"a file without one ({str(error).removeprefix(source).lstrip(',: ')})") from None
    return plan_of(tree, sealed=sealed)


def plan_of(tree: Tree, *, sealed: bool = True) -> Plan:
    """The plan that the data of a file makes; see `parse_plan`."""
    source = tree.source
    kind = tree.data.get("kind") if isinstance(tree.data, dict) else None
    if kind != KIND:
        raise _no_plan(source, "a file without one" if kind is None else "another kind of file")
    _check_version(tree.data, source)
    try:
        plan = Plan.model_validate(_as_now(tree.data))
    except ValidationError as error:
        raise plan_error(error, tree) from None
    if sealed:
        check_integrity(tree.data, source)
    return plan


def _no_plan(source: str, found: str) -> PlanError:
    return PlanError(f"{source}: expected a plan, with a line `kind: {KIND}`, found {found}; {NAME_A_PLAN}")


def dump_plan(plan: Plan) -> str:
    """The text of a plan's file, with its integrity."""
    text = f"# yaml-language-server: $schema={SCHEMA_FILE}\n{to_yaml(to_data(with_digest(plan)))}"
    size = len(text.encode())
    if size > MAX_BYTES:
        raise PlanError(f"expected a plan of at most {MAX_BYTES:,} bytes, found {size:,}; plan fewer lengths")
    read_tree(text, "plan")
    return text


def write_plan(plan: Plan, path: str | os.PathLike[str]) -> None:
    """Writes a plan with its integrity, in one step: on any failure the file there before stays as it was.

    Raises:
        PlanError: the plan is too large for a file.
        UsageError: the file cannot be written, or there is no plan to write.
    """
    if not isinstance(plan, Plan):
        raise UsageError(f"expected a plan to write, found {plan!r:.80}")
    write_bytes(path, dump_plan(plan).encode())


def rewrite_plan(plan: Plan, path: str | os.PathLike[str], before: str) -> None:
    """Writes a plan as `write_plan` does, in place of the text that it was made from.

    Raises:
        ConflictError: the file holds another text by now.
        PlanError, UsageError: see `write_plan`; or the file is no longer there.
    """
    data = dump_plan(plan).encode()
    if read_text(path) != before:
        raise ConflictError(
            f"expected {path} as it was read, found it changed meanwhile; it is left as it is: run again"
        )
    write_bytes(path, data)


@dataclass(frozen=True, slots=True)
class Sealed:
    """The plan as it is now in the file, and what became of it, a line each."""

    plan: Plan
    changed: bool
    notes: tuple[str, ...]


def seal(path: str | os.PathLike[str]) -> Sealed:
    """Renews the integrity of the plan at `path`; one that fits is left as it is."""
    text = read_text(path)
    plan = parse_plan(text, os.fspath(path), sealed=False)
    is_sealed = _is_sealed(read_tree(text, os.fspath(path)).data)
    if is_sealed or plan == with_digest(plan):  # its defaults may be left out
        if not is_sealed:
            rewrite_plan(plan, path, text)
        return Sealed(plan, not is_sealed, (f"its integrity fits its content; {plan.status}",))
    sealed = with_digest(plan.model_copy(update={"status": "unverified", "quality": None, "cost": None}))
    rewrite_plan(sealed, path, text)
    again = {
        "quality": f"`sparsekv verify --plan {shlex.quote(os.fspath(path))} --write` measures quality again",
        "cost": "cost comes from `sparsekv plan` alone",
    }
    dropped = [name for name in again if getattr(plan, name) is not None]
    notes = (f"dropped {' and '.join(dropped)}: measured on other content",) if dropped else ()
    return Sealed(sealed, True, ("sealed as unverified", *notes, *(again[name] for name in dropped)))
