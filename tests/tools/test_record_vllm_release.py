"""A release's record is what the contract finds in its wheel."""

import json
from pathlib import Path
from zipfile import ZipFile

import pytest
from record_vllm_release import main, recorded, sources_of
from vllm_contract import METADATA, unfulfilled

FILES = {
    "vllm/__init__.py": "from vllm.entrypoints.llm import LLM\n",
    "vllm/config/__init__.py": "from .cache import CacheConfig\n",
    "vllm/config/cache.py": "class CacheConfig:\n    block_size: int\n    unused: int\n",
    "vllm/v1/attention/backend.py": "class CommonAttentionMetadata:\n    seq_lens: int\n    from_the_future: int\n",
    "vllm/v1/engine/core.py": "class EngineCore:\n    def preprocess_add_request(self, request, more): ...\n",
    "vllm/config/data.bin": "no text",
}


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    path = tmp_path / "vllm-9.9.9-cp38-abi3-any.whl"
    with ZipFile(path, "w") as archive:
        for name, text in FILES.items():
            archive.writestr(name, text)
    return path


def test_a_record_has_what_we_use_and_every_field_of_a_steps_metadata(wheel: Path, tmp_path: Path) -> None:
    out = tmp_path / "9.9.9.json"
    main(str(wheel), str(out))
    data = json.loads(out.read_text())
    assert data["release"] == "9.9.9"
    assert data["names"]["vllm.config:CacheConfig"] == ["block_size"]
    assert data["names"][f"{METADATA}!"] == ["from_the_future", "seq_lens"]
    assert data["names"]["vllm"] == ["LLM"]
    calls = data["calls"]
    assert calls["vllm.v1.engine.core:EngineCore.preprocess_add_request"] == ["request", "more"]
    assert calls["vllm.v1.worker.gpu.model_runner:GPUModelRunner.prepare_attn"] is None
    assert {"CacheConfig.cache_dtype", "LLM.apply_model"} <= set(unfulfilled(sources_of(wheel), "cuda"))
    assert recorded(sources_of(wheel))["names"] == data["names"]


def test_what_is_no_wheel_of_vllm_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match="expected a wheel named vllm"):
        main(str(tmp_path / "torch-2.14.whl"), str(tmp_path / "a.json"))
