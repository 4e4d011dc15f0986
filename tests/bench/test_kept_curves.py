"""What layers keep by published rules: at equal bytes, on the same prompts."""

import numpy as np
import pytest
import torch
from planner_models import bare_job, loaded_tiny, quick_options

from sparsekv.bench.kept_curves import (
    DENSE,
    OURS,
    RANDOM,
    Found,
    held_out_prompts,
    kept_share,
    lines,
    measured,
    rules_at,
    shuffled,
)
from sparsekv.planner.retain_search import rule_of
from sparsekv.planner.settled import settle

LENGTH = 1024


@pytest.fixture(scope="module")
def job():
    options = quick_options(retain=0.5, verify_samples=0, tasks=("kv_retrieval", "perplexity"), lengths=(LENGTH,))
    return bare_job(loaded_tiny(), settle(options, 4096, "cpu"))


def test_every_rule_has_as_many_tokens_and_runs_on_all_prompts(job) -> None:
    rules = rules_at(job)
    assert {OURS, RANDOM, "snapkv", "sinks and window", "evenly"} <= set(rules)
    found = measured(job, held_out_prompts(job, 2), rules)
    for name, own in found.items():
        assert own.share == pytest.approx(1.0 if name == DENSE else 0.5, abs=0.06)
        assert own.share <= 0.502 or name == DENSE
        assert len(own.nats) == 4
        assert min(own.nats) > 0 or name == DENSE
    assert max(found[DENSE].nats) == 0
    assert kept_share(rules["snapkv"], (0, 1, 2), LENGTH) == 0.5


def test_tokens_at_random_are_as_many_between_the_same_ends() -> None:
    rule, kept_gS = rule_of((0,), 0.25), torch.zeros(2, 600, dtype=torch.bool)
    kept_gS[:, :4] = kept_gS[:, -128:] = kept_gS[:, 100:200] = True
    found_gS = shuffled(kept_gS, rule, torch.Generator().manual_seed(0))
    assert found_gS[:, :4].all()
    assert found_gS[:, -128:].all()
    assert found_gS.sum(1).tolist() == kept_gS.sum(1).tolist()
    assert not torch.equal(found_gS, kept_gS)


def test_answers_are_lost_where_dense_alone_is_right_and_count_where_it_solves_the_task() -> None:
    right = {"easy": [True, True, True, False], "hard": [False] * 4, "perplexity": [True] * 4}
    changed = {"easy": [True, False, False, True], "hard": [True] * 4, "perplexity": [False] * 4}
    found = {DENSE: Found(1.0, [0.0] * 4, right), "some": Found(0.5, [0.1, 0.3], changed)}
    header, _, dense, some = lines(found, 2048)
    assert "of 4 | easy |" in header
    assert "0 / 0 | 75%" in dense
    assert "0.500 | 0.2 | 2 / 1 | 50%" in some
    assert np.mean(found["some"].nats) == pytest.approx(0.2)
