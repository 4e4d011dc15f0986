"""Calibration prompts: of which tasks, whose turn it is, and which rows of a prompt look back."""

import numpy as np
import pytest
from planner_models import made_up_prices
from planner_profiles import made_up_model, made_up_profile, options_for
from task_tokenizers import REFERENCE_MODEL, kit_named, tokenizer_named

from sparsekv.planner.allocate import allocate
from sparsekv.planner.job import solved_tasks, with_tasks
from sparsekv.planner.options import TASKS, PlanOptions, settle
from sparsekv.planner.profile.calibration import (
    Calibration,
    CalibrationPrompt,
    digest_of_calibration,
    mix_of,
    over_prompts,
    task_of_each,
)
from sparsekv.planner.profile.profile_data import Candidate
from sparsekv.planner.profile.resume import LayerRecord, length_means
from sparsekv.planner.tasks import HARD_TASKS, Split
from sparsekv.plans.patterns import AShape, Dense, tokens
from sparsekv.runtime.hf.load import LoadedModel, load_model


def prompts(**options: object) -> tuple[CalibrationPrompt, ...]:
    settled = settle(PlanOptions(lengths=(1024,), **options), 4096, "cpu")  # type: ignore[arg-type]
    return Calibration(
        tokenizer_named("shipped"), tuple(one.text for one in settled.prompts), settled.tasks, settled.seed
    ).prompts(1024, settled.calibration_samples)


@pytest.mark.parametrize(
    ("solved", "samples", "expected"),
    [
        (("a", "b"), 3, "a b a"),
        (("quote_text", "quote_code", "perplexity"), 3, "quote_text quote_code perplexity"),
        (("quote_text", "quote_code", "niah_single", "perplexity"), 3, "quote_text quote_code niah_single"),
    ],
)
def test_few_samples_quote_first_and_then_take_turns(solved: tuple[str, ...], samples: int, expected: str) -> None:
    assert task_of_each(solved, samples) == tuple(expected.split())


def test_eight_samples_have_every_task_and_more_have_no_more_quotations() -> None:
    assert mix_of(TASKS[:8], 8) == dict.fromkeys(TASKS[:8], 1)
    assert mix_of(("quote_text", "quote_code", "perplexity"), 8) == {"quote_text": 1, "quote_code": 1, "perplexity": 6}
    assert mix_of(("quote_text",), 3) == {"quote_text": 3}


def test_own_prompts_are_counted_as_such() -> None:
    assert mix_of((), 4) == {"prompts": 4}


@pytest.mark.parametrize("task", ["quote_code", "kv_retrieval", "perplexity"])
def test_the_rows_that_predict_the_answer_are_scored(task: str) -> None:
    (prompt,) = prompts(tasks=(task,))
    assert prompt.answer_rows == range(prompt.answer_start - 1, len(prompt.ids) - 1)


def test_of_an_own_prompt_the_last_rows_are_scored() -> None:
    (prompt,) = prompts(prompts=("a text of several words " * 200,))
    assert prompt.answer_rows == range(1024 - 32 - 1, 1024 - 1)


def test_the_digest_covers_tokens_and_where_the_answer_begins() -> None:
    one = prompts(tasks=("quote_code",))
    other = CalibrationPrompt(one[0].ids, one[0].answer_start - 1)
    assert digest_of_calibration({1024: one}) == digest_of_calibration({1024: prompts(tasks=("quote_code",))})
    assert digest_of_calibration({1024: one}) != digest_of_calibration({1024: (other,)})


# --- hard tasks -------------------------------------------------------------------------------------------------------


def test_the_worst_hard_task_counts_where_it_is_larger_than_the_mean_over_all_prompts() -> None:
    values_P2 = np.array([[6.0, 0.0], [0.0, 3.0], [0.0, 5.0], [2.0, 0.0]])
    tasks = ("quote_text", "kv_retrieval", "kv_retrieval", "niah_multivalue")
    np.testing.assert_allclose(over_prompts(values_P2, tasks), (2.0, 4.0))
    np.testing.assert_allclose(over_prompts(values_P2, ("",) * 4), (2.0, 2.0))


def damage_of(last: str) -> float:
    """Of a head that only the last of four prompts needs, which is of that task."""
    narrow = AShape(sink=tokens(64), window=tokens(192))
    prompts = [CalibrationPrompt(np.zeros(1024, np.int32), 1000, task) for task in ("cwe", "quote_code", "", last)]
    records = [
        LayerRecord(
            length=1024,
            sample=sample,
            layer=0,
            candidates=((0, 0),),
            patterns=((narrow, narrow),),
            damage=((1.0, damage),),
            tiles=((0.4, 0.4),),
            columns=((0.0, 0.0),),
        )
        for sample, damage in enumerate((1e-3, 1e-3, 1e-3, 1.0))
    ]
    candidate = Candidate(family="a_shape", range="narrow", density=0.4)
    return length_means(1024, prompts, [candidate], None, [records]).layers[0].damage[0][1]


@pytest.mark.parametrize("task", HARD_TASKS)
def test_a_head_that_only_a_hard_task_needs_is_not_averaged_away(task: str) -> None:
    assert damage_of(task) > 3 * damage_of("fwe")


PLANTED = (1, 3)  # heads that only the last prompt needs


def heads_left_dense(last: str) -> tuple[int, ...]:
    """By a loss, of four heads that all other prompts need equally little."""
    narrow = AShape(sink=tokens(64), window=tokens(192))
    prompts = [CalibrationPrompt(np.zeros(8192, np.int32), 8000, task) for task in ("qa", "cwe", "fwe", "", last)]
    needed = tuple(1.0 if head in PLANTED else 2e-3 for head in range(4))
    records = [
        LayerRecord(
            length=8192,
            sample=sample,
            layer=0,
            candidates=((0,) * 4,),
            patterns=((narrow,) * 4,),
            damage=(damage,),
            tiles=((0.2,) * 4,),
            columns=((0.0,) * 4,),
        )
        for sample, damage in enumerate(((1e-3,) * 4,) * 4 + (needed,))
    ]
    candidate = Candidate(family="a_shape", range="narrow", density=0.2)
    entry = length_means(8192, prompts, [candidate], None, [records])
    options = options_for(loss=0.06, phases=("prefill",))
    heads = allocate(made_up_profile(entry, model=made_up_model(layers=1)), made_up_prices(), options).bucket(8192)
    return tuple(n for n, pattern in enumerate(heads.patterns(0, 4)) if isinstance(pattern, Dense))


@pytest.mark.parametrize("task", HARD_TASKS)
def test_planted_heads_whose_loss_only_a_hard_task_shows_stay_dense(task: str) -> None:
    assert heads_left_dense(task) == PLANTED
    assert heads_left_dense("perplexity") == ()


def test_few_samples_have_a_hard_task_among_them() -> None:
    solved = ("quote_text", "quote_code", "niah_single", "kv_retrieval", "perplexity", "niah_multiquery")
    assert task_of_each(solved, 3) == ("quote_text", "quote_code", "kv_retrieval")
    assert set(HARD_TASKS) & set(solved) <= set(task_of_each(solved, 5))


# --- tasks that the model solves --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def reference() -> LoadedModel:
    return load_model(REFERENCE_MODEL, device="cpu", dtype="auto")


def test_the_reference_model_solves_what_it_was_trained_on_where_that_fits(reference: LoadedModel) -> None:
    kit = kit_named("shipped", Split.CALIBRATION)
    tasks = ("kv_retrieval", "variable_tracking")
    assert solved_tasks(reference, kit, tasks, 512, samples=2) == tasks
    assert solved_tasks(reference, kit, tasks, 64, samples=2) == ("kv_retrieval",)


def test_tasks_that_were_asked_for_or_profiled_are_taken_without_running_the_model(loaded: LoadedModel) -> None:
    settled, no_model = settle(PlanOptions(lengths=(512,)), 4096, "cpu"), LoadedModel(None, None, loaded.info)  # type: ignore[arg-type]
    assert with_tasks(no_model, settled, ("niah_single",)).tasks == ("niah_single",)
    given = settle(PlanOptions(lengths=(512,), tasks=("two_stage",)), 4096, "cpu")
    assert with_tasks(no_model, given, ("niah_single",)).tasks == ("two_stage",)
