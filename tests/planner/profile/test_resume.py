"""What an interrupted run has measured is found again, whatever ran in between."""

import errno
import fcntl
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from planner_profiles import made_up_model

from sparsekv.planner.profile.resume import LayerRecord, Records, RunShape, only_run
from sparsekv.plans.errors import ConflictError, PlanWarning, UsageError

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


def test_a_run_adds_no_records_to_those_of_another_that_began_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    first = Records(path, {"seed": 0}, SHAPE)
    first.add(record(3))
    with pytest.warns(PlanWarning):
        second = Records(path, {"seed": 1}, SHAPE)
    second.add(record(5))
    with pytest.raises(ConflictError, match="partial"):
        first.add(record(4))
    again = Records(path, {"seed": 1}, SHAPE)
    assert [layer for layer in range(8) if record(layer).key in again] == [5]


def test_one_run_at_a_time_has_the_records_of_a_path(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    with only_run(path):
        with pytest.raises(ConflictError, match="partial"), only_run(path):
            pass
        with only_run(tmp_path / "other"):
            pass
    with only_run(path):
        pass
    assert list(tmp_path.iterdir()) == []


def test_a_run_that_was_killed_keeps_no_lock(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    program = """
import os, signal, sys
from pathlib import Path
from sparsekv.planner.profile.resume import only_run
with only_run(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program, path], timeout=120).returncode < 0
    assert len(list(tmp_path.iterdir())) == 1
    with only_run(path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", ["flock", "open"])
def test_a_folder_that_cannot_be_locked_is_profiled_into_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fails: str
) -> None:
    def refuse(*arguments: object, **options: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    if fails == "flock":
        monkeypatch.setattr(fcntl, "flock", refuse)
    path = tmp_path / ("partial" if fails == "flock" else "p" * 255)  # whose lock would have too long a name
    with only_run(path):
        assert list(tmp_path.iterdir()) == []
    assert list(tmp_path.iterdir()) == []


def test_a_full_disk_while_damaged_records_are_dropped_loses_no_sound_ones(tmp_path: Path) -> None:
    path = tmp_path / "partial"
    records = Records(path, {"seed": 0}, SHAPE)
    for layer in range(3):
        records.add(record(layer))
    path.write_text(path.read_text() + "{}\n")
    before, (soft, hard) = path.read_text(), resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8, hard))
    try:
        with pytest.warns(PlanWarning), pytest.raises(UsageError, match="partial"):
            Records(path, {"seed": 0}, SHAPE)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == before
    assert list(tmp_path.iterdir()) == [path]
