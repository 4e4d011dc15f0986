"""The layer rule: which package may import which, and where the outside world may be looked at."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# The one table of allowed arrows. `sparsekv` itself (version, facade) may be read by the command line only.
MAY_IMPORT = {
    "plans": set(),
    "kernels": {"plans"},
    "runtime": {"plans", "kernels"},
    "planner": {"plans", "kernels", "runtime"},
    "cli": {"plans", "kernels", "runtime", "planner"},
}
# plans/ starts in a fraction of a second because of what is not here.
HEAVY = {"torch", "transformers", "triton", "numpy", "scipy", "safetensors", "tokenizers"}
LONGEST_FILE = 500

SOURCES = sorted(path for package in MAY_IMPORT for path in (ROOT / package).rglob("*.py"))


def imported(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every module a file imports anywhere in it, inside functions and TYPE_CHECKING blocks as well."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield ("." * node.level + (node.module or ""), node.lineno)
            if not node.level and node.module == "sparsekv":
                yield from ((f"sparsekv.{alias.name}", node.lineno) for alias in node.names)


def breaches(package: str, source: str) -> list[str]:
    """What in a file of `package` breaks the rule."""
    found = []
    for module, line in imported(ast.parse(source)):
        parts = module.split(".")
        if module.startswith("."):
            found.append(f"line {line}: relative import; write `from sparsekv.{package}...`")
        elif parts[0] in MAY_IMPORT:
            found.append(f"line {line}: imports the folder {parts[0]}; write `from sparsekv.{parts[0]}...`")
        elif parts[0] == "sparsekv" and len(parts) > 1 and parts[1] in MAY_IMPORT:
            if parts[1] != package and parts[1] not in MAY_IMPORT[package]:
                found.append(f"line {line}: {package} may not import {parts[1]}")
        elif package == "plans" and parts[0] in HEAVY:
            found.append(f"line {line}: plans may not import {parts[0]}")
    return found


def environment_reads(source: str) -> list[int]:
    """Lines that look at environment variables."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and (node.value.id, node.attr) in {("os", "environ"), ("os", "getenv")}
    ]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_no_file_imports_a_layer_above_its_own(path: Path) -> None:
    package = path.relative_to(ROOT).parts[0]
    assert breaches(package, path.read_text()) == []


@pytest.mark.parametrize(
    ("package", "line"),
    [
        ("plans", "from sparsekv.kernels.tiles import Chunk"),
        ("plans", "import torch.nn"),
        ("plans", "def f():\n    import numpy as np"),
        ("kernels", "import sparsekv.runtime.hf.apply"),
        ("runtime", "from sparsekv import planner"),
        ("runtime", "from ..plans import budget"),
        ("planner", "from sparsekv.cli.main import main"),
        ("cli", "from plans.patterns import tokens"),
    ],
)
def test_the_rule_catches_each_kind_of_breach(package: str, line: str) -> None:
    assert len(breaches(package, line)) == 1


def test_the_rule_lets_the_allowed_arrows_through() -> None:
    assert breaches("planner", "from sparsekv.runtime.hf.apply import apply\nimport torch") == []
    assert breaches("cli", "from sparsekv import __version__") == []


def test_the_environment_is_read_in_one_settings_module() -> None:
    readers = {str(path.relative_to(ROOT)) for path in SOURCES if environment_reads(path.read_text())}
    assert readers <= {"runtime/settings.py"}


def test_no_file_has_grown_past_a_few_screens() -> None:
    long = {str(path.relative_to(ROOT)) for path in SOURCES if len(path.read_text().splitlines()) > LONGEST_FILE}
    assert long == set()
