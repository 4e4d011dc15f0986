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

import sparsekv.runtime.vllm.internals as internals
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.vllm.attention_backend import PlannedBackend, SparseBackend
from sparsekv.runtime.vllm.internals import engine_facts, engine_model
from sparsekv.runtime.vllm.settings import Connector, EngineFacts

FOLDER = resolve_model("tiny-retriever").path_or_id


def config_of(**settings: Any) -> Any:
    return EngineArgs(**{"model": FOLDER, "dtype": "float32", "enforce_eager": True} | settings).create_engine_config()


@pytest.mark.parametrize(
    ("settings", "facts"),
    [
        ({}, {}),
        ({"kv_cache_dtype": "fp8"}, {"kv_cache_dtype": "fp8"}),
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
    assert model.quantization is None
    assert engine_model(config_of(quantization="fp8", dtype="bfloat16")).quantization == "fp8"


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


@pytest.mark.parametrize(
    ("backend", "major", "says"),
    [
        ("TRITON_ATTN", 9, "attention by TRITON_ATTN"),
        (None, 10, "its own choice"),
        (None, 9, None),
        ("FLASH_ATTN", 10, None),
    ],
)
def test_an_engine_with_a_plan_that_its_backend_does_not_execute_says_so_once_or_ends(
    plan_file: Path, backend: str | None, major: int, says: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU where another backend was asked for, or is what vLLM takes where none was."""
    warned: list[str] = []
    monkeypatch.setattr(internals.logger, "warning", lambda text, *args: warned.append(text % args))

    def made(asked: str | None = backend, **options: Any) -> Any:
        warned.clear()
        own = {"plan": str(plan_file), "require": False} | options
        return config_of(additional_config={"sparsekv": own}, attention_backend=asked)

    made()
    assert warned == [], "on a CPU ours always runs"
    monkeypatch.setattr(internals, "platform", internals.OnCuda)
    monkeypatch.setattr(registry, "_ATTN_OVERRIDES", {})
    internals.register()
    capability = SimpleNamespace(major=major)
    monkeypatch.setattr(type(current_platform), "get_device_capability", classmethod(lambda _: capability))
    made()
    assert [says in line for line in warned] == [True] * (says is not None)
    made(dense=True)
    made("CUSTOM")
    assert warned == []
    AttentionBackendEnum.FLASH_ATTN.clear_override()
    register_backend(AttentionBackendEnum.FLASH_ATTN, "of.another.Plugin")
    internals.register()
    assert AttentionBackendEnum.FLASH_ATTN.get_path() == "of.another.Plugin"
    made()
    assert len(warned) == 1
    with pytest.raises(UsageError, match="expected a backend that executes the plan"):
        made(require=None)
    made(plan="nowhere.yaml")
    assert "expected a plan at nowhere.yaml" in warned[0]
