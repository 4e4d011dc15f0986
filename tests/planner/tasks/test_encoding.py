"""Encoding piece by piece gives what the tokenizer gives for the whole."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from task_tokenizers import NAMES, TEXT_CHARACTERS, kit_named, tokenizer_named
from tokenizers import Tokenizer, models, pre_tokenizers

from sparsekv.planner.tasks import TASKS, DocumentRequest, PieceEncoder, Split, TaskError, generator, load_filler_text
from sparsekv.planner.tasks.documents import Draws, longest_key, longest_value
from sparsekv.planner.tasks.wording import FIRST_WORDS, SECOND_WORDS

ANCHORED = ("metaspace", "metaspace_no_begin")


def encode_whole(name: str, text: str) -> list[int]:
    return list(tokenizer_named(name)(text, add_special_tokens=False)["input_ids"])


def spelled(name: str, ids: list[int]) -> str:
    """Behind a line, so that decoders that cut the first space off cut nothing."""
    newline = list(kit_named(name).encoder.newline_ids)
    text = str(tokenizer_named(name).decode([*newline, *ids]))
    return text[text.index("\n") + 1 :]


@pytest.mark.parametrize("name", NAMES)
def test_pieces_are_anchored_exactly_where_the_tokenizer_puts_a_space_in_front(name: str) -> None:
    alone, piece = encode_whole(name, "green"), kit_named(name).encoder.encode(["green"])
    assert (alone != piece) == (name in ANCHORED)
    assert spelled(name, piece) == "green"


@pytest.mark.parametrize("name", NAMES)
def test_a_document_of_pairs_has_the_tokens_of_its_text(name: str) -> None:
    document = TASKS["kv_retrieval"].document(
        kit_named(name), DocumentRequest(600), Draws(generator(Split.EVALUATION, "test", 0, 0, 0))
    )
    ids = [*document.context_ids.tolist(), *document.queries[0].question_ids.tolist()]
    newline = list(kit_named(name).encoder.newline_ids)
    whole = encode_whole(name, "\n" + spelled(name, ids))
    assert whole[-len(ids) :] == ids
    assert len(whole) - len(ids) <= len(newline) + 1


@pytest.mark.parametrize("name", NAMES)
def test_filler_is_the_text_line_by_line(name: str) -> None:
    filler = kit_named(name).filler
    text = load_filler_text(Split.CALIBRATION)[:TEXT_CHARACTERS]
    assert spelled(name, filler.ids.tolist()) == text
    starts = [0, *filler.line_ends[:-1].tolist()]
    for place in (1, 50, -1):
        line = filler.ids[starts[place] : filler.line_ends[place]].tolist()
        assert spelled(name, line) == text.splitlines(keepends=True)[place]


@pytest.mark.parametrize("name", NAMES)
@given(first=st.sampled_from(FIRST_WORDS), second=st.sampled_from(SECOND_WORDS), number=st.integers(10**6, 10**7 - 1))
@settings(max_examples=30, deadline=None)
def test_no_key_or_value_is_longer_than_the_longest(name: str, first: str, second: str, number: int) -> None:
    encoder = kit_named(name).encoder
    for joiner in "-_":
        assert len(encoder.encode([f" {first}", f"{joiner}{second}"])) <= longest_key(encoder, joiner)
    assert len(encoder.encode([f" {number}"])) <= longest_value(7)


def test_a_tokenizer_that_merges_newlines_with_what_follows_is_refused() -> None:
    vocabulary = {"▁": 0, "\n": 1, "g": 2, "r": 3, "e": 4, "n": 5, "\ng": 6, "▁\n": 7, "x": 8}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("\n", "g")]))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    encoder = PieceEncoder(lambda texts: [encoding.ids for encoding in tokenizer.encode_batch(texts)])
    assert encoder.encode(["x"]) == [8]
    with pytest.raises(TaskError, match="'green'"):
        encoder.encode(["green"])
