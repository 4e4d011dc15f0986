"""What a table reads off a curve."""

import pytest

from sparsekv.bench.curve_file import CurvePoint
from sparsekv.bench.curves import density_within, frontier, tables, value_at

LINE = [(0.1, 0.01), (0.4, 0.0001)]


def test_a_curve_is_read_by_its_best_points() -> None:
    assert frontier([(0.4, 0.1), (0.2, 0.3), (0.3, 0.5), (0.1, 1.0)]) == [(0.1, 1.0), (0.2, 0.3), (0.4, 0.1)]


def test_both_axes_are_read_off_straight_lines_in_logarithms() -> None:
    for density, kl in (*LINE, (0.2, 0.001)):
        assert value_at(LINE, density) == pytest.approx(kl)
        assert density_within(LINE, kl) == pytest.approx(density)


def test_what_a_method_does_not_reach_has_no_number() -> None:
    assert (value_at(LINE, 0.05), density_within(LINE, 0.00001)) == (None, None)
    assert (value_at(LINE, 0.9), density_within(LINE, 1.0)) == (0.0001, 0.1)
    assert (value_at([], 0.5), density_within([], 0.5)) == (None, None)


def test_tables_have_a_row_a_method_of_each_phase_and_length() -> None:
    common = {"phase": "decode", "length": 4096}
    points = [CurvePoint(method=name, density=0.5, kl=kl, **common) for name, kl in (("a", 0.0), ("b", 0.5))]
    lines = list(tables(points, (0.5,), (0.1,)))
    assert lines[3:] == ["| a | 1e-09 | (0.5) |", "| b | 0.5 |  |", ""]
