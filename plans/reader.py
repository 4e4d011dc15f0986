"""Plan files read strictly: bounded, every field known and of its type, signed, and each fault named by its line."""

from __future__ import annotations

import os
from typing import Any

from pydantic import ValidationError

from sparsekv.plans.errors import PlanError
from sparsekv.plans.files import decode, read_text
from sparsekv.plans.migrations import migrate
from sparsekv.plans.problems import plan_error, printable
from sparsekv.plans.schema import KIND, SCHEMA_VERSION, Plan
from sparsekv.plans.signature import check as check_signature
from sparsekv.plans.yaml_tree import Tree, read_tree


def load_plan(path: str | os.PathLike[str]) -> Plan:
    """The plan in a file.

    Raises:
        UsageError: there is no such file, or it cannot be read.
        PlanError: it is no plan, contradicts itself, or was changed since it was signed.
    """
    return parse_plan(read_text(path), os.fspath(path))


def parse_plan(text: str | bytes, source: str = "plan", *, signed: bool = True) -> Plan:
    """The plan in `text`; `source` names it in messages. `signed=False` reads one whose integrity does not fit.

    Raises:
        PlanError: it is no plan, contradicts itself, or (when `signed`) was changed since it was signed.
    """
    tree = read_tree(decode(text.encode(errors="surrogatepass") if isinstance(text, str) else text, source), source)
    document = _document(tree)
    plan = _validated(migrate(document, SCHEMA_VERSION, source), tree)
    if signed:
        check_signature(document, source)
    return plan


def _document(tree: Tree) -> dict[str, Any]:
    if not isinstance(tree.data, dict):
        found = "a list" if isinstance(tree.data, list) else "a single value"
        raise PlanError(f"{tree.source}: expected a plan, a mapping with `kind: {KIND}`, found {found}")
    if tree.data.get("kind") != KIND:
        raise PlanError(f"{tree.source}: expected `kind: {KIND}`, found {_what(tree.data)}")
    return tree.data


def _what(data: dict[str, Any]) -> str:
    kind = data.get("kind")
    if isinstance(kind, str) and kind.startswith("sparsekv."):
        name = printable(kind.removeprefix("sparsekv.")[:40])
        return f"a {name} file of sparsekv (kind: sparsekv.{name}); name the plan instead"
    if kind is not None:
        return f"kind {kind!r:.60}, which is not a file of sparsekv"
    if "model_type" in data or "architectures" in data:
        return "a model's config.json; the plan beside it is called sparsekv.yaml"
    return f"none; its first fields are {printable(', '.join(list(data)[:3])[:80]) or 'missing'}"


def _validated(document: dict[str, Any], tree: Tree) -> Plan:
    try:
        return Plan.model_validate(document)
    except ValidationError as error:
        raise plan_error(error, tree) from None
