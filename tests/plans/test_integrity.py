"""The digest over a plan's content, and what sealing an edited one does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from plans_samples import full_plan, small_plan

from sparsekv.plans import files
from sparsekv.plans.errors import ConflictError, PlanError, UsageError
from sparsekv.plans.files import content_digest, dump_plan, load_plan, parse_plan, seal, with_digest, write_plan


@pytest.fixture
def path(tmp_path: Path) -> Path:
    place = tmp_path / "plan.yaml"
    write_plan(full_plan(), place)
    return place


def edit(path: Path, before: str, after: str) -> None:
    assert before in path.read_text()
    path.write_text(path.read_text().replace(before, after, 1))


def test_sealing_an_edited_plan_drops_what_was_measured_before(path: Path) -> None:
    edit(path, "{tokens: 600}", "{tokens: 601}")
    with pytest.raises(PlanError, match="sparsekv seal"):
        load_plan(path)
    sealed = seal(path)
    plan = load_plan(path)
    assert plan == sealed.plan
    assert (plan.status, plan.quality, plan.cost) == ("unverified", None, None)
    assert sealed.changed
    assert sealed.notes[0] == "sealed as unverified"
    assert sealed.notes[1].startswith("dropped")
    assert f"`sparsekv verify --plan {path} --write`" in sealed.notes[2]
    assert sealed.notes[3] == "cost comes from `sparsekv plan` alone"


def test_sealing_overwrites_no_plan_that_is_edited_at_that_moment(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    edit(path, "{tokens: 600}", "{tokens: 601}")
    edits = [lambda: edit(path, "{tokens: 601}", "{tokens: 602}")]
    monkeypatch.setattr(files, "dump_plan", lambda plan: (edits.pop()(), dump_plan(plan))[1])
    with pytest.raises(ConflictError):
        seal(path)
    assert "{tokens: 602}" in path.read_text()


def test_sealing_a_sound_plan_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    sealed = seal(path)
    assert path.read_bytes() == before
    assert not sealed.changed
    assert sealed.plan.status == "verified"


def without_a_default(data: object) -> Iterator[tuple[object, str]]:
    """Places of the file where a field may be left out: (mapping, key)."""
    if isinstance(data, dict):
        yield from ((data, key) for key in data)
    for one in data.values() if isinstance(data, dict) else data if isinstance(data, list) else ():
        yield from without_a_default(one)


def test_a_field_that_has_its_default_may_be_left_out_and_is_written_again(tmp_path: Path) -> None:
    """Whatever the field is: what is sealed is read afterwards, and nothing that was measured is lost."""
    path, written = tmp_path / "plan.yaml", small_plan(status="verified", quality=full_plan().quality)
    write_plan(written, path)
    before, text, sealed = load_plan(path), path.read_text(), 0
    for number in range(len(list(without_a_default(yaml.safe_load(text))))):
        data = yaml.safe_load(text)
        holder, key = list(without_a_default(data))[number]
        del holder[key]
        path.write_text(yaml.safe_dump(data, sort_keys=False))
        try:
            same = parse_plan(path.read_text(), sealed=False) == before
        except PlanError:
            continue
        found = seal(path)
        assert load_plan(path) == found.plan
        assert (found.plan == before) == same
        sealed += same
    assert sealed > 3


def test_a_plan_with_fields_that_are_gone_is_read_by_the_signature_that_it_was_written_with() -> None:
    data = yaml.safe_load(dump_plan(full_plan()))
    data["provenance"]["command"] = "plan"
    with pytest.raises(PlanError, match="integrity"):
        parse_plan(json.dumps(data))
    data["integrity"] = content_digest(data)
    assert with_digest(parse_plan(json.dumps(data))) == with_digest(full_plan())


def test_an_edit_that_makes_no_sense_is_not_sealed(path: Path) -> None:
    edit(path, "{tokens: 600}", "{tokens: -1}")
    before = path.read_bytes()
    with pytest.raises(PlanError, match=r"slash\.tokens"):
        seal(path)
    assert path.read_bytes() == before


def test_a_status_raised_by_hand_does_not_survive(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    write_plan(full_plan().model_copy(update={"status": "imported"}), path)
    edit(path, "status: imported", "status: verified")
    assert seal(path).plan.status == "unverified"


def test_the_digest_sees_every_value_but_itself() -> None:
    assert content_digest({"a": 1, "integrity": "x"}) == content_digest({"integrity": "y", "a": 1})
    assert len({content_digest({"a": value}) for value in (1, 1.0, "1", True, None, [1])}) == 6


@pytest.mark.parametrize("path", [None, 5, b"plan.yaml"])
def test_what_is_no_path_and_what_is_no_plan_are_refused_by_name(path: object, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="expected the path of a plan file"):
        load_plan(path)
    with pytest.raises(UsageError, match="expected a plan to write"):
        write_plan(path, tmp_path / "plan.yaml")
    assert not list(tmp_path.iterdir())
