"""benchmarks/curves.py: what a table reads off a curve."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

from sparsekv.bench.curve_file import CurvePoint

PATH = Path(__file__).parents[2] / "benchmarks" / "curves.py"


@pytest.fixture(scope="module")
def curves() -> ModuleType:
    spec = importlib.util.spec_from_file_location("curves", PATH)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_a_curve_is_read_by_its_best_points(curves: ModuleType) -> None:
    assert curves.frontier([(0.4, 0.1), (0.2, 0.3), (0.3, 0.5), (0.1, 1.0)]) == [(0.1, 1.0), (0.2, 0.3), (0.4, 0.1)]


def test_both_axes_are_read_off_straight_lines_in_logarithms(curves: ModuleType) -> None:
    line = [(0.1, 0.01), (0.4, 0.0001)]
    assert curves.value_at(line, 0.2) == pytest.approx(0.001)
    assert curves.density_within(line, 0.001) == pytest.approx(0.2)
    for density, kl in line:
        assert curves.value_at(line, density) == pytest.approx(kl)
        assert curves.density_within(line, kl) == pytest.approx(density)


def test_what_a_method_does_not_reach_has_no_number(curves: ModuleType) -> None:
    line = [(0.1, 0.01), (0.4, 0.0001)]
    assert curves.value_at(line, 0.05) is None
    assert curves.density_within(line, 0.00001) is None
    assert (curves.value_at(line, 0.9), curves.density_within(line, 1.0)) == (0.0001, 0.1)
    assert (curves.value_at([], 0.5), curves.density_within([], 0.5)) == (None, None)


def test_tables_have_a_row_a_method_of_each_phase_and_length(curves: ModuleType) -> None:
    common = {"phase": "decode", "length": 4096}
    points = [CurvePoint(method=name, density=0.5, kl=kl, **common) for name, kl in (("a", 0.0), ("b", 0.5))]
    lines = list(curves.tables(points, (0.5,), (0.1,)))
    assert lines[0] == "Decode at 4k:\n"
    assert lines[3:] == ["| a | 1e-09 | (0.5) |", "| b | 0.5 |  |", ""]


def test_curves_beside_each_other_share_the_table_of_a_phase_and_length(curves: ModuleType) -> None:
    def point(method: str, density: float, kl: float, phase: str = "prefill") -> CurvePoint:
        return CurvePoint.model_validate(
            {"method": method, "density": density, "kl": kl, "phase": phase, "length": 4096}
        )

    found = {
        "one": [point("a", 0.1, 0.01), point("a", 0.4, 0.0001), point("b", 0.4, 0.5, "decode")],
        "two": [point("a", 0.1, 0.04), point("c", 0.5, 0.001)],
    }
    lines = list(curves.tables_beside(found, (0.2, 0.5, 0.6), (0.001, 0.00001)))
    head = "one: nats at 0.2 / 0.5 / 0.6 | two: nats at 0.2 / 0.5 / 0.6"
    within = "one: density for nats 0.001 / 1e-05 | two: density for nats 0.001 / 1e-05"
    assert lines[:5] == [
        "Prefill at 4k:\n",
        f"| method | {head} | {within} |",
        "|---|---|---|---|---|",
        "| a | 0.001 / (0.0001) / - | (0.04) / - / - | 0.2 / - | - |",
        "| c | - | - / 0.001 / (0.001) | - | (0.5) / - |",
    ]
    assert lines[5:7] == ["", "Decode at 4k:\n"]
    assert lines[9:] == ["| b | - / (0.5) / - | - | - | - |", ""]
    assert "density for" not in " ".join(curves.tables_beside(found, (0.2,), ()))
