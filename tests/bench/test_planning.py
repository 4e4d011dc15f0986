"""The bench of planning: stages, memory, and a run that is stopped and goes on."""

import json
from pathlib import Path

import pytest

from sparsekv.bench.planning import main
from sparsekv.plans.files import load_plan


def test_stages_and_memory_are_told_and_a_stopped_profile_goes_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out, command = tmp_path / "plan.yaml", ["tiny-retriever", "--layers", "2", "--lengths", "512", "--samples", "1"]
    assert main([*command, "--no-verify", "--stop-at", "0", "--device", "cpu", "--out", str(out)]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"profile", "others"} <= found["stage_seconds"].keys()
    assert (found["layers"], found["lengths"], found["status"]) == (2, [512], "unverified")
    assert 0.0 < found["peak_host_gib"] < 64.0
    assert len(found["resume"]["parts"]) == 2
    assert load_plan(out).model.layers == 2
    assert sorted(tmp_path.iterdir()) == [out]
