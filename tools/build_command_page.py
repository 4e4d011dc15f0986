"""Writes docs/commands.md from the command line itself: `python tools/build_command_page.py`."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import typer

PAGE = Path(__file__).resolve().parent.parent / "docs" / "commands.md"
HEAD = """# Commands

Made by `python tools/build_command_page.py` from what `--help` says.

`MODEL` is an alias (`tiny-retriever`, `llama3.1-8b`, `qwen2.5-7b-1m`, ...), a hub id, a folder or a GGUF file (which
takes the extra `[gguf]`). Data goes to standard output and progress to standard error; commands with a result take
`--json`, with which a failure is an object with `error` too. Exit codes: 0 done, 1 a check or gate failed, 2 usage, 3
plan and model do not match; `validate` exits 1 for a file that is no sound plan, `diff` 1 for plans that differ, 128 +
n what signal n ended (130 by Ctrl-C, 141 where `| head` has read enough). `--set KEY=VALUE`, which may be repeated,
sets what has no flag. Flags and keys go over `SPARSEKV_DEVICE`, `SPARSEKV_DTYPE` and `SPARSEKV_BACKEND`, which go over
defaults. Lengths such as `32k` are 32,768 tokens, `1m` is 1,048,576.
"""


def page() -> str:
    """The page as it has to be."""
    from sparsekv.cli.main import app

    return HEAD + "".join(_sections(typer.main.get_command(app), "sparsekv"))


def _sections(command: Any, name: str) -> Iterator[str]:
    for child in getattr(command, "commands", {}).values():
        called = f"{name} {child.name}"
        if hasattr(child, "commands"):
            yield from _sections(child, called)
            continue
        context = child.context_class(child, info_name=called)
        usage = " ".join([called, *child.collect_usage_pieces(context)])
        yield f"\n## {called}\n\n{_cell(child.help or '')}\n\n    {usage}\n\n"
        yield "| option | |\n|---|---|\n"
        yield from (f"| `{_cell(names)}` | {_cell(said)} |\n" for names, said in _options(child, context))
        if child.keys:
            yield "\n| key of `--set` | |\n|---|---|\n"
            yield from (f"| `{name}={_cell(key.metavar)}` | {_cell(key.help)} |\n" for name, key in child.keys.items())
        yield "\n" + "".join(f"    {example}\n" for example in child.examples)


def _options(command: Any, context: Any) -> list[tuple[str, str]]:
    records = [param.get_help_record(context) for param in command.params if param.param_type_name == "option"]
    return [record for record in records if record]


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(page())
