"""Every command line that a document shows runs as written, with stand-ins for models and files.

A stage that takes minutes or a GPU ends its command: by then all that the command was given has been read and checked.
"""

import argparse
import ast
import inspect
import io
import json
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from importlib import import_module
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from command_line import sparsekv as sparsekv
from short_filler import short_filler as short_filler
from shown_commands import Shown, shown
from stand_ins import StandIns
from stand_ins import stand_ins as stand_ins

from sparsekv.bench.random_model import BenchModel
from sparsekv.cli.bench_model import Benched
from sparsekv.cli.main import app
from sparsekv.kernels import backends
from sparsekv.planner.options import PlanOptions, settle
from sparsekv.planner.plan import PlanResult
from sparsekv.plans.aliases import PLAN_NAME, is_alias
from sparsekv.runtime.vllm.settings import read_options

ROOT = Path(__file__).resolve().parent.parent
NO_COMMANDS = ("commands.md", "api.md", "extending.md")  # usage and Python, by tools; what a reader adds first
PAGES = [
    *(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")),
    *(page for page in sorted((ROOT / "docs").rglob("*.md")) if page.name not in NO_COMMANDS),
    *sorted((ROOT / "examples").glob("*.py")),
    *sorted((ROOT / "bench").glob("*.py")),
]
SPARSEKV = typer.main.get_command(app)
TARGETS = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]

VALUES = {"LENGTH": "1k", "LIST": "1k,2k", "N": "3", "A": "0.5", "R": "0.5", "SHARE": "0.5"}
OUTPUTS = ("-o", "--out", "--profile-out", "--picture")
STAGES = (
    "sparsekv.planner.verify.verify",
    *(f"sparsekv.bench.{name}" for name in ("kernels.bench_kernels", "prefill.bench_prefill", "decode.bench_decode")),
    *(
        f"sparsekv.bench.{name}"
        for name in (
            "serve.bench_serve",
            "turns.bench_turns",
            "compare.compare_methods",
            "suite.run_suite",
        )
    ),
)


@pytest.fixture
def stages(monkeypatch: pytest.MonkeyPatch, stand_ins: StandIns) -> None:
    """Replaces what takes minutes, a GPU, vLLM or the network."""

    def stop(*_: object, **__: object) -> None:
        raise typer.Exit

    def planned(job: object, *, profile_out: Path | None, **_: object) -> PlanResult:
        if profile_out:
            stand_ins.put(str(profile_out), "--profile")
        return PlanResult(stand_ins.plan, settle(PlanOptions(), 4096, "cpu"), ("nothing was measured",))

    def benched(flags: Benched, *_: object, **__: object) -> BenchModel:
        return BenchModel(stand_ins.loaded.model, stand_ins.loaded.info, flags.model, "loaded")

    choose_backend = backends.choose_backend
    for stage in STAGES:
        monkeypatch.setattr(stage, stop)
    monkeypatch.setattr("sparsekv.planner.plan.compile_plan", planned)
    monkeypatch.setattr("sparsekv.cli.bench_model.subject_of", benched)
    on_cuda = torch.device("cuda"), torch.bfloat16
    monkeypatch.setattr("sparsekv.cli.bench_model.device_and_dtype", lambda _: on_cuda)
    monkeypatch.setattr("sparsekv.cli.bench_own.which", str)
    monkeypatch.setattr(backends, "check_backend", lambda *_: None)
    monkeypatch.setattr(backends, "choose_backend", lambda *shape: choose_backend(*shape[:3]))
    monkeypatch.setattr("sparsekv.bench.vllm_engines.find_spec", lambda _: True)
    monkeypatch.setattr("sparsekv.planner.job.solved_tasks", lambda *_: ())


@pytest.fixture
def fault(sparsekv: Any, stages: None, monkeypatch: pytest.MonkeyPatch) -> Callable[[list[str]], str]:
    """Runs a command in the working folder; returns why it fails, or nothing."""

    def ran(script: Callable[[], object], words: list[str]) -> str:
        monkeypatch.setattr(sys, "argv", words)
        try:
            script()
        except SystemExit as stop:
            return f"exit {stop.code}" if stop.code else ""
        return ""

    def called(words: list[str]) -> str:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"a prompt")))
        match words:
            case ["sparsekv", *given]:
                done = sparsekv(*given)
                return done.err or done.out if done.code else ""
            case ["python", "-m", "sparsekv.bench.lm_eval", *_]:
                return ""  # its options are those of lm-evaluation-harness, which reads them
            case ["python", "-m", module, *given] if module.startswith("sparsekv."):
                return ran(lambda: _read_arguments(module, monkeypatch), [module, *given])
            case ["python", "examples/with_transformers.py" as script, *given]:
                return ran(lambda: runpy.run_path(str(ROOT / script), run_name="__main__"), [script, *given])
            case ["make", target, *_]:
                return "" if target in TARGETS else f"no target {target}"
            case ["pip", "install", *given]:
                extras = {
                    extra for word in given if (at := re.fullmatch(r"\.\[(.+)\]", word)) for extra in at[1].split(",")
                }
                return "".join(f"no extra {extra}" for extra in extras - {*EXTRAS})
            case ["vllm", "serve", *given] if "--additional-config" in given:
                read_options(json.loads(given[given.index("--additional-config") + 1]))
        return ""

    return called


def _read_arguments(module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Has a module of the laboratory read its arguments, and end there."""
    own = import_module(module)
    if hasattr(own, "_arguments"):
        own._arguments(*(None for _ in inspect.signature(own._arguments).parameters))
        return
    read = argparse.ArgumentParser.parse_args

    def stop(parser: argparse.ArgumentParser, arguments: None = None) -> None:
        read(parser, arguments)
        raise SystemExit

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    own.main()


def shown_by(page: Path) -> Iterator[Shown]:
    """What a page, or the docstring of a script, shows as of now."""
    text = page.read_text()
    text = text if page.suffix == ".md" else ast.get_docstring(ast.parse(text)) or ""
    return (part for part in shown(text) if not part.commit)


def commands_of(part: Shown) -> Iterator[list[str]]:
    """The words of each command; letters that stand for a value have one, brackets of what may be left out go."""
    for command in (command for line in part.lines for command in line.split(" && ")):
        try:
            words = shlex.split(re.sub(r"(^|\s)\[(.+?)\]", r"\1\2", command))
        except ValueError:  # an apostrophe: no command
            continue
        while words and re.match(r"[A-Z_0-9]+=", words[0]):
            words.pop(0)
        words = [re.sub(r"\b[A-Z]+\b", lambda word: VALUES.get(word[0], word[0]), word) for word in words]
        if part.is_span and words and words[0] in SPARSEKV.commands:
            words.insert(0, "sparsekv")
        if words and not (part.is_span and _is_mention(words)):
            yield words


def _is_mention(words: list[str]) -> bool:
    """Returns whether a span names a command without what it is about: `plan`, `run --exact`."""
    if words[0] != "sparsekv":
        return len(words) == 1 or (words[1] == "-m" and len(words) == 3)
    command = SPARSEKV
    while words[1:] and words[1] in getattr(command, "commands", ()):
        command, words = command.commands[words[1]], words[1:]
    about = {"argument", "--plan"} if (params := command.params) and params[0].param_type_name == "argument" else ()
    first = words[1] if words[1:] else ""
    return not first or bool(about and first.startswith("-") and first not in about)


@pytest.mark.parametrize(
    "page", [page for page in PAGES if any([*commands_of(part)] for part in shown_by(page))], ids=lambda p: p.name
)
def test_what_a_page_shows_runs(
    page: Path, fault: Any, stand_ins: StandIns, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    faults = []
    for number, part in enumerate(shown_by(page)):
        commands = [*commands_of(part)]
        if not commands:
            continue
        (folder := tmp_path / str(number)).mkdir()
        monkeypatch.chdir(folder)
        stand_ins.put("my-model")
        for words in commands:
            has_shape = bool({"--random-weights", "--memory"} & {*words})
            for before, word in pairwise(words):
                if not (before in OUTPUTS or (has_shape and is_alias(word))):
                    stand_ins.put(word, before)
            if words[1:2] == ["plan"]:  # which replaces none
                for plan in (*Path().glob(f"*/{PLAN_NAME}"), Path("plan.yaml")):
                    plan.unlink(missing_ok=True)
            if why := fault(words):
                faults.append(f"{shlex.join(words)}: {why}")
    assert not faults, "\n".join(["", *faults])
