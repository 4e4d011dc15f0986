"""Lengths: all prompts of a cell are equally long, and prompt and answer never exceed what was asked for."""

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from task_tokenizers import NAMES, byte_level, kit_named, kit_of, metaspace

from sparsekv.planner.tasks import (
    RETRIEVAL_TASKS,
    TASKS,
    DocumentRequest,
    Kit,
    Split,
    generator,
    make_samples,
)
from sparsekv.planner.tasks.documents import Draws

SHORTEST = 640  # holds a question of every task, in single characters too


def draws(seed: int = 0) -> Draws:
    return Draws(generator(Split.EVALUATION, "test", 0, seed, 0))


@given(
    build=st.sampled_from([byte_level, metaspace]),
    vocabulary=st.integers(380, 5000),
    single_digits=st.booleans(),
    begin=st.booleans(),
    extra=st.integers(0, 3000),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_lengths_hold_with_any_vocabulary(build, vocabulary, single_digits, begin, extra, seed) -> None:
    kit = kit_of(build(vocabulary, single_digits=single_digits, begin=begin), characters=8_000)
    for task in TASKS.values():
        length = SHORTEST + extra
        room = task.longest_answer(kit.encoder, length - len(kit.encoder.bos_ids))
        for sample in make_samples(task, kit, length, seed, count=3):
            assert len(sample.past_ids) == length - room
            assert len(sample.answer_ids) <= room


@pytest.mark.parametrize("tokenizer", NAMES)
@pytest.mark.parametrize("task", RETRIEVAL_TASKS)
def test_documents_with_many_questions_fill_their_length(task: str, tokenizer: str) -> None:
    kit = kit_named(tokenizer)
    for seed, (length, queries) in enumerate([(900, 1), (900, 4), (3000, 32)]):
        document = TASKS[task].document(kit, DocumentRequest(length, queries), draws(seed))
        assert 1 <= len(document.queries) <= queries
        assert length - _slack(task, kit) <= len(document) <= length
        assert document.context_ids.dtype == np.int32
        assert document.context_ids.shape == document.context_is_text.shape
        if len(document.queries) > 1:
            assert sum(map(len, document.queries)) <= length // 2


def _slack(task: str, kit: Kit) -> int:
    """Only pairs by themselves fall short, by less than their longest line."""
    return 40 if task == "kv_retrieval" and kit is kit_named("characters") else 20 if task == "kv_retrieval" else 0


def test_text_without_questions_is_all_context() -> None:
    document = TASKS["perplexity"].document(kit_named("shipped"), DocumentRequest(500, queries=0), draws())
    assert len(document.context_ids) == 500
    assert document.context_is_text.all()
    assert document.queries == ()
