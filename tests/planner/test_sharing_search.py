"""Layers that share a choice of tokens: the pattern that was planted is found, and verified as any plan is."""

from __future__ import annotations

from typing import Any

import pytest
from own_texts import text_of
from tiny_indexers import KINDS, PLANTED, TOPK, planted_model
from tiny_models import tiny_tokenizer

import sparsekv
from sparsekv.planner.job import job_of
from sparsekv.planner.options import GivenPrompt, PlanOptions
from sparsekv.planner.progress import Progress
from sparsekv.planner.sharing_search import SharingSearch
from sparsekv.planner.verify import VerifyRun, verify
from sparsekv.plans.errors import UsageError
from sparsekv.plans.phases import IndexSharing
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import LoadedModel

EVEN = "FSFSFS"  # as many layers at even distances
OPTIONS = PlanOptions(lengths=(256,), tasks=("kv_retrieval",), calibration_samples=1, verify="none", loss=0.001)


def loaded_of(kind: str, pattern: str = PLANTED) -> LoadedModel:
    model = planted_model(kind, pattern)
    return LoadedModel(model, tiny_tokenizer(), describe_model(model, "tests/indexers"))


@pytest.mark.parametrize("kind", KINDS)
def test_the_planted_pattern_is_found_and_beats_the_even_one(kind: str) -> None:
    job = job_of(loaded_of(kind), OPTIONS)
    with SharingSearch.on(job, Progress()) as search:
        plan = search.plan(job.options)
        denser = search.plan(job.options.dense_at((256,)))
    assert plan.index_sharing is not None
    assert (plan.index_sharing.pattern, plan.planned_lengths) == (PLANTED, (256,))
    assert search.losses[PLANTED] < 1e-6 < OPTIONS.loss < search.losses[EVEN]
    assert denser.is_dense


def test_a_shared_choice_is_verified_as_any_plan_is() -> None:
    loaded = loaded_of("deepseek_v32")
    job = job_of(loaded, OPTIONS)
    prompts = [GivenPrompt(text_of(0, 200), "yz")]
    kl = {}
    for pattern in (PLANTED, EVEN):
        sharing = IndexSharing(pattern=pattern, lengths=(256,))
        plan = Plan(status="unverified", model=loaded.info, index_sharing=sharing)
        result = verify(loaded, plan, job.options, VerifyRun("small", 1, 0.05), prompts=prompts)
        (score,) = result.quality.lengths
        kl[pattern] = score.kl
    assert kl[PLANTED] < 1e-6 < kl[EVEN]


def test_a_plan_that_misses_its_test_is_followed_by_one_for_half_of_its_loss() -> None:
    job = job_of(loaded_of("glm_moe_dsa", "FSF"), OPTIONS.but(loss=100.0))
    with SharingSearch.on(job, Progress()) as search:
        plans = [search.plan(job.options.but(missed={256: times})) for times in (0, 1)]
    assert [plan.index_sharing and plan.index_sharing.pattern for plan in plans] == ["FSS", "FSF"]


def test_each_plan_behind_a_miss_has_more_layers_that_choose_up_to_all_of_them() -> None:
    """Also where the first loses nothing, and where no loss is allowed."""
    job = job_of(loaded_of("glm_moe_dsa", "FSF"), OPTIONS)
    with SharingSearch.on(job, Progress()) as search:
        plans = [search.plan(job.options.but(missed={256: times})) for times in (0, 1, 2)]
        search.losses.update(dict.fromkeys(search.losses, 1e-6))
        least = search._fewest(0.0, 1)
    assert [plan.index_sharing and plan.index_sharing.pattern for plan in plans] == ["FSF", "FFF", "FFF"]
    assert least == "FFF"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"retain": 0.5}, "--retain"),
        ({"filter_layers": (0,), "phases": ("decode",)}, "--set filter_layers, --only"),
        ({"lengths": (TOPK,)}, "above the 16 tokens"),
    ],
)
def test_options_that_say_nothing_of_indexers_are_refused(options: dict[str, Any], words: str) -> None:
    given = {"lengths": (256,), "tasks": ("kv_retrieval",), "verify": "none"} | options
    with pytest.raises(UsageError, match=words):
        sparsekv.plan_model(loaded_of("glm_moe_dsa", "FS"), **given)
