"""The decode method of docs/extending.md at work: every program has it in its layers instead of their own."""

from __future__ import annotations

import sys
from dataclasses import replace
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from sparsekv.runtime.core.program import Program

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "extending" / "even_spread.py"


def _load() -> Any:
    spec = spec_from_file_location("even_spread_example", EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = sys.modules[spec.name] = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.EvenSpread


EvenSpread: Any = _load()


def spread(program: Program, role: Any) -> Program:
    """The program with this role in every layer but the first."""
    first, *others = program.layers
    return replace(program, layers=(first, *(replace(layer, role=role) for layer in others)))


def lower_to(patch: pytest.MonkeyPatch, role: Any) -> None:
    """Every plan is lowered to this role from here on."""
    lower = Program.of
    patch.setattr(Program, "of", lambda *args, **options: spread(lower(*args, **options), role))
