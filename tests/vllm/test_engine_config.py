"""What is read of vLLM's own configuration, and the backend that it is given."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoConfig
from vllm.config.multimodal import MultiModalConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform
from vllm.v1.attention.backends import registry
from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.metrics.loggers import load_stat_logger_plugin_factories

import sparsekv.runtime.vllm.internals as internals
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.vllm.attention_backend import PlannedBackend, SparseBackend
from sparsekv.runtime.vllm.internals import engine_facts, engine_model
from sparsekv.runtime.vllm.notice import PlanNotice, unused_plan
from sparsekv.runtime.vllm.settings import Connector, EngineFacts
from sparsekv.runtime.vllm.unavailable import UnavailableBackend

FOLDER = resolve_model("tiny-retriever").path_or_id


def config_of(**settings: Any) -> Any:
    return EngineArgs(**{"model": FOLDER, "dtype": "float32", "enforce_eager": True} | settings).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({}, {}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
        ({"quantization": "fp8", "dtype": "bfloat16"}, {"quantization": "fp8", "dtype": "bfloat16"}),
        ({"tensor_parallel_size": 2}, {"tensor_parallel": 2}),
        ({"pipeline_parallel_size": 2}, {"stages": (range(6), range(6, 12))}),
        (
            {"speculative_config": {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 3}},
            {"speculative": "ngram", "drafted": 2},
        ),
        (
            {"kv_transfer_config": {"kv_connector": "ExampleConnector", "kv_role": "kv_both"}},
            {"connectors": (Connector("ExampleConnector"),), "one_group": True},  # which vLLM then decides by itself
        ),
        ({"disable_hybrid_kv_cache_manager": True}, {"one_group": True}),
        ({"kv_sharing_fast_prefill": True}, {"fast_prefill": True}),
    ],
    ids=lambda given: next(iter(given), "plain"),
)
def test_what_decides_about_a_plan_is_read_as_it_is_set(settings: dict[str, Any], facts: dict[str, Any]) -> None:
    found = engine_facts(config_of(**settings))
    assert found == EngineFacts(**({"release": "0.32.0", "device": "cpu", "model": FOLDER} | facts))


def test_the_model_is_described_as_it_is_loaded(engine: Any) -> None:  # which makes the ranks known
    model = engine_model(config_of(max_model_len=3072))
    assert (model.name, model.config.model_type, model.longest) == (FOLDER, "llama", 3072)


@pytest.mark.parametrize(
    ("limits", "modalities"),
    [
        ({}, ("image", "video")),
        ({"limit_per_prompt": {"image": 0}}, ("video",)),
        ({"limit_per_prompt": {"image": 0, "video": 0}}, ()),
        ({"limit_per_prompt": {"image": 0, "video": 0}, "enable_mm_embeds": True}, ("image", "video")),
        ({"language_model_only": True}, ()),
    ],
    ids=str,
)
def test_what_requests_may_hold_beside_text_is_read_and_the_decoder_is_the_model(
    limits: dict[str, Any], modalities: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    whole = AutoConfig.for_model("qwen3_vl")
    for name, value in (
        ("hf_config", whole),
        ("hf_text_config", whole.text_config),
        ("multimodal_config", MultiModalConfig(**limits)),
    ):
        monkeypatch.setattr(config.model_config, name, value)
    assert engine_facts(config).modalities == modalities
    assert engine_model(config).config is whole.text_config


def test_the_backend_stands_in_the_place_of_vllms_own_in_every_process_that_loads_plugins() -> None:
    config_of()  # makes vLLM load its plugins
    assert AttentionBackendEnum.CPU_ATTN.get_class() is PlannedBackend
    assert PlannedBackend.get_name() == SparseBackend.get_name() == AttentionBackendEnum.CPU_ATTN.name
    assert current_platform.device_type == "cpu"


def test_another_device_is_refused_when_vllm_asks_what_the_backend_can_do() -> None:
    with pytest.raises(UnsupportedError, match="expected vLLM on a CPU or an NVIDIA GPU"):
        UnavailableBackend.validate_configuration(head_size=64)


@pytest.mark.parametrize(
    ("backend", "major", "says"),
    [
        ("TRITON_ATTN", 9, "attention runs by TRITON_ATTN"),
        (None, 10, "its own choice"),
        (None, 9, None),
        ("FLASH_ATTN", 10, None),
    ],
)
def test_a_server_with_a_plan_that_its_backend_does_not_execute_says_so_once(
    plan_file: Path, backend: str | None, major: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU where another backend was asked for, or is what vLLM takes where none was."""
    config = config_of(additional_config={"sparsekv": {"plan": str(plan_file)}}, attention_backend=backend)
    assert unused_plan(config) is None, "on a CPU ours always runs"
    monkeypatch.setattr(internals, "platform", internals.OnCuda)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    internals.register()
    capability = SimpleNamespace(major=major)
    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda _: capability))
    assert unused_plan(config) is None if says is None else says in unused_plan(config)
    assert unused_plan(config_of(additional_config={"sparsekv": {"plan": str(plan_file), "dense": True}})) is None
    asked = config_of(additional_config={"sparsekv": {"plan": str(plan_file)}}, attention_backend="CUSTOM")
    assert unused_plan(asked) is None
    AttentionBackendEnum.FLASH_ATTN.clear_override()
    register_backend(AttentionBackendEnum.FLASH_ATTN, "of.another.Plugin")
    internals.register()
    assert AttentionBackendEnum.FLASH_ATTN.get_path() == "of.another.Plugin"
    assert unused_plan(config) is not None
    with pytest.raises(UsageError, match="which is not executed"):
        PlanNotice(config)
    kept = config_of(additional_config={"sparsekv": {"plan": "nowhere.yaml", "require": False}})
    PlanNotice(kept)
    assert "expected a plan at nowhere.yaml" in unused_plan(kept)


def test_an_api_server_finds_the_notice_among_its_loggers() -> None:
    assert PlanNotice in load_stat_logger_plugin_factories()
