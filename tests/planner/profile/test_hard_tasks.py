"""A head that one kind of question needs is not averaged away by prompts that do without it."""

import numpy as np
import pytest
import torch
from planner_models import TILE, blocky_head, dense_of, local_head, made_up_prices
from planner_profiles import made_up_model, made_up_profile, options_for, rows

from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.allocate import allocate
from sparsekv.planner.profile.calibration import CalibrationPrompt, over_prompts, task_of_each
from sparsekv.planner.profile.head_errors import Layer, SampledRows, score_candidates
from sparsekv.planner.profile.profile_data import Candidate, Profile
from sparsekv.planner.profile.resume import LayerRecord, length_means
from sparsekv.planner.profile.search_space import CommonPrefix
from sparsekv.planner.tasks import HARD_TASKS
from sparsekv.plans.patterns import AShape, Dense, Pattern, tokens

LENGTH, SIZE, HEADS, PLANTED = 1024, 32, 4, 3
NARROW = AShape(sink=tokens(64), window=tokens(192))
OTHERS = ("quote_text", "quote_code", "perplexity", "two_stage", "niah_single", "variable_tracking", "cwe")


def record(sample: int, retrieves: bool) -> LayerRecord:
    """One layer over one prompt. Heads with blocks far away lose them under a narrow window: the planted one has such
    where it `retrieves`, and others, of less weight in the answer, on every prompt."""
    generator = torch.Generator().manual_seed(sample)
    makes = [blocky_head] * PLANTED + [blocky_head if retrieves else local_head]
    heads = [make(LENGTH, SIZE, generator) for make in makes]
    q_BHSD, k_BHSD = (torch.stack(part)[None] for part in zip(*heads, strict=True))
    prefix = CommonPrefix(q_BHSD, k_BHSD, Chunk.uniform(1, 0, LENGTH), TILE, scale=1.0)
    v_BHSD, gradient_BHSD = (torch.randn(k_BHSD.shape, generator=generator) for _ in range(2))
    gradient_BHSD[:, :PLANTED] *= 0.6
    whole = SampledRows.of(LENGTH, LENGTH - 64, TILE, 1)
    layer = Layer(prefix, v_BHSD, dense_of(prefix, v_BHSD), gradient_BHSD, whole, "cpu")
    (score,) = score_candidates(layer, [(NARROW,) * HEADS])
    tables = {name: rows(getattr(score, f"{name}_H")[None]) for name in ("damage", "tiles", "columns")}
    return LayerRecord(
        length=LENGTH, sample=sample, layer=0, candidates=((0,) * HEADS,), patterns=((NARROW,) * HEADS,), **tables
    )


@pytest.fixture(scope="module")
def records() -> list[LayerRecord]:
    """Only the last prompt needs the planted head."""
    return [record(sample, retrieves=sample == len(OTHERS)) for sample in range(len(OTHERS) + 1)]


def profile_of(records: list[LayerRecord], last: str) -> Profile:
    prompts = [CalibrationPrompt(np.zeros(LENGTH, np.int32), LENGTH - 8, task) for task in (*OTHERS, last)]
    candidate = Candidate(family="a_shape", range="narrow", density=0.4)
    (group,) = made_up_model(layers=1).attention
    model = made_up_model().model_copy(update={"attention": (group,)})
    return made_up_profile(length_means(LENGTH, prompts, [candidate], None, [records]), model=model)


def planned(profile: Profile) -> tuple[Pattern, ...]:
    """The patterns of a plan with room for one dense head."""
    density = profile.lengths[0].layers[0].tiles[0][0]
    options = options_for(lengths=(LENGTH,), target_density=((1.05 + (HEADS - 1) * density) / HEADS,))
    return allocate(profile, made_up_prices(), options).bucket(LENGTH).patterns(0, HEADS)


@pytest.mark.parametrize("task", HARD_TASKS)
def test_a_head_whose_loss_only_a_hard_task_shows_stays_dense(records: list[LayerRecord], task: str) -> None:
    assert planned(profile_of(records, task)) == (NARROW,) * PLANTED + (Dense(),)
    averaged = planned(profile_of(records, "fwe"))
    assert averaged[PLANTED] == NARROW
    assert Dense() in averaged


def test_the_worst_hard_task_counts_where_it_is_larger_than_the_mean_over_all_prompts() -> None:
    values_P2 = np.array([[6.0, 0.0], [0.0, 3.0], [0.0, 5.0], [2.0, 0.0]])
    tasks = ("quote_text", "kv_retrieval", "kv_retrieval", "niah_multivalue")
    np.testing.assert_allclose(over_prompts(values_P2, tasks), (2.0, 4.0))
    np.testing.assert_allclose(over_prompts(values_P2, ("",) * 4), (2.0, 2.0))


def test_few_samples_have_a_hard_task_among_them() -> None:
    solved = ("quote_text", "quote_code", "niah_single", "kv_retrieval", "perplexity", "niah_multiquery")
    assert task_of_each(solved, 3) == ("quote_text", "quote_code", "kv_retrieval")
    assert set(HARD_TASKS) & set(solved) <= set(task_of_each(solved, 5))
