"""Every command in the documents can be typed: its module, subcommand and flags are there, or a commit is named."""

import re
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
import typer
from shown_commands import shown

from sparsekv.cli.main import app

ROOT = Path(__file__).resolve().parent.parent
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
SPARSEKV = typer.main.get_command(app)
OLD_SCRIPT = re.compile(r"benchmarks/\w+\.py")
FLAG = re.compile(r"--?[a-z][a-z-]*")


def commands(text: str) -> Iterator[tuple[str, str]]:
    """Lines of blocks of code and spans of code, each with the commit that stands behind it, if one does."""
    for part in shown(text):
        yield from ((line, part.commit) for line in part.lines)


def fault(command: str) -> str:
    """Returns what is not there of what a command names; empty of a sound one, and of what is no command."""
    if old := OLD_SCRIPT.search(command):
        return "" if (ROOT / old[0]).exists() else f"no {old[0]}"
    words = [word for word in command.split() if not re.match(r"[A-Z_0-9]+=", word)]
    if words[:2] == ["python", "-m"] and words[2].startswith("sparsekv.") and not words[2].endswith(".NAME"):
        return _fault_of_file("/".join(words[2].split(".")[1:]) + ".py", words[3:])
    if words[:1] == ["python"] and words[1].endswith(".py"):
        return _fault_of_file(words[1], words[2:])
    is_short = bool(words) and words[0] in SPARSEKV.commands and any(word.startswith("--") for word in words)
    return _fault_of_subcommand(words[not is_short :]) if is_short or words[:1] == ["sparsekv"] else ""


def _fault_of_file(name: str, words: list[str]) -> str:
    if not (ROOT / name).exists():
        return f"no {name}"
    source = (ROOT / name).read_text()
    return next((f"no {word} in {name}" for word in words if FLAG.fullmatch(word) and word not in source), "")


def _fault_of_subcommand(words: list[str]) -> str:
    command, known = SPARSEKV, {"--help"}
    known |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    for before, word in pairwise(("", *words)):
        word = word.split("=")[0].strip("()[].,;'\"")
        if before == "--set":
            if word not in command.keys:
                return f"no key {word}"
        elif FLAG.fullmatch(word):
            if word not in known:
                return f"no {word}"
        elif hasattr(command, "commands"):
            if word not in command.commands:
                return f"no subcommand {word}"
            command = command.commands[word]
            known |= {name for param in command.params for name in (*param.opts, *param.secondary_opts)}
    return ""


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_command_without_a_commit_is_there_now(page: Path) -> None:
    faults = [
        f"{command}: {why}" for command, commit in commands(page.read_text()) if not commit and (why := fault(command))
    ]
    assert not faults, "name the commit that had it behind the command, `command` (at COMMIT), or correct it"


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ("python benchmarks/decode_goals.py", "no benchmarks/decode_goals.py"),
        ("python -m sparsekv.bench.growth PART", "no bench/growth.py"),
        ("python -m sparsekv.bench.planning llama3-8b --lengths 32k", ""),
        ("python -m sparsekv.bench.planning --longths 32k", "no --longths in bench/planning.py"),
        ("python tools/none.py", "no tools/none.py"),
        ("SPARSEKV_DEVICE=cpu sparsekv run --plan a.yaml --compare", ""),
        ("sparsekv bench prefil", "no subcommand prefil"),
        ("sparsekv --debug run --plan a.yaml --exct", "no --exct"),
        ("bench prefill --random-weights", ""),
        ("bench prefill --random-weight 2", "no --random-weight"),
        ("sparsekv plan MODEL --set sed=3", "no key sed"),
        ("plan", ""),
        ("vllm serve --no-flag-of-ours", ""),
    ],
)
def test_what_a_command_names_is_looked_for(command: str, why: str) -> None:
    assert fault(command) == why


def test_marks_stand_behind_spans_and_blocks_have_none() -> None:
    text = "a `python\nb.py` (at 0123abc; two GPUs), `c` at\n0123abcd and `d` of 0123abc\n\n    python e.py  # why\n"
    found = [("python e.py", ""), ("python b.py", "0123abc"), ("c", "0123abcd"), ("d", "")]
    assert list(commands(text)) == found
