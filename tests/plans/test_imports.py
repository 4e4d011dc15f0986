"""What reading a plan costs to start: no torch, no rich, whatever module is asked for."""

from __future__ import annotations

import pkgutil
import subprocess
import sys

import pytest

import sparsekv.plans

MODULES = [f"sparsekv.plans.{module.name}" for module in pkgutil.iter_modules(sparsekv.plans.__path__)]
HEAVY = ("torch", "transformers", "triton", "numpy", "safetensors", "huggingface_hub")


def loaded_by(*modules: str) -> set[str]:
    code = f"import {', '.join(modules)}, sys; print(*sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(found.stdout.split())


def test_all_of_plans_leaves_torch_out() -> None:
    assert loaded_by(*MODULES).isdisjoint(HEAVY)


@pytest.mark.parametrize("module", ["sparsekv.plans.files", "sparsekv.plans.aliases"])
def test_reading_leaves_rich_out(module: str) -> None:
    assert "rich" not in loaded_by(module)
