"""run: what is said of prompts and answers that are shorter or longer than what the plan was made for."""

from pathlib import Path

import pytest
from model_folders import sparse_plan
from plans_samples import quality_at
from tiny_models import tiny_model

from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.phases import PrefillBucket
from sparsekv.plans.schema import Plan

PROMPT = "What is the number? " * 40
FEW = ("--max-new-tokens", 6)


def made_for(length: int, plan: Plan) -> Plan:
    """The plan, whose prefill goes on beyond this length as up to it."""
    assert plan.prefill is not None
    (last,) = plan.prefill.lengths
    ends = (last.model_copy(update={"up_to": length}), last.model_copy(update={"extrapolated": True}))
    return plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"lengths": ends})})


@pytest.fixture
def short(folder: Path, tmp_path: Path) -> Path:
    """A plan of the folder's model for 128 tokens, of prefill alone."""
    plan = made_for(128, load_plan(folder / "sparsekv.yaml")).model_copy(update={"decode": None})
    write_plan(plan, tmp_path / "plan.yaml")
    return tmp_path / "plan.yaml"


@pytest.mark.parametrize(
    ("first", "flags", "said"),
    [
        (64, ("--prompt", "a"), "prefill is sparse from 65 tokens on"),
        (1, ("--prompt", "a few"), "nothing of this run was sparse"),
        (1024, (), "prefill is sparse from 1,025 tokens on"),
        (1024, ("--compare",), "prefill is sparse from 1,025 tokens on"),
        (1024, ("--only", "decode"), "at every length"),
        (64, (), ""),
        (None, (), "at every length"),
    ],
)
def test_a_run_by_a_plan_of_which_nothing_was_sparse_says_so(sparsekv, folder, tmp_path, first, flags, said):
    sparse = sparse_plan(tiny_model(context=2048)).prefill.lengths[-1]
    dense = PrefillBucket(up_to=first, dense=True)
    lengths = (dense, sparse) if first else (dense,)
    plan = load_plan(folder / "sparsekv.yaml")
    prefill = plan.prefill.model_copy(update={"lengths": lengths})
    write_plan(plan.model_copy(update={"prefill": prefill, "decode": None}), tmp_path / "plan.yaml")
    done = sparsekv("run", folder, "--plan", tmp_path / "plan.yaml", "--prompt", PROMPT, *FEW, *flags)
    assert done.code == 0, done.err
    notes = ("is sparse from", "nothing of this run was sparse", "dense at every length")
    told = [line for line in done.err.splitlines() if any(note in line for note in notes)]
    assert len(told) == bool(said)
    assert said in "".join(told)


@pytest.mark.parametrize(
    ("changes", "prompt", "new", "said"),
    [
        ({}, 1024, 0, ""),
        ({}, 1025, 0, "this prompt, 1,025 tokens, is longer than the plan was made for (1,024)"),
        ({}, 1000, 30, "prompt and answer, 1,030 tokens, are longer than the plan was made for (1,024)"),
        ({"decode": False}, 1000, 30, ""),
        ({"prefill": False}, 1025, 0, "prompt and answer, 1,025 tokens"),
        ({"exact": True}, 1025, 0, ""),
        ({"exact": "decode"}, 1025, 0, "this prompt, 1,025 tokens"),
        ({"exact": "decode"}, 1000, 30, ""),
        ({"plan": None}, 1025, 0, ""),
    ],
)
def test_what_is_longer_than_the_plan_was_made_for_is_told_by_the_phases_that_follow_it(changes, prompt, new, said):
    from sparsekv.cli.answers import Answer, Session
    from sparsekv.runtime.hf.generate import Generation

    plan = made_for(1024, sparse_plan(tiny_model(context=2048)))
    answer = Answer(Generation("", (0,) * new, prompt, 1.0, 1.0), 0.5, 0, 0, decode_share=0.5)
    told = Session(None, **{"plan": plan, **changes}).beyond_reach(answer)
    assert told.startswith(said)
    assert bool(told) == bool(said)


def test_a_prompt_longer_than_the_plan_was_made_for_is_told_once(sparsekv, folder, short):
    done = sparsekv("run", folder, "--plan", short, "--prompt", PROMPT, *FEW, "--compare")
    assert done.code == 0, done.err
    assert done.err.count("longer than the plan was made for (128)") == 1


@pytest.mark.parametrize(("flags", "told"), [((), 0), (("--prefill-chunk", 256), 0), (("--prefill-chunk", 128), 1)])
def test_a_run_cuts_as_the_plan_was_verified_and_says_another_cut_once(sparsekv, folder, tmp_path, flags, told):
    quality = quality_at(1024, step=256)
    plan = load_plan(folder / "sparsekv.yaml").model_copy(update={"status": "verified", "quality": quality})
    write_plan(plan, tmp_path / "plan.yaml")
    done = sparsekv("run", folder, "--plan", tmp_path / "plan.yaml", "--prompt", PROMPT, *FEW, *flags)
    assert done.code == 0, done.err
    assert done.err.count("chunks of 256") == told


def test_a_comparison_tells_what_was_sparse_and_what_became_of_drafts():
    from sparsekv.cli.answers import Answer
    from sparsekv.cli.run import _comparison_text
    from sparsekv.runtime.hf.generate import Generation

    def told(tokens: int, prefill: float, decode: float, density: float = 1.0, **others: int) -> list[list[str]]:
        sparse = Answer(Generation("", tuple(range(tokens)), 900, prefill, decode), density, 7, 0, **others)
        return [line.split("  ") for line in _comparison_text(dense, sparse).splitlines()]

    dense = Answer(Generation("", tuple(range(64)), 900, 2.0, 6.3), 1.0, 7, 0)
    names = ("prefill", "attention computed in prefill", "decode, tokens", "keys and values on the device")
    rows = {row[0]: row[-1].strip() for row in told(64, 1.0, 3.15, 0.25) if row[0] in names}
    assert rows == {"prefill": "2.00x", "attention computed in prefill": "25%", "decode, tokens": "2.00x"}
    drafted = told(64, 1.9, 9.0, drafted=40, accepted=30)
    assert {row[0]: row[-1].strip() for row in drafted if row[0] in names} == {"decode, tokens": "0.70x"}
    assert drafted[-1] == ["30 of 40 drafted tokens accepted"]
    assert told(8, 1.0, 0.1, 0.5)[-1] == ["decode is compared from 32 new tokens on"]
    assert not any("speed-up" in row[-1] for row in told(64, 1.0, 3.0))
