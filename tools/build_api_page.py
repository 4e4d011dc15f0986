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

What this page names is the API; all else may change in any release, whatever it is called. A name, an argument or a
field of the API is deprecated in one minor release, with a `DeprecationWarning` that says what to use, before it is
removed in the next; plan files of a released schema version can be read, or migrated, by every later release.
"""
ERRORS = (
    "Every error that is raised on purpose is a `SparseKVError`, whose message says what was expected, what was found, "
    "and what to do. They are in `sparsekv.plans.errors`; `exit_code` is what the command line returns."
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
    """A signature as a block of code, one argument a line where it is long."""
    signature = inspect.signature(function)
    arguments, returned = list(_arguments(signature)), signature.return_annotation
    line = f"{name}({', '.join(arguments)}) -> {returned}"
    if len(line) > 100:
        line = f"{name}(\n" + "".join(f"    {one},\n" for one in arguments) + f") -> {returned}"
    return "\n".join(f"    {part}" for part in line.splitlines())


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
    told = f"## {name}\n\n`{module}.{name}`\n\n{_described(found)}"
    if fields := list(_fields(found)):
        told += "\n| field | |\n|---|---|\n" + "".join(f"| `{field}` | `{_cell(kind)}` |\n" for field, kind in fields)
    own = [member for member, value in vars(found).items() if _is_told(member, value)]
    return told + "".join(_member(found, one) for one in (own if members is None else members))


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
    value = inspect.getattr_static(found, name)
    if isinstance(value, property):
        kind = inspect.get_annotations(value.fget)["return"]
        return f"\n### {found.__name__}.{name}\n\n    {name}: {kind}\n\n{_described(value.fget)}"
    return f"\n### {found.__name__}.{name}\n\n{_code(name, value)}\n\n{_described(value)}"


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
    """A docstring as Markdown: paragraphs, and lists of what it names."""
    return "\n\n".join(map(_paragraph, inspect.cleandoc(found.__doc__).split("\n\n"))) + "\n"


def _paragraph(part: str) -> str:
    title, _, rest = part.partition(":\n")
    if title not in _SECTIONS:
        return " ".join(part.split())
    lines = textwrap.dedent(rest)
    if title == "Returns":
        return f"Returns: {' '.join(lines.split())}"
    entries = re.split(r"\n(?=\S)", lines)
    return f"{title}:\n\n" + "\n".join(map(_entry, entries))


def _entry(entry: str) -> str:
    names, _, said = " ".join(entry.split()).partition(": ")
    return f"- {', '.join(f'`{name}`' for name in names.split(', '))}: {said}"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
