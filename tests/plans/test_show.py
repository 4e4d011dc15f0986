"""Plans as tables, readable at 100 columns, and what is said of them; whole pages are in cli/test_messages.py."""

from __future__ import annotations

import pytest
from plans_samples import full_plan, large_plan, quality_at, small_plan
from rich.console import Console

from sparsekv.cli.exchange import section
from sparsekv.plans.aliases import ModelSource
from sparsekv.plans.brief import length_rows, next_command, sentence, verdict
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.quality import CellScore, Excludes, Quality
from sparsekv.plans.schema import Plan, Provenance
from sparsekv.plans.show import describe, span


def shown(plan: Plan) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        for part in describe(plan):
            console.print(part)
    return captured.get().splitlines()


PLANS = [small_plan(), full_plan(), large_plan(), large_plan(80, 64, 6), small_plan(prefill=None, decode=None)]


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_fits_31_lines_of_100_columns_and_its_end_12(plan: Plan) -> None:
    end = verdict(plan, "plan.yaml")
    assert len(end) <= 12
    assert len(shown(plan)) + 1 + len(end) <= 31
    assert max(map(len, (*shown(plan), *end))) <= 100


def test_each_length_has_the_share_of_attention_that_is_computed_and_its_gain() -> None:
    assert length_rows(small_plan(quality=quality_at(4096)))[1] == ("4k", "50%", "", "100%", "", "0.0020")


CELL = CellScore(task="niah_multikey", length=4096, prompts=30, answered=30, lost=1)
UNJUDGED = CELL.model_copy(update={"unjudged": True})
RETAINS = {"kv_cache": full_plan().kv_cache, "provenance": Provenance(settings={"retain": 0.5}), "decode": None}


@pytest.mark.parametrize(
    ("fields", "changes", "command"),
    [
        ({}, {}, "sparsekv verify ./m --plan a.yaml --write"),
        ({}, {"missed": (4096,)}, "sparsekv plan ./m -o a.yaml --force"),
        (RETAINS, {"missed": (4096,)}, "sparsekv plan ./m -o a.yaml --retain 0.6 --force"),
        (
            {},
            {"cells": (UNJUDGED,)},
            "sparsekv plan ./m -o a.yaml --prompts FILE --force",
        ),
        ({}, {"test": "betting"}, "sparsekv verify ./m --plan a.yaml --write"),
    ],
)
def test_the_next_command_follows_from_the_test(fields: dict[str, object], changes, command: str) -> None:
    plan = small_plan(quality=quality_at(4096).model_copy(update=changes), **fields)
    assert next_command(plan, "a.yaml", "./m") == command


def test_the_sentence_names_prompts_points_and_what_is_excluded() -> None:
    cells = tuple(CELL.model_copy(update={"length": length, "won": 2}) for length in (8192, 16384))
    quality = Quality(test="small", cells=cells, excludes=Excludes(net_loss=0.0257, task_loss=0.3038))
    plan = small_plan(status="verified", quality=quality)
    assert sentence(plan) == (
        "verified (small): 60 prompts, 1 task at 8k, 16k: +3.3 points beside dense; a loss above 2.6 points over all, "
        "or 31 in any task, is excluded (95%)"
    )
    left = quality.model_copy(update={"cells": (*cells, UNJUDGED), "reason": "why"})
    assert sentence(plan.model_copy(update={"quality": left, "status": "unverified"})).endswith(
        "; not judged: niah_multikey at 4k; why"
    )
    own = Quality(test="prompts", cells=(CELL.model_copy(update={"task": "prompts", "answered": 0, "lost": 0}),))
    assert sentence(plan.model_copy(update={"quality": own})).endswith("dense: tested by divergence alone")
    assert sentence(small_plan()) == "unverified: its quality was not measured"
    assert sentence(small_plan(prefill=None, decode=None)) == "dense: nothing gained"


@pytest.mark.parametrize(("chunk", "said"), [(2048, " for prompts in chunks of 2k"), (None, "")])
def test_a_status_says_for_which_cut_of_prompts_it_is(chunk: int | None, said: str) -> None:
    plan = small_plan(status="verified", quality=quality_at(4096, step=chunk))
    assert verdict(plan, "a.yaml")[0] == f"a.yaml: verified{said}"
    assert "verified (small)" in "\n".join(section(plan, ModelSource("org/name")))
    unverified = plan.model_copy(update={"status": "unverified"})
    assert verdict(unverified, "a.yaml")[0] == "a.yaml: unverified"


def test_no_tokens_are_the_least_share() -> None:
    assert span([fraction(0.5), tokens(0), fraction(0.25)]) == "0 to 50%"
    assert span([tokens(512), tokens(0)]) == "0 to 512 tokens"
