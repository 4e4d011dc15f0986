"""Fields of a plan that another format cannot hold: one list a format decides what is told to be lost.

A path names a field from the plan down, such as `decode.lengths.segments.layers`, and stands for all below it. A field
that no list names, one that comes into the schema later too, is told.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from sparsekv.plans.schema import Plan
from sparsekv.plans.types import Part

_SAME_MODEL = ("kind", "schema_version", "model", "integrity")  # of any file for the model
_KNOWN = ("status", "targets", "quality", "cost", "provenance", "extensions")  # of a plan, not what it computes
_WORDS = {
    "prefill": "the prefill phase",
    "decode": "the decode phase",
    "kv_cache": "KV cache eviction: all tokens stay cached",
    "decode.offload": "layers in host memory: all stay on the device",
    "decode.lengths.segments.selector": "queries that choose besides the newest",
    "decode.lengths.segments.window": "how many queries choose",
    "decode.lengths.segments.scope": "choices by tensor-parallel rank",
    "decode.lengths.segments.heads": "choices by KV head and maps of heads: one choice for all heads",
    "decode.lengths.segments.budget": "the number of chosen tokens",
    "decode.lengths.segments.sink": "the number of sinks",
    "decode.lengths.segments.recent": "the number of recent tokens",
}


@dataclass(frozen=True)
class Format:
    """Holds what a format holds.

    Attributes:
        held: paths of the fields that are written; the writer itself tells where it rounds or merges one.
        given_back: what reading a file gives to fields that it does not hold.
    """

    held: frozenset[str]
    given_back: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def lost(self, plan: Plan) -> list[str]:
        """Returns a line for each field of the plan that is not held and not at its default, `path`: what it is."""
        found: dict[str, None] = {}
        known = []
        for path, value in _leaves(plan):
            top = path.partition(".")[0]
            if top in _KNOWN:
                known.append(top)
            elif top not in _SAME_MODEL and not self._holds(path) and self.given_back.get(path, path) != value:
                found[self._told(path)] = None
        lines = [f"`{path}`: {_WORDS[path]}" if path in _WORDS else f"`{path}`" for path in found]
        about = ", ".join(f"`{name}`" for name in dict.fromkeys(known))
        return [*lines, f"{about}: what is known of the plan"] if about else lines

    def _holds(self, path: str) -> bool:
        return any(path == own or path.startswith(f"{own}.") for own in self.held)

    def _told(self, path: str) -> str:
        """The shortest part of the path below which nothing is held."""
        parts = path.split(".")
        starts = (".".join(parts[:count]) for count in range(1, len(parts)))
        return next((one for one in starts if not any(f"{own}.".startswith(f"{one}.") for own in self.held)), path)


def _leaves(part: Part, path: str = "") -> Iterator[tuple[str, Any]]:
    """The fields of a part and of those below that are not at their defaults."""
    for name, info in type(part).model_fields.items():
        value, here = getattr(part, name), f"{path}.{name}" if path else name
        if not info.is_required() and value == info.get_default(call_default_factory=True):
            continue
        parts = value if isinstance(value, tuple) and value and isinstance(value[0], Part) else (value,)
        for one in parts:
            if isinstance(one, Part):
                yield from _leaves(one, here)
            else:
                yield here, one
