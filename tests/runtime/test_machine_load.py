"""Other work on the cores is told, once, where threads that spin would suffer from it."""

import os
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch_state import torch_threads

from sparsekv.plans.errors import PlanWarning
from sparsekv.runtime import plan_checks
from sparsekv.runtime.plan_checks import warn_of_spinning
from sparsekv.runtime.settings import threads_spin

CPU, GPU = torch.device("cpu"), torch.device("cuda")


@pytest.fixture(autouse=True)
def machine(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """A busy one, where threads spin."""
    for name in ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"):
        monkeypatch.delenv(name, raising=False)
    put_load(monkeypatch, 6.0)
    plan_checks._warn_of_spinning.cache_clear()
    with torch_threads(2):
        yield monkeypatch
    plan_checks._warn_of_spinning.cache_clear()


def put_load(monkeypatch: pytest.MonkeyPatch, load: float) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    monkeypatch.setattr(os, "getloadavg", lambda: (load, 0.0, 0.0))


def warned(device: torch.device) -> int:
    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        warn_of_spinning(device)
    return sum(issubclass(one.category, PlanWarning) for one in found)


def test_a_busy_machine_is_warned_of_once():
    assert [warned(CPU), warned(CPU)] == [1, 0]


def test_where_threads_do_not_spin_or_nothing_else_runs_there_is_no_warning(machine):
    assert not warned(GPU)
    with torch_threads(1):
        assert not warned(CPU)
    machine.setenv("OMP_WAIT_POLICY", "PASSIVE")
    assert not warned(CPU)
    machine.delenv("OMP_WAIT_POLICY")
    put_load(machine, 2.1)  # our own threads on both cores
    assert not warned(CPU)


@pytest.mark.parametrize(
    ("variables", "spins"),
    [
        ({}, True),
        ({"OMP_WAIT_POLICY": "active"}, True),
        ({"OMP_WAIT_POLICY": "passive"}, False),
        ({"GOMP_SPINCOUNT": "1000"}, False),
        ({"KMP_BLOCKTIME": "0"}, False),
    ],
)
def test_threads_spin_unless_a_variable_of_openmp_bounds_it(variables, spins):
    assert threads_spin(variables) is spins


def test_apply_warns(machine):
    from tiny_models import tiny_model
    from tiny_plans import every_head, plan_for

    from sparsekv.plans.patterns import Dense
    from sparsekv.runtime.hf.apply import apply

    model = tiny_model(context=256)
    with pytest.warns(PlanWarning, match="OMP_WAIT_POLICY") as found:
        apply(model, plan_for(model, every_head(model, Dense()))).close()
    assert [one.filename for one in found if "OMP_WAIT_POLICY" in str(one.message)] == [__file__]
