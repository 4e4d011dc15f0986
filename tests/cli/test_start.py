"""Commands that need no model start at once: nothing heavy is imported on their way."""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
from planner_profiles import made_up_length, made_up_profile
from plans_samples import large_plan, small_plan

from sparsekv.planner.records import write_measured
from sparsekv.plans.files import write_plan

HEAVY = ("torch", "transformers", "triton", "numpy", "scipy", "huggingface_hub", "altair", "vl_convert")
# Each command in a fork of its own: what was imported before is imported once, and nothing is torn down.
PROGRAM = f"""
import json, os, sys, traceback
import sparsekv.cli.arguments, sparsekv.plans.files
from sparsekv.cli.main import main
for number, arguments in enumerate(json.loads(sys.argv[1])):
    if not os.fork():
        for stream, name in ((1, "out"), (2, "err")):
            os.dup2(os.open(f"{{number}}.{{name}}", os.O_WRONLY | os.O_CREAT), stream)
        sys.argv = ["sparsekv", *arguments]
        code = 70
        try:
            main()
        except SystemExit as stop:
            code = stop.code or 0
        except BaseException:
            traceback.print_exc()
        finally:
            with open(f"{{number}}.heavy", "w") as file:
                json.dump([name for name in {HEAVY} if name in sys.modules], file)
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)
    with open(f"{{number}}.code", "w") as file:
        file.write(str(os.waitstatus_to_exitcode(os.wait()[1])))
"""


class Done(NamedTuple):
    """What a command printed, how it ended, and which of HEAVY it had imported."""

    code: int
    out: str
    err: str
    heavy: set[str]


def run_each(commands: Sequence[Sequence[str]], folder: Path, first: str = "") -> dict[Sequence[str], Done]:
    """Runs commands in a folder, after the line `first`."""
    call = [sys.executable, "-c", f"{first}\n{PROGRAM}", json.dumps(commands)]
    subprocess.run(call, cwd=folder, check=True, timeout=200)

    def written(number: int, name: str) -> str:
        return (folder / f"{number}.{name}").read_text()

    return {
        command: Done(
            int(written(number, "code")),
            *(written(number, name) for name in ("out", "err")),
            set(json.loads(written(number, "heavy"))),
        )
        for number, command in enumerate(commands)
    }


@pytest.fixture(scope="module")
def plans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("plans")
    write_plan(small_plan(), folder / "small.yaml")
    write_plan(large_plan(), folder / "large.yaml")
    write_measured(made_up_profile(made_up_length(4096, np.random.default_rng(0))), folder / "profile.json")
    return folder


LIGHT = (
    ("--help",),
    ("--version",),
    ("plan", "--help"),
    ("run", "--help"),
    ("validate", "large.yaml"),
    ("show", "small.yaml"),
    ("seal", "small.yaml"),
    ("diff", "large.yaml", "small.yaml"),
    ("schema",),
)
REFUSED = (
    ("plan", "tiny-retriever", "-o", "new.yaml", "--set", "tasks=juggling"),
    ("plan", "tiny-retriever", "-o", "new.yaml", "--only", "prefill", "--offload"),
    ("run", "tiny-retriever", "--dense", "--prompt", "a", "--device", "quantum"),
    ("verify", "--plan", "small.yaml", "--lengths", "soon"),
    ("verify", "tiny-retriever", "--set", "tasks=juggling"),
    ("bench", "kernels", "--lengths", "soon"),
    ("plan", "tiny-retriever", "-o", "new.yaml", "--lengths", "4k,64k"),
    ("plan", "tiny-retriever", "-o", "no/such/folder/new.yaml"),
    ("plan", "tiny-retriever", "-o", "new.yaml", "--profile", "profile.json", "--lengths", "16k"),
    ("plan", "nobody/nothing", "-o", "new.yaml"),
    ("run", "nobody/nothing", "--dense", "--prompt", "a"),
    ("verify", "tiny-retriever", "--plan", "small.yaml", "--lengths", "64k"),
    ("eval", "tiny-retriever", "--length", "64k"),
    ("bench", "prefill", "tiny-retriever", "--lengths", "64k"),
    ("bench", "decode", "tiny-retriever", "--lengths", "64k"),
)
NOT_THERE = (
    ("plan", "tiny-retriever", "-o", "new.yaml", "--device", "cpu", "--set", "backend=flash"),
    ("run", "tiny-retriever", "--plan", "small.yaml", "--prompt", "a", "--device", "cuda:77"),
    ("verify", "tiny-retriever", "--plan", "small.yaml", "--device", "cpu", "--set", "backend=flash"),
    ("eval", "tiny-retriever", "--plan", "small.yaml", "--device", "cuda:77"),
    ("bench", "prefill", "tiny-retriever", "--device", "cpu", "--set", "backend=flash"),
    ("bench", "decode", "llama3-8b", "--random-weights", "--device", "cuda:77"),
    ("bench", "kernels", "--device", "cpu", "--set", "backend=flash"),
    ("doctor", "--device", "cuda:77"),
    ("doctor", "--memory", "tiny-retriever", "8k", "--device", "cpu", "--set", "backend=flash"),
)


@pytest.fixture(scope="module")
def light(plans: Path) -> dict[Sequence[str], Done]:
    return run_each((*LIGHT, *REFUSED), plans)


@pytest.fixture(scope="module")
def with_torch(plans: Path) -> dict[Sequence[str], Done]:
    return run_each(NOT_THERE, plans, "import torch")


@pytest.mark.parametrize("arguments", LIGHT, ids=" ".join)
def test_commands_without_a_model_import_nothing_heavy(light, arguments):
    done = light[arguments]
    assert done.code == (arguments[0] == "diff"), done.err  # 1: the two differ
    assert done.out
    assert not done.heavy


@pytest.mark.parametrize("arguments", REFUSED, ids=" ".join)
def test_what_is_wrong_with_options_lengths_places_and_names_is_told_before_torch_is_imported(light, arguments):
    assert light[arguments].code == 2, light[arguments].err
    assert not {"torch", "transformers", "scipy"} & light[arguments].heavy


@pytest.mark.parametrize("arguments", NOT_THERE, ids=" ".join)
def test_a_device_or_backend_that_is_not_there_is_told_before_transformers_is_imported(with_torch, arguments):
    assert with_torch[arguments].code == 2, with_torch[arguments].err
    assert not {"transformers", "scipy"} & with_torch[arguments].heavy


def test_the_package_itself_and_reading_a_plan_import_nothing_heavy():
    code = "import sys, sparsekv, sparsekv.plans.files, sparsekv.plans.aliases"
    code += f"; print([name for name in {(*HEAVY, 'rich')} if name in sys.modules])"
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
