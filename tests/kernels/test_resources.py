"""Kernels compiled for GPUs that this machine does not have: no spilled registers, shared memory that suffices."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).parents[1] / "support/kernel_resources.py"


def resources(*arguments: str) -> list[dict[str, object]]:
    # In a process of its own: here, Triton was imported as an interpreter.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    done = subprocess.run(
        [sys.executable, PROGRAM, "--json", *arguments], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "120"])  # 90: index/test_triton_compile.py
def test_index_building_does_not_spill_registers(capability: str) -> None:
    found = resources("--capability", capability, "--kernel", "index", "blocks")
    assert {"stats_kernel", "lines_kernel", "select_kernel", "rows_kernel", "choose_kernel"} <= {
        built["kernel"] for built in found
    }
    assert any("last_q 256" in str(built["case"]) for built in found)
    assert not [built for built in found if built["spilled_bytes"]]


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_scores_of_observed_queries_do_not_spill_registers(capability: str) -> None:
    found = resources("--capability", capability, "--kernel", "observed")
    assert {built["kernel"] for built in found} >= {
        "observed_stats_kernel",
        "join_kernel",
        "sums_kernel",
        "_move_kernel",
    }
    assert not [built for built in found if built["spilled_bytes"] and "float32" not in str(built["case"])]


@pytest.mark.slow
def test_scores_of_observed_queries_fit_the_smallest_shared_memory() -> None:
    cases = {str(built["case"]) for built in resources("--capability", "89", "--kernel", "observed")}
    assert {"head size 128, float32", "head size 256, bfloat16", "head size 512, bfloat16"} <= cases  # which take most


@pytest.mark.slow
@pytest.mark.parametrize("capability", ["80", "90"])
def test_prefill_decode_and_damage_do_not_spill_registers(capability: str) -> None:
    found = resources("--capability", capability, "--kernel", "prefill", "decode", "damage")
    large = [built for built in found if "size 256" in str(built["case"]) or "size 512" in str(built["case"])]
    usual = [built for built in found if built not in large]
    assert {built["kernel"] for built in usual} >= {"prefill_kernel", "decode_kernel", "damage_kernel"}
    assert not [built for built in usual if built["spilled_bytes"]]
    assert large
    assert all(int(str(built["spilled_bytes"])) <= (128 if capability == "90" else 0) for built in large)
