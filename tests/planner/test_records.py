"""Files that a run goes on from: nothing is lost, mixed or read that was not written there."""

import errno
import fcntl
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar, Literal

import pytest

from sparsekv.planner.records import RunFile, RunRecord, RunSettings, only_run
from sparsekv.plans.errors import ConflictError, PlanError, UsageError
from sparsekv.plans.types import Text


class Point(RunRecord):
    name: Text
    value: float = 0.5

    @property
    def key(self) -> str:
        return self.name


class Note(RunRecord):
    text: Text

    @property
    def key(self) -> str:
        return self.text


class Run(RunSettings):
    WHAT: ClassVar[str] = "points"
    RECORDS: ClassVar[Any] = Point | Note
    TOLD: ClassVar[frozenset[str]] = frozenset({"place"})
    kind: Literal["sparsekv.points"] = "sparsekv.points"
    schema_version: Literal[1] = 1
    seed: int = 0
    chunk: int | None = None
    place: Text = "here"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with two points and a note."""
    path = tmp_path / "a.jsonl"
    file = RunFile.of(Run(), path)
    assert not path.exists()
    file.add(Point(name="a"))
    file.add(Point(name="b"), Note(text="n"))
    return path


def names(path: Path) -> list[str]:
    return list(RunFile.of(Run(), path).all(Point))


def test_what_was_measured_is_there_again_and_a_later_record_takes_the_place_of_an_earlier(path: Path) -> None:
    RunFile.of(Run(), path).add(Point(name="a", value=0.1 + 0.2), Point(name="c"))
    file = RunFile.of(Run(place="there"), path)
    assert [*file.all(Point)] == ["a", "b", "c"]
    assert file.all(Point)["a"].value == 0.1 + 0.2
    assert [*file.all(Note)] == ["n"]
    assert path.read_text().count("\n") == 6


def test_a_last_line_that_was_cut_short_is_dropped_and_measured_again(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])
    assert not RunFile.of(Run(), path).all(Note)
    RunFile.of(Run(), path).add(Note(text="other"))
    assert [*RunFile.of(Run(), path).all(Note)] == ["other"]
    assert names(path) == ["a", "b"]


@pytest.mark.parametrize(
    "line", ["", "{", "[]", "[" * 9999, "null", '{"name":"c","value":0.5}', "changed", "another run's"]
)
def test_a_line_that_no_such_run_wrote_is_refused_by_its_number(path: Path, tmp_path: Path, line: str) -> None:
    lines = path.read_text().splitlines()
    RunFile.of(Run(seed=1), tmp_path / "b").add(Point(name="a"))
    made = {"changed": lines[1].replace("0.5", "0.6"), "another run's": (tmp_path / "b").read_text().splitlines()[1]}
    path.write_text("\n".join([lines[0], made.get(line, line), *lines[2:]]) + "\n")
    with pytest.raises(PlanError, match=rf"{path.name}, found line 2 changed"):
        RunFile.of(Run(), path)


@pytest.mark.parametrize("written", [0, 1, 30, 100])
def test_a_run_killed_in_its_first_write_begins_anew(path: Path, written: int) -> None:
    path.write_bytes(path.read_bytes()[:written])
    RunFile.of(Run(seed=1), path).add(Point(name="c"))
    assert [*RunFile.of(Run(seed=1), path).all(Point)] == ["c"]


def test_blank_last_lines_are_skipped_and_replaced(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\n\n")
    RunFile.of(Run(), path).add(Point(name="c"))
    assert names(path) == ["a", "b", "c"]


@pytest.mark.parametrize(
    "content", ["[]", "{}", '{"kind": "sparsekv.other", ', "[" * 9999, '{"kind": "mine"}\n', "old\n", "version", "name"]
)
def test_a_file_of_something_else_is_refused(path: Path, content: str) -> None:
    head = json.loads(path.read_text().splitlines()[0])
    made = {"version": json.dumps(head | {"schema_version": 2}) + "\n", "name": json.dumps(head | {"more": 1}) + "\n"}
    path.write_text(made.get(content, content))
    with pytest.raises(PlanError, match=r"points in .*a\.jsonl, found another file"):
        RunFile.of(Run(), path)


def test_a_run_that_differs_is_refused_by_each_difference(path: Path) -> None:
    with pytest.raises(UsageError, match=r"chunk: none there, 64 here; seed: 0 there, 1 here\. Give"):
        RunFile.of(Run(seed=1, chunk=64, place="there"), path)


def test_without_a_path_nothing_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    file = RunFile.of(Run(), None)
    file.add(Point(name="a"))
    assert [*file.all(Point)] == ["a"]
    assert list(tmp_path.iterdir()) == []


# --- one run at a time ------------------------------------------------------------------------------------------------


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
from sparsekv.planner.records import only_run
with only_run(Path(sys.argv[1])):
    os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", program, path], timeout=120).returncode < 0
    assert len(list(tmp_path.iterdir())) == 1
    with only_run(path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("fails", ["flock", "open"])
def test_a_folder_that_cannot_be_locked_is_written_into_all_the_same(
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
