"""Environment variables are read in one place, and a wrong one is named."""

import pytest

from sparsekv.kernels.backends import BACKENDS
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.settings import CHOICES, Settings, read_settings


def test_absent_and_empty_variables_leave_the_defaults():
    assert read_settings({}) == Settings(backend="auto", device="auto", dtype="auto")
    assert read_settings({"SPARSEKV_DEVICE": " ", "BACKEND": "cpu"}) == Settings()


def test_variables_preset_each_field(monkeypatch):
    found = read_settings({"SPARSEKV_BACKEND": "cpu", "SPARSEKV_DEVICE": "cuda:1", "SPARSEKV_DTYPE": "bfloat16"})
    assert found == Settings(backend="cpu", device="cuda:1", dtype="bfloat16")
    monkeypatch.setenv("SPARSEKV_BACKEND", "triton")
    assert read_settings().backend == "triton"


def test_the_backends_that_may_be_named_are_those_there_are():
    assert set(CHOICES["backend"]) == {"auto", *BACKENDS}


@pytest.mark.parametrize("name", ["BACKEND", "DTYPE"])
def test_a_value_that_means_nothing_is_named(name: str):
    with pytest.raises(UsageError, match=f"SPARSEKV_{name} to be auto, .*found 'fast'"):
        read_settings({f"SPARSEKV_{name}": "fast"})
