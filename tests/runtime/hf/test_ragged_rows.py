"""Rows of a padded batch that are picked, and masks that do not fit; tests/core has what they compute."""

import pytest
import torch
from tiny_models import random_tokens
from tiny_plans import decode_plan, every_head, plan_for, segment

from sparsekv.plans.errors import PromptError, UnsupportedError, UsageError
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


PROMPTS = [random_tokens(1, length, length) for length in LENGTHS]


@pytest.fixture
def handle(model):
    with torch.no_grad(), apply(model, plan_for(model, every_head(model, *PATTERNS), DECODE)) as handle:
        yield handle


@pytest.mark.parametrize("left", [[1], [3, 1], [False, True, False, True]], ids=str)
def test_generate_goes_on_with_the_rows_that_are_left(model, handle, left):
    ids, mask = padded(PROMPTS, "both", 203)
    cache = model(ids, attention_mask=mask).past_key_values
    with pytest.raises(UsageError, match="none selected"):
        cache.batch_select_indices(torch.zeros(4, dtype=torch.bool))
    cache.batch_select_indices(torch.tensor(left))
    assert cache.get_seq_length() == 203
    rows = torch.arange(4)[torch.tensor(left)].tolist()
    more = random_tokens(len(rows), 6, 5)
    whole = torch.cat((mask[rows], torch.ones_like(more)), 1)
    options = {"max_new_tokens": 5, "do_sample": False}
    found = model.generate(torch.cat((ids[rows], more), 1), attention_mask=whole, past_key_values=cache, **options)
    for row, source in enumerate(rows):
        text = torch.cat((PROMPTS[source], more[row : row + 1]), 1)
        alone = model.generate(text, past_key_values=model(PROMPTS[source]).past_key_values, **options)
        assert torch.equal(found[row, -5:], alone[0, -5:])


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
