"""Flags that texts tell people to use must exist: in the README, and in the messages of every layer."""

import ast
import re
from pathlib import Path
from typing import Any

from typer.main import get_command

from sparsekv.cli.main import app

ROOT = Path(__file__).resolve().parents[2]
OTHERS = {
    "--tasks",
    "--metadata",  # of lm-evaluation-harness  # of the hub's own command, and of vLLM's
    *("--include", "--create-pr"),
    *("--local-dir", "--additional-config", "--attention-backend", "--kv-cache-dtype", "--kv-transfer-config"),
    *("--pipeline-parallel-size", "--speculative-config"),
    *("--max-num-batched-tokens", "--block-size", "--enable-dbo", "--disable-hybrid-kv-cache-manager"),
    *("--language-model-only", "--limit-mm-per-prompt", "--enable-mm-embeds"),
    *("--calculate-kv-scales", "--kv-sharing-fast-prefill", "--enable-eplb", "--enable-lora"),
    *("--data-parallel-size", "--scheduler-cls", "--worker-cls", "--spec-method", "--spec-model", "--spec-tokens"),
    *("--hf-overrides", "--max-model-len"),
    # of SGLang
    *("--enable-deterministic-inference", "--enable-two-batch-overlap", "--enable-pdmux", "--disaggregation-mode"),
    *("--enable-dp-attention", "--enable-kv-cache-sharding", "--attn-cp-size", "--dcp-size", "--pp-size"),
    *("--dllm-algorithm", "--prefill-only-disable-kv-cache", "--cuda-graph-backend-prefill", "--enable-torch-compile"),
    *("--continuous-batching", "--cb-num-blocks", "--port"),  # of the server of transformers
}
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z-]+")


def parameters_of(command: str) -> list[Any]:
    found = get_command(app).commands[command]
    parts = getattr(found, "commands", {"": found}).values()  # a command, or a group of some
    return [parameter for part in parts for parameter in part.params]


def flags_of(command: str) -> set[str]:
    return {flag for parameter in parameters_of(command) for flag in parameter.opts} | {"--help"}


COMMANDS = tuple(get_command(app).commands)
KNOWN = {flag for command in COMMANDS for flag in flags_of(command)} | {"--debug", "--version"}
SOURCES = [
    path for folder in ("plans", "kernels", "runtime", "planner", "cli") for path in (ROOT / folder).rglob("*.py")
]


def test_messages_name_flags_that_exist():
    trees = {path: ast.parse(path.read_text()) for path in SOURCES}
    named = {
        (str(path.relative_to(ROOT)), flag)
        for path, tree in trees.items()
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
        for flag in FLAG.findall(node.value)
    }
    assert {pair for pair in named if pair[1] not in KNOWN | OTHERS} == set()


def test_no_option_is_called_like_its_value():
    """Typer 0.27 shows `--device DEVICE` as the flag `--DEVICE`, and takes no other."""
    options = [
        (command, parameter.name, parameter.metavar)
        for command in COMMANDS
        for parameter in parameters_of(command)
        if parameter.param_type_name == "option"
    ]
    assert [option for option in options if str(option[2]).lower() == option[1]] == []
