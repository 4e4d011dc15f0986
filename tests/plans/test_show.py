"""Plans as tables: complete, and readable at 100 columns."""

from __future__ import annotations

import json
import re

import pytest
from plans_samples import full_plan, large_plan, quality_at, small_plan
from rich.console import Console

from sparsekv.cli.exchange import section
from sparsekv.cli.verdict import next_command, verdict
from sparsekv.plans.aliases import ModelSource
from sparsekv.plans.brief import length_rows, sentence
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.quality import CellScore, Excludes, Quality
from sparsekv.plans.schema import Plan, Provenance
from sparsekv.plans.show import describe, span, summary


def shown(plan: Plan, full: bool = False) -> list[str]:
    console = Console(width=100, color_system=None)
    with console.capture() as captured:
        for part in describe(plan, full):
            console.print(part)
    return captured.get().splitlines()


PLANS = [small_plan(), full_plan(), large_plan(), large_plan(80, 64, 6), small_plan(prefill=None, decode=None)]


@pytest.mark.parametrize("plan", PLANS)
def test_a_plan_fits_31_lines_of_100_columns_and_its_end_12(plan: Plan) -> None:
    end = verdict(plan, "plan.yaml")
    assert len(end) <= 12
    assert len(shown(plan)) + 1 + len(end) <= 31
    assert max(map(len, (*shown(plan), *end))) <= 100


def test_full_tables_fit_100_columns() -> None:
    lines = shown(full_plan(), full=True)
    assert max(map(len, lines)) <= 100
    assert not any("…" in line for line in lines)


def test_the_tables_leave_nothing_of_a_plan_out() -> None:
    text = "\n".join(shown(full_plan(), full=True))
    model = ("example/mixed-8l @ 0123abc", "layers 5: sliding, window 1024", "quote_text", "niah_multikey")
    prefill = ("12,289 to 131,072", "as up to 131,072", "vertical 2%, slash 600 tokens, last_q 64, max_tiles 10%")
    rest = (
        "5%, at most 8192",
        "layers 2,4-5, hot set of 4096 tokens",
        "attention_sum",
        "21 -> 22 of 24",
        "not judged: 0 of 21",
        "NVIDIA H200",
    )
    assert [said for said in (*model, *prefill, *rest) if said not in text] == []


def test_what_a_sparse_step_attends_to_is_drawn_where_the_plan_has_one() -> None:
    axis, legend = (
        next(line for line in shown(full_plan(), full=True) if word in line) for word in ("oldest  SSSS", "S sinks")
    )
    drawn = axis.split()[1]
    assert axis.split()[2] == "newest"
    assert re.fullmatch(r"S+\.[.C]*C[.C]*\.R+", drawn)
    assert all(word in legend for word in ("S sinks", "C chosen", "R recent", ". skipped"))
    assert not any("oldest" in line for line in shown(small_plan(decode=None), full=True))


def test_the_summary_is_json_with_every_layer() -> None:
    found = json.loads(json.dumps(summary(full_plan()), allow_nan=False))
    assert found["model"] == {"id": "example/mixed-8l", "revision": "0123abc", "layers": 9}
    sparse = found["prefill"][1]
    assert [row["layer"] for row in sparse["layers"]] == list(range(9))
    assert sparse["layers"][0]["heads"]["0-1"] == "a_shape sink 128 tokens, window 1024 tokens"
    assert sum(sparse["heads"].values()) == 8 * 4 + 8
    assert found["prefill"][2] == {"up_to": None, "dense": False, "extrapolated": True, "same_as": 131072}
    assert found["decode"]["lengths"][1]["segments"][0]["filter"] == 1


@pytest.mark.parametrize(
    ("plan", "command"),
    [
        (full_plan(), "sparsekv run"),
        (small_plan(), "sparsekv verify"),
        (small_plan(prefill=None, decode=None), "sparsekv run"),
    ],
    ids=["verified", "not", "dense"],
)
def test_the_verdict_begins_with_the_status_and_ends_with_the_next_command(plan: Plan, command: str) -> None:
    lines = verdict(plan, "a.yaml")
    assert lines[0] == f"a.yaml: {plan.status_text}"
    assert any("lossy" in line for line in lines) == bool(plan.retained)
    assert f"{command} --plan a.yaml" in lines[-1]


def test_each_length_has_the_share_of_attention_that_is_computed_and_its_gain() -> None:
    assert length_rows(full_plan()) == [
        ("12k", "100%", "", "87%", "", ""),
        ("32k", "22%", "4.00x", "86%", "", "0.0015"),
        ("128k", "sparse", "", "44%", "", ""),
    ]
    assert [row[:1] + row[1::2] for row in length_rows(small_plan())] == [
        ("to 2k", "100%", "100%", ""),
        ("4k", "sparse", "100%", ""),
        ("128k", "sparse", "70%", ""),  # four of twelve layers read a tenth
    ]
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
    assert sentence(small_plan()) == "unverified: its quality was not measured"
    assert sentence(small_plan(prefill=None, decode=None)) == "dense: nothing gained"


@pytest.mark.parametrize(("chunk", "said"), [(2048, " for prompts in chunks of 2k"), (None, "")])
def test_a_status_says_for_which_cut_of_prompts_it_is(chunk: int | None, said: str) -> None:
    plan = small_plan(status="verified", quality=quality_at(4096, step=chunk))
    assert verdict(plan, "a.yaml")[0] == f"a.yaml: verified{said}"
    assert "verified (small)" in "\n".join(section(plan, ModelSource("org/name")))
    unverified = plan.model_copy(update={"status": "unverified"})
    assert verdict(unverified, "a.yaml")[0] == "a.yaml: unverified"


def test_what_dropping_does_to_answers_has_a_line_of_its_own_in_the_verdict() -> None:
    cells = tuple(
        CellScore(task=name, length=length, prompts=4, answered=4, lost=3)
        for name in ("second_question", "two_stage")
        for length in (4096, 8192)
    )
    lossy = full_plan().model_copy(update={"quality": Quality(test="small", cells=cells)})
    assert any("44% of the cache at 128k" in line for line in verdict(lossy, "a.yaml"))
    (line,) = (line for line in verdict(lossy, "a.yaml") if "hurts" in line)
    assert line.endswith("dense -> plan: second_question 100% -> 25% (of 8)")
    assert not any("hurts" in line for line in verdict(lossy.model_copy(update={"kv_cache": None}), "a.yaml"))


def test_no_tokens_are_the_least_share() -> None:
    assert span([fraction(0.5), tokens(0), fraction(0.25)]) == "0 to 50%"
    assert span([tokens(512), tokens(0)]) == "0 to 512 tokens"
