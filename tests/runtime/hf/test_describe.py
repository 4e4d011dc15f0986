"""What a plan records of a model does not depend on how the model was loaded."""

import copy
from collections import defaultdict
from contextlib import suppress

import pytest
import torch
from tiny_models import ARCHITECTURES, heads_of, random_tokens, tiny_model, tiny_tokenizer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.model import Fingerprint
from sparsekv.runtime.architecture import ARCHITECTURES as FAMILIES
from sparsekv.runtime.hf.describe import describe_model
from sparsekv.runtime.hf.load import load_model
from sparsekv.runtime.model_config import describe_config


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_shapes_come_from_the_config(architecture: str):
    info = describe_model(tiny_model(architecture), "org/name", "main")
    (group,) = info.attention
    assert (info.id, info.revision, info.model_type) == ("org/name", "main", architecture)
    assert (group.layers, group.kind, group.window) == ((0, 1, 2), "full", None)
    assert (group.heads, group.kv_heads, group.head_dim) == heads_of(architecture)
    assert info.context_length == 4096
    rope = info.rope.get("full_attention", info.rope)
    assert rope["rope_type"] in ("default", "llama3", "proportional")
    assert rope["rope_theta"] >= 10000


TOLD_OTHERWISE = ("tie_word_embeddings", "use_bidirectional_attention")  # by the weights, and refused


@pytest.mark.parametrize("architecture", sorted({*FAMILIES} - {"qwen3_vl_text"}))  # which no class loads alone
def test_settings_by_which_the_same_weights_compute_something_else_are_in_the_digest(architecture: str):
    model, prompt = tiny_model(architecture), random_tokens(1, 24)
    config, expected = model.config.to_dict(), logits(model, prompt)
    for name in config.keys() - PreTrainedConfig().to_dict().keys() - {*TOLD_OTHERWISE}:
        for value in OTHERS[type(config[name])](config[name]):
            found = expected
            with suppress(Exception):  # a value that the family has not
                changed = AutoConfig.for_model(**config | {name: value})
                changed._attn_implementation = model.config._attn_implementation
                if describe_config(changed) == describe_config(model.config):
                    twin = AutoModelForCausalLM.from_config(changed).eval()
                    twin.load_state_dict(model.state_dict())
                    found = logits(twin, prompt)
            assert torch.equal(found, expected), name


@pytest.mark.parametrize(
    ("architecture", "one", "other"),
    [
        ("llama", {"hidden_act": "silu"}, {"hidden_act": "swish"}),
        ("gemma2", {"hidden_act": "silu", "hidden_activation": "gelu"}, {"hidden_activation": "gelu"}),
    ],
)
def test_another_spelling_of_the_activation_is_no_other_architecture(architecture, one, other):
    assert describe_config(tiny_model(architecture, **one).config) == describe_config(
        tiny_model(architecture, **other).config
    )


OTHERS = defaultdict(
    lambda: lambda value: (),
    {
        bool: lambda value: (not value,),
        int: lambda value: (value + 1,),
        float: lambda value: (1.5 * value + 0.01,),
        str: lambda value: ("gelu", "relu"),
        type(None): lambda value: (0.5, 1, True),
        list: lambda value: ([item + 1 if item and not isinstance(item, str) else item for item in value],),
    },
)


def logits(model, prompt: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        return model(prompt).logits


def test_sliding_layers_are_groups_of_their_own():
    kinds = ["sliding_attention", "full_attention", "sliding_attention"]
    model = tiny_model("qwen3", layer_types=kinds, use_sliding_window=True, sliding_window=64, max_window_layers=0)
    found = {group.layers: (group.kind, group.window) for group in describe_model(model).attention}
    assert found == {(0, 2): ("sliding", 64), (1,): ("full", None)}
    (group,) = describe_model(tiny_model("mistral", sliding_window=32)).attention
    assert (group.kind, group.window) == ("sliding", 32)


def prints_of(model, *dtypes: torch.dtype) -> set[Fingerprint]:
    return {describe_model(copy.deepcopy(model).to(dtype)).fingerprint for dtype in dtypes}


@pytest.mark.parametrize("checkpoint", [torch.bfloat16, torch.float16])
def test_the_weights_digest_of_a_half_precision_checkpoint_is_the_same_in_every_dtype(checkpoint: torch.dtype):
    assert len(prints_of(tiny_model(dtype=checkpoint), torch.float32, torch.bfloat16, torch.float16)) == 1


def test_the_weights_digest_of_a_float32_checkpoint_is_other_only_in_float16():
    model = tiny_model(dtype=torch.float32)
    assert len(prints_of(model, torch.float32, torch.bfloat16)) == 1
    assert len(prints_of(model, torch.float32, torch.float16)) == 2


@pytest.mark.parametrize("checkpoint", [torch.float32, torch.float16])
def test_a_weight_that_rounds_up_to_the_smallest_that_is_looked_at_is_the_same_in_bfloat16(checkpoint: torch.dtype):
    model = tiny_model(dtype=checkpoint)
    for value in model.parameters():
        torch.nn.init.constant_(value, 2.0**-12 - 2.0**-23)
    assert len(prints_of(model, torch.float32, torch.bfloat16)) == 1


def test_a_model_whose_weights_are_elsewhere_is_refused():
    model = tiny_model()
    model.model.layers[1].to("meta")
    with pytest.raises(UnsupportedError, match="found 9"):
        describe_model(model)


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.down_proj.weight", "model.norm.weight"]
)
def test_the_weights_digest_sees_every_tensor(name: str):
    model = tiny_model()
    before = describe_model(model).fingerprint
    with torch.no_grad():
        model.get_parameter(name).add_(0.5)
    assert describe_model(model).fingerprint.weights != before.weights


def test_the_weights_digest_sees_shapes_where_values_are_the_same():
    prints = []
    for width in (96, 192):
        model = tiny_model(ffn=width)
        for value in model.parameters():
            torch.nn.init.ones_(value)
        prints.append(describe_model(model).fingerprint)
    assert prints[0].architecture == prints[1].architecture
    assert prints[0].weights != prints[1].weights


def test_the_weights_digest_does_not_depend_on_how_files_are_split(tmp_path):
    model = tiny_model(dtype=torch.bfloat16)
    expected = describe_model(model).fingerprint
    for size in ("1GB", "20KB"):
        model.save_pretrained(tmp_path / size, max_shard_size=size)
        tiny_tokenizer().save_pretrained(tmp_path / size)
        assert load_model(str(tmp_path / size)).info.fingerprint == expected
    assert len(list((tmp_path / "20KB").glob("*.safetensors"))) > 1


def test_a_path_is_never_recorded(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    assert describe_model(tiny_model(), str(folder)).id == "my-model"
    assert describe_model(tiny_model(), "../somewhere/else").id == "else"
    assert describe_model(tiny_model()).id == "llama"
