"""Which KV connectors run beside a plan, and what keys a store that engines share has to have."""

from typing import Any

import pytest
from plans_samples import small_plan

from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.vllm.connectors import ENGINE_TO_ENGINE, SHARED, TO_HOST, Connector, connectors_of, store_name
from sparsekv.runtime.vllm.engine_facts import EngineFacts
from sparsekv.runtime.vllm.engine_settings import check_engine

PLAN = small_plan()
NAME = store_name(PLAN)
TIERED = {"spec_name": "TieringOffloadingSpec"}


def check(*connectors: Connector, model: str = "some/model", allow_untested: bool = False) -> None:
    check_engine(EngineFacts("0.32.0", "cpu", model=model, connectors=connectors), PLAN, allow_untested)


def refusal(*connectors: Connector, **given: Any) -> str:
    with pytest.raises(UnsupportedError) as caught:
        check(*connectors, **given)
    return str(caught.value)


@pytest.mark.parametrize("name", [*ENGINE_TO_ENGINE, *TO_HOST])
def test_pages_that_nobody_else_finds_may_come_from_anywhere(name: str) -> None:
    check(Connector(name))


@pytest.mark.parametrize("name", SHARED)
def test_a_shared_store_runs_with_the_plans_name_in_its_keys_alone(name: str) -> None:
    option, by_model = SHARED[name]
    message = refusal(Connector(name))
    if option is not None:
        assert f'"{option}": "...{NAME}"' in message
        check(Connector(name, {option: f"of-us/{NAME}"}))
        refusal(Connector(name, {option: "of-us/plan-01234567"}))
    if by_model:
        assert f"a model folder (or a link to it) whose name ends in {NAME}" in message
        check(Connector(name), model=f"/models/some-{NAME}/")
        refusal(Connector(name), model=f"/models/{NAME}/some")
    else:
        refusal(Connector(name), model=f"/models/some-{NAME}")


def test_a_store_is_named_by_what_an_engine_executes_of_a_plan() -> None:
    assert store_name(PLAN.model_copy(update={"decode": None})) != NAME
    assert store_name(PLAN.model_copy(update={"status": "imported"})) == NAME


def test_exact_output_shares_a_store_with_no_engine_whose_decode_is_the_plans() -> None:
    """Whose answers are in pages that it would take for those of dense decode."""
    exact = {"release": "0.32.0", "device": "cpu", "self_drafting": True, "model": "some/model"}

    def named(name: str) -> EngineFacts:
        return EngineFacts(**exact, connectors=(Connector("ExampleConnector", {"shared_storage_path": name}),))

    with pytest.raises(UnsupportedError, match="without the plan's name"):
        check_engine(named(NAME), PLAN, True)
    check_engine(named(store_name(PLAN.model_copy(update={"decode": None}))), PLAN, True)


@pytest.mark.parametrize(("tier", "option"), [("fs", "root_dir"), ("obj", "prefix"), ("p2p", None)])
def test_tiers_behind_host_memory_are_shared_stores(tier: str, option: str | None) -> None:
    def offloading(**settings: Any) -> Connector:
        return Connector("OffloadingConnector", TIERED | {"secondary_tiers": [{"type": tier} | settings]})

    assert f"OffloadingConnector, tier {tier} without the plan's name" in refusal(offloading())
    check(offloading(), model=f"some-{NAME}")
    if option is not None:
        check(offloading(**{option: f"/mnt/{NAME}"}))


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
    assert named in refusal(connector)
    check(connector, allow_untested=True)


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
    message = refusal(*found)
    assert "(Mine)" in message
    assert "ExampleConnector without the plan's name" in message
    assert "NixlConnector" not in message
    assert connectors_of({"kv_connector": None}) == ()
