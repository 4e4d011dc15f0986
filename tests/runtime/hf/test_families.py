"""What is special to a family of models holds under a plan: long ropes, local layers, experts."""

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import EVERYTHING, decode_plan, every_head, plan_for, segment
from torch_state import most_allocated

from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.patterns import AShape, BlockSparse, Dense, fraction, tokens
from sparsekv.runtime.architecture import ARCHITECTURES, REFUSED, architecture_of
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import describe_model, last_norm_of, logits_of
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.long_inputs import Chunking
from sparsekv.runtime.hf.memory import MemoryModel, ModelSize, Request
from sparsekv.runtime.hf.placement import Placement
from sparsekv.runtime.model_config import describe_config, linear_layers

SWITCH = 64
WIDE = {"ffn": 1024, "hidden": 64, "head_dim": 16}
CUT = Chunking(above=20, rows=17, output_bytes=1)
FULL = (AShape(sink=tokens(1), window=fraction(1.0)), BlockSparse(keep=fraction(1.0)), Dense())


@pytest.fixture(scope="module", params=["phi3", "phimoe"])
def long_rope(request):
    pairs = 4 if request.param == "phi3" else 8  # of half a head of 16, or of all of it
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "partial_rotary_factor": pairs / 8,
        "original_max_position_embeddings": SWITCH,
        "short_factor": [1.0] * pairs,
        "long_factor": [1.0 + number for number in range(pairs)],
        "short_mscale": 1.2,
        "long_mscale": 1.5,
    }
    return tiny_model(request.param, head_dim=16, rope_parameters=rope, original_max_position_embeddings=SWITCH)


def full_plan(model):
    return plan_for(model, every_head(model, *FULL), decode_plan(segment(0, (1, 2), EVERYTHING)))


@pytest.mark.parametrize("length", [SWITCH - 3, SWITCH, 150])
def test_a_long_rope_takes_the_angles_of_the_whole_length(long_rope, length: int) -> None:
    prompt = random_tokens(1, length)
    ask = {"attention_mask": torch.ones_like(prompt), "max_new_tokens": 6, "do_sample": False, "output_logits": True}
    dense = long_rope.generate(prompt, **ask, return_dict_in_generate=True, use_cache=False)
    with apply(long_rope, full_plan(long_rope), chunking=CUT) as handle:
        cache = handle.new_cache(length + 6)
        found = long_rope.generate(prompt, **ask, return_dict_in_generate=True, past_key_values=cache)
    assert torch.equal(found.sequences, dense.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(dense.logits), atol=2e-4, rtol=2e-4)
    assert found.past_key_values is cache
    assert cache.get_seq_length() == length + 5


@pytest.mark.parametrize("length", [SWITCH, SWITCH + 1, 150])
def test_pieces_of_a_prompt_have_the_angles_of_the_whole(long_rope, length: int) -> None:
    prompt, cache, at = random_tokens(1, length), None, 0
    with torch.no_grad():
        expected = long_rope(prompt, logits_to_keep=1).logits
        with apply(long_rope, full_plan(long_rope)):
            for size in piece_sizes(length, 20, SWITCH):
                out = long_rope(prompt[:, at : at + size], past_key_values=cache, logits_to_keep=1)
                cache, at = out.past_key_values, at + size
    torch.testing.assert_close(out.logits, expected, atol=2e-4, rtol=2e-4)


def test_a_piece_across_the_change_of_angles_is_refused(long_rope) -> None:
    prompt = random_tokens(1, 150)
    with apply(long_rope, full_plan(long_rope)), pytest.raises(UnsupportedError):
        long_rope.generate(prompt, max_new_tokens=2, prefill_chunk_size=40)


GLOBAL_THIRD = {
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    "sliding_window": 24,
    "layers": 6,
}


def test_local_layers_are_never_filters_and_windows_beyond_the_context_are_none() -> None:
    model = tiny_model("gemma3_text", **GLOBAL_THIRD)
    assert {group.layers: (group.kind, group.window) for group in describe_model(model).attention} == {
        (0, 1, 3, 4): ("sliding", 24),
        (2, 5): ("full", None),
    }
    with pytest.raises(ValueError, match="expected a filter layer with full attention, found layer 0"):
        plan_for(model, None, decode_plan(segment(0, (2,), 9)))
    assert describe_model(tiny_model("phi3", sliding_window=4096)).full_layers == (0, 1, 2)


@pytest.mark.parametrize(
    ("architecture", "widths"),
    [
        *((name, {"ffn": 256, "hidden": 128}) for name in ("mixtral", "qwen2_moe", "qwen3_moe", "granitemoe")),
        *((name, WIDE) for name in ("afmoe", "apertus", "cohere", "cohere2_moe", "glm", "glm4", "gpt_oss")),
        *((name, WIDE) for name in ("granitemoeshared", "laguna", "minimax_m2", "phi", "phi3")),
        *((name, WIDE) for name in ("gemma3_text", "llama", "olmo2", "qwen3")),
    ],
)
def test_a_long_pass_takes_no_more_than_was_said(architecture: str, widths: dict[str, int]) -> None:
    model, chunking = tiny_model(architecture, layers=2, **widths), Chunking(above=500, rows=500)
    size = ModelSize.of(model, describe_model(model))
    said = MemoryModel(size, None, None, on_cpu=True, chunking=chunking).use(Request(2000), Placement())
    prompt = random_tokens(1, 2000)
    with torch.no_grad(), apply(model, plan_for(model), chunking=chunking) as handle:
        cache = handle.new_cache(2000)
        most = most_allocated(lambda: model(prompt, past_key_values=cache, logits_to_keep=1))
    assert said.working / 2 < most <= said.working
    assert said.weights == sum(weight.nbytes for weight in (*model.parameters(), *model.buffers()))


def test_attention_that_is_not_causal_is_refused() -> None:
    config = tiny_model("gemma3_text").config
    config.use_bidirectional_attention = True
    with pytest.raises(UnsupportedError):
        describe_config(config)


REASONS = {
    "qwen2_vl": "three positions",
    "llama4": "chunks",
    "bert": "supported",
    "deepseek_v3": "MLA",
    "kimi_k3": "MLA",
    "glm_moe_dsa": "sparsekv plan",
    "hy_v4": "indexer",
    "minimax_m3": "indexer",
    "qwen4_exp": "indexer",
    "mimo_v2_flash": "narrower",
    "muse_glimmer": "vision tower",
    "falcon_h1": "recurrent state beside",
}


@pytest.mark.parametrize("model_type", REASONS)
def test_what_cannot_run_is_refused_with_the_reason(model_type: str) -> None:
    with pytest.raises(UnsupportedError, match=REASONS[model_type]) as refused:
        architecture_of(model_type)
    assert "\n" not in str(refused.value)


def test_an_unknown_model_type_is_told_the_nearest_one_and_where_a_record_goes() -> None:
    with pytest.raises(UnsupportedError, match=r"nearest by name is 'qwen3_moe'.*docs/extending\.md"):
        architecture_of("qwen9_moe")
    assert not {*REFUSED} & {*ARCHITECTURES}


@pytest.mark.parametrize("architecture", ["cohere", "granite_swa", "lfm2", "phi", "vaultgemma"])
def test_the_head_of_a_model_is_applied_to_the_decoders_output_as_it_applies_it(architecture: str) -> None:
    model, prompt = tiny_model(architecture), random_tokens(1, 20)
    with torch.no_grad():
        hidden_1SE = model.model(prompt).last_hidden_state
        torch.testing.assert_close(logits_of(model, hidden_1SE), model(prompt).logits)
    assert list(model.model.children()).index(last_norm_of(model)) > 1  # behind embeddings and layers


def test_a_layer_is_recurrent_by_its_cache_whatever_its_kind_is_called() -> None:
    assert linear_layers(tiny_model("lfm2").config) == linear_layers(tiny_model("granitemoehybrid").config) == (0,)
    assert linear_layers(tiny_model("jamba").config) == (0, 2)
    assert linear_layers(tiny_model("gemma3_text", **GLOBAL_THIRD).config) == ()


@pytest.mark.parametrize("family", ["ministral3", "mistral", "mixtral", "phi3", "qwen3_moe", "starcoder2"])
def test_models_with_one_window_have_it_in_every_layer_whatever_their_layers_are_called(family: str) -> None:
    """As their modelling code has it, which reads no `layer_types`."""
    model, prompt = tiny_model(family, sliding_window=32, use_sliding_window=True), random_tokens(1, 120)
    with torch.no_grad():
        before = model(prompt, logits_to_keep=1).logits
        model.config.layer_types = ["full_attention"] * model.config.num_hidden_layers
        assert torch.equal(model(prompt, logits_to_keep=1).logits, before)
    (group,) = describe_config(model.config).attention
    assert (group.kind, group.window) == ("sliding", 32)
