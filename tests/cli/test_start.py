"""Commands that need no model start at once: nothing heavy is imported on their way."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from plans_samples import large_plan, small_plan

from sparsekv.plans.files import write_plan

HEAVY = ("torch", "transformers", "triton", "numpy", "scipy", "huggingface_hub", "altair", "vl_convert")
PROGRAM = f"""
import sys
from sparsekv.cli.main import main
try:
    main()
finally:
    import json
    print(json.dumps([name for name in {HEAVY} if name in sys.modules]), file=sys.stderr)
"""


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    write_plan(small_plan(), folder / "small.yaml")
    write_plan(large_plan(), folder / "large.yaml")
    return folder


@pytest.mark.parametrize(
    "arguments",
    [
        ("--help",),
        ("--version",),
        ("plan", "--help"),
        ("run", "--help"),
        ("validate", "large.yaml"),
        ("show", "small.yaml"),
        ("seal", "small.yaml"),
        ("diff", "large.yaml", "small.yaml"),
        ("schema",),
    ],
    ids=" ".join,
)
def test_commands_without_a_model_import_nothing_heavy(plans, arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=plans, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == (arguments[0] == "diff"), done.stderr  # 1: the two differ
    assert done.stdout
    assert json.loads(done.stderr.splitlines()[-1]) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ("plan", "tiny-retriever", "-o", "new.yaml", "--tasks", "juggling"),
        ("plan", "tiny-retriever", "-o", "new.yaml", "--only", "prefill", "--offload"),
        ("run", "tiny-retriever", "--dense", "--prompt", "a", "--device", "quantum"),
        ("verify", "--plan", "small.yaml", "--lengths", "soon"),
        ("eval", "tiny-retriever", "--tasks", "juggling"),
        ("bench", "kernels", "--lengths", "soon"),
    ],
    ids=" ".join,
)
def test_wrong_options_are_told_before_torch_is_imported(plans, arguments):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, *arguments], cwd=plans, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 2, done.stderr
    assert not {"torch", "transformers", "scipy"} & set(json.loads(done.stderr.splitlines()[-1]))


def test_the_package_itself_imports_nothing_heavy():
    code = f"import sys, sparsekv; print([name for name in {HEAVY} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


@pytest.mark.parametrize("asked", [None, "active"])
def test_threads_that_wait_give_their_core_away_unless_the_user_wants_them_to_spin(asked, monkeypatch):
    monkeypatch.delenv("OMP_WAIT_POLICY", raising=False)
    if asked:
        monkeypatch.setenv("OMP_WAIT_POLICY", asked)
    code = """
import os, sys
from sparsekv.__main__ import main
sys.argv = ["sparsekv", "--version"]
try:
    main()
finally:
    print(os.environ["OMP_WAIT_POLICY"])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split()[-1] == (asked or "passive")


def test_the_package_lists_its_calls_and_imports_none_of_them_for_it():
    code = (
        "import sys, sparsekv; print('torch' in sys.modules, {'apply', 'load_plan', 'plan_model'} <= {*dir(sparsekv)})"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["False", "True"]
