"""The JSON Schema of a plan file, for editors and other tools."""

from __future__ import annotations

from typing import Any

from sparsekv.plans.schema import Plan
from sparsekv.plans.writer import SCHEMA_FILE

_ALWAYS = ("kind", "schema_version", "integrity")


def json_schema() -> dict[str, Any]:
    """The schema of version 1 (JSON Schema 2020-12). What fields say about each other, only the reader checks."""
    schema = Plan.model_json_schema(mode="validation")
    schema["required"] = [*_ALWAYS, *(name for name in schema["required"] if name not in _ALWAYS)]
    schema["$defs"]["HeadGroup"] = _flat(schema["$defs"]["HeadGroup"], schema["$defs"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_FILE, **schema}


def _flat(group: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A head group as it stands in a file: the pattern's fields beside `layer` and `heads`."""
    place = {name: group["properties"][name] for name in ("layer", "heads")}
    members = []
    for reference in group["properties"]["pattern"]["oneOf"]:
        pattern = definitions.pop(reference["$ref"].removeprefix("#/$defs/"))
        required = [*place, "pattern", *pattern.get("required", ())]
        members.append(pattern | {"properties": place | pattern["properties"], "required": required})
    return {"description": group["description"], "oneOf": members}
