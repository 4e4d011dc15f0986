"""The exact assignment of filter layers against brute force."""

from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsekv.planner.filter_layers import Assignment, SegmentProblem, solve_segments


def brute_force(problem: SegmentProblem) -> tuple[int, float]:
    """Cost and loss of the best of all assignments: each layer dense, sparse, or a filter."""
    best = (np.iinfo(np.int64).max, np.inf)
    for plan in product(("dense", "sparse", "filter"), repeat=len(problem.dense_ns)):
        cost, loss, filter_ = 0, 0.0, None
        for layer, action in enumerate(plan):
            if action == "sparse":
                cost += int(problem.sparse_ns[layer])
                loss += np.inf if filter_ is None else float(problem.loss[layer, filter_])
            else:
                cost += int(problem.dense_ns[layer])
                if action != "dense":
                    cost += int(problem.choose_ns[layer])
                    filter_ = layer
        if loss <= problem.most_loss:
            best = min(best, (cost, loss))
    return best


def value_of(problem: SegmentProblem, found: Assignment) -> tuple[int, float]:
    """Cost and loss of an assignment, from its segments alone."""
    cost, loss = int(problem.dense_ns.sum()), 0.0
    for segment in found.segments:
        cost += int(problem.choose_ns[segment.filter])
        for layer in segment.layers:
            cost += int(problem.sparse_ns[layer] - problem.dense_ns[layer])
            loss += float(problem.loss[layer, segment.filter])
    return cost, loss


@st.composite
def problems(draw: st.DrawFn) -> SegmentProblem:
    layers = draw(st.integers(2, 6))
    prices = st.integers(0, 50)
    losses = st.one_of(st.floats(0, 1), st.just(np.inf))
    loss = np.full((layers, layers), np.inf)
    for j, i in product(range(layers), repeat=2):
        if i < j:
            loss[j, i] = draw(losses)
    arrays = [np.array(draw(st.lists(prices, min_size=layers, max_size=layers)), np.int64) for _ in range(3)]
    return SegmentProblem(*arrays, loss, draw(st.floats(0, 2)))


@settings(max_examples=150, deadline=None)
@given(problems())
def test_no_assignment_is_cheaper_than_the_one_found_whose_segments_cost_as_much(problem: SegmentProblem) -> None:
    found = solve_segments(problem)
    cost, loss = brute_force(problem)
    assert found.loss == pytest.approx(loss)
    assert found.loss <= problem.most_loss
    # A filter that no layer uses is dropped from the segments; it is only ever taken where choosing is free.
    assert value_of(problem, found) == (cost, pytest.approx(loss))


def test_an_80_layer_model_is_solved_in_time() -> None:
    rng = np.random.default_rng(0)
    loss = rng.random((80, 80)) * 0.01
    full = np.full(80, 100_000), np.full(80, 20_000), np.full(80, 30_000)
    found = solve_segments(SegmentProblem(*full, loss, 0.1))
    assert found.segments
    assert found.loss <= 0.1
