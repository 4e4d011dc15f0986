"""`sparsekv schema`: the JSON Schema of the plan file."""

from __future__ import annotations

from sparsekv.cli import commands
from sparsekv.cli.arguments import Json
from sparsekv.cli.output import emit_json


def schema(as_json: Json = False) -> None:
    """Print the JSON Schema of the plan file, for editors and other tools (always JSON)."""
    from sparsekv.plans.schema import json_schema

    emit_json(json_schema())


app = commands.app(schema)
