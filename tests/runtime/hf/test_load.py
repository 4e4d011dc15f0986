"""Loading: from a folder in any dtype, and errors that say what to type."""

import json

import pytest
import torch
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
from tiny_models import tiny_model, tiny_tokenizer

from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.hf import load as hub
from sparsekv.runtime.hf.load import load_model, torch_device

HUB_ID = "some-organisation/some-model"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    place = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(dtype=torch.bfloat16).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_folder_loads_with_tokenizer_and_description(folder, dtype: str):
    loaded = load_model(str(folder), device="cpu", dtype=dtype)
    assert loaded.model.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    assert not loaded.model.training
    assert loaded.info.id == "tiny"
    assert loaded.tokenizer("abc")["input_ids"] == [0, 1, 2]
    assert loaded.info == load_model(resolve_model(str(folder)), device="cpu").info


def test_an_unsupported_architecture_is_named_before_its_weights_are_looked_for(tmp_path):
    for kind in ("gpt2", "never-heard-of"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(UnsupportedError, match=f"glm, llama, mistral, qwen2, qwen3\\), found '{kind}'"):
            load_model(str(tmp_path))


def test_a_broken_folder_says_what_cannot_be_read(folder, tmp_path):
    for name in ("config.json", "tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UsageError, match="cannot read its weights"):
        load_model(str(tmp_path))
    (tmp_path / "model.safetensors").write_bytes(b"not a tensor")
    with pytest.raises(UsageError, match="cannot read its weights"):
        load_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(UsageError, match=r"cannot read its config\.json"):
        load_model(str(tmp_path))


def test_a_folder_without_a_tokenizer_says_so(folder, tmp_path):
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    with pytest.raises(UsageError, match="cannot read its tokenizer"):
        load_model(str(tmp_path))


def answer(monkeypatch, error):
    def auth_check(self, repository):
        raise error

    monkeypatch.setattr(hub.HfApi, "auth_check", auth_check)


class _Response:
    def __init__(self):
        self.headers, self.status_code, self.request = {}, 403, None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GatedRepoError("gated", response=_Response()), "it is gated"),
        (RepositoryNotFoundError("none", response=_Response()), "no such model"),
        (OfflineModeIsEnabled("offline"), "cannot be reached"),
        (TimeoutError("slow"), "cannot be reached"),
    ],
    ids=["gated", "unknown", "offline", "timeout"],
)
def test_a_model_that_cannot_be_had_gives_the_two_commands(monkeypatch, error, reason: str):
    answer(monkeypatch, error)
    with pytest.raises(UsageError, match=reason) as refused:
        load_model(HUB_ID)
    assert "hf auth login" in str(refused.value)
    assert f"https://huggingface.co/{HUB_ID}" in str(refused.value)
    assert f"hf download {HUB_ID} --local-dir some-model" in str(refused.value)


def test_local_files_only_does_not_ask_the_hub(monkeypatch):
    answer(monkeypatch, AssertionError("asked the hub"))
    with pytest.raises(UsageError, match="offline mode is on"):
        load_model(HUB_ID, local_files_only=True)


def test_devices_and_dtypes_that_do_not_exist_are_named(folder):
    with pytest.raises(UsageError, match="device that this machine has, found 'toaster'"):
        torch_device("toaster")
    for other in ("meta", "mps", ""):  # of torch, not of ours: nothing runs there
        with pytest.raises(UsageError, match="neither cpu nor cuda"):
            torch_device(other)
    with pytest.raises(UsageError, match="found 'cuda:77'"):
        torch_device("cuda:77")
    with pytest.raises(UsageError, match=r"expected a dtype of auto, .*found 'int3'"):
        load_model(str(folder), dtype="int3")
