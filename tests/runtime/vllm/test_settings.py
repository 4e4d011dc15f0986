"""Where the plan of an engine is, and engines that cannot run it: refused when they start, by name, with a way out."""

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
from plans_samples import small_plan

from sparsekv.plans.errors import PlanWarning, UnsupportedError, UsageError
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import tokens
from sparsekv.plans.phases import Eviction
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.pays import parse
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.plan_checks import refuse
from sparsekv.runtime.vllm.settings import (
    ENGINE_TO_ENGINE,
    SHARED,
    TO_HOST,
    Connector,
    EngineFacts,
    EngineOptions,
    check_engine_layer,
    connectors_of,
    host_of,
    plan_path,
    read_options,
    store_name,
    warn_of_release,
)

ANYWAY = EngineOptions(allow_untested=True)
FACTS: dict[str, Any] = {"release": "0.32.0", "device": "cpu"}


def check_engine(facts: EngineFacts, plan: Plan, options: EngineOptions) -> None:
    refuse(plan, plan.model, host_of(facts, plan, options))
    warn_of_release(facts, options)


def refusal(plan: Plan | None = None, allow_untested: bool = False, **facts: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        check_engine(EngineFacts(**(FACTS | facts)), plan or small_plan(), EngineOptions(allow_untested=allow_untested))
    return str(caught.value)


def test_a_plain_engine_is_taken() -> None:
    check_engine(EngineFacts(**FACTS), small_plan(), EngineOptions())
    check_engine(EngineFacts(**FACTS, dtype="bfloat16", kv_cache_dtype="bfloat16"), small_plan(), EngineOptions())


@pytest.mark.parametrize(
    ("fact", "named", "way_out"),
    [
        ({"kv_cache_dtype": "fp8_e5m2"}, "fp8_e5m2", "--kv-cache-dtype auto or fp8"),
        ({"context_parallel": 2}, "context parallelism over 2 ranks", "sizes to 1"),
        ({"connectors": (Connector("HiSparseConnector"),)}, "(HiSparseConnector)", '"allow_untested": true'),
        ({"modalities": ("image",)}, "more than text (image)", """--limit-mm-per-prompt '{"image": 0}'"""),
        ({"modalities": ("image", "video")}, "image, video", "--language-model-only"),
        ({"micro_batches": True}, "micro-batches", "turn them off"),
        ({"fast_prefill": True}, "rows skip some layers", "remove --kv-sharing-fast-prefill"),
        ({"stages": (range(8), range(8, 12))}, "pipeline parallelism over 2 stages", '"allow_untested": true'),
        ({"release": "0.31.0", "missing": ("LLM.ask",)}, "LLM.ask", '"allow_untested": true'),
        ({"release": "0.32.0", "device": "rocm"}, "vLLM 0.32.0 on rocm", "0.32.0 on cpu"),
        ({"unknown": ("from_the_future",)}, "does not know (from_the_future)", '"allow_untested": true'),
    ],
    ids=str,
)
def test_what_the_host_cannot_run_is_refused_by_name(fact: dict[str, Any], named: str, way_out: str) -> None:
    message = refusal(**fact)
    assert named in message
    assert way_out in message
    assert '"dense": true' in message


@pytest.mark.parametrize(
    ("fact", "named"),
    [
        ({"one_group": True}, "--disable-hybrid-kv-cache-manager"),
        ({"micro_batches": True}, "micro-batches (--enable-dbo), where layers 0-1"),
        ({"tensor_parallel": 4}, "4 ranks that share 2 KV heads"),
        ({"speculative": "ngram"}, "speculative decoding (ngram), where layers 0-1"),
        ({"connectors": (Connector("NixlConnector"),)}, "KV connectors (NixlConnector), where layers 0-1"),
    ],
    ids=str,
)
def test_engines_that_cannot_drop_tokens_are_refused_by_name(fact: dict[str, Any], named: str) -> None:
    rule = {"sink": 4, "recent": 128, "generated": 8, "score": "attention_sum", "observe": 64, "heads": "max"}
    plan = small_plan(decode=None, kv_cache=(Eviction(layers=(0, 1), keep=tokens(64), **rule),))
    check_engine(EngineFacts(**FACTS), plan, EngineOptions())
    assert named in refusal(plan, **fact)


def test_everything_that_stands_in_the_way_is_named_at_once() -> None:
    message = refusal(connectors=(Connector("LMCacheConnectorV1"),), context_parallel=2)
    assert "LMCacheConnectorV1" in message
    assert "context parallelism" in message


def test_an_untested_release_that_has_all_that_is_used_runs_with_a_warning() -> None:
    with pytest.warns(PlanWarning, match=r"0\.33\.0"):
        check_engine(EngineFacts(**(FACTS | {"release": "0.33.0"})), small_plan(), EngineOptions())


def test_an_untested_release_runs_where_it_is_allowed_and_nothing_else_with_it() -> None:
    check_engine(EngineFacts(**(FACTS | {"release": "0.40.0"})), small_plan(), ANYWAY)
    message = refusal(allow_untested=True, release="0.40.0", missing=("LLM.ask",), context_parallel=2)
    assert "vLLM" not in message.partition("found:")[2]


def test_pipeline_stages_that_cut_a_segment_are_refused_and_others_are_not() -> None:
    plan = small_plan()  # layer 2 chooses for layers 4 to 7
    assert "layer 2" in refusal(plan, True, stages=(range(5), range(5, 12)))
    check_engine(EngineFacts(**FACTS, stages=(range(8), range(8, 12))), plan, ANYWAY)


@pytest.mark.parametrize("found", [(8, 2, None), (4, 1, None), (4, 2, 512)], ids=["heads", "kv heads", "window"])
def test_a_layer_that_vllm_runs_otherwise_than_the_models_config_says_is_refused(found: tuple[Any, ...]) -> None:
    layer = LayerProgram(3, heads=4, kv_heads=2, window=None)
    check_engine_layer(layer, 4, 2, None)
    with pytest.raises(UnsupportedError, match="layer 3 with"):
        check_engine_layer(layer, *found)


# --- connectors

PLAN = small_plan()
NAME = store_name(PLAN)
TIERED = {"spec_name": "TieringOffloadingSpec"}


def connect(*connectors: Connector, model: str = "some/model", allow_untested: bool = False) -> None:
    facts = EngineFacts("0.32.0", "cpu", model=model, connectors=connectors)
    check_engine(facts, PLAN, EngineOptions(allow_untested=allow_untested))


def refused_connectors(*connectors: Connector, **given: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        connect(*connectors, **given)
    return str(caught.value)


@pytest.mark.parametrize("name", [*ENGINE_TO_ENGINE, *TO_HOST])
def test_pages_that_nobody_else_finds_may_come_from_anywhere(name: str) -> None:
    connect(Connector(name))


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_store_runs_with_the_plans_name_in_its_keys_alone(name: str) -> None:
    option, by_model = SHARED[name]
    message = refused_connectors(Connector(name))
    if option is not None:
        assert f'"{option}": "...{NAME}"' in message
        connect(Connector(name, {option: f"of-us/{NAME}"}))
        refused_connectors(Connector(name, {option: "of-us/plan-01234567"}))
    if by_model:
        assert f"a model folder (or a link to it) whose name ends in {NAME}" in message
        connect(Connector(name), model=f"/models/some-{NAME}/")
        refused_connectors(Connector(name), model=f"/models/{NAME}/some")
    else:
        refused_connectors(Connector(name), model=f"/models/some-{NAME}")


def test_a_store_is_named_by_what_an_engine_executes_of_a_plan() -> None:
    assert store_name(PLAN.model_copy(update={"decode": None})) != NAME
    assert store_name(PLAN.model_copy(update={"status": "imported"})) == NAME


@pytest.mark.parametrize("rule", ["always", "never", "prefill=18kx512 decode=never"])
def test_a_store_is_named_by_the_rule_that_an_engine_is_given(rule: str) -> None:
    name, options = store_name(PLAN, parse(rule)), EngineOptions(sparse=rule)
    assert name not in (NAME, store_name(PLAN, parse("prefill=16kx512 decode=never")))
    for path in (NAME, name):
        facts = EngineFacts("0.32.0", "cpu", connectors=(Connector("ExampleConnector", {"shared_storage_path": path}),))
        with nullcontext() if path == name else pytest.raises(UnsupportedError, match="without the plan's name"):
            check_engine(facts, PLAN, options)


def test_exact_output_shares_a_store_with_no_engine_whose_decode_is_the_plans() -> None:
    """Whose answers are in pages that it would take for those of dense decode."""
    exact = {"release": "0.32.0", "device": "cpu", "self_drafting": True, "model": "some/model"}

    def named(name: str) -> EngineFacts:
        return EngineFacts(**exact, connectors=(Connector("ExampleConnector", {"shared_storage_path": name}),))

    with pytest.raises(UnsupportedError, match="without the plan's name"):
        check_engine(named(NAME), PLAN, ANYWAY)
    check_engine(named(store_name(PLAN.model_copy(update={"decode": None}))), PLAN, ANYWAY)


@pytest.mark.parametrize(("tier", "option"), [("fs", "root_dir"), ("obj", "prefix"), ("p2p", None)])
def test_tiers_behind_host_memory_are_shared_stores(tier: str, option: str | None) -> None:
    def offloading(**settings: Any) -> Connector:
        return Connector("OffloadingConnector", TIERED | {"secondary_tiers": [{"type": tier} | settings]})

    assert f"OffloadingConnector, tier {tier} without the plan's name" in refused_connectors(offloading())
    connect(offloading(), model=f"some-{NAME}")
    if option is not None:
        connect(offloading(**{option: f"/mnt/{NAME}"}))


@pytest.mark.parametrize(
    ("connector", "named"),
    [
        (Connector("HF3FSKVConnector"), "HF3FSKVConnector"),
        (Connector("NixlConnector", module="of.another"), "NixlConnector"),
        (Connector("OffloadingConnector", {"spec_name": "Mine"}), "OffloadingConnector with Mine"),
        (Connector("OffloadingConnector", TIERED | {"secondary_tiers": [{"type": "kvcr"}]}), "with kvcr"),
    ],
    ids=str,
)
def test_what_nobody_looked_at_is_refused_unless_that_is_allowed(connector: Connector, named: str) -> None:
    assert named in refused_connectors(connector)
    connect(connector, allow_untested=True)


def test_each_part_of_several_is_looked_at() -> None:
    parts = [
        {"kv_connector": "NixlConnector", "kv_role": "kv_both"},
        {"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": [
            {"kv_connector": "ExampleConnector", "kv_connector_extra_config": {"shared_storage_path": "/mnt"}},
            {"kv_connector": "Mine", "kv_connector_module_path": "my.module"},
        ]}},
    ]  # fmt: skip
    found = connectors_of({"kv_connector": "MultiConnector", "kv_connector_extra_config": {"connectors": parts}})
    assert [one.name for one in found] == ["NixlConnector", "ExampleConnector", "Mine"]
    message = refused_connectors(*found)
    assert "(Mine)" in message
    assert "ExampleConnector without the plan's name" in message
    assert "NixlConnector" not in message
    assert connectors_of({"kv_connector": None}) == ()


# --- the plan and its settings


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
