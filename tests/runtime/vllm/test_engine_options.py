"""The settings of an engine, and where its plan is looked for."""

from pathlib import Path

import pytest
from plans_samples import small_plan

from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import write_plan
from sparsekv.runtime.vllm.engine_options import EngineOptions, plan_path, read_options


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model's folder with a plan."""
    write_plan(small_plan(), tmp_path / "sparsekv.yaml")
    return tmp_path


@pytest.mark.parametrize("config", [{}, None, {"other": {"plan": "x"}}, {"sparsekv": None}, {"sparsekv": {}}], ids=str)
def test_a_configuration_without_settings_of_ours_has_the_defaults(config: object) -> None:
    assert read_options(config) == EngineOptions()


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ({"plam": "x"}, "sparsekv.plam"),
        ({"plan": 3}, "sparsekv.plan"),
        ({"allow_untested": "yes"}, "sparsekv.allow_untested"),
        ("plan.yaml", "sparsekv"),
    ],
    ids=str,
)
def test_a_setting_that_is_unknown_or_of_another_type_is_refused_by_name(given: object, where: str) -> None:
    with pytest.raises(UsageError, match=f"found at {where}: "):
        read_options({"sparsekv": given})


def test_the_plan_that_is_asked_for_goes_before_the_one_beside_the_model(folder: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.yaml"
    write_plan(small_plan(), other)
    assert plan_path(EngineOptions(plan=str(other)), str(folder), None) == other
    assert plan_path(EngineOptions(plan=str(folder)), "example/model", None) == folder / "sparsekv.yaml"


def test_the_plan_beside_the_model_is_found_and_left_alone_when_dense_is_asked_for(folder: Path) -> None:
    assert plan_path(EngineOptions(), str(folder), None) == folder / "sparsekv.yaml"
    assert plan_path(EngineOptions(dense=True), str(folder), None) is None


def test_a_model_without_a_plan_has_none(tmp_path: Path) -> None:
    assert plan_path(EngineOptions(), str(tmp_path), None) is None
    assert plan_path(EngineOptions(), "example/no-such-model-in-the-cache", "main") is None


def test_a_plan_that_is_asked_for_and_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no such"):
        plan_path(EngineOptions(plan=str(tmp_path / "none.yaml")), str(tmp_path), None)


def test_the_plan_of_a_hub_model_is_found_in_the_cache_at_the_revision(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = "0123456789abcdef" * 2 + "01234567"
    repository = tmp_path / "hub" / "models--example--planned"
    snapshot = repository / "snapshots" / commit
    snapshot.mkdir(parents=True)
    (repository / "refs").mkdir()
    (repository / "refs" / "tuned").write_text(commit)
    (snapshot / "sparsekv.yaml").write_bytes((folder / "sparsekv.yaml").read_bytes())
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert plan_path(EngineOptions(), "example/planned", "tuned") == snapshot / "sparsekv.yaml"
    assert plan_path(EngineOptions(), "example/planned", "other") is None
