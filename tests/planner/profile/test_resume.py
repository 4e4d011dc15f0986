"""What an interrupted run has measured is found again, whatever ran in between."""

from pathlib import Path

import pytest
from planner_profiles import made_up_model

from sparsekv.planner.profile.resume import LayerRecord, Records, RunShape
from sparsekv.plans.errors import PlanWarning

SHAPE = RunShape(made_up_model(layers=8), {64: 1}, {64: ()}, None)


def record(layer: int) -> LayerRecord:
    return LayerRecord(length=64, sample=0, layer=layer)


def test_a_run_with_other_options_loses_no_partial_profile(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml.profile.partial"
    first = Records(path, {"seed": 0}, SHAPE)
    first.add(record(3))
    with pytest.warns(PlanWarning, match="partial"):
        second = Records(path, {"seed": 1}, SHAPE)
    second.add(record(5))
    assert record(3).key not in second
    with pytest.warns(PlanWarning, match="other options"):
        again = Records(path, {"seed": 0}, SHAPE)
    assert record(3).key in again
    assert record(5).key not in again
    with pytest.warns(PlanWarning, match="other options"):
        assert record(5).key in Records(path, {"seed": 1}, SHAPE)


def test_a_first_line_of_another_kind_names_no_file(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    path.write_text("sparsekv.partial ../../else\nmore\n")
    Records(path, {"seed": 0}, SHAPE).add(record(3))
    assert list(tmp_path.iterdir()) == [path]


def test_a_partial_profile_without_records_is_not_left_behind(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    Records(path, {"seed": 0}, SHAPE)
    assert not path.exists()
    path.write_text(f"sparsekv.partial {'0' * 64}\n")
    Records(path, {"seed": 1}, SHAPE)
    assert list(tmp_path.iterdir()) == []
