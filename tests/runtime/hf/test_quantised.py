"""Quantised checkpoints: they load as the weights that they stand for, and are told from those of any other model."""

import importlib.util
import json
import os
import shutil
from functools import partial
from typing import Any

import pytest
import torch
from model_folders import save_model
from quantised_folders import GROUP, awq, compress, fp8_by_blocks, fp8_by_tensor, gptq, quantise
from safetensors.torch import load_file, save_file
from tiny_models import random_tokens, tiny_model
from tiny_multimodal import multimodal_model
from transformers import AutoModelForCausalLM, FineGrainedFP8Config
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.plans.model import differences
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import load_config, load_model

FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [48, 32]}
FORMATS: dict[str, tuple[dict[str, Any], Any]] = {
    "fp8 blocks": (FP8, partial(fp8_by_blocks, rows=48, columns=32)),  # which leave a rest of rows
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_by_tensor),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": True}, gptq),
    "gptq by GPTQModel, 2 bits": (
        {"quant_method": "gptq", "bits": 2, "group_size": GROUP, "meta": {"quantizer": ["gptqmodel:2.2.0"]}},
        partial(gptq, bits=2, of_words=True),
    ),
    "gptq by GPTQModel, told otherwise": (
        {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "meta": "gptqmodel:2.2.0"},
        partial(gptq, of_words=True),
    ),
    "gptq v2, 8 bits": (
        {"quant_method": "gptq", "bits": 8, "group_size": GROUP, "checkpoint_format": "gptq_v2"},
        partial(gptq, bits=8, v2=True),
    ),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "version": "gemm"}, awq),
}


@pytest.fixture
def folder(tmp_path):
    return save_model(tiny_model(layers=2), tmp_path / "tiny")


def logits(model):
    with torch.no_grad():
        return model(random_tokens(1, 40)).logits


@pytest.mark.parametrize("architecture", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("kind", FORMATS)
def test_a_quantised_model_is_the_weights_that_it_stands_for(tmp_path, kind, architecture):
    folder = save_model(tiny_model(architecture, layers=2), tmp_path / "tiny")
    twin, exact = quantise(folder, *FORMATS[kind])
    loaded, plain = load_model(twin), load_model(exact)
    assert loaded.model.state_dict().keys() == plain.model.state_dict().keys()
    torch.testing.assert_close(dict(loaded.model.state_dict()), dict(plain.model.state_dict()), rtol=1e-6, atol=0)
    assert all(parameter.is_contiguous() for parameter in loaded.model.parameters())
    assert getattr(loaded.model.config, "quantization_config", None) is None
    assert loaded.model.generation_config == plain.model.generation_config
    assert loaded.model.name_or_path == str(twin)
    assert differences(plain.info, loaded.info) == ()


@pytest.mark.parametrize("kind", ["gemma3", "qwen3_vl"])
def test_the_decoder_of_a_quantised_multimodal_model_is_the_weights_that_it_stands_for(tmp_path, kind):
    twin, exact = quantise(save_model(multimodal_model(kind), tmp_path / "tiny"), *FORMATS["fp8 blocks"])
    assert torch.equal(logits(load_model(twin).model), logits(load_model(exact).model))


@pytest.mark.parametrize("scale", ["float", "ue8m0"])
def test_a_checkpoint_that_transformers_quantised_is_what_it_dequantises(tmp_path, monkeypatch, scale):
    monkeypatch.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, **_: None)  # it asks for a GPU
    folder, twin = save_model(tiny_model("qwen2", layers=2), tmp_path / "tiny"), tmp_path / "fp8"
    how = FineGrainedFP8Config(weight_block_size=(16, 16), scale_fmt=scale)
    save_model(AutoModelForCausalLM.from_pretrained(folder, quantization_config=how), twin)
    how.dequantize = True
    own = AutoModelForCausalLM.from_pretrained(twin, quantization_config=how)
    ours = load_model(twin).model
    assert not torch.equal(logits(ours), logits(load_model(folder).model))
    torch.testing.assert_close(dict(ours.state_dict()), dict(own.state_dict()), rtol=1e-6, atol=0)


SCHEMES = {
    "8 bits": {"W8A8": ["Linear"]},
    "several": {"W4A16": [r"re:.*mlp\..*_proj"], "FP8_DYNAMIC": [r"re:.*self_attn\..*_proj"]},
}


@pytest.mark.parametrize("groups", SCHEMES.values(), ids=SCHEMES)
def test_compressed_tensors_are_what_its_own_tools_decompress(tmp_path, groups):
    tools = pytest.importorskip("compressed_tensors.compressors")
    twin = compress(save_model(tiny_model(layers=2, ffn=128, hidden=128), tmp_path / "tiny"), groups)
    loaded, own = load_model(twin), AutoModelForCausalLM.from_pretrained(twin, dtype=torch.float32)
    tools.ModelCompressor(own.config.quantization_config.quantization_config).decompress_model(own)
    names = [name for name, _ in loaded.model.named_parameters()]
    assert len(names) == 2 * 9 + 3
    for name in names:
        torch.testing.assert_close(loaded.model.get_parameter(name), own.get_parameter(name), rtol=1e-5, atol=1e-7)


def test_files_that_differ_in_one_scale_are_other_weights_and_copies_are_the_same(folder):
    twin, _ = quantise(folder, *FORMATS["fp8 tensor"])
    first, copy = load_model(twin).info, load_model(shutil.copytree(twin, twin.with_name("copy"))).info
    assert first.fingerprint == copy.fingerprint
    tensors = load_file(twin / "model.safetensors")
    tensors["model.layers.1.mlp.up_proj.weight_scale"] *= 2
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    assert first.fingerprint.weights_difference(load_model(twin).info.fingerprint) == "other"
    assert first.fingerprint.weights_difference(load_model(folder).info.fingerprint) == "other"


def test_weights_that_were_changed_since_are_not_the_files_any_more(folder):
    loaded = load_model(quantise(folder, *FORMATS["awq"])[0])
    assert describe_model(loaded.model.to(torch.bfloat16)).fingerprint == loaded.info.fingerprint
    with torch.no_grad():
        loaded.model.lm_head.weight.mul_(2)
    assert loaded.info.fingerprint.weights_difference(describe_model(loaded.model).fingerprint) == "other"


def test_layers_that_lie_in_several_files_are_put_together(folder):
    twin, exact = quantise(folder, *FORMATS["gptq"])
    tensors = load_file(twin / "model.safetensors")
    parts = {f"model-{n}.safetensors": dict(sorted(tensors.items())[n::2]) for n in range(2)}
    for file, part in parts.items():
        save_file(part, twin / file, {"format": "pt"})
    os.remove(twin / "model.safetensors")
    index = {"weight_map": {name: file for file, part in parts.items() for name in part}}
    (twin / "model.safetensors.index.json").write_text(json.dumps(index))
    torch.testing.assert_close(logits(load_model(twin).model), logits(load_model(exact).model))
    os.remove(twin / "model-1.safetensors")
    with pytest.raises(UsageError, match="safetensors files"):
        load_model(twin)


@pytest.mark.parametrize("device_map", ["auto"])
def test_a_quantised_model_is_spread_over_devices_as_any_other(folder, device_map):
    twin, exact = quantise(folder, *FORMATS["awq"])
    torch.testing.assert_close(logits(load_model(twin, device_map=device_map).model), logits(load_model(exact).model))


def test_a_missing_package_is_named_before_weights_are_read(folder, monkeypatch):
    twin, _ = quantise(folder, {"quant_method": "compressed-tensors", "config_groups": {}}, fp8_by_tensor)
    (twin / "model.safetensors").unlink()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"compressed-tensors.*pip install .*compressed-tensors"):
        load_config(twin)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"quant_method": "gptq", "bits": 3, "group_size": 32}, "2 or 4 or 8 bits.*3 bits"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "gemm.*gemv"),
        ({"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": {}}}}, "transform_config"),
    ],
)
def test_forms_that_are_not_read_are_refused_by_name_before_weights_are_read(folder, config, said):
    twin, _ = quantise(folder, config, awq)
    (twin / "model.safetensors").unlink()
    with pytest.raises(UnsupportedError, match=said):
        load_config(twin)


def test_tensors_that_are_no_layer_of_the_format_are_named(folder):
    twin, _ = quantise(folder, FORMATS["fp8 tensor"][0], awq)
    with pytest.raises(UsageError, match=r"_proj holds qweight, qzeros, scales.*fp8"):
        load_model(twin)


def test_packed_numbers_without_a_scale_are_refused(folder):
    twin, _ = quantise(folder, *FORMATS["fp8 tensor"])
    tensors = load_file(twin / "model.safetensors")
    tensors.pop("model.layers.1.mlp.up_proj.weight_scale")
    save_file(tensors, twin / "model.safetensors", {"format": "pt"})
    with pytest.raises(UsageError, match=r"layers.1.mlp.up_proj.weight is of torch.float8_e4m3fn"):
        load_model(twin)
