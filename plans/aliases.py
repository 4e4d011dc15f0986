"""Resolves MODEL: an alias of one checkpoint, a hub id, a folder, or a GGUF file."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType

from sparsekv.plans.errors import UsageError, did_you_mean

PLAN_NAME = "sparsekv.yaml"
SHIPPED = "tiny-retriever"
_HUB_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}/[A-Za-z0-9][A-Za-z0-9._-]{0,95}", re.ASCII)
_NO_TEXT = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ufeff\ud800-\udfff]")  # cannot stand in a plan


@dataclass(frozen=True, slots=True)
class ModelSource:
    """The source of a model: a folder, a GGUF file, or a hub id."""

    path_or_id: str
    is_gguf: bool = False
    trouble: str | None = None  # why the hub does not give it, "" where it does; None where the hub was not asked

    @property
    def place(self) -> str:
        """The folder, that around the GGUF file, or the hub id."""
        return str(Path(self.path_or_id).parent) if self.is_gguf else self.path_or_id

    @property
    def is_local(self) -> bool:
        return os.path.isdir(self.place)


ALIASES: Mapping[str, str] = MappingProxyType(
    tomllib.loads((Path(__file__).parent / "data" / "aliases.toml").read_text())
)
"""The checkpoint of each alias."""


def resolve_model(name: str | os.PathLike[str]) -> ModelSource:
    """The source that a name means. A folder with a model in it goes before an alias; its config.json before a GGUF
    file.
    """
    if not isinstance(name, str | os.PathLike):
        raise UsageError(f"expected the name of a model folder, a hub id or an alias, found {name!r:.80}")
    name = os.fspath(name)
    path = Path(os.path.expanduser(name))
    if name and _is_model(path):
        return ModelSource(_readable(path))
    if name and (gguf := _gguf_file(path)):
        return ModelSource(_readable(gguf), is_gguf=True)
    if name.lower() == SHIPPED:
        return ModelSource(str(_shipped()))
    if not is_alias(name):
        _refuse_path(name, path)
    return ModelSource(ALIASES.get(name.lower(), name))


def names_gguf(path: str | os.PathLike[str]) -> bool:
    return os.fspath(path).endswith(".gguf")


def is_hub_id(name: str) -> bool:
    return bool(_HUB_ID.fullmatch(name))


def is_alias(name: str) -> bool:
    return name.lower() in ALIASES


def without_plan(model: str, found: str) -> str:
    """The message for a plan that is not where the plan of `model` was looked for."""
    return (
        f"expected a plan, found {found}; name one with --plan FILE, or make it: `sparsekv plan {model}`, which says "
        "how to run it"
    )


def holds_model(folder: Path) -> bool:
    """True of a folder with a model, as `resolve_model` finds it: its config.json, or a single GGUF file."""
    return _is_model(folder) or len(list(folder.glob("*.gguf"))) == 1


def _is_model(path: Path) -> bool:
    return os.path.isfile(path / "config.json")  # False of what no file can be called


def _gguf_file(path: Path) -> Path | None:
    """The GGUF file that is `path`, or the only one in it."""
    if os.path.isfile(path):
        return path if names_gguf(path) else None
    found = sorted(path.glob("*.gguf")) if os.path.isdir(path) else []
    if len(found) > 1:
        raise UsageError(
            f"expected one GGUF file in {path}, found {len(found)} ({', '.join(file.name for file in found)}); name "
            f"the one that is meant: {found[0]}"
        )
    return found[0] if found else None


def _readable(path: Path) -> str:
    name = path.resolve().name  # which plans and profiles name
    if _NO_TEXT.search(name):
        raise UsageError(f"expected a model whose name has no control characters, found {name!r:.80}; rename it")
    return str(path)


def _refuse_path(name: str, path: Path) -> None:
    if name and os.path.isdir(path):
        raise UsageError(
            f"expected a Hugging Face model in {path}, found a folder without config.json and without a GGUF file"
        )
    if name and os.path.exists(path):
        raise UsageError(f"expected a model folder, hub id or alias, found the file {path}; name the folder around it")
    if names_gguf(name):
        raise UsageError(f"expected a GGUF file at {path}, found none; check the path")
    first, *rest = name.split(os.sep)
    if name.startswith((".", "/", "~")) or len(rest) > 1 or (rest and os.path.isdir(first)):
        raise UsageError(
            f"expected a model folder at {path}, found none; check the path (a hub id is organisation/name)"
        )
    if not is_hub_id(name):
        raise UsageError(_unknown(name))


def _shipped() -> Path:
    folder = Path(str(files("sparsekv.plans"))) / "data" / SHIPPED
    if not _is_model(folder):
        raise UsageError(
            f"expected the model {SHIPPED} with this installation, in {folder}, found none; install sparsekv again, "
            "or train it with tools/train_reference_model.py"
        )
    return folder


def _unknown(name: str) -> str:
    meant = did_you_mean(name, ALIASES)
    meant += "; a plan is named with --plan FILE" if name.endswith((".yaml", ".yml")) else ""
    return (
        f"expected a model folder, a hub id (organisation/name) or an alias, found {name!r:.80}{meant}\n"
        f"Aliases: {', '.join(ALIASES)}"
    )
