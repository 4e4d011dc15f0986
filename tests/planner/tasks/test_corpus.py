"""Long prompts: text enough for all of a run, of installed packages behind what is shipped, and other text a split."""

from __future__ import annotations

from dataclasses import replace
from functools import cache, partial
from itertools import combinations, count, islice

import numpy as np
import pytest
from task_tokenizers import kit_named, tokenizer_named

from sparsekv.planner.tasks import TASKS, Kit, Split, load_filler_text, make_sample, prepare
from sparsekv.planner.tasks import text as text_module
from sparsekv.planner.tasks.text import SHORT, Corpus, Filler, PieceEncoder, Shares, corpus_text

SPLITS = (Split.CALIBRATION, Split.VERIFICATION, Split.EVALUATION)
LONG = 131_072
CHARACTERS_PER_TOKEN = 3.6
NUMBERED = 1 << 20  # the first token id of text


def numbering() -> PieceEncoder:
    """Encodes lines to tokens of 3.6 characters, each of which occurs once."""
    encoder = kit_named("shipped").encoder
    numbered = PieceEncoder(lambda texts: [encoder.encode([text]) for text in texts])
    fresh = count(NUMBERED)
    numbered.encode_lines = lambda lines: [
        [*islice(fresh, max(1, round(len(line) / CHARACTERS_PER_TOKEN)))] for line in lines
    ]
    return numbered


def kit_of_numbers(split: Split) -> Kit:
    kit, encoder = kit_named("shipped", split), numbering()
    return replace(kit, corpus=cache(partial(Corpus, split, encoder)))


def passages(text: str) -> list[str]:
    """The 64 characters from the first letter of every line."""
    found, start = [], 0
    for line in text.split("\n"):
        first = start + len(line) - len(line.lstrip(" "))
        found.append(text[first : first + 64])
        start += len(line) + 1
    return [passage for passage in found if len(passage) == 64]


def test_no_64_characters_of_a_split_stand_in_another_or_twice() -> None:
    each = {split: passages(corpus_text(split, True) + corpus_text(split, False)) for split in SPLITS}
    distinct = {split: {*found} for split, found in each.items()}
    assert all(len(each[split]) == len(distinct[split]) for split in SPLITS)
    assert not [pair for pair in combinations(SPLITS, 2) if distinct[pair[0]] & distinct[pair[1]]]


def test_there_are_twenty_megabytes_to_verify_on_and_what_is_shipped_comes_first() -> None:
    assert sum(len(corpus_text(Split.VERIFICATION, shipped)) for shipped in (True, False)) > 20_000_000
    for split in SPLITS:
        lines = {*load_filler_text(split).split("\n")}
        assert {*corpus_text(split, True).split("\n")} <= lines


@pytest.mark.parametrize(("split", "seed"), [(Split.VERIFICATION, 2**32 - 1), (Split.EVALUATION, 0)])
def test_thirty_prompts_of_128k_share_no_text(split: Split, seed: int) -> None:
    tasks = ("niah_single", "perplexity", "niah_multivalue")
    kit = kit_of_numbers(split).shared_by(tasks, (1024, LONG))
    made = [make_sample(TASKS[task], kit, LONG, seed, index) for index in range(10) for task in tasks]
    text = [sample.past_ids[sample.past_ids >= NUMBERED] for sample in made]
    assert min(map(len, text)) > 0.95 * LONG - 2048
    assert len(np.unique(np.concatenate(text))) == sum(map(len, text))


def test_prompts_of_several_lengths_share_no_text() -> None:
    kit = kit_of_numbers(Split.CALIBRATION).shared_by(("niah_single", "perplexity"), (16_384, 32_768))
    text = [
        make_sample(TASKS[task], kit, length, 0, index).past_ids
        for length in (16_384, 32_768) for task in ("niah_single", "perplexity") for index in range(3)
    ]  # fmt: skip
    numbers = np.concatenate([ids[ids >= NUMBERED] for ids in text])
    assert len(np.unique(numbers)) == len(numbers)


@pytest.mark.parametrize("length", [2048, 16_384])
def test_the_text_of_turns_goes_on_and_does_not_return(length: int) -> None:
    encoder = numbering()
    kit = replace(kit_named("shipped"), filler=Filler.from_text(corpus_text(Split.VERIFICATION, True), encoder))
    for index in range(8):
        past = make_sample(TASKS["turns"], kit, length, 0, index).past_ids
        assert (np.diff(past[past >= NUMBERED]) > 0).all()


def test_a_short_prompt_reads_no_text_of_packages(monkeypatch) -> None:
    monkeypatch.setattr(text_module, "_package_text", lambda split: pytest.fail("packages were read"))
    corpus_text.cache_clear()
    kit = prepare(tokenizer_named("shipped"), Split.EVALUATION)
    bare = replace(kit, corpus=None)
    for task in ("niah_single", "perplexity", "quote_code"):
        made, expected = (make_sample(TASKS[task], one, SHORT, 3, 1) for one in (kit, bare))
        assert np.array_equal(made.prompt_ids, expected.prompt_ids)
    make_sample(TASKS["niah_single"], kit, 4 * SHORT, 0, 0)  # the text that is shipped is enough


def test_a_long_sample_does_not_depend_on_those_made_before_it() -> None:
    kits = [prepare(tokenizer_named("shipped"), Split.VERIFICATION).shared_by(("niah_single",), (8192,)) for _ in "ab"]
    orders = (range(4), reversed(range(4)))
    one, other = (
        {index: make_sample(TASKS["niah_single"], kit, 8192, 5, index).prompt_ids for index in order}
        for kit, order in zip(kits, orders, strict=True)
    )
    assert all(np.array_equal(one[index], other[index]) for index in one)


def test_text_that_ends_begins_again(monkeypatch) -> None:
    lines = "".join(f"name_{number} = some_function(of={number})\n" for number in range(2000))
    monkeypatch.setattr(text_module, "corpus_text", lambda split, shipped: lines if shipped else "")
    corpus = Corpus(Split.VERIFICATION, numbering(), 0)
    whole = corpus.share(0, 1 << 20)
    for start in (0, 10_000, 10**7):
        share = corpus.share(start, 5000)
        assert len(share.ids) >= 5000
        assert share.line_ends[-1] == len(share.ids)
        assert {*share.ids.tolist()} <= {*whole.ids.tolist()}


def test_tasks_and_lengths_take_turns_without_a_gap() -> None:
    shares = Shares(("a", "b"), (SHORT, 8192, 16_384))
    starts = sorted(
        (shares.start(task, length, index), length)
        for task in "ab" for length in (8192, 16_384) for index in range(3)
    )  # fmt: skip
    ends = [start + length + 256 for start, length in starts]
    assert [start for start, _ in starts] == [0, *ends[:-1]]


def test_fillers_join_and_part_at_lines() -> None:
    text = "one\n\n two words\nthree more words stand in here\nend\n"
    encoder = kit_named("characters").encoder
    whole = Filler.from_text(text, encoder)
    joined = Filler.from_text(text[:16], encoder).followed_by(Filler.from_text(text[16:], encoder))
    for one, other in ((joined, whole), (whole.lines(1, 3), Filler.from_text("\n two words\n", encoder))):
        assert np.array_equal(one.ids, other.ids)
        assert np.array_equal(one.line_ends, other.line_ends)
        assert np.array_equal(one.prose_lines, other.prose_lines)
