"""Loading: from a folder in any dtype, and errors that say what to type."""

import json
import logging
import sys
from contextlib import contextmanager, nullcontext

import pytest
import torch
from huggingface_hub import HfApi
from huggingface_hub.errors import GatedRepoError, OfflineModeIsEnabled, RepositoryNotFoundError
from safetensors.torch import load_file, save_file
from tiny_models import tiny_model, tiny_tokenizer
from tokenizers.processors import TemplateProcessing

from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.hf.load import load_config, load_model
from sparsekv.runtime.model_config import torch_device
from sparsekv.runtime.settings import DEVICE_MAPS

HUB_ID = "some-organisation/some-model"


@pytest.fixture
def folder(tmp_path):
    place = tmp_path / "models" / "tiny"
    tiny_model(dtype=torch.bfloat16).save_pretrained(place)
    tiny_tokenizer().save_pretrained(place)
    return place


@contextmanager
def weights_of(folder):
    """The tensors of a checkpoint, written back as they are at the end."""
    path = folder / "model.safetensors"
    tensors = load_file(path)
    yield tensors
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.mark.parametrize("dtype", ["auto", "float32", "bfloat16"])
def test_a_folder_loads_with_tokenizer_and_description(folder, dtype: str):
    loaded = load_model(str(folder), device="cpu", dtype=dtype)
    assert loaded.model.dtype == (torch.bfloat16 if dtype == "bfloat16" else torch.float32)
    assert not loaded.model.training
    assert loaded.info.id == "tiny"
    assert loaded.tokenizer("abc")["input_ids"] == [0, 1, 2]
    assert loaded.info == load_model(resolve_model(str(folder)), device="cpu").info


def test_a_model_may_be_a_path_and_device_and_dtype_those_of_torch(folder):
    loaded = load_model(folder, device=torch.device("cpu"), dtype=torch.bfloat16)
    assert (loaded.info.id, loaded.model.dtype) == ("tiny", torch.bfloat16)
    assert repr(loaded) == "LoadedModel(tiny, torch.bfloat16, cpu)"
    assert load_config(folder).model_type == "llama"


@pytest.mark.parametrize("device_map", DEVICE_MAPS)
def test_a_device_map_gives_the_same_model(folder, device_map):
    spread, plain = load_model(folder, device_map=device_map), load_model(folder)
    assert spread.info == plain.info
    ids = torch.arange(20)[None]
    with torch.no_grad():
        assert torch.equal(
            spread.model(ids.to(spread.model.device)).logits, plain.model(ids.to(plain.model.device)).logits
        )


@pytest.mark.parametrize(
    ("source", "options", "said"),
    [
        (None, {}, "hub"),
        (b"tiny", {}, "hub"),
        ("FOLDER", {"device": "cpu", "device_map": "auto"}, "cpu and auto"),
        ("FOLDER", {"device_map": "everywhere"}, "'everywhere'"),
    ],
    ids=str,
)
def test_a_source_or_placement_that_is_none_is_refused(folder, source, options: dict, said: str):
    with pytest.raises(UsageError, match=said):
        load_model(folder if source == "FOLDER" else source, **options)


def test_without_accelerate_a_device_map_says_what_to_install(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "accelerate", None)
    with pytest.raises(UsageError, match=r"pip install .*accelerate"):
        load_model(folder, device_map="auto")


def test_an_unsupported_architecture_is_named_before_its_weights_are_looked_for(tmp_path):
    for kind in ("gpt2", "never-heard-of"):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))
        with pytest.raises(UnsupportedError, match=f"'{kind}'"):
            load_model(str(tmp_path))


MLP = "model.layers.1.mlp.{}_proj.weight"


def without(names):
    return lambda tensors: [tensors.pop(name) for name in names]


@pytest.mark.parametrize(
    ("change", "found"),
    [
        (without([MLP.format("up")]), ["1 missing (model.layers.1.mlp.up_proj.weight)"]),
        (
            without([f"model.layers.{layer}.mlp.{kind}_proj.weight" for layer in (0, 1) for kind in ("up", "down")]),
            ["4 missing (model.layers.0.mlp.down_proj.weight, model.layers.0.mlp.up_proj.weight, ", ", ...)"],
        ),
        (
            lambda tensors: tensors.update({"model.layers.1.extra.bias": torch.ones(3)}),
            ["model.layers.1.extra.bias"],
        ),
        (
            lambda tensors: tensors.update({MLP.format("up"): torch.ones(96, 32)}),
            [f"1 of another shape ({MLP.format('up')}: (96, 32) in place of (96, 64))"],
        ),
    ],
    ids=["missing", "many missing", "unexpected", "another shape"],
)
def test_tensors_that_are_not_those_of_the_model_are_refused_by_name(
    folder, change, found: list[str], caplog, monkeypatch
):
    monkeypatch.setattr(logging.getLogger("transformers"), "propagate", True)  # to where caplog listens
    with weights_of(folder) as tensors:
        change(tensors)
    with pytest.raises(UsageError, match="config") as refused:
        load_model(str(folder))
    assert all(part in str(refused.value) for part in found), str(refused.value)
    assert not caplog.records


@pytest.mark.parametrize("size", ["1GB", "100KB"])
def test_a_tensor_too_many_is_told_with_its_file_and_a_way_to_go_on(tmp_path, size: str):
    model = tiny_model()
    model.register_parameter("v_head", torch.nn.Parameter(torch.ones(1, 64)))
    model.save_pretrained(tmp_path, max_shard_size=size)
    tiny_tokenizer().save_pretrained(tmp_path)
    (file,) = (path.name for path in tmp_path.glob("*.safetensors") if "v_head" in load_file(path))
    with pytest.raises(UsageError, match=rf"v_head in {file}"):
        load_model(tmp_path)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_are_refused_by_name(folder, value: float):
    with weights_of(folder) as tensors:
        tensors[MLP.format("up")][3, 5] = value
    with pytest.raises(UsageError, match=r"1 of 30 tensors.*up_proj\.weight"):
        load_model(str(folder))


def test_tied_embeddings_and_buffers_of_old_checkpoints_are_not_missed(tmp_path):
    model = tiny_model(tie_word_embeddings=True)
    model.save_pretrained(tmp_path)
    tiny_tokenizer().save_pretrained(tmp_path)
    with weights_of(tmp_path) as tensors:
        assert "lm_head.weight" not in tensors
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)
    assert torch.equal(load_model(str(tmp_path)).model.lm_head.weight, model.lm_head.weight)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"num_hidden_layers": 0}, "num_hidden_layers"),
        ({"max_position_embeddings": -5}, "max_position_embeddings of 1 or more .* found -5"),
        ({"max_position_embeddings": None}, "max_position_embeddings"),
        ({"head_dim": 0}, "head_dim of 1 or more"),
        ({"num_attention_heads": 0}, r"config\.json.*zero|num_attention_heads of 1"),
        ({"num_key_value_heads": 0}, "num_key_value_heads of 1 or more"),
        ({"num_key_value_heads": 3}, "4 attention heads .* multiple .* 3 key-value heads"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window of 1 or more .* found 0"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": float("nan")}}, "finite rope parameters .*nan"),
        ({"num_hidden_layers": "three"}, "num_hidden_layers"),
    ],
    ids=str,
)
def test_a_config_that_no_model_can_have_is_named_before_the_weights_are_read(folder, fields: dict, said: str):
    (folder / "model.safetensors").unlink()
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | fields))
    with pytest.raises(UsageError, match=said):
        load_model(str(folder))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("config.json", "[1]"),
        ("config.json", "null"),
        ("tokenizer.json", "{"),
        ("tokenizer.json", "[]"),
        ("tokenizer_config.json", "["),
        ("tokenizer_config.json", "[]"),
        ("generation_config.json", "[]"),
        ("generation_config.json", "{"),
        ("model.safetensors.index.json", "[]"),
    ],
)
def test_a_broken_file_is_named(folder, name: str, content: str):
    (folder / name).write_text(content)
    if name == "model.safetensors.index.json":
        (folder / "model.safetensors").unlink()
    with pytest.raises(UsageError, match=name):
        load_model(str(folder))


@pytest.mark.parametrize("settings", [None, {}, {"tokenizer_class": "LlamaTokenizer"}])  # the last: an empty one
def test_a_folder_without_a_tokenizer_says_which_file_is_missing(folder, settings):
    (folder / "tokenizer.json").unlink()
    if settings is not None:
        (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    with pytest.raises(UsageError, match=r"tokenizer\.json"):
        load_model(str(folder))


def test_a_tokenizer_of_another_model_is_refused(folder):
    model = tiny_model()
    model.resize_token_embeddings(60)
    model.save_pretrained(folder)
    with pytest.raises(UsageError, match=r"at most 60 entries, .* found 98"):
        load_model(str(folder))


@pytest.mark.parametrize(("starts", "refused"), [(True, True), (False, False)])
def test_a_token_added_beyond_the_vocabulary_is_refused_only_where_prompts_start_with_it(folder, starts, refused):
    tokenizer = tiny_tokenizer()
    for number in range(60):  # 98 entries, 128 embeddings
        tokenizer.add_special_tokens({"bos_token": f"<added {number}>"})
    if starts:
        beginning = ("<bos>", tokenizer.bos_token_id)
        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<bos> $A", special_tokens=[beginning])
    tokenizer.save_pretrained(folder)
    with pytest.raises(UsageError, match="at most 128 entries") if refused else nullcontext():
        assert load_model(folder).tokenizer("a")["input_ids"] == [0]


@pytest.mark.parametrize("name", ["two\nlines", "a\x1b[31mred", "b\x9bc", "d\udcff"])
def test_a_folder_whose_name_is_no_text_is_refused_without_printing_it(folder, tmp_path, name: str, monkeypatch):
    folder.rename(tmp_path / name)
    monkeypatch.chdir(tmp_path / name)
    for source in (str(tmp_path / name), "."):
        with pytest.raises(UsageError, match="control characters") as refused:
            load_model(source)
        assert str(refused.value).isprintable()


def answer(monkeypatch, error):
    def auth_check(self, repository):
        raise error

    monkeypatch.setattr(HfApi, "auth_check", auth_check)


class _Response:
    def __init__(self):
        self.headers, self.status_code, self.request = {}, 403, None


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (GatedRepoError("gated", response=_Response()), "it is gated"),
        (RepositoryNotFoundError("none", response=_Response()), "no such model"),
        (OfflineModeIsEnabled("offline"), "HF_HUB_OFFLINE"),
        (TimeoutError("slow"), "offline: the hub cannot be reached"),
    ],
    ids=["gated", "unknown", "offline", "timeout"],
)
def test_a_model_that_cannot_be_had_gives_the_two_commands(monkeypatch, error, reason: str):
    answer(monkeypatch, error)
    with pytest.raises(UsageError, match=reason) as refused:
        load_model(HUB_ID)
    has_answered = "offline" not in reason and "OFFLINE" not in reason
    assert ("hf auth login" in str(refused.value)) == has_answered
    assert (f"https://huggingface.co/{HUB_ID}" in str(refused.value)) == has_answered
    assert f"hf download {HUB_ID} --local-dir some-model" in str(refused.value)


def test_local_files_only_does_not_ask_the_hub(monkeypatch):
    answer(monkeypatch, AssertionError("asked the hub"))
    with pytest.raises(UsageError, match="offline"):
        load_model(HUB_ID, local_files_only=True)


def test_devices_and_dtypes_that_do_not_exist_are_named(folder):
    with pytest.raises(UsageError, match="'toaster'"):
        torch_device("toaster")
    for other in ("meta", "mps", ""):  # of torch, not of ours: nothing runs there
        with pytest.raises(UsageError, match="neither"):
            torch_device(other)
    with pytest.raises(UsageError, match="found 'cuda:77'"):
        torch_device("cuda:77")
    with pytest.raises(UsageError, match="'int3'"):
        load_model(str(folder), dtype="int3")
