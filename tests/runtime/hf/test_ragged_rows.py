"""Padded batches run as rows of their own lengths: each as if it were alone."""

import pytest
import torch
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.plans.errors import PromptError, UnsupportedError
from sparsekv.plans.patterns import AShape, VerticalSlash, fraction, tokens
from sparsekv.runtime.hf.apply import apply

LENGTHS = (150, 17, 200, 2)
PATTERNS = (
    AShape(sink=tokens(64), window=tokens(64)),
    VerticalSlash(vertical=tokens(9), slash=tokens(64), max_tiles=fraction(1.0)),
)
DECODE = decode_plan(segment(0, (1, 2), 8, selector="uniform", window=3))


def padded(prompts, side="left", columns=None):
    """Ids and mask of these prompts, [1, S] each."""
    columns = columns or max(prompt.shape[1] for prompt in prompts)
    ids = torch.zeros(len(prompts), columns, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        spare = columns - prompt.shape[1]
        first = {"left": spare, "right": 0, "both": spare // 2}[side]
        ids[row, first : first + prompt.shape[1]], mask[row, first : first + prompt.shape[1]] = prompt[0], 1
    return ids, mask


def sparse_plan(model):
    return plan_for(model, every_head(model, *PATTERNS), DECODE)


def of_lengths(*lengths):
    return [random_tokens(1, length, length) for length in lengths]


PROMPTS = of_lengths(*LENGTHS)


@pytest.fixture
def handle(model):
    with torch.no_grad(), apply(model, sparse_plan(model)) as handle:
        yield handle


def decoded(model, cache, count=5, row=slice(None)):
    """Logits of some steps that go on from a cache."""
    given = random_tokens(len(LENGTHS), count, 3)[row]
    return torch.cat([model(token, past_key_values=cache).logits for token in given.split(1, 1)], 1)


def test_generate_gives_the_tokens_of_each_row_alone(model, handle):
    ids, mask = padded(PROMPTS, "left", 207)  # as of a tokenizer that pads to a multiple
    copies = 2
    options = {"num_return_sequences": copies, "do_sample": True, "top_k": 1}
    found = model.generate(ids, attention_mask=mask, max_new_tokens=8, **options)
    for row, prompt in enumerate(PROMPTS):
        alone = model.generate(prompt, max_new_tokens=8, do_sample=False)[0, LENGTHS[row] :]
        for copied in range(copies):
            assert torch.equal(found[row * copies + copied, ids.shape[1] :], alone)


def test_pieces_of_a_prompt_begin_where_a_row_does(model):
    ids, mask = padded(PROMPTS)
    options = {"max_new_tokens": 6, "do_sample": False}
    with torch.no_grad(), apply(model, plan_for(model, None, DECODE)):
        found = model.generate(ids, attention_mask=mask, prefill_chunk_size=64, **options)
        for row, prompt in enumerate(PROMPTS):
            assert torch.equal(found[row, 200:], model.generate(prompt, **options)[0, LENGTHS[row] :])
        ids, mask = padded(PROMPTS, "right")
        with pytest.raises(UnsupportedError, match="pad on the left"):
            model.generate(ids, attention_mask=mask, prefill_chunk_size=64, **options)


def test_turns_given_as_embeddings_go_on_from_each_row(model, handle):
    ids, mask = padded(PROMPTS)
    cache = model(ids, attention_mask=mask).past_key_values
    first = decoded(model, cache, 2)
    turns = of_lengths(30, 40, 5, 9)
    more, more_mask = padded(turns, "right")
    whole = torch.cat((mask, torch.ones(4, 2, dtype=torch.long), more_mask), 1)
    embeddings = model.get_input_embeddings()(more)
    second = model(inputs_embeds=embeddings, attention_mask=whole, past_key_values=cache).logits
    last = decoded(model, cache)
    assert cache.get_seq_length() == whole.shape[1] + 5
    for row, (prompt, turn) in enumerate(zip(PROMPTS, turns, strict=True)):
        alone = model(prompt).past_key_values
        near(first[row], decoded(model, alone, 2, slice(row, row + 1)))
        near(second[row, more_mask[row].bool()], model(turn, past_key_values=alone).logits)
        near(last[row], decoded(model, alone, 5, slice(row, row + 1)))


@pytest.mark.parametrize("left", [[1], [3, 1]], ids=str)
def test_generate_goes_on_with_the_rows_that_are_left(model, handle, left):
    ids, mask = padded(PROMPTS, "both", 203)
    cache = model(ids, attention_mask=mask).past_key_values
    cache.batch_select_indices(torch.tensor(left))
    assert cache.get_seq_length() == 203
    more = random_tokens(len(left), 6, 5)
    whole = torch.cat((mask[left], torch.ones_like(more)), 1)
    options = {"max_new_tokens": 5, "do_sample": False}
    found = model.generate(torch.cat((ids[left], more), 1), attention_mask=whole, past_key_values=cache, **options)
    for row, source in enumerate(left):
        text = torch.cat((PROMPTS[source], more[row : row + 1]), 1)
        alone = model.generate(text, past_key_values=model(PROMPTS[source]).past_key_values, **options)
        assert torch.equal(found[row, -5:], alone[0, -5:])


def near(found, alone):
    torch.testing.assert_close(found, alone[0], rtol=1e-4, atol=1e-4)


def test_what_rows_of_different_lengths_cannot_do_yet_is_refused(model):
    ids, mask = padded(PROMPTS)
    offloaded = plan_for(model, None, decode_plan(segment(0, (1, 2), 8), offload=(1,)))
    hybrid, dense = tiny_model("qwen3_5_text"), plan_for(model)
    for other, plan, options, said in (
        (model, offloaded, {}, "host memory"),
        (hybrid, plan_for(hybrid), {}, "recurrent state"),
        (model, dense, {"output_hidden_states": True}, "more is asked"),
        (model, dense, {"position_ids": torch.arange(200)[None]}, "position_ids"),
    ):
        with torch.no_grad(), apply(other, plan), pytest.raises(UnsupportedError, match=said):
            other(ids, attention_mask=mask, **options)


def test_masks_that_do_not_fit_the_cache_are_refused(model, handle):
    ids, mask = padded(PROMPTS)
    cache, token = model(ids, attention_mask=mask).past_key_values, random_tokens(4, 1)
    with pytest.raises(UnsupportedError, match="marks the"):
        model(token, attention_mask=torch.ones(4, 201), past_key_values=cache)
    still = torch.cat((mask, torch.tensor([[1], [1], [0], [1]])), 1)
    with pytest.raises(UnsupportedError, match="every row"):
        model(token, attention_mask=still, past_key_values=cache)
    mask[2] = 0
    with pytest.raises(PromptError, match="none in row 2"):
        model.generate(ids, attention_mask=mask, max_new_tokens=3)
