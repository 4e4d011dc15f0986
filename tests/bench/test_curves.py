"""Curves of a model, their file, and what a table reads off them."""

import pytest

from sparsekv.bench.curve_file import CurvePoint, CurveRun
from sparsekv.bench.curves import density_within, frontier, main, value_at
from sparsekv.planner.records import RunFile, only_run

LINE = [(0.1, 0.01), (0.4, 0.0001)]


def test_a_curve_is_read_by_its_best_points() -> None:
    assert frontier([(0.4, 0.1), (0.2, 0.3), (0.3, 0.5), (0.1, 1.0)]) == [(0.1, 1.0), (0.2, 0.3), (0.4, 0.1)]


def test_both_axes_are_read_off_straight_lines_in_logarithms() -> None:
    for density, kl in (*LINE, (0.2, 0.001)):
        assert value_at(LINE, density) == pytest.approx(kl)
        assert density_within(LINE, kl) == pytest.approx(density)


ONE = ("--length", "1k", "--tasks", "kv_retrieval", "--samples", "1", "--densities", "0.6", "--budgets", "20%")


def test_a_curve_is_measured_once_and_its_table_printed(folder, tmp_path, capsys):
    path = tmp_path / "curve.json"
    call = [str(folder), "-o", str(path), *ONE, "--plan", str(folder / "sparsekv.yaml"), "--methods"]
    main([*call, "plan,streamingllm,quest"])
    points = [*RunFile.read(CurveRun, path).all(CurvePoint).values()]
    cases = [(point.phase, point.method) for point in points]
    assert cases == [("prefill", "plan"), ("prefill", "streamingllm"), ("decode", "plan"), ("decode", "quest")]
    assert all(0 < point.density < 1 and point.kl > 0 and point.length == 1024 for point in points)
    measured, before = capsys.readouterr().out, path.read_bytes()
    main([str(path)])
    assert capsys.readouterr().out == measured
    main([*call, "quest", "--only", "decode"])
    assert path.read_bytes() == before
    assert "| quest |" in capsys.readouterr().out


def test_no_other_file_is_replaced_and_a_second_run_into_one_is_refused(folder, tmp_path):
    (path := tmp_path / "notes.json").write_text("{}")
    call = [str(folder), "-o", str(path), *ONE]
    with pytest.raises(SystemExit, match="curve"):
        main(call)
    with only_run(path), pytest.raises(SystemExit, match="found one that is under way"):
        main(call)
    assert path.read_text() == "{}"
