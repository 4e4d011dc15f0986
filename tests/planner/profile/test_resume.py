"""What an interrupted run has profiled is found again, whatever ran in between."""

from pathlib import Path

import pytest

from sparsekv.planner.profile.resume import LayerRecord, records_at
from sparsekv.plans.errors import PlanWarning


def record(layer: int) -> LayerRecord:
    return LayerRecord(length=64, sample=0, layer=layer)


def layers(path: Path, seed: int) -> list[int]:
    return [layer for _, _, layer in records_at(path, {"seed": seed}).all(LayerRecord)]


def test_a_run_with_other_options_loses_no_partial_profile(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml.profile.partial"
    records_at(path, {"seed": 0}).add(record(3))
    with pytest.warns(PlanWarning, match="partial"):
        second = records_at(path, {"seed": 1})
    second.add(record(5))
    with pytest.warns(PlanWarning, match="other options"):
        assert layers(path, 0) == [3]
    with pytest.warns(PlanWarning, match="other options"):
        assert layers(path, 1) == [5]


def test_a_partial_profile_without_records_is_not_left_behind(tmp_path: Path) -> None:
    records_at(tmp_path / "partial", {"seed": 0})
    assert list(tmp_path.iterdir()) == []
