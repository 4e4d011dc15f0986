"""What is wrong with a call is said before anything is imported that loads a model, which takes seconds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

_WITHOUT_TRANSFORMERS = "import sys; sys.modules['transformers'] = None; from sparsekv.cli.main import main; main()"


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ("plan tiny-retriever -o plan.yaml --backend flash --device cpu", "flash"),
        ("plan tiny-retriever -o plan.yaml --device cuda:77", "cuda:77"),
        ("plan tiny-retriever -o plan.yaml --length 64k", "64k"),
        ("plan models/nope -o plan.yaml", "models/nope"),
        ("plan tiny-retriever -o nowhere/plan.yaml", "nowhere"),
        ("eval tiny-retriever --length 64k", "64k"),
        ("run tiny-retriever --dense -p hello --device cuda:77", "cuda:77"),
        ("bench prefill tiny-retriever --density 10% --backend flash --device cpu", "flash"),
    ],
)
def test_a_call_that_cannot_run_is_refused_without_importing_transformers(
    tmp_path: Path, arguments: str, named: str
) -> None:
    command = [sys.executable, "-c", _WITHOUT_TRANSFORMERS, *arguments.split()]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (2, "")
    assert named in done.stderr
