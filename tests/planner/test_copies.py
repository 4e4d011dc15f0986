"""Copies: samples that say the same again do not count, whatever prompts have in common and wherever they are cut."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from own_texts import text_of
from planner_models import QUICK, quick_options
from tiny_models import tiny_tokenizer

from sparsekv.planner import fixed_test
from sparsekv.planner.evaluation.batches import EvalSamples
from sparsekv.planner.evaluation.given import GivenSamples, HeldOut, samples_of
from sparsekv.planner.options import GivenPrompt, Settled, set_aside, settle
from sparsekv.planner.profile.calibration import Calibration, Seen
from sparsekv.planner.tasks import Sample
from sparsekv.plans.errors import PlanWarning, PromptError

LENGTHS = (256, 512)
RANDOM = np.random.default_rng(0)


def tokens(count: int) -> np.ndarray:
    return RANDOM.integers(0, 50_000, count).astype(np.int32)


@pytest.fixture(scope="module", autouse=True)
def one_prompt_is_enough() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(fixed_test.SIZES, "small", replace(QUICK, own=1))
        yield


def options(**changes: object) -> Settled:
    return settle(quick_options(lengths=LENGTHS, target_density=(), **{"verify": "small"} | changes), 4096, "cpu")


@pytest.mark.parametrize("length", [256, 1024, 2048, 5000, 40_000])
def test_texts_that_differ_at_their_ends_alone_are_copies_and_other_texts_are_not(length: int) -> None:
    text, seen = tokens(length), Seen(length)
    again = np.tile(tokens(9), length)[:length]  # one that repeats itself
    assert all(map(seen.is_new, (text, again, tokens(length))))
    for copied in (text, again):
        another_end = np.concatenate([copied[:-64], tokens(64)])
        behind_headers = [np.concatenate([tokens(count), copied])[:length] for count in (1, 7, 50)]
        shorter = copied[: 3 * length // 4]
        assert not any(map(seen.is_new, (copied, another_end, *behind_headers, shorter)))
    half = np.concatenate([text[: length // 2], tokens(length // 2)])
    assert seen.is_new(half)
    assert not seen.is_new(half)
    assert not seen.is_new(half[: length // 2])


def test_a_copy_of_a_known_text_is_found_though_that_one_is_a_copy_itself() -> None:
    rng = np.random.default_rng(0)
    first = rng.integers(0, 30000, 512)
    second = first.copy()
    second[:60] = rng.integers(0, 30000, 60)
    held_out = second.copy()
    held_out[-60:] = rng.integers(0, 30000, 60)
    seen = Seen(512)
    seen.add(first)
    seen.add(second)
    assert not seen.is_new(held_out)


def test_short_texts_are_copies_only_where_most_of_them_is_equal() -> None:
    seen = Seen(4096)
    assert all(seen.is_new(np.asarray(ids, np.int32)) for ids in ([1], [2], [1, 2], range(20), range(20, 40)))
    assert not any(seen.is_new(np.asarray(ids, np.int32)) for ids in ([1], [1, 2], range(20), range(1, 20)))


@st.composite
def own_prompts(draw: st.DrawFn) -> dict[GivenPrompt, int]:
    """Prompts about documents, and how long the document of each is: behind headers, with a question and an answer."""
    about = draw(st.lists(st.integers(0, 5), min_size=2, max_size=10))
    prompts = {}
    for number, document in enumerate(about):
        header, question, answer = (draw(st.integers(0, most)) for most in (20, 30, 10))
        text = text_of(100 + number, header) + text_of(document, SIZES[document])
        prompts[GivenPrompt(text + text_of(200 + number, question) + f"{number:2}?", "a" * answer)] = document
    return prompts


SIZES = (190, 195, 440, 445, 600, 650)  # of documents: the first two come near 256 tokens, the others near 512 as well


@given(own_prompts())
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.filterwarnings("ignore::sparsekv.plans.errors.PlanWarning")
def test_held_out_prompts_are_of_other_documents_than_those_calibrated_on_and_of_one_each(about) -> None:
    calibrated, aside = set_aside(about)
    left = {about[prompt] for prompt in aside} - {about[prompt] for prompt in calibrated}
    if not left:
        with pytest.raises(PromptError, match="different texts"):
            HeldOut.of(tiny_tokenizer(), calibrated, aside, options())
        return
    found = HeldOut.of(tiny_tokenizer(), calibrated, aside, options()).by_length
    assert len(found[256]) == len(left)
    assert len(found[512]) == sum(SIZES[document] > 256 for document in left)
    for samples in found.values():
        beginnings = {text[: len(text) - 64] for text in map(text_of_sample, samples)}
        assert len(beginnings) == len(samples)
        assert not any(one in prompt.text for one in beginnings for prompt in calibrated)


def text_of_sample(sample: Sample) -> str:
    return tiny_tokenizer().decode([*sample.prompt_ids, *sample.answer_ids])


@given(own_prompts())
@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.too_slow])
@pytest.mark.filterwarnings("ignore::sparsekv.plans.errors.PlanWarning")
def test_prompts_calibrated_on_or_chosen_to_verify_on_are_of_one_document_each(about) -> None:
    tokenizer, prompts = tiny_tokenizer(), [one for one in about if one.answer]
    chosen = GivenSamples.of(EvalSamples((), (1024,)), samples_of(tokenizer, prompts, 1024))
    assert len(chosen.given[1024]) == len({about[one] for one in prompts})
    longer = [one.text for one, document in about.items() if SIZES[document] > 256]
    if longer:
        calibrated = Calibration(tokenizer, tuple(longer), (), 0).prompts(512, len(longer))
        assert len(calibrated) == len({document for document in about.values() if SIZES[document] > 256})


def shared(count: int, different: int) -> Sequence[GivenPrompt]:
    """Prompts with one of so many beginnings, longer than they are cut, and a question each."""
    beginnings = [text_of(number, 600) for number in range(different)]
    return [GivenPrompt(f"{beginnings[number % different]} {number}?", " 4") for number in range(count)]


def test_prompts_that_become_one_text_where_they_are_cut_are_refused() -> None:
    with pytest.raises(PromptError, match=r"at least 60 different .* found 0 of 100 at 256, 0 of 100 at 512"):
        HeldOut.of(tiny_tokenizer(), *set_aside(shared(200, 1)), options(verify="full"))


def test_fewer_than_it_takes_to_verify_are_refused_only_where_copies_seem_to_be_enough() -> None:
    calibrated, aside = [GivenPrompt(text_of(99, 600))], shared(50, 10)
    with pytest.raises(PromptError, match="10 of 50 at 256, 10 of 50 at 512"):
        HeldOut.of(tiny_tokenizer(), calibrated, aside, options(verify="full"))
    few = aside[:28]
    with pytest.warns(PlanWarning, match="10 of 28 held-out prompts are different texts at 512"):
        found = HeldOut.of(tiny_tokenizer(), calibrated, few, options(verify="full"))
    assert found.count == 10
    assert found.part(0).by_length == found.by_length
    assert found.part(1) is None
