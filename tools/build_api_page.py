"""Writes docs/api.md, what a program calls, from signatures and docstrings: `python tools/build_api_page.py`."""

from __future__ import annotations

import dataclasses
import inspect
import re
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PAGE = Path(__file__).resolve().parent.parent / "docs" / "api.md"
HEAD = """# API

Made by `python tools/build_api_page.py` from signatures and docstrings.

    import sparsekv

    plan = sparsekv.plan_model("./my-model", lengths="32k,128k")        # or the command: sparsekv plan
    sparsekv.write_plan(plan, "./my-model/sparsekv.yaml")
    loaded = sparsekv.load_model("./my-model")                          # or by an alias: "tiny-retriever"
    prompt = loaded.tokenizer(open("book.txt").read(), return_tensors="pt").to(loaded.model.device)
    with sparsekv.apply(loaded.model, plan) as handle:                  # a transformers model; then it is what it was
        loaded.model.generate(**prompt, max_new_tokens=64)
        print(handle.stats())

`import sparsekv` imports nothing else; each name does when it is used. The package is typed. The
fields of a plan are explained in [the plan file](plan-file.md).

## What holds, and how long

The API is the names on this page; everything else may change in any release. A name, argument or field is deprecated
in one minor release, with a `DeprecationWarning` that names its successor, and removed in the next. Every later release
reads or migrates plan files of a released schema version.
"""
ERRORS = (
    "Every deliberate error is a `SparseKVError`. Its message has the expected value, the found one, and the way out. "
    "Errors are in `sparsekv.plans.errors`; the command line returns their `exit_code`."
)
# Classes that calls return or take, by where they are, and the members that are part of the API; None is all.
CLASSES: dict[str, tuple[str, ...] | None] = {
    "sparsekv.runtime.hf.load:LoadedModel": None,
    "sparsekv.runtime.hf.apply:Handle": (
        "backend", "host_layers", "closed", "close", "suspend", "resume", "new_cache", "stats", "reset_stats",
    ),
    "sparsekv.runtime.core.stats:RunStats": None,
    "sparsekv.plans.schema:Plan": ("planned_lengths", "is_dense", "buckets"),
    "sparsekv.planner.verify:Verification": ("recorded",),
}  # fmt: skip
_SECTIONS = ("Args", "Attributes", "Returns", "Raises")


def page() -> str:
    """The page as it has to be."""
    import sparsekv

    functions = [name for name in sparsekv.__all__ if inspect.isfunction(getattr(sparsekv, name))]
    parts = [HEAD]
    parts += [_function(f"sparsekv.{name}", getattr(sparsekv, name)) for name in functions]
    parts += [_class(place, members) for place, members in CLASSES.items()]
    return "\n".join((*parts, _options(), _errors()))


def _function(name: str, function: Any) -> str:
    return f"## {name}\n\n{_code(name, function)}\n\n{_described(function)}"


def _code(name: str, function: Any) -> str:
    """A signature as a block of code."""
    signature = inspect.signature(function)
    line = f"{name}({', '.join(_arguments(signature))}) -> {signature.return_annotation}"
    return "\n".join(textwrap.wrap(line, 110, initial_indent="    ", subsequent_indent=" " * 8, break_on_hyphens=False))


def _arguments(signature: inspect.Signature) -> Iterator[str]:
    """Each as it is written, and the star before those that are given by name."""
    starred = False
    for one in signature.parameters.values():
        if one.name == "self":
            continue
        if one.kind is one.KEYWORD_ONLY and not starred:
            starred = True
            yield "*"
        default = "" if one.default is one.empty else f" = {one.default!r}"
        yield f"{'**' if one.kind is one.VAR_KEYWORD else ''}{one.name}: {one.annotation}{default}"


def _class(place: str, members: tuple[str, ...] | None) -> str:
    module, _, name = place.partition(":")
    found = getattr(__import__(module, fromlist=[name]), name)
    own = [member for member, value in vars(found).items() if _is_told(member, value)]
    fields = ", ".join(f"`{field}: {_cell(kind)}`" for field, kind in _fields(found))
    rows = [f"| {fields} | fields |\n"] if fields else []
    rows += [_member(found, one) for one in (own if members is None else members)]
    return f"## {name}\n\n`{module}.{name}`: {_described(found)}\n| member | |\n|---|---|\n" + "".join(rows)


def _fields(found: Any) -> Iterator[tuple[str, str]]:
    """The fields of a dataclass or a model, with their types as they are written."""
    if dataclasses.is_dataclass(found):
        yield from ((field.name, str(field.type)) for field in dataclasses.fields(found))
    elif hasattr(found, "model_fields"):
        written = inspect.get_annotations(found)
        yield from ((name, written[name]) for name in found.model_fields if name in written)


def _is_told(name: str, value: Any) -> bool:
    return not name.startswith("_") and (isinstance(value, property) or inspect.isfunction(value))


def _member(found: Any, name: str) -> str:
    """A row: its signature, and its docstring in one paragraph."""
    value = inspect.getattr_static(found, name)
    if isinstance(value, property):
        kind = f"{name}: {inspect.get_annotations(value.fget)['return']}"
        return f"| `{_cell(kind)}` | {_cell(_described(value.fget))} |\n"
    signature = inspect.signature(value)
    call = f"{name}({', '.join(_arguments(signature))}) -> {signature.return_annotation}"
    return f"| `{_cell(call)}` | {_cell(_described(value).replace(chr(10) + '- ', ' '))} |\n"


def _options() -> str:
    from sparsekv.planner.options import PlanOptions

    declared = ((name, field) for name, field, _ in PlanOptions.declared())
    rows = [(name, PlanOptions.flag_of(name), _help(field)) for name, field in declared]
    listed = "".join(
        f"| `{name}` | {f'`{option}`' if option != name else ''} | {_cell(said)} |\n"
        for name, option, said in rows
        if said
    )
    return (
        "## PlanOptions\n\n`sparsekv.planner.options.PlanOptions`\n\n"
        "The options of `plan_model` and `verify_plan`, by keyword; a value may be the text that the flag takes. Their "
        "defaults are those of [the command](commands.md#sparsekv-plan).\n\n"
        f"| option | on the command line | |\n|---|---|---|\n{listed}"
    )


def _help(field: Any) -> str:
    """What is said of an option on the command line, or to programs."""
    told = next((part.help for part in field.metadata if hasattr(part, "help")), None)
    return told or field.description or ""


def _errors() -> str:
    from sparsekv.plans.errors import SparseKVError

    home = SparseKVError.__module__
    rows = [SparseKVError, *(one for one in SparseKVError.__subclasses__() if one.__module__ == home)]
    listed = "".join(f"| `{one.__name__}` | {one.exit_code} | {_cell(_first(one))} |\n" for one in rows)
    return f"## Errors\n\n{ERRORS}\n\n| error | exit code | |\n|---|---|---|\n{listed}"


def _first(found: Any) -> str:
    return inspect.cleandoc(found.__doc__).split("\n\n")[0]


def _described(found: Any) -> str:
    """A docstring as Markdown: paragraphs, then one list of arguments, result and errors."""
    parts = inspect.cleandoc(found.__doc__).split("\n\n")
    told = [" ".join(part.split()) for part in parts if part.partition(":\n")[0] not in _SECTIONS]
    listed = [line for part in parts for line in _lines(*part.partition(":\n")[::2])]
    return "\n\n".join((*told, *(["\n".join(listed)] if listed else []))) + "\n"


def _lines(title: str, rest: str) -> Iterator[str]:
    """The list items of a section of a docstring; none of a paragraph."""
    if title not in _SECTIONS:
        return
    lines = textwrap.dedent(rest)
    if title == "Returns":
        yield f"- returns: {' '.join(lines.split())}"
        return
    for entry in re.split(r"\n(?=\S)", lines):
        names, _, said = " ".join(entry.split()).partition(": ")
        raised = "raises " if title == "Raises" else ""
        yield f"- {raised}{', '.join(f'`{name}`' for name in names.split(', '))}: {said}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
