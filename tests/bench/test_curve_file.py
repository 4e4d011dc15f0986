"""Curve files: what is read, and what is refused with its place."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sparsekv.bench.curve_file import CurvePoint, read_curve
from sparsekv.plans.errors import PlanError, UsageError

POINT = {"method": "a", "length": "4k", "phase": "prefill", "density": 0.1, "kl": 0.5}


def test_points_are_read_in_order_and_unknown_keys_are_left_to_others(tmp_path: Path) -> None:
    path = tmp_path / "curve.json"
    path.write_text(json.dumps([POINT | {"samples": 3}, POINT | {"method": "b", "agreement": 1.0}]))
    first = CurvePoint(method="a", length=4096, phase="prefill", density=0.1, kl=0.5)
    assert read_curve(path) == (first, first.model_copy(update={"method": "b", "agreement": 1.0}))


@pytest.mark.parametrize(
    ("content", "place"),
    [
        ("[", "no whole JSON"),
        ("[" * 100_000, "no whole JSON"),
        ("{}", "the top"),
        (json.dumps([POINT, POINT | {"density": 2.0}]), "1.density"),
        (json.dumps([POINT | {"kl": "low"}]), "0.kl"),
        (json.dumps([POINT | {"phase": "both"}]), "0.phase"),
        ('[{"method": "a", "length": 4, "phase": "decode", "density": NaN}]', "0.density"),
    ],
)
def test_what_is_no_curve_is_refused_with_its_place(tmp_path: Path, content: str, place: str) -> None:
    path = tmp_path / "curve.json"
    path.write_text(content)
    with pytest.raises(PlanError, match=place):
        read_curve(path)


def test_a_missing_file_is_wrong_usage(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the curve"):
        read_curve(tmp_path / "none.json")
