"""What fp8 adds to a plan is measured beside what it adds to dense."""

import json
import sys
from pathlib import Path

import pytest

from sparsekv.bench import float8_quality
from sparsekv.bench.hand_plans import HandDecode
from sparsekv.bench.random_model import describe_named
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import tokens


def test_the_same_samples_are_measured_in_each_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plans, _ = HandDecode(tokens(96), (1,)).plans(describe_named("tiny-retriever", False), 512)
    write_plan(plans["last"], tmp_path / "plan.yaml")
    given = ["tiny-retriever", "--plan", str(tmp_path / "plan.yaml"), "--lengths", "400", "--samples", "2"]
    monkeypatch.setattr(sys, "argv", ["x", *given, "--device", "cpu", "--dtype", "float32"])
    monkeypatch.setattr(float8_quality, "TASKS", ("quote_text",))
    float8_quality.main()
    found = json.loads(capsys.readouterr().out)
    dense, plain, both = (found[name]["nats"] for name in ("dense in fp8", "plan", "plan in fp8"))
    assert found["samples"] == 2
    assert min(dense, plain, both) > 0
    assert found["added to the plan"]["nats"] == pytest.approx(both - plain, abs=2e-6)
    assert found["added to the plan beyond what is added to dense"]["nats"] == pytest.approx(
        both - plain - dense, abs=3e-6
    )
