"""Plans in engines whose weights are quantised: which weights a plan's quality was measured on is said."""

import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
from quantised_folders import compress
from vllm_engine import BUDGET, Oracle, generate, make_engine, tokens_of

from sparsekv.plans.errors import PlanWarning
from sparsekv.plans.files import write_plan
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.vllm.engine_host import serving_stats, start_host
from sparsekv.runtime.vllm.internals import engine_facts, engine_model
from sparsekv.runtime.vllm.settings import EngineOptions

WORDS = "other weights"


@pytest.fixture(scope="module")
def folder(reference: LoadedModel, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights of 8 bits, the only ones that run in float32 on a CPU."""
    place = tmp_path_factory.mktemp("quantised") / "tiny"
    shutil.copytree(str(reference.model.name_or_path), place, ignore=shutil.ignore_patterns("*.yaml"))
    return compress(place, {"W8A8": ["Linear"]})


@pytest.fixture(scope="module")
def told(folder: Path, plan_file: Path, kept_engines: list[Any]) -> list[str]:
    """An engine with the plan of the base model, and what it warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        kept_engines.append(make_engine(str(folder), additional_config={"sparsekv": {"plan": str(plan_file)}}))
    return [str(one.message) for one in caught if one.category is PlanWarning]


def test_a_plan_of_the_base_model_runs_and_says_once_that_its_quality_was_measured_on_other_weights(
    told: list[str], kept_engines: list[Any], folder: Path, plan: Plan, prompts: dict[int, list[int]]
) -> None:
    assert [WORDS in line for line in told] == [True]
    (output,) = generate(kept_engines[-1], [prompts[1100]])
    answer = Oracle(load_model(folder, device="cpu").model, plan)(prompts[1100], range(BUDGET, 1100, BUDGET))
    assert tokens_of(output) == answer.tokens  # activations are quantised in the engine alone
    assert serving_stats(kept_engines[-1]).prefill_density == pytest.approx(answer.density, rel=0.02)


def test_a_plan_of_the_quantised_model_says_nothing(
    told: list[str], kept_engines: list[Any], folder: Path, plan: Plan, tmp_path: Path
) -> None:
    own = plan.model_copy(update={"model": load_model(folder, device="cpu").info})
    write_plan(own, tmp_path / "plan.yaml")
    config = kept_engines[-1].llm_engine.vllm_config
    with warnings.catch_warnings():
        warnings.simplefilter("error", PlanWarning)
        start_host(tmp_path / "plan.yaml", EngineOptions(), engine_facts(config), engine_model(config))
