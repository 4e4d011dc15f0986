"""Layers with a recurrent state run as they are beside planned ones; what cannot be taken back is refused."""

import re

import pytest
import torch
from tiny_models import HYBRIDS, random_tokens, tiny_model, tiny_tokenizer
from tiny_plans import decode_plan, every_head, plan_for, segment
from torch_state import most_allocated
from transformers import DynamicCache, Lfm2Config

from sparsekv.planner.evaluation.predictions import after_prompt, prefill
from sparsekv.plans.errors import UnsupportedError
from sparsekv.plans.model import AttentionGroup
from sparsekv.plans.patterns import AShape, Dense, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import PrefillPlan
from sparsekv.runtime.architecture import recurrence_of
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.describe import cache_inputs, describe_model, position_inputs, takes_one_piece
from sparsekv.runtime.hf.generate import generate_stream
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.memory import MemoryModel, ModelSize, Request
from sparsekv.runtime.hf.placement import Placement

PATTERNS = (
    AShape(sink=tokens(64), window=tokens(64)),
    VerticalSlash(vertical=tokens(9), slash=tokens(30), last_q=16, max_tiles=fraction(1.0)),
    Dense(),
)


@pytest.fixture(scope="module", params=HYBRIDS)
def model(request):
    return tiny_model(request.param, ffn=256)


def attending(model) -> tuple[int, ...]:
    return describe_model(model).full_layers


def prefill_of(model, *patterns):
    bucket = every_head(model, *patterns).lengths[0]
    heads = tuple(group for group in bucket.heads if group.layer in attending(model))
    return PrefillPlan(tile={"query": 64, "key": 64}, lengths=(bucket.model_copy(update={"heads": heads}),))


def plan_of(model):
    first, *others = attending(model)
    chosen = segment(first, (*others,) or (first,), 9, sink=2, recent=3)
    return plan_for(model, prefill_of(model, *PATTERNS), decode_plan(chosen))


def test_recurrent_layers_are_described_last(model) -> None:
    full, linear = describe_model(model).attention
    assert ((full.layers, full.kind), (linear.layers, linear.kind)) == (
        (((1,), "full"), ((0, 2), "linear"))
        if model.config.model_type == "jamba"
        else (((1, 2), "full"), ((0,), "linear"))
    )
    assert (linear.heads, linear.head_dim) == {
        "qwen3": (4, 16), "lfm2": (1, 64), "jamba": (1, 128), "bamba": (4, 32), "granitemoehybrid": (4, 32),
        "nemotron": (4, 32),
    }[re.sub("_.*", "", model.config.model_type)]  # fmt: skip


@pytest.mark.parametrize(
    ("width", "heads"), [(64, (1, 64)), (1023, (1, 1023)), (1024, (1, 1024)), (1536, (3, 512)), (2048, (2, 1024))]
)
def test_layers_without_heads_are_described_at_any_width(width: int, heads: tuple[int, int]) -> None:
    config = Lfm2Config(hidden_size=width, conv_L_cache=3)
    found = recurrence_of(config)
    assert (found.heads, found.head_dim) == heads
    assert found.key_heads == found.heads
    AttentionGroup(layers="0", kind="linear", heads=found.heads, kv_heads=found.key_heads, head_dim=found.head_dim)


def test_pieces_and_steps_of_the_unmodified_model_are_its_whole_text(model) -> None:
    """Without what is given beside the tokens some forget how many came before; those that can do with it have none."""
    text, loses = random_tokens(2, 120), takes_one_piece(model.config.model_type)
    sizes = (118, 1, 1) if loses else (70, 48, 1, 1)

    def gap(inputs) -> float:
        cache, found = DynamicCache(config=model.config), []
        for piece in text.split([*sizes], 1):
            found.append(model(piece, use_cache=True, **inputs(cache, piece)).logits)
        return float((torch.cat(found, 1) - expected).abs().max())

    with torch.no_grad():
        expected = model(text).logits
        assert gap(lambda cache, piece: cache_inputs(model, cache, piece)) < 1e-3
        plain = gap(lambda cache, piece: {"past_key_values": cache})
        assert (plain > 0.1) == bool(position_inputs(model.config.model_type, 1, 1, torch.device("cpu")))
        if loses:
            sizes = (70, 50)
            assert gap(lambda cache, piece: {"past_key_values": cache}) > 0.1


def test_a_text_that_is_evaluated_step_by_step_or_at_once_has_the_logits_of_the_whole(model) -> None:
    text = random_tokens(1, 100)
    with torch.no_grad():
        expected = model(text).logits[:, 59:]
        for stepwise in (False, True):
            prompts = prefill(model, text[:, :60], None)
            found = after_prompt(model, prompts, text[:, 60:], stepwise=stepwise)
            torch.testing.assert_close(found, expected, atol=1e-3, rtol=1e-3)


def test_a_pass_takes_no_more_memory_than_was_said(model) -> None:
    said = MemoryModel(ModelSize.of(model, describe_model(model)), None, None, on_cpu=True).use(
        Request(1024), Placement()
    )
    with torch.no_grad(), apply(model, plan_for(model)) as handle:
        cache = handle.new_cache(1024)
        most = most_allocated(lambda: model(random_tokens(1, 1024), past_key_values=cache, logits_to_keep=1))
    assert said.working / 2 < most <= said.working


def test_a_prompt_is_streamed_in_pieces(model) -> None:
    loaded, prompt = LoadedModel(model, tiny_tokenizer(), describe_model(model)), random_tokens(1, 150)[0].tolist()
    with apply(model, plan_of(model)) as handle:
        cache = handle.new_cache(156, chunk=40)
        if takes_one_piece(model.config.model_type):
            with pytest.raises(UnsupportedError, match="without chunks"):
                generate_stream(loaded, prompt, max_new_tokens=6, chunk=40, cache=cache)
            assert cache.get_seq_length() == 0
            return
        found = generate_stream(loaded, prompt, max_new_tokens=6, chunk=40, cache=cache)
        assert generate_stream(loaded, prompt, max_new_tokens=6, chunk=40).token_ids == found.token_ids
    assert cache.get_seq_length() == 155
    with apply(model, plan_for(model)):
        whole, pieces = (generate_stream(loaded, prompt, max_new_tokens=6, chunk=chunk) for chunk in (None, 40))
    assert whole.token_ids == pieces.token_ids


def test_what_a_recurrent_state_cannot_do_is_refused(model) -> None:
    with torch.no_grad(), apply(model, plan_of(model)):
        cache = model(random_tokens(1, 90)).past_key_values
        with pytest.raises((UnsupportedError, RuntimeError, ValueError)):
            cache.crop(50)
