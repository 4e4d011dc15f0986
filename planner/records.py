"""Files of what was measured: those of a run that goes on where an earlier one ended, and profiles.

A run's file has a JSON object a line: first its settings, then one record after another, as they are measured. Each
line has a digest of itself and the settings, so that a line that was changed, or written by another run, is refused. A
line cut short by an interruption is dropped. A profile is one object with its digest, compressed when large.
"""

from __future__ import annotations

import fcntl
import gzip
import io
import json
import os
import zlib
from collections import defaultdict
from collections.abc import Hashable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, ClassVar, Generic, Self, TypeVar

from pydantic import BaseModel, TypeAdapter, ValidationError

from sparsekv import __version__
from sparsekv.plans.errors import ConflictError, PlanError, UsageError
from sparsekv.plans.files import content_digest, pieces, read_bytes, write_bytes
from sparsekv.plans.types import FieldError, Part
from sparsekv.plans.yaml_io import printable

MAX_BYTES = 512 << 20
_COMPRESS_ABOVE = 1 << 20
_GZIP = b"\x1f\x8b"
_INTEGRITY, _KIND = "integrity", "kind"

# --- files of a run ---------------------------------------------------------------------------------------------------


class RunSettings(Part):
    """The first line of a run's file: all that its records have in common. Subclasses have `kind`, `schema_version`.

    Attributes:
        WHAT: the name of such a file in messages.
        RECORDS: the type of its records, or a union of types.
        TOLD: fields in which runs into one file may differ.
    """

    WHAT: ClassVar[str]
    RECORDS: ClassVar[Any]
    TOLD: ClassVar[frozenset[str]] = frozenset()

    @property
    def digest(self) -> str:
        """Digest of the settings, which goes into that of each record."""
        return content_digest(self.model_dump(mode="json"))

    def check(self, record: RunRecord) -> None:
        """Raises ValueError for a record that no run with these settings writes."""

    def differences(self, run: Mapping[str, Any]) -> Iterator[str]:
        """Yields each setting in which a run differs from a file, of those that `run` has."""
        for name in sorted(run.keys() - self.TOLD):
            yield from difference(name, getattr(self, name), run[name])


def difference(name: str, there: object, here: object) -> Iterator[str]:
    if isinstance(there, Mapping) and isinstance(here, Mapping):
        for key in {**there, **here}:
            yield from difference(f"{name} {key}", there.get(key), here.get(key))
    elif there != here:
        yield f"{name.replace('_', ' ')}: {_told(there)} there, {_told(here)} here"


def _told(value: object) -> str:
    text = ", ".join(map(str, value)) if isinstance(value, tuple) else value
    return "none" if text in (None, "") else f"{text!s:.60}"


def check_same(file: RunFile[Any], differences: Iterable[str]) -> None:
    if told := "; ".join(differences):
        raise UsageError(
            f"expected {file.settings.WHAT} of this run in {file.path}, found those of another: {told:.600}. Give the "
            "options of that run, remove the file, or name another one"
        )


class RunRecord(Part):
    @property
    def key(self) -> Hashable:
        """Returns the identity of the record among those of its type; a later one takes its place."""
        raise NotImplementedError


Settings = TypeVar("Settings", bound=RunSettings)
Record = TypeVar("Record", bound=RunRecord)
Measured = TypeVar("Measured", bound=Part)


class RunFile(Generic[Settings]):
    """The records of a run, on disk too where there is a path. The first record brings the file."""

    def __init__(self, settings: Settings, path: Path | None = None) -> None:
        self.settings, self.path = settings, path
        self._digest = settings.digest
        self._cut = 0  # bytes behind the last whole line: blank lines, and one that an interruption cut short
        self._records: dict[type[RunRecord], dict[Any, Any]] = defaultdict(dict)

    @classmethod
    def of(cls, settings: Settings, path: Path | None) -> Self:
        """Returns the file of an earlier run with the same settings, or an empty one."""
        file = cls.earlier(type(settings), path)
        if file is None:
            new = cls(settings, path)
            new._cut = path.stat().st_size if path is not None and path.exists() else 0
            return new
        check_same(file, file.settings.differences(dict(settings)))
        return file

    @classmethod
    def earlier(cls, kind: type[Settings], path: Path | None) -> Self | None:
        """Reads the file of an earlier run, if that wrote its settings; see `read`."""
        return cls.read(kind, path) if path is not None and path.exists() and not _is_cut(kind, path) else None

    @classmethod
    def read(cls, kind: type[Settings], path: Path) -> Self:
        """Reads the file of a run, up to the end of its last whole line.

        Raises:
            UsageError: the file cannot be read.
            PlanError: it is no such file, of another version, or was changed.
        """
        content = _content(path, kind.WHAT)
        whole = content.rpartition(b"\n")[0].rstrip(b"\n")
        first, *lines = whole.split(b"\n")
        fault = f"found another file, or one of another version; name a new one for {kind.WHAT}"
        records = TypeAdapter(kind.RECORDS)
        try:
            file = cls(kind.model_validate(_without_digest(first, "")), path)
            for number, line in enumerate(lines, 2):
                fault = f"found line {number} changed; remove that line: it is measured again"
                record = records.validate_python(_without_digest(line, file._digest))
                file.settings.check(record)
                file._keep(record)
        except (ValueError, RecursionError):
            raise PlanError(f"expected {kind.WHAT} in {path}, {fault}") from None
        file._cut = len(content) - len(whole) - 1
        return file

    def all(self, kind: type[Record]) -> Mapping[Any, Record]:
        """The records of one type by their keys, in the order in which they were first measured."""
        return self._records[kind]

    def add(self, *records: RunRecord) -> None:
        """Appends records; where that fails, the file is as it was."""
        if self.path is not None:
            try:
                self._append(self.path, b"".join(_line(one, self._digest) for one in records))
            except OSError as error:
                raise UsageError(
                    f"cannot write {self.path}: {error.strerror or error}; make room, the run goes on where it stopped"
                ) from error
        for record in records:
            self._keep(record)

    def _keep(self, record: RunRecord) -> None:
        self._records[type(record)][record.key] = record

    def _append(self, path: Path, lines: bytes) -> None:
        before = path.stat().st_size - self._cut if path.exists() else None
        try:
            if self._cut:
                os.truncate(path, before or 0)
            with path.open("ab") as file:
                file.write(lines if before else _line(self.settings, "") + lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError:
            with suppress(OSError):
                path.unlink() if before is None else os.truncate(path, before)
            raise
        self._cut = 0


def _is_cut(settings: type[RunSettings], path: Path) -> bool:
    """True of a file that is empty, or has a first part of its settings alone."""
    content, begin = read_bytes(path, MAX_BYTES), json.dumps({_KIND: _what(settings)})[:-1].encode()
    return b"\n" not in content and content[: len(begin)] == begin[: len(content)]


def _line(part: Part, run: str) -> bytes:
    data = part.model_dump(mode="json")
    data = {_KIND: data[_KIND]} | data if _KIND in data else data  # first, so that a cut line tells whose it is
    return json.dumps(data | {_INTEGRITY: content_digest(data | {"run": run})}).encode() + b"\n"


def _without_digest(line: bytes, run: str) -> dict[str, Any]:
    """The data of a line; raises ValueError where it is not what was written there."""
    data = json.loads(line)
    if not isinstance(data, dict) or data.pop(_INTEGRITY, None) != content_digest(data | {"run": run}):
        raise ValueError
    return data


@contextmanager
def only_run(path: Path) -> Iterator[None]:
    """Keeps other runs from what is written at `path`, by a lock on a hidden file beside it that ends with the process.

    Folders that cannot be locked, as some on a network, are left to those who write.
    """
    lock = path.with_name(f".{path.name}.lock")
    held: BinaryIO | None = None
    try:
        held = _locked(lock)
    except BlockingIOError:
        raise ConflictError(
            f"expected no other run into {path}, found one that is under way; wait for its end, or name another file"
        ) from None
    except OSError:
        pass
    try:
        yield
    finally:
        if held is not None:
            with held, suppress(OSError):
                lock.unlink()


def _locked(lock: Path) -> BinaryIO:
    while True:
        file = lock.open("ab")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.close()
            if not isinstance(error, BlockingIOError):
                lock.unlink(missing_ok=True)
            raise
        if os.fstat(file.fileno()).st_nlink:
            return file
        file.close()  # a run that ended has removed it in the meantime


# --- profiles ---------------------------------------------------------------------------------------------------------


def write_measured(measured: Part, path: Path) -> None:
    """Writes a profile, atomically; large ones are compressed, whatever the name."""
    data = measured.model_dump(mode="json")
    content = json.dumps(data | {_INTEGRITY: content_digest(data)}, separators=(",", ":")).encode() + b"\n"
    write_bytes(path, gzip.compress(content, mtime=0) if len(content) > _COMPRESS_ABOVE else content)


def read_measured(kind: type[Measured], path: Path) -> Measured:
    """Reads a file of `write_measured`.

    Raises:
        UsageError: there is no such file.
        PlanError: it is not a whole and sound record of that kind.
    """
    what = _what(kind)
    try:
        data = json.loads(_content(path, what))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"expected a {what} in {path}, found no whole JSON: {error}; make it again") from error
    digest = data.pop(_INTEGRITY, None) if isinstance(data, dict) else None
    try:
        measured = kind.model_validate(data)
    except ValidationError as error:
        schema = kind.model_fields["schema_version"].default
        raise PlanError(
            f"expected a {what} of schema {schema} in {path}, found at {first_fault(error)}; make it again"
        ) from error
    if digest != content_digest(data):
        raise PlanError(
            f"expected {path} as it was written, found a changed {what}; make it again, it is measured data"
        )
    return measured


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong and where, cut short: the file may hold anything, also as the name of a field."""
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    steps = (*first["loc"], *(cause.path if isinstance(cause, FieldError) else ()))
    where = printable(".".join(map(str, steps))) or "the top"
    return f"{where:.200}: {printable(first['msg'].removeprefix('Value error, ')):.300}"


def _what(kind: type[Part]) -> str:
    return str(kind.model_fields["kind"].default)


def digest_of(measured: BaseModel) -> str:
    """`sha256:...` over the canonical content of a profile or of prices."""
    return content_digest(measured.model_dump(mode="json"))


def _content(path: Path, what: str) -> bytes:
    """Up to MAX_BYTES of a file, unpacked; counted before they are held: a small file may hold a thousand times its
    size."""
    content = read_bytes(path, MAX_BYTES)
    size = len(content)
    try:
        if content.startswith(_GZIP):
            with gzip.open(io.BytesIO(content)) as unpacked:
                size = sum(map(len, pieces(unpacked.read, MAX_BYTES + 1)))
            content = gzip.decompress(content) if size <= MAX_BYTES else b""
    except (OSError, EOFError, zlib.error) as error:
        raise PlanError(f"expected a whole {what} in {path}, found a damaged one: {error}; make it again") from error
    if size > MAX_BYTES:
        raise PlanError(f"expected a {what} of at most {MAX_BYTES >> 20} MiB, found more in {path}; make it again")
    return content


def versions() -> dict[str, str]:
    return {"sparsekv": __version__, **{name: version(name) for name in ("torch", "transformers")}}
