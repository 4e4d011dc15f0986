"""One prompt, streamed and timed, gives the model's own tokens."""

import copy
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from tiny_models import END, tiny_model, tiny_tokenizer
from tiny_plans import info_of, plan_for
from transformers import GenerationConfig

from sparsekv.plans.errors import PromptError, UsageError
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.generate import Sampling, encode_prompt, generate_stream, piece_sizes
from sparsekv.runtime.hf.load import LoadedModel


@pytest.fixture(scope="module")
def loaded():
    model = tiny_model(context=256)
    return LoadedModel(model, tiny_tokenizer(), info_of(model))


@pytest.fixture(scope="module")
def prompt(loaded):
    return encode_prompt(loaded.tokenizer, "the quick brown fox jumps over the lazy dog; " * 4)


def own_tokens(loaded, prompt, count):
    ids = torch.tensor([prompt])
    out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=count, do_sample=False)
    return tuple(out[0, len(prompt) :].tolist())


@pytest.mark.parametrize("chunk", [None, 16, 50, 179, 180])
def test_the_tokens_are_those_of_generate(loaded, prompt, chunk):
    pieces = []
    found = generate_stream(loaded, prompt, max_new_tokens=9, chunk=chunk, on_text=pieces.append)
    assert found.token_ids == own_tokens(loaded, prompt, 9)
    assert found.new_tokens == 9
    assert found.prompt_tokens == len(prompt)
    assert found.text == "".join(pieces) == loaded.tokenizer.decode(found.token_ids, skip_special_tokens=True)
    assert found.prefill_seconds > 0
    assert found.decode_seconds > 0


def test_only_the_last_token_gets_logits(loaded, prompt):
    rows = []
    hook = loaded.model.lm_head.register_forward_hook(lambda module, args, output: rows.append(output.shape[1]))
    with apply(loaded.model, plan_for(loaded.model)):
        generate_stream(loaded, prompt, max_new_tokens=3)
        generate_stream(loaded, prompt, max_new_tokens=3, chunk=50)
    hook.remove()
    assert set(rows) == {1}


@pytest.mark.parametrize("planned", [False, True])
@pytest.mark.parametrize(
    "own",
    [
        {"num_beams": 4},
        {"num_beams": 4, "num_beam_groups": 2, "diversity_penalty": 0.5},
        {"num_return_sequences": 2, "do_sample": True},
        {"penalty_alpha": 0.6, "top_k": 4},
        {"prompt_lookup_num_tokens": 3},
        {"cache_implementation": "static"},
        {"dola_layers": "high"},
    ],
    ids=str,
)
def test_it_is_one_greedy_sequence_whatever_the_checkpoint_asks_for(loaded, prompt, own, planned, monkeypatch):
    expected = own_tokens(loaded, prompt, 4)
    monkeypatch.setattr(loaded.model, "generation_config", GenerationConfig(**own))
    with apply(loaded.model, plan_for(loaded.model)) if planned else nullcontext():
        assert generate_stream(loaded, prompt, max_new_tokens=4).token_ids == expected


def test_tokens_that_the_model_has_no_embedding_of_are_refused(loaded):
    with pytest.raises(PromptError, match="found 130"):
        generate_stream(loaded, [1, 130, 2])


@pytest.mark.parametrize("template", ["{{ raise_exception('no') }}", "{% if %}", "{{ 1 / 0 }}", "{{ messages[7].a }}"])
def test_a_chat_template_that_fails_says_so(template):
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template
    with pytest.raises(PromptError, match=r"chat template.*--raw"):
        encode_prompt(tokenizer, "hello")
    assert encode_prompt(tokenizer, "a", chat=False) == (0,)


def test_a_seed_fixes_what_is_drawn_and_disturbs_nobody(loaded, prompt):
    before = torch.get_rng_state()
    draws = [
        generate_stream(loaded, prompt, max_new_tokens=12, sampling=Sampling(temperature=1.5, seed=seed)).token_ids
        for seed in (3, 3, 4)
    ]
    assert draws[0] == draws[1] != draws[2]
    assert torch.equal(torch.get_rng_state(), before)


def test_generation_ends_at_the_end_token(loaded, prompt):
    third = own_tokens(loaded, prompt, 3)
    ending = replace(loaded, model=copy.deepcopy(loaded.model))
    ending.model.generation_config.eos_token_id = third[-1]
    assert generate_stream(ending, prompt, max_new_tokens=40).token_ids == third[: third.index(third[-1]) + 1]


def test_no_more_is_generated_than_the_context_holds(loaded, prompt):
    found = generate_stream(loaded, (prompt * 2)[:250], max_new_tokens=40)
    assert found.new_tokens == 6


def test_a_prompt_beyond_the_context_is_refused(loaded, prompt):
    with pytest.raises(PromptError, match="context of 256 tokens, found 256"):
        generate_stream(loaded, (prompt * 2)[:256])


def test_a_chunk_too_small_to_be_sensible_is_refused(loaded, prompt):
    with pytest.raises(UsageError, match="at least 16 tokens, found 1"):
        generate_stream(loaded, prompt, chunk=1)


def test_empty_prompts_are_refused(loaded):
    with pytest.raises(PromptError, match="empty"):
        generate_stream(loaded, ())
    with pytest.raises(PromptError, match="white space"):
        encode_prompt(loaded.tokenizer, " \n")


def test_a_chat_template_is_used_where_there_is_one():
    tokenizer = tiny_tokenizer()
    assert encode_prompt(tokenizer, "hi") == tuple(tokenizer("hi")["input_ids"])
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    assert encode_prompt(tokenizer, "hi") == (*tokenizer("user: hi")["input_ids"], END)
    assert encode_prompt(tokenizer, "hi", chat=False) == tuple(tokenizer("hi")["input_ids"])


@pytest.mark.parametrize(
    ("tokens", "chunk"), [(1025, 512), (1024, 512), (513, 512), (40, 512), (514, 512), (1026, 512)]
)
def test_no_piece_of_a_chunked_prefill_is_a_decode_step(tokens: int, chunk: int) -> None:
    sizes = piece_sizes(tokens, chunk)
    assert sum(sizes) == tokens
    assert all(2 <= size <= chunk for size in sizes)
