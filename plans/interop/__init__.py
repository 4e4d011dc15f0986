"""Sparse attention settings of other tools, read into plans and written from them.

A format is a file here and a row below. None of it runs code, or needs more than the standard library and the schema.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

from sparsekv.plans.errors import PlanError, PlanMismatchError, did_you_mean
from sparsekv.plans.interop import filter_lists, minference
from sparsekv.plans.interop.source import Exported, Imported, Source
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan, Provenance


@dataclass(frozen=True)
class Reader:
    """The reader of one kind of file, and what a file lacks to be one, None where it is."""

    missed: Callable[[Source], str | None]
    read: Callable[[Source, ModelInfo], Imported]


READERS = MappingProxyType(
    {
        "minference": Reader(minference.missed, minference.read),
        "qwen-1m": Reader(minference.missed, minference.read_qwen),
        "kascade": Reader(filter_lists.missed_maps, filter_lists.read_maps),
        "filter-layers": Reader(filter_lists.missed_list, filter_lists.read_list),
        "indexcache": Reader(filter_lists.missed_letters, filter_lists.read_letters),
    }
)
WRITERS: MappingProxyType[str, Callable[[Plan], Exported]] = MappingProxyType(
    {
        "minference": minference.write,
        "sparseengine": filter_lists.write_list,
        "indexcache": filter_lists.write_letters,
        "index-topk": filter_lists.write_topk,
    }
)


def recognised(source: Source, kind: str | None = None) -> str:
    """The kind of a file, by its content, or as asked for."""
    if kind is not None and kind not in READERS:
        raise PlanError(f"expected a kind of {', '.join(READERS)}, found {kind!r}{did_you_mean(kind, READERS)}")
    tried = {name: reader.missed(source) for name, reader in READERS.items() if kind in (None, name)}
    found = next((name for name, missed in tried.items() if missed is None), None)
    if found is None:
        listed = "\n".join(f"  {name}: {missed}" for name, missed in tried.items())
        raise PlanError(f"expected a file of one of these kinds, found in {source.name}:\n{listed}")
    is_qwen = kind is None and found == "minference" and source.name == minference.QWEN_FILE
    return "qwen-1m" if is_qwen else found


def plan_of(source: Source, kind: str, model: ModelInfo) -> tuple[Plan, tuple[str, ...]]:
    """A plan for a model, and what the file did not say, a line each."""
    found = READERS[kind].read(source, model)
    name = "".join(letter if letter.isprintable() else "?" for letter in source.name)
    phases: Any = {"prefill": found.prefill, "decode": found.decode, "index_sharing": found.index_sharing}
    origin = Provenance(source=f"{kind}: {name}"[:200])
    try:
        plan = Plan(status="imported", model=model, provenance=origin, **phases)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise PlanMismatchError(f"{source.name} does not fit {model.id}: {reason}") from None
    return plan, tuple(found.notes)
