"""Curves of a model, their file, and what a table reads off them."""

from pathlib import Path

import pytest
from model_folders import save_model, sparse_plan
from tiny_models import tiny_model

from sparsekv.bench.curve_file import CurvePoint, CurveRun
from sparsekv.bench.curves import density_within, frontier, main, tables, value_at
from sparsekv.planner.records import RunFile, only_run
from sparsekv.plans.files import write_plan

LINE = [(0.1, 0.01), (0.4, 0.0001)]


def test_a_curve_is_read_by_its_best_points() -> None:
    assert frontier([(0.4, 0.1), (0.2, 0.3), (0.3, 0.5), (0.1, 1.0)]) == [(0.1, 1.0), (0.2, 0.3), (0.4, 0.1)]


def test_both_axes_are_read_off_straight_lines_in_logarithms() -> None:
    for density, kl in (*LINE, (0.2, 0.001)):
        assert value_at(LINE, density) == pytest.approx(kl)
        assert density_within(LINE, kl) == pytest.approx(density)


def test_tables_have_a_row_a_method_of_each_phase_and_length() -> None:
    common = {"phase": "decode", "length": 4096}
    points = [CurvePoint(method=name, density=0.5, kl=kl, **common) for name, kl in (("a", 0.0), ("b", 0.5))]
    lines = list(tables(points, (0.5,), (0.1,)))
    assert lines[3:] == ["| a | 1e-09 | (0.5) |", "| b | 0.5 |  |", ""]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(context=2048)
    folder = save_model(model, tmp_path_factory.mktemp("models") / "tiny")
    write_plan(sparse_plan(model), folder / "sparsekv.yaml")
    return folder


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


@pytest.mark.parametrize(
    ("arguments", "word"),
    [
        (("--methods", "juggling"), "juggling"),
        (("--methods", "streamingllmm"), "did you mean streamingllm?"),
        (("--methods", "kascade"), "--profile"),
        (("--only", "prefill", "--methods", "quest"), "quest"),
        (("--length", "4k"), "2k"),
        (("--tasks", "juggling"), "juggling"),
    ],
)
def test_what_no_curve_can_be_made_of_is_refused(folder, tmp_path, arguments, word):
    with pytest.raises(SystemExit, match=word.replace("?", r"\?")):
        main([str(folder), "-o", str(tmp_path / "curve.json"), *ONE, *arguments])
    assert not (tmp_path / "curve.json").exists()


def test_no_other_file_is_replaced_and_a_second_run_into_one_is_refused(folder, tmp_path):
    (path := tmp_path / "notes.json").write_text("{}")
    call = [str(folder), "-o", str(path), *ONE]
    with pytest.raises(SystemExit, match="curve"):
        main(call)
    with only_run(path), pytest.raises(SystemExit, match="found one that is under way"):
        main(call)
    assert path.read_text() == "{}"
