"""Layers that keep less: the damage of each, budgets in bytes, and the plan that comes of it."""

from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from planner_models import bare_job, loaded_tiny, quick_options
from tiny_plans import plan_for

from sparsekv.kernels.methods import register_file
from sparsekv.planner import eviction_search
from sparsekv.planner.eviction_search import (
    EvictionTrials,
    allocated,
    by_hand,
    filled,
    in_few_groups,
    rule_of,
    rules_of,
)
from sparsekv.planner.job import job_of
from sparsekv.planner.options import PlanOptions, settle
from sparsekv.planner.plan import compile_plan
from sparsekv.plans.errors import UsageError
from sparsekv.plans.phases import Eviction
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.apply import apply

LENGTH = 1024
EXAMPLE = Path(__file__).parents[2] / "examples" / "my_method.py"


@pytest.fixture(scope="module")
def loaded():
    return loaded_tiny()


def settled(**changes):
    return settle(quick_options(retain=0.4, **changes), 4096, "cpu")


@pytest.mark.parametrize("score", [None, "key_norm"])
def test_a_trial_is_what_the_runtime_does(loaded, score):
    """Rows of one pass over masks, beside decode steps of layers that dropped tokens."""
    register_file(EXAMPLE)
    options, layout = settled(score=score), {0: 0.25, 2: 0.05}
    (prompt,) = bare_job(loaded, options).calibration_prompts(LENGTH, 1)
    with EvictionTrials.on(loaded) as trials:
        nothing, found = trials.damages(prompt, [{}, layout], options)
        prefix = trials.prefilled(prompt, eviction_search._FEW_STEPS, options)
    plan = plan_for(loaded.model, None, None, *(rule_of((layer,), share, score) for layer, share in layout.items()))
    ids = torch.from_numpy(prompt.ids.astype(np.int64))[None]
    with torch.no_grad(), apply(loaded.model, plan):
        cache = loaded.model(ids[:, : prefix.past]).past_key_values
        seen = [loaded.model(row, past_key_values=cache).logits for row in prefix.rows_1R.split(1, 1)]
    log_1RV = torch.cat(seen, 1).float().log_softmax(-1)
    dense_1RV = prefix.dense_1RV
    by_steps = float((dense_1RV.exp() * (dense_1RV - log_1RV)).sum(-1).mean())
    assert nothing == pytest.approx(0, abs=1e-6)
    assert by_steps > 1e-3
    assert found == pytest.approx(by_steps, rel=1e-3)


def test_layers_that_lose_most_keep_most_and_bytes_are_what_was_asked_for():
    layers, damage = (0, 1, 3, 4), np.zeros((4, len(eviction_search._SHARES)))
    damage[2] = np.linspace(0.1, 2.0, damage.shape[1])
    damage[3] = np.linspace(0.001, 0.002, damage.shape[1])
    options = settled()
    layout = allocated(layers, damage, options, 8192)
    assert layout.get(3, 1.0) > max(layout[0], layout[1])
    for found in (layout, *by_hand(layers, options.retain, 8192).values()):
        assert 0.3 < eviction_search._spent(layers, found, 8192) <= 0.4 + 1e-3
    with pytest.raises(UsageError, match="--retain of at least"):
        allocated(layers, damage, options.but(retain=0.02), LENGTH)


@pytest.mark.parametrize("seed", range(20))
def test_all_bytes_are_spent_where_most_damages_are_none(seed):
    generator = np.random.default_rng(seed)
    shape = (int(generator.integers(2, 33)), len(eviction_search._SHARES))
    damage = np.sort(generator.random(shape), 1) * (generator.random(shape) < generator.uniform(0.0, 0.6))
    layers, retain, length = range(shape[0]), float(generator.uniform(0.1, 0.95)), int(generator.integers(2048, 131072))
    layout = allocated(layers, damage, settled().but(retain=retain), length)
    assert retain - 0.01 < eviction_search._spent(layers, layout, length) <= retain
    rules = rules_of(SimpleNamespace(full_layers=tuple(layers), context_length=length), layout)
    assert all(rule.keep == "all" or rule.kept_tokens(length) < length for rule in rules)
    assert sorted(layer for rule in rules for layer in rule.layers) == list(layers)
    least = {layer: float(generator.choice(eviction_search._SHARES)) for layer in layers}
    more = filled(layers, least, retain, length)
    if eviction_search._spent(layers, least, length) <= retain:
        assert all(more.get(layer, 1.0) >= share for layer, share in least.items())
        kept = [more[layer] / least[layer] for layer in more]
        assert kept == pytest.approx([kept[0]] * len(kept))
    else:
        assert more == least


def test_a_share_that_keeps_all_up_to_the_context_is_no_rule():
    info = loaded_tiny().info
    layouts = (
        dict.fromkeys(info.full_layers, 0.99996),
        by_hand(info.full_layers, 0.8, info.context_length)["as a pyramid"],
    )
    for layout in layouts:
        rules = rules_of(info, layout)
        assert rules[0].keep == "all"
        Plan(status="unverified", model=info, kv_cache=rules)


@pytest.mark.parametrize("retain", [0.3, 0.5, 0.7])
def test_for_vllm_layers_that_lose_least_drop_in_few_groups_that_fit_with_their_padding(retain):
    generator, layers = np.random.default_rng(0), tuple(range(32))
    damage = np.sort(generator.random((32, len(eviction_search._SHARES))), 1)
    found = in_few_groups(layers, damage, settled(few_groups=True).but(retain=retain), 8192)
    assert 1 < len(found) <= 4
    for name, layout in found.items():
        (share,), few = set(layout.values()), len(layout)
        size = min(few, 32 - few) or few
        groups = -(-few // size), -(-(32 - few) // size)
        kept = rule_of((0,), share).kept_tokens(8192) / 8192
        assert sum(groups) <= 12
        assert size * (groups[0] * kept + groups[1]) <= retain * 32 + 0.1
        slot = {share: number for number, share in enumerate(eviction_search._SHARES)}.get(share)
        if slot is not None:
            assert damage[list(layout), slot].max() <= np.delete(damage[:, slot], list(layout)).min(initial=2.0), name


def test_a_layer_that_others_stand_in_for_is_dear_only_beside_them():
    """Layers 0 and 1 hold the same: one of them may go, not both."""

    def mean(runs):
        return np.array([1.0 - min(1.0, run.get(0, 1.0) + run.get(1, 1.0)) + 0.3 * (2 in run) for run in runs])

    alone, beside = (eviction_search.damage_beside(base, (0, 1, 2), mean) for base in ({}, {0: 0.02, 2: 0.5}))
    assert alone[:2].max() == 0
    assert beside[1].max() > 0.9
    assert beside[2].max() == pytest.approx(0.3)


def test_rules_name_every_full_layer_once(loaded):
    rules = rules_of(loaded.info, {0: 0.25, 2: 0.25})
    assert rules == (Eviction(layers=(1,), keep="all"), rule_of((0, 2), 0.25))


def test_a_plan_keeps_its_share_of_bytes_is_verified_as_decode_and_says_what_else_was_tried(loaded):
    result = compile_plan(job_of(loaded, quick_options(retain=0.4, verify="small")))
    plan = result.plan
    kept = [plan.evicting[layer].kept_tokens(LENGTH) if layer in plan.evicting else LENGTH for layer in range(3)]
    assert 0.2 < sum(kept) / (3 * LENGTH) <= 0.4 + 1e-3
    assert plan.decode is None
    assert plan.quality is not None
    assert plan.provenance.settings["retain"] == 0.4
    (told,) = (line for line in result.remarks if "layouts" in line)
    taken, others = told.split(" nats ")
    assert all(f"{name} " in others or f'"{name}"' in taken for name in ("by damage", "by damage alone", "evenly"))


def test_few_groups_go_with_a_share_to_keep():
    assert PlanOptions(retain=0.3, few_groups=True).few_groups
