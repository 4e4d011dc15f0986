"""Profile and device-cost files: JSON, compressed when large, the same bytes for the same content."""

from __future__ import annotations

import gzip
import io
import json
import zlib
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from pydantic import BaseModel, ValidationError

from sparsekv import __version__
from sparsekv.planner.cost.device_cost import DeviceCost
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.plans.errors import PlanError, PlanMismatchError, UsageError
from sparsekv.plans.files import content_digest, open_input, write_bytes
from sparsekv.plans.model import OTHER_WEIGHTS, ModelInfo
from sparsekv.plans.types import FieldError, canonical_json
from sparsekv.plans.yaml_io import printable

MAX_BYTES = 512 << 20
_COMPRESS_ABOVE = 1 << 20
_PIECE = 1 << 20
_GZIP = b"\x1f\x8b"
_INTEGRITY = "integrity"

Record = TypeVar("Record", Profile, DeviceCost)


def write_measured(record: Profile | DeviceCost, path: Path) -> None:
    """Writes a profile or a device cost, atomically; large ones are compressed, whatever the name.

    Raises:
        UsageError: the file cannot be written.
    """
    data = record.model_dump(mode="json")
    content = canonical_json(data | {_INTEGRITY: content_digest(data)}) + b"\n"
    write_bytes(path, gzip.compress(content, mtime=0) if len(content) > _COMPRESS_ABOVE else content)


def read_measured(kind: type[Record], path: Path) -> Record:
    """Reads a file of `write_measured`.

    Raises:
        UsageError: there is no such file.
        PlanError: it is not a whole and sound record of that kind.
    """
    what = _name_of(kind)
    try:
        data = json.loads(_content(path, what))
    except (ValueError, RecursionError) as error:
        raise PlanError(f"expected a {what} in {path}, found no whole JSON: {error}; make it again") from error
    digest = data.pop(_INTEGRITY, None) if isinstance(data, dict) else None
    record = record_of(kind, data, path)
    if digest != digest_of(record):
        raise PlanError(
            f"expected {path} as it was written, found a changed {what}; make it again, it is measured data"
        )
    return record


def record_of(kind: type[Record], data: Any, path: Path) -> Record:
    """The record that the data of a file makes, without its digest; `path` names it in messages.

    Raises:
        PlanError: it is no sound record of that kind.
    """
    what = _name_of(kind)
    try:
        return kind.model_validate(data)
    except ValidationError as error:
        schema = kind.model_fields["schema_version"].default
        raise PlanError(
            f"expected a {what} of schema {schema} in {path}, found at {first_fault(error)}; make it again"
        ) from error


def first_fault(error: ValidationError) -> str:
    """The first thing that is wrong and where, cut short: the file may hold anything, also as the name of a field."""
    first = error.errors(include_url=False, include_input=False)[0]
    cause = first.get("ctx", {}).get("error")
    steps = (*first["loc"], *(cause.path if isinstance(cause, FieldError) else ()))
    where = printable(".".join(map(str, steps))) or "the top"
    return f"{where:.200}: {printable(first['msg'].removeprefix('Value error, ')):.300}"


def _name_of(kind: type[Record]) -> str:
    return "profile" if kind is Profile else "device-cost file"


def check_model(profile: Profile, model: ModelInfo, *, weights: bool = True) -> None:
    """Refuses a profile of another model; `weights` off compares the architecture alone.

    Raises:
        PlanMismatchError: it is of another architecture, or of other weights.
    """
    found, expected = profile.model.fingerprint, model.fingerprint
    for part in ("architecture", "weights") if weights else ("architecture",):
        if getattr(found, part) != getattr(expected, part):
            other = OTHER_WEIGHTS if part == "weights" else f"other {part}"
            if part == "weights" and found.weights_difference(expected) == "older kind":
                other = "a weights fingerprint of an older kind"
            raise PlanMismatchError(
                f"expected a profile of {model.id}, found one of {profile.model.id}, with {other}; "
                "profile this model again (leave --profile out)"
            )


def digest_of(record: BaseModel) -> str:
    """`sha256:...` over the canonical content of a profile or a device cost."""
    return content_digest(record.model_dump(mode="json"))


def _content(path: Path, what: str) -> bytes:
    try:
        with open_input(path) as file:
            content = b"".join(_pieces(file))
    except OSError as error:
        raise UsageError(f"cannot read the {what} {path}: {error.strerror or error}") from error
    size = len(content)
    try:
        if size <= MAX_BYTES and content.startswith(_GZIP):
            # Counted before it is held: a small file may hold a thousand times its size.
            with gzip.open(io.BytesIO(content)) as unpacked:
                size = sum(map(len, _pieces(unpacked)))
            content = gzip.decompress(content) if size <= MAX_BYTES else b""
    except EOFError:
        raise PlanError(f"expected a whole {what} in {path}, found one cut short; make it again") from None
    except (OSError, zlib.error) as error:
        raise PlanError(f"expected a whole {what} in {path}, found a damaged one: {error}; make it again") from error
    if size > MAX_BYTES:
        raise PlanError(f"expected a {what} of at most {MAX_BYTES >> 20} MiB, found more in {path}; make it again")
    return content


def _pieces(file: BinaryIO | gzip.GzipFile) -> Iterator[bytes]:
    """Returns what is in a file, up to a little more than MAX_BYTES."""
    left = MAX_BYTES
    while left >= 0 and (piece := file.read(_PIECE)):
        left -= len(piece)
        yield piece


def versions() -> dict[str, str]:
    """Versions of what measurements depend on."""
    return {"sparsekv": __version__, **{name: version(name) for name in ("torch", "transformers")}}
