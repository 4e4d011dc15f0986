"""Files that are no plan. Each message names the file, and where it can the line, the field, and what to do."""

from __future__ import annotations

import json
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import yaml
from plans_samples import full_plan, large_plan

from sparsekv.plans import yaml_io
from sparsekv.plans.errors import PlanError, UsageError
from sparsekv.plans.files import MAX_BYTES, NAME_A_PLAN, dump_plan, load_plan, parse_plan, with_digest
from sparsekv.plans.phases import PrefillPlan
from sparsekv.plans.schema import KIND

TEXT = dump_plan(full_plan())


def refusal(text: str | bytes) -> str:
    with pytest.raises(PlanError) as caught:
        parse_plan(text, "a.yaml")
    return str(caught.value)


def test_a_fault_of_a_plan_is_named_by_itself() -> None:
    spoiled = (TEXT + "[", TEXT.replace("kind:", '"kind" :') + "[")
    for text in (*spoiled, '{"kind": "sparsekv.plan", ', '{"a": 1, "kind": "sparsekv.plan", '):
        assert NAME_A_PLAN not in refusal(text)


@pytest.mark.parametrize("opening", ["[", "{", "{a: ", "- ", "? ", "{? ", "[{a: "])
@pytest.mark.parametrize("times", [30, 5_000, 1_000_000])
def test_deep_nesting_is_refused_before_it_costs_anything(opening: str, times: int) -> None:
    assert "expected" in refusal("kind: sparsekv.plan\nx:\n  " + opening * times)


FLOODS = {
    "a list": "extensions: {a: [" + "1," * 4_000_000 + "1]}\n",
    "lines": "extensions:\n" + "  - 1\n" * 1_300_000,
    "keys": "".join(f"k{n}: 1\n" for n in range(700_000)),
    "records of nothing": "targets: [" + "{}," * 2_700_000 + "{}]\n",
    "head groups of nothing": "prefill: {lengths: [{heads: [" + "{}," * 2_700_000 + "{}]}]}\n",
    "head groups": "prefill: {lengths: [{heads: [" + "{layer: 0, heads: 0, pattern: dense}," * 220_000 + "]}]}\n",
}


@pytest.mark.parametrize("flood", FLOODS)
def test_a_flood_of_values_is_refused_where_it_passes_what_a_plan_may_hold(flood: str) -> None:
    assert len(FLOODS[flood]) < MAX_BYTES
    assert "expected at most 400,000 values" in refusal(FLOODS[flood])


def test_a_plan_of_many_head_groups_may_hold_more_values_than_other_files(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = large_plan(4, 32, 1)
    text = dump_plan(plan)
    monkeypatch.setattr(yaml_io, "MAX_VALUES", 100)
    assert parse_plan(text) == with_digest(plan)
    monkeypatch.setattr(yaml_io, "MAX_GROUPS", 100)
    assert "expected at most" in refusal(text)


def test_a_flood_of_wrong_head_groups_is_refused_at_the_first() -> None:
    line = next(line for line in TEXT.splitlines() if "pattern: vertical_slash" in line)
    message = refusal(TEXT.replace(line, "\n".join([line.replace("last_q: 64", "last_q: 0")] * 5_000), 1))
    assert message.count("last_q: expected") == 1


@pytest.mark.parametrize("written", ["2e-2", "2.0e-2", ".02", "0.020", "+0.02"])
def test_floats_may_be_written_in_any_form(written: str) -> None:
    text = TEXT.replace("{fraction: 0.02}", f"{{fraction: {written}}}", 1)
    assert parse_plan(text) == with_digest(full_plan())


def test_layout_order_and_comments_do_not_matter() -> None:
    plan = full_plan().model_copy(update={"extensions": {}})
    data = yaml.safe_load(dump_plan(plan))
    text = "# a comment\r\n" + yaml.safe_dump(data, sort_keys=True, width=40).replace("\n", "\r\n")
    assert parse_plan(text) == with_digest(plan)


class TestIntegrity:
    def test_an_edited_plan_points_at_seal(self) -> None:
        assert "`sparsekv seal a.yaml`" in refusal(TEXT.replace("{tokens: 600}", "{tokens: 601}"))

    def test_a_plan_without_its_digest_points_at_seal(self) -> None:
        message = refusal(TEXT[: TEXT.index("integrity:")])
        assert "found none" in message
        assert "seal" in message

    def test_a_fault_is_told_before_the_digest(self) -> None:
        assert "slash.tokens" in refusal(TEXT.replace("{tokens: 600}", "{tokens: x}"))


class TestFiles:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("nowhere.yaml", "nowhere"),
            ("", "found a folder"),
            ("file/plan.yaml", "Not a directory"),
            ("a\0b", "null"),
            ("a" * 5000, "long"),
        ],
        ids=lambda value: ascii(value)[:20],
    )
    def test_what_is_no_file_that_can_be_read_is_named(self, tmp_path: Path, name: str, said: str) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(UsageError, match=said):
            load_plan(f"{tmp_path}/{name}")

    @pytest.mark.skipif(os.geteuid() == 0, reason="root reads everything")
    def test_no_permission(self, tmp_path: Path) -> None:
        path = tmp_path / "plan.yaml"
        path.write_text(TEXT)
        path.chmod(0)
        with pytest.raises(UsageError, match="Permission denied"):
            load_plan(path)

    def test_a_device_or_a_pipe_nobody_writes_to_is_not_waited_for(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr("sparsekv.plans.files._PIPE_SECONDS", 0.01)
        os.mkfifo(tmp_path / "pipe")
        for path in ("/dev/zero", tmp_path / "pipe"):
            with pytest.raises(UsageError, match="expected a file"):
                load_plan(path)

    def test_a_pipe_is_waited_for_while_somebody_has_it_open(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("sparsekv.plans.files._PIPE_SECONDS", 0.01)
        read, write = os.pipe()
        with ThreadPoolExecutor(1) as pool, os.fdopen(read):
            plan = pool.submit(load_plan, f"/dev/fd/{read}")
            time.sleep(0.1)
            with os.fdopen(write, "w") as file:
                file.write(TEXT)
            assert plan.result() == parse_plan(TEXT)

    @pytest.mark.parametrize("text", ["hunter2: x\n", "kind: hunter2\n", "hunter2: 1\nhunter2: 2\n", "a: !hunter2 b\n"])
    def test_the_content_of_a_file_that_is_no_plan_is_not_shown(self, tmp_path: Path, text: str) -> None:
        path = tmp_path / "sparsekv.yaml"
        path.write_text(text)
        with pytest.raises(PlanError) as refused:
            load_plan(path)
        assert "hunter2" not in str(refused.value)

    def test_a_tile_that_no_index_is_built_for_is_refused(self) -> None:
        with pytest.raises(ValueError, match="64 x 128"):
            PrefillPlan.model_validate({"tile": {"query": 64, "key": 128}, "lengths": [{"up_to": None, "dense": True}]})


def test_plans_are_read_alike_without_libyaml(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(yaml, "CSafeLoader")
    assert parse_plan(TEXT) == with_digest(full_plan())
    assert "expected YAML, found a fault" in refusal("a: [")
    assert "expected YAML in UTF-8" in refusal("a: \x07")
    assert "levels of nesting" in refusal("[" * 100_000)


def test_a_plan_that_is_cut_off_is_refused_and_a_fault_at_its_end_says_so() -> None:
    sealed = TEXT.rstrip()
    said = [refusal(sealed[:length]) for length in range(1, len(sealed) - 1, 7)]
    faults = [one for one in said if "found a fault" in one]
    assert len(faults) > 20
    assert sum("may be cut off" in one for one in faults) >= 0.99 * len(faults)  # a number may end behind its sign
    assert "may be cut off" in refusal(sealed[: sealed.rindex("\n")])  # whole, but for the digest


@pytest.mark.parametrize(
    "text",
    [
        TEXT.replace("{tokens: 600}", "{tokens: 600", 1),
        TEXT.rstrip() + "\n\tx\nend: 1\n",
        TEXT.rstrip() + " : 1\n",
        json.dumps({"kind": KIND, "a": 1, "b": [2, 3]}).replace("1,", "1"),
        TEXT.replace("\n", "\r").replace("{tokens: 600}", "{tokens: 600", 1),
    ],
)
def test_a_fault_before_the_end_is_no_sign_of_a_file_that_is_cut_off(text: str) -> None:
    said = refusal(text)
    assert "found a fault" in said
    assert "may be cut off" not in said
