"""Files on disk: read whole up to a bound, written whole or not at all."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from sparsekv.plans.errors import PlanError, UsageError

MAX_BYTES = 8 << 20


def read_text(path: str | os.PathLike[str], limit: int = MAX_BYTES) -> str:
    """The UTF-8 text of a file of at most `limit` bytes.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        PlanError: it is longer, or it is not text.
    """
    try:
        with open(path, "rb") as file:
            data = file.read(limit + 1)
    except IsADirectoryError:
        raise UsageError(f"{path}: expected a file, found a folder; name the file in it") from None
    except FileNotFoundError:
        raise UsageError(f"{path}: expected a file, found none; check the path") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path}: cannot be read: {_reason(error)}") from None
    return decode(data, str(path), limit)


def decode(data: bytes, source: str, limit: int = MAX_BYTES) -> str:
    """`data` as UTF-8 text.

    Raises:
        PlanError: it is longer than `limit` bytes, or not text.
    """
    if len(data) > limit:
        raise PlanError(f"{source}: expected at most {limit:,} bytes, found more; this is not a file of sparsekv")
    if b"\0" in data:
        raise PlanError(f"{source}: expected text, found binary data")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        raise PlanError(f"{source}, line {line}: expected UTF-8 text, found other bytes; save it as UTF-8") from None


def write_text(path: str | os.PathLike[str], text: str) -> None:
    """Puts `text` at `path`; see `write_bytes`."""
    write_bytes(path, text.encode())


def write_bytes(path: str | os.PathLike[str], data: bytes) -> None:
    """Puts `data` at `path` through a temporary file beside it; a file there before keeps its mode.

    Whatever happens on the way, Ctrl-C included, `path` holds either what it held before or all of `data`, and no
    temporary file stays.

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
    _sync_folder(target.parent)


def _mode(target: Path) -> int | None:
    try:
        found = target.stat().st_mode
    except FileNotFoundError:
        return None
    if stat.S_ISDIR(found):
        raise IsADirectoryError(21, "it is a folder; name a file in it")
    if not stat.S_ISREG(found):
        raise OSError(22, "it is not a regular file")
    return stat.S_IMODE(found)


def _sync_folder(folder: Path) -> None:
    # The file is in place; a file system that cannot sync folders is no reason to say otherwise.
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _reason(error: Exception) -> str:
    return getattr(error, "strerror", None) or str(error)
