"""Training rows: exact in length, and what they are depends on their place in the run alone."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from reference_model.batches import (
    FIRST_ANSWER,
    NO_LOSS,
    TEXT,
    make_row,
    micro_batches_per_step,
    rows_per_micro_batch,
)
from reference_model.batches import batches as load_batches
from reference_model.optimizer import rate_factor
from reference_model.prepare import prepare, training_kit
from reference_model.recipe import TASK_SHARES, Recipe, Stage, smoke
from reference_model.tokenizer import piece_encoder
from task_tokenizers import tokenizer_named

from sparsekv.planner.tasks import Kit, PieceEncoder

RECIPE = smoke(Recipe())


@pytest.fixture(scope="module")
def work(library: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("prepared")
    prepare(replace(RECIPE, shape=replace(RECIPE.shape, vocab=1000)), library, folder)
    return folder


@pytest.fixture(scope="module")
def kit(work: Path) -> Kit:
    return training_kit(work)


@pytest.mark.parametrize("length", [128, 512, 2048])
def test_rows_are_exactly_as_long_as_asked_and_learn_answers_or_text(kit: Kit, length: int) -> None:
    rows = [make_row(kit, Recipe(), length, index) for index in range(40)]
    assert {len(row.ids) for row in rows} == {len(row.kinds) for row in rows} == {length}
    assert all(row.ids[0] == kit.encoder.bos_ids[0] for row in rows)
    assert all((row.kinds != NO_LOSS).any() for row in rows)
    assert max(row.kinds.max() for row in rows) < FIRST_ANSWER + len(TASK_SHARES)
    plain = sum(not (row.kinds >= FIRST_ANSWER).any() for row in rows)
    assert 4 <= plain <= 26
    kinds = set(np.concatenate([row.kinds for row in rows]).tolist())
    assert {NO_LOSS, TEXT} < kinds


def test_batches_that_start_late_are_those_of_the_whole_run(work: Path) -> None:
    stage = Stage(128, 4)
    whole = list(load_batches(RECIPE, stage, work, 0, 4, workers=0))
    late = list(load_batches(RECIPE, stage, work, 2, 4, workers=0))
    per_step = micro_batches_per_step(RECIPE, 128)
    assert len(whole) == 4 * per_step
    assert len(late) == 2 * per_step
    for one, other in zip(whole[2 * per_step :], late, strict=True):
        assert torch.equal(one.ids_RT, other.ids_RT)
        assert torch.equal(one.kinds_RT, other.kinds_RT)
    assert whole[0].ids_RT.shape == (rows_per_micro_batch(RECIPE, 128), 128)


def test_learning_rates_fall_to_zero_within_the_seconds_of_the_last_length() -> None:
    recipe = replace(Recipe(), stages=(Stage(128, seconds=50), Stage(256, seconds=100)), decay_share=0.5)
    assert rate_factor(recipe, 0, seconds=0) == 1 / recipe.warmup_steps
    factors = [rate_factor(recipe, 1000, seconds) for seconds in (49, 100, 125, 140, 150, 151)]
    assert factors == pytest.approx([1, 1, 0.5, 0.2, 0, 0])


def test_the_tokenizer_itself_and_its_wrapper_encode_alike() -> None:
    wrapped = tokenizer_named("shipped")
    raw = piece_encoder(wrapped.backend_tokenizer)
    runs = [("The special number for", " amber", "-falcon", " is", " 1234567", ".\n"), ("\n",)]
    assert raw.encode_all(runs) == PieceEncoder.of(wrapped).encode_all(runs)
    assert raw.bos_ids == PieceEncoder.of(wrapped).bos_ids
