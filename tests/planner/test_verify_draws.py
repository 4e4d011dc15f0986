"""Which samples a verification runs, of what, with outcomes that are made up: what is decided costs nothing more."""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from made_outcomes import LENGTHS, PHASES, TASKS, Call, outcome, verified

from sparsekv.planner.evaluation.results import Outcome
from sparsekv.planner.options import Gate
from sparsekv.planner.outcomes_file import OutcomesRecord, keep_outcomes, read_outcomes
from sparsekv.plans.errors import PlanError, UsageError


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_once_only_right_answers_are_undecided_nothing_else_is_run(monkeypatch: pytest.MonkeyPatch, dtype) -> None:
    found, calls = verified(monkeypatch, dtype=dtype)
    assert found.conclusive, found.reasons
    floors = {f"{phase} floor" for phase in PHASES} if dtype == torch.bfloat16 else set()
    whole = Call(frozenset(PHASES | floors), frozenset(TASKS), LENGTHS[0], greedy=True, numbers=("0",))
    assert calls[0] == whole
    last = calls[-1]
    assert (last.tasks, last.greedy) == ({"niah_single", "niah_multikey"}, False)
    assert last.names <= PHASES
    kinds = list(dict.fromkeys((call.names, call.tasks, call.greedy) for call in calls if call.length == LENGTHS[0]))
    assert len(kinds) <= 6  # each call asks for what the one before it did, or less
    for before, after in pairwise(call for call in calls if call.length == LENGTHS[0]):
        assert after.names <= before.names
        assert after.tasks <= before.tasks
        assert after.greedy <= before.greedy
    both, evidence = found.quality.both, found.quality.evidence
    assert both.claims["failed"].prompts < both.claims["accuracy"].prompts < evidence.prompts
    assert both.agreement.exact == 1.0


def test_a_length_that_misses_ends_the_drawing(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(rng: np.random.Generator, name: str, task: str) -> Outcome:
        return outcome(rng, name, task, lost=0.5)

    found, calls = verified(monkeypatch, draw)
    assert not found.passed
    assert len(calls) < 40


def test_a_plan_that_loses_more_than_its_gate_is_rarely_verified(monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(rng: np.random.Generator, name: str, task: str) -> Outcome:
        return outcome(rng, name, task, lost=0.036)

    assert sum(verified(monkeypatch, draw, seed=seed)[0].conclusive for seed in range(6)) <= 1


def saved(record: OutcomesRecord, folder: Path) -> OutcomesRecord:
    """It, as a later run reads it."""
    keep_outcomes(record, folder / "plan.yaml.outcomes")
    return read_outcomes(folder / "plan.yaml.outcomes")


@pytest.mark.parametrize(("seconds", "lost"), [(9, 0.004), (301, 0.004), (60, 0.08)])
def test_a_verification_in_parts_comes_to_what_one_comes_to(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, seconds: int, lost: float
) -> None:
    """Whether it is verified or missed, and wherever in a round the time is up."""

    def draw(rng: np.random.Generator, name: str, task: str) -> Outcome:
        return outcome(rng, name, task, lost)

    whole, once = verified(monkeypatch, draw)
    assert whole.conclusive == (lost < 0.01)
    assert whole.outcomes is None  # nothing is left to be drawn
    parts, calls = [], []
    while not parts or (parts[-1].outcomes and len(parts) < 200):
        earlier = saved(parts[-1].outcomes, tmp_path) if parts else None
        parts.append(verified(monkeypatch, draw, calls=calls, earlier=earlier, verify_time=float(seconds))[0])
    assert calls == once  # no sample twice, none left out
    assert parts[-1].quality == whole.quality
    assert all(not part.conclusive and part.reasons[0].startswith("undecided") for part in parts[:-1])


def test_an_undecided_verification_says_prompts_and_seconds_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, calls = verified(monkeypatch, verify_time=40.0)
    told = re.search(
        r"about (\d+) more prompts like these \d+ would decide: (\d+) s at ([\d.]+) s a prompt$", found.reasons[0]
    )
    assert told, found.reasons
    more, seconds, pace = map(float, told.groups())
    assert found.seconds == pytest.approx(seconds, abs=0.5)
    assert seconds == pytest.approx(more * pace, rel=0.05)
    slowest, fastest = (1 / some(len(call.tasks) for call in calls) for some in (min, max))
    assert fastest <= pace <= slowest  # of calls that take a second each


@pytest.mark.parametrize(("seconds", "fits"), [(0.5, False), (40.0, True)])
def test_a_time_that_holds_the_first_round_alone_is_said_with_how_long_one_takes(
    monkeypatch: pytest.MonkeyPatch, seconds: float, fits: bool
) -> None:
    found, calls = verified(monkeypatch, verify_time=seconds)
    told = re.search(r"no second round of prompts fits into 0.5 s: one takes (\d+) s$", found.reasons[0])
    assert fits == (told is None)
    assert told is None or int(told[1]) == len(calls)  # each takes a second


def test_outcomes_say_the_seconds_that_are_needed_and_may_lack_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    found, _ = verified(monkeypatch, verify_time=40.0)
    kept = saved(found.outcomes, tmp_path)
    assert kept.seconds == pytest.approx(found.seconds, rel=1e-5)
    older = kept.model_copy(update={"seconds": None})
    assert "seconds" not in older.model_dump()
    assert saved(older, tmp_path) == older


def test_outcomes_of_other_settings_are_not_gone_on_from(monkeypatch: pytest.MonkeyPatch) -> None:
    drawn = verified(monkeypatch, verify_time=20.0)[0].outcomes
    stricter = Gate(max_kl=0.01)
    for changes, said in [
        ({"gate": stricter}, "max kl both: 0.055 there, 0.01 here"),
        ({"dtype": torch.float32}, "dtype: bfloat16 there, float32 here"),
        ({"prefill_chunk": 512}, "prefill chunk: none there, 512 here"),
        ({"verify_lengths": LENGTHS[:1]}, "lengths: 2048, 4096 there, 2048 here"),
    ]:
        calls: list[Call] = []
        with pytest.raises(UsageError, match=said):
            verified(monkeypatch, calls=calls, earlier=drawn, **changes)
        assert calls == []


def test_a_changed_file_of_outcomes_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml.outcomes"
    with pytest.raises(UsageError, match="without --more first"):
        read_outcomes(path)
    record = verified(monkeypatch, verify_time=8.0)[0].outcomes
    keep_outcomes(record, path)
    text = path.read_text()
    assert read_outcomes(path) == record
    for changed, said in [
        (text.replace('"looks":', '"looks":1'), "changed"),
        (text[:-20], "no whole JSON"),
        (text.replace('"mode":"both"', '"mode":"third"'), "results"),
        (text.replace('"phase":"both"', '"phase":"third"'), "wanted"),
        ("[]", "found at"),
    ]:
        assert changed != text
        path.write_text(changed)
        with pytest.raises(PlanError, match=said):
            read_outcomes(path)
    keep_outcomes(None, path)
    assert not path.exists()


def test_a_figure_near_its_gate_does_not_say_how_many_prompts_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, _ = verified(monkeypatch, lambda rng, name, task: outcome(rng, name, task, 0.03), verify_time=20.0)
    assert found.passed
    assert found.reasons[0].startswith("undecided")
    assert "cannot be told from these" in found.reasons[0]
    assert found.seconds is None
