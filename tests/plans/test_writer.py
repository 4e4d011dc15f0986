"""Files written whole or not at all, and alike every time."""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import Any, NoReturn

import pytest
import yaml
from plans_samples import full_plan, small_plan

from sparsekv.plans import files, yaml_io
from sparsekv.plans.errors import PlanError, UsageError
from sparsekv.plans.files import dump_plan, load_plan, parse_plan, with_digest, write_plan
from sparsekv.plans.patterns import VerticalSlash, fraction, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan

OLD = "the file that was there\n"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "plan.yaml"
    place.write_text(OLD)
    return place


def test_equal_plans_give_equal_bytes_however_they_were_made() -> None:
    plan = full_plan()
    shuffled = plan.model_dump(mode="json")
    shuffled = {key: shuffled[key] for key in reversed(shuffled)}
    shuffled["extensions"] = {"b": 1, "a": {"d": 1, "c": 2}}
    ordered = plan.model_dump(mode="json") | {"extensions": {"a": {"c": 2, "d": 1}, "b": 1}}
    assert dump_plan(Plan.model_validate(shuffled)) == dump_plan(Plan.model_validate(ordered))


def test_bytes_do_not_depend_on_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    fast = dump_plan(full_plan())
    monkeypatch.delattr(yaml, "CSafeDumper")
    assert dump_plan(full_plan()) == fast


@pytest.mark.parametrize("share", [1e-05, 2.5e-07, 1e-300, 0.1, 1.0, 1 / 3])
def test_floats_are_floats_for_every_yaml_reader(share: float) -> None:
    pattern = VerticalSlash(vertical=fraction(share), slash=tokens(1), max_tiles=fraction(share))
    bucket = PrefillBucket(up_to=None, heads=(HeadGroup(layer=0, heads=(0,), pattern=pattern),))
    plan = small_plan(prefill=PrefillPlan(tile=small_plan().prefill.tile, lengths=(bucket,)))  # type: ignore[union-attr]
    text = dump_plan(plan)
    found = yaml.safe_load(text)["prefill"]["lengths"][0]["heads"][0]["vertical"]["fraction"]
    assert type(found) is float
    assert found == pytest.approx(share, rel=1e-5)
    assert parse_plan(text) == with_digest(plan)


ODD_TEXT = [
    *("no", "yes", "on", "null", "~", "", " ", "1", "1.0", "1e5", "0x1", "1:30", "2001-01-01", "=", "<<", ".inf", "-"),
    *("---", "a: b", "a #b", "#", "'", '"', "\\", "{", "[", "&a", "*a", "!t", "%", "@", "`", "a\nb", "\n", "\t", "\r"),
    *("\x85", "\u2028", "\x00", "\x7f", "\ufeff", "é", "\U0001f600", "a" * 5000, "b " * 300, "sha256:00"),
]


@pytest.mark.parametrize("value", ODD_TEXT, ids=lambda value: ascii(value)[:20])
def test_text_stays_text(value: str) -> None:
    plan = small_plan(extensions={"value": value, "key": {value: 1}, "line": [value, {"x": value}]})
    text = dump_plan(plan)
    assert parse_plan(text) == with_digest(plan)
    assert yaml.safe_load(text)["extensions"] == plan.extensions


def test_a_plan_too_large_to_read_is_not_written(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "MAX_BYTES", 1000)
    with pytest.raises(PlanError, match="at most 1,000 bytes"):
        write_plan(small_plan(), path)
    assert path.read_text() == OLD


def test_a_plan_of_more_values_than_a_reader_accepts_is_not_written(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(yaml_io, "MAX_VALUES", 1000)
    with pytest.raises(PlanError, match="at most 1,000 values"):
        write_plan(small_plan(extensions={"a": [1] * 1100}), path)
    assert path.read_text() == OLD


class TestReplacing:
    @pytest.mark.parametrize("mode", [0o600, 0o640, 0o664, 0o755])
    def test_the_mode_of_the_old_file_stays(self, path: Path, mode: int) -> None:
        path.chmod(mode)
        write_plan(small_plan(), path)
        assert stat.S_IMODE(path.stat().st_mode) == mode

    def test_a_new_file_has_the_usual_mode(self, tmp_path: Path) -> None:
        (tmp_path / "other").touch()
        write_plan(small_plan(), tmp_path / "plan.yaml")
        assert (tmp_path / "plan.yaml").stat().st_mode == (tmp_path / "other").stat().st_mode

    def test_a_link_stays_a_link(self, path: Path) -> None:
        link = path.with_name("link.yaml")
        link.symlink_to(path.name)
        write_plan(small_plan(), link)
        assert link.is_symlink()
        assert load_plan(path) == with_digest(small_plan())


class TestFailures:
    """Every step can fail, by an error or by Ctrl-C; the old file stays and nothing else is left."""

    @pytest.mark.parametrize("step", ["open", "fchmod", "fsync", "replace"])
    @pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()], ids=repr)
    def test_the_old_file_survives(
        self, path: Path, monkeypatch: pytest.MonkeyPatch, step: str, error: BaseException
    ) -> None:
        def fail(*_: Any, **__: Any) -> NoReturn:
            raise error

        monkeypatch.setattr(files.os, step, fail)
        with pytest.raises((UsageError, KeyboardInterrupt)) as caught:
            write_plan(small_plan(), path)
        monkeypatch.undo()
        assert path.read_text() == OLD
        assert os.listdir(path.parent) == [path.name]
        if isinstance(caught.value, UsageError):
            assert f"{path}: " in str(caught.value)

    def test_a_folder_that_cannot_be_synced_is_no_failure(self, path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sync = os.fsync

        def only_files(descriptor: int) -> None:
            if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                raise OSError(errno.EINVAL, "Invalid argument")
            sync(descriptor)

        monkeypatch.setattr(files.os, "fsync", only_files)
        write_plan(small_plan(), path)
        assert load_plan(path) == with_digest(small_plan())

    @pytest.mark.parametrize(
        "target", ["", "missing/plan.yaml", "/dev/null"], ids=["folder", "missing folder", "device"]
    )
    def test_what_is_no_regular_file_in_a_folder_is_refused(self, tmp_path: Path, target: str) -> None:
        with pytest.raises(UsageError):
            write_plan(small_plan(), tmp_path / target)
        assert os.listdir(tmp_path) == []

    @pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
    def test_a_folder_without_permission(self, path: Path) -> None:
        path.parent.chmod(0o500)
        with pytest.raises(UsageError):
            write_plan(small_plan(), path)
        path.parent.chmod(0o700)
