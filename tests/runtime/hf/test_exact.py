"""`exact`: what is generated is what dense attention generates, whatever the plan drafts."""

import pytest
import torch
from emulated_graphs import emulate
from tiny_models import random_tokens, tiny_model
from tiny_plans import decode_plan, plan_for, segment
from transformers import DynamicCache, LogitsProcessor, LogitsProcessorList

from sparsekv.plans.brief import DRAFTS
from sparsekv.plans.errors import UnsupportedError
from sparsekv.runtime.core.pays import DraftLength
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.exact import Sampled

GOOD = decode_plan(segment(0, (1, 2, 3), 30, sink=4, recent=10))
BAD = decode_plan(segment(0, (1, 2, 3), 1, sink=0, recent=1))


@pytest.fixture(scope="module")
def model():
    return tiny_model(layers=4)


@pytest.fixture
def drafting(monkeypatch):
    """Draft lengths take turns, whatever the time says."""
    sizes = iter([0, 4, 2, 10, 6, 4] * 100)
    monkeypatch.setattr(DraftLength, "next", lambda self, most: next(size for size in sizes if size <= most))


def generated(model, prompt, cache=None, new=40, **more):
    options = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None, "pad_token_id": 0} | more
    options = {"attention_mask": torch.ones_like(prompt)} | options
    return model.generate(prompt, past_key_values=cache, **options)


def exactly(model, plan, prompt, **more):
    with apply(model, plan_for(model, None, plan), exact=True) as handle:
        return generated(model, prompt, **more), handle.stats()


def test_drafts_behind_rows_that_ended_do_not_grow_the_cache(model, drafting):
    prompt, cache = random_tokens(3, 50), DynamicCache()
    exactly(model, BAD, prompt, cache=cache)
    assert {layer.store.capacity for layer in cache.layers} == {50 + 40 + DRAFTS[-1]}


def test_a_turn_may_be_given_without_the_tokens_before_it(model, drafting):
    prompt, more = random_tokens(2, 50), random_tokens(2, 9, 5)
    with apply(model, plan_for(model, None, GOOD), exact=True):
        cache = DynamicCache()
        first = generated(model, prompt, cache)
        whole = torch.cat((first, more), 1)
        found = generated(model, whole[:, 89:], cache, attention_mask=torch.ones_like(whole))
        assert cache.get_seq_length() == whole.shape[1] + 39
    assert torch.equal(found[:, -40:], generated(model, whole)[:, -40:])


def test_a_turn_goes_on_from_rows_that_ended_at_different_tokens(model, drafting):
    prompt, pads, more = random_tokens(3, 50), (0, 20, 7), random_tokens(3, 6, 5)
    mask = torch.ones_like(prompt)
    for row, pad in enumerate(pads):
        mask[row, 50 - pad :].fill_(0)
    with torch.no_grad(), apply(model, plan_for(model, None, GOOD), exact=True):
        end = int(generated(model, prompt, attention_mask=mask)[0, 52])
        cache = DynamicCache()
        answers = generated(model, prompt, cache, attention_mask=mask, eos_token_id=end)[:, 50:]
        counts = [(*answer.tolist()[:-1], end).index(end) + 1 for answer in answers]
        assert len(set(counts)) > 1
        assert cache.get_seq_length() == 50 + answers.shape[1] - 1
        made = torch.stack([torch.arange(answers.shape[1] - 1) < count - 1 for count in counts]).long()
        last = torch.stack([answer[count - 1 : count] for answer, count in zip(answers, counts, strict=True)])
        whole = torch.cat((mask, made, torch.ones(3, 7, dtype=torch.long)), 1)
        found = model(torch.cat((last, more), 1), attention_mask=whole, past_key_values=cache).logits
    for row, count in enumerate(counts):
        text = (prompt[row, mask[row].bool()], answers[row, :count], more[row])
        expected = model(torch.cat(text)[None]).logits[0, -7:]
        torch.testing.assert_close(found[row], expected, rtol=1e-4, atol=1e-4)


def test_single_passes_are_dense_too(model):
    prompt, new = random_tokens(2, 50), random_tokens(2, 3, 1)
    with torch.no_grad():
        expected = model(torch.cat((prompt, new), 1)).logits[:, -3:]
        with apply(model, plan_for(model, None, BAD), exact=True):
            cache = model(prompt).past_key_values
            found = torch.cat([model(token, past_key_values=cache).logits for token in new.split(1, 1)], 1)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4)


class Broken(Exception):
    pass


class Unknown(LogitsProcessor):
    """May remember what it saw."""


@pytest.mark.parametrize("passes", [2, 3, 5, 8])
def test_a_pass_that_fails_amid_drafts_and_checks_leaves_a_cache_of_whole_tokens(model, drafting, passes):
    prompt, seen = random_tokens(1, 50), []

    def broken(*_):
        seen.append(1)
        if len(seen) == passes:
            raise Broken

    with apply(model, plan_for(model, None, GOOD), exact=True):
        cache = DynamicCache()
        with model.model.layers[2].mlp.register_forward_pre_hook(broken), pytest.raises(Broken):
            generated(model, prompt, cache)
        before = generated(model, prompt, new=cache.get_seq_length() - 49)
        found = generated(model, before, cache, new=5)
    assert torch.equal(found, generated(model, prompt, new=found.shape[1] - 50))


def test_captured_drafts_and_checks_give_the_same_tokens(model, drafting, monkeypatch):
    if not torch.cuda.is_available():
        emulate(monkeypatch)
    prompt = random_tokens(2, 50)
    with apply(model, plan_for(model, None, GOOD), backend="triton", exact=True) as handle:
        found = generated(model, prompt, new=6)
        assert handle.steps.why_not == ""
        assert handle.steps.replayed >= handle.stats().checks > 1
    assert torch.equal(found, generated(model, prompt, new=6))


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 3])
def test_captured_drafts_and_checks_give_the_tokens_of_dense_decoding_on_a_gpu(drafting, rows):
    there = tiny_model(layers=4).to("cuda")
    prompt = random_tokens(rows, 300).to("cuda")
    with apply(there, plan_for(there, None, GOOD), backend="triton", exact=True) as handle:
        found, stats = generated(there, prompt, new=100), handle.stats()
        assert (handle.steps.why_not, stats.checks < 100) == ("", True)
    assert 0 < stats.drafts_accepted < stats.tokens_drafted  # some of sparse steps are not dense attention's
    with apply(there, plan_for(there, None, GOOD), backend="triton", decode=False):
        assert torch.equal(found, generated(there, prompt, new=100))


@pytest.mark.parametrize(
    "options",
    [
        {"output_scores": True, "return_dict_in_generate": True},
        {"use_cache": False},
        {"num_beams": 2},
        {"custom_generate": lambda *args, **kwargs: None},
        {"logits_processor": LogitsProcessorList([Unknown()])},
        {"prefix_allowed_tokens_fn": lambda batch, ids: [1, 2]},
    ],
    ids=lambda options: next(iter(options)),
)
def test_what_drafts_cannot_follow_is_refused_by_name(model, options):
    with apply(model, plan_for(model, None, GOOD), exact=True), pytest.raises(UnsupportedError):
        generated(model, random_tokens(1, 30), **options)


# --- rejection sampling -----------------------------------------------------------------------------------------------


def chi_square(counts, expected):
    return float(((counts - expected) ** 2 / expected).sum())


def test_sampled_tokens_are_distributed_as_dense_attention_has_them():
    """All pairs of a draft and what follows, over a vocabulary of four; drafts from another distribution."""
    torch.manual_seed(0)
    rows, p = 40000, torch.tensor([0.5, 0.3, 0.15, 0.05])
    after = torch.tensor([[0.1, 0.2, 0.3, 0.4], [0.7, 0.1, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25], [0.0, 0.5, 0.5, 0.0]])
    judge, q = Sampled(), torch.tensor([0.1, 0.3, 0.2, 0.4])
    drafts_B = judge.draft(q.log().expand(rows, 4))
    scores = torch.stack((p.expand(rows, 4), after[drafts_B]), 1).log()
    verdict = judge.judge(drafts_B[:, None], scores)
    accepted = verdict.accepted_B == 1
    first = torch.where(accepted, drafts_B, verdict.next_B)
    assert chi_square(torch.bincount(first, minlength=4), rows * p) < 16.3  # 3 degrees of freedom, 0.1%
    for token in range(3):
        follow = verdict.next_B[accepted & (drafts_B == token)]
        assert chi_square(torch.bincount(follow, minlength=4), len(follow) * after[token]) < 16.3
    expected = float(torch.minimum(p, q).sum())
    assert abs(float(accepted.float().mean()) - expected) < 0.01


def test_drafts_from_dense_attentions_own_distribution_all_count():
    judge, scores = Sampled(), torch.randn(50, 8)
    drafts = torch.stack([judge.draft(scores) for _ in range(3)], 1)
    verdict = judge.judge(drafts, scores[:, None].expand(50, 4, 8))
    assert verdict.accepted_B.tolist() == [3] * 50
    assert judge.judge(drafts[:, :0], scores[:, None]).accepted_B.tolist() == [0] * 50


# --- how long drafts are ----------------------------------------------------------------------------------------------


def paced(agreement, dense, step, cycles=400):
    """The draft lengths of a run with these times, and its seconds over those of dense decoding."""
    pace, tokens, seconds, sizes = DraftLength(), 0.0, 0.0, []
    generator = torch.Generator().manual_seed(1)
    for _ in range(cycles):
        size = pace.next(100)
        agrees = torch.rand(max(size, 1), generator=generator) < agreement
        count = int(agrees[:size].int().cumprod(0).sum())
        took = dense + size * step
        pace.ran(size, took, [count])
        sizes.append(size)
        tokens, seconds = tokens + count + 1, seconds + took
    return sizes, seconds / (tokens * dense)


def test_drafts_are_as_long_as_pays():
    sizes, share = paced(0.975, 23.0, 10.0)
    assert min(sizes[10:]) >= 4
    assert share < 0.65
    assert max(paced(0.6, 23.0, 10.0)[0][100:]) <= 2


def test_where_no_draft_pays_it_is_dense_decoding_within_two_percent():
    sizes, share = paced(0.5, 10.0, 9.0, 2000)
    assert len(set(sizes)) == 2, "others would be captured in vain"
    assert share < 1.02


def test_a_draft_never_runs_over_the_end_of_an_answer():
    pace = DraftLength()
    for most in (9, 5, 3, 2, 1, 0, 0):
        size = pace.next(most)
        assert size <= most
        assert size in DRAFTS
        pace.ran(size, 1.0, [size])
