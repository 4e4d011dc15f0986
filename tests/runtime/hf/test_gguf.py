"""GGUF files: the model in them is the one that is loaded, and what cannot be is refused with what to do."""

import shutil
import sys

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from transformers import AutoModelForCausalLM

from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.model import differences
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import load_config, load_model

gguf = pytest.importorskip("gguf")
from gguf_files import write_gguf  # noqa: E402

Q8 = gguf.GGMLQuantizationType.Q8_0


@pytest.fixture(scope="module")
def twin():
    return tiny_model(layers=2)


@pytest.fixture(scope="module")
def exact(twin, tmp_path_factory):
    return write_gguf(twin, tmp_path_factory.mktemp("exact") / "model.gguf")


@pytest.fixture
def file(exact, tmp_path):
    return shutil.copy(exact, tmp_path / "mine.gguf")


def logits(model):
    with torch.no_grad():
        return model(random_tokens(1, 40)).logits


@pytest.mark.parametrize("tied", [False, True])
def test_a_file_that_is_not_quantised_is_its_safetensors_twin(tmp_path, tied):
    model = tiny_model(layers=2, tie_word_embeddings=tied)
    loaded = load_model(write_gguf(model, tmp_path / "model.gguf"))
    assert torch.equal(logits(loaded.model), logits(model))
    assert loaded.info.fingerprint == describe_model(model).fingerprint
    assert loaded.info.id == "model.gguf"
    assert loaded.tokenizer.decode(loaded.tokenizer("abc b a")["input_ids"]) == "abc b a"


def test_a_quantised_file_loads_as_in_transformers_and_differs_from_its_twin_in_weights_alone(twin, tmp_path):
    write_gguf(twin, tmp_path / "small.gguf", quantisation=Q8)
    loaded = load_model(tmp_path)  # the only one in its folder
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="small.gguf", dtype=torch.float32)
    assert torch.equal(logits(loaded.model), logits(plain))
    ours, theirs = loaded.info, describe_model(twin)
    assert differences(theirs, ours) == ()
    assert theirs.fingerprint.weights_difference(ours.fingerprint) == "other"


def test_the_file_that_is_named_is_loaded_not_one_of_that_name_in_the_working_directory(file, tmp_path, monkeypatch):
    (tmp_path / "here").mkdir()
    write_gguf(tiny_model(layers=3), tmp_path / "here" / "mine.gguf")
    monkeypatch.chdir(tmp_path / "here")
    assert load_model("../mine.gguf").info.layers == 2


def test_several_files_in_a_folder_are_named(file, tmp_path):
    shutil.copy(file, tmp_path / "other.gguf")
    with pytest.raises(UsageError, match=r"2 \(mine.gguf, other.gguf\)"):
        resolve_model(tmp_path)


@pytest.mark.parametrize("share", [0, 0.3, 0.99])
def test_a_truncated_file_is_named(file, share):
    whole = file.read_bytes()
    file.write_bytes(whole[: int(len(whole) * share)])
    with pytest.raises(UsageError, match=r"mine.gguf"):
        load_config(file)


def test_a_file_of_other_data_is_named(file):
    file.write_bytes(b"<!DOCTYPE html>")
    with pytest.raises(UsageError, match="GGUF"):
        load_config(file)


def test_an_architecture_that_transformers_does_not_read_is_named(twin, tmp_path):
    with pytest.raises(UsageError, match="chatglm"):
        load_config(write_gguf(twin, tmp_path / "model.gguf", architecture="chatglm"))


def test_scaled_rope_that_transformers_leaves_out_is_refused(twin, tmp_path):
    factors = {"rope_freqs.weight": torch.ones(16)}
    with pytest.raises(UnsupportedError, match="rope_freqs"):
        load_config(write_gguf(twin, tmp_path / "model.gguf", extra=factors))


def test_tensors_that_transformers_leaves_out_are_refused(twin, tmp_path):
    bias = {"blk.0.attn_q.bias": torch.ones(128)}
    with pytest.raises(UnsupportedError, match="left out"):
        load_model(write_gguf(twin, tmp_path / "model.gguf", extra=bias))


@pytest.mark.parametrize("package", ["gguf", "accelerate"])
def test_without_the_packages_a_file_says_what_to_install(file, monkeypatch, package):
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(UsageError, match=rf"{package}.*pip install .*gguf"):
        load_config(file)
