"""Which layers' keys and values lie in host memory."""

import pytest
from tiny_plans import decode_plan, segment

from sparsekv.plans.patterns import tokens
from sparsekv.runtime.hf.placement import Placement, place_layers, spill_order


@pytest.mark.parametrize(
    ("asked", "expected"),
    [(None, {4, 5}), (0, set()), (1, {5}), (2, {4, 5}), (3, {4, 5, 6}), (4, {4, 5, 6, 7}), ((0, 7), {0, 7})],
)
def test_layers_go_to_the_host_as_asked_and_those_that_decode_reads_least_first(asked, expected):
    plan = decode_plan(segment(1, (4, 5, 6), 100), offload=(4, 5), hot=33)
    assert place_layers(plan, 8, asked) == Placement(frozenset(expected), tokens(33))


def test_a_filter_layer_that_attends_to_its_own_choice_reads_all_keys_and_does_not_go_before_dense_ones():
    plan = decode_plan(segment(3, (3, 5), 100), offload=(5,))
    assert place_layers(plan, 8, 2).layers == {5, 7}


def test_without_a_plan_the_last_layers_go_to_the_host():
    assert place_layers(None, 8, None).layers == frozenset()
    assert place_layers(None, 8, 3).layers == {5, 6, 7}


def test_what_the_plan_permits_goes_to_the_host_or_stays():
    plan = decode_plan(segment(1, (4, 5, 6), 100), offload=(4, 5), hot=33)
    assert place_layers(plan, 8, None, "always") == Placement(frozenset({4, 5}), tokens(33))
    assert place_layers(plan, 8, None, "never").layers == frozenset()
    assert place_layers(plan, 8, None, "auto").layers == {4, 5}


def test_layers_of_which_decode_reads_least_go_first():
    plan = decode_plan(segment(0, (1, 2), 300), segment(3, (4, 5, 6), 100), offload=(1, 2, 4, 5))
    assert spill_order(plan, 1000) == (5, 4, 2, 1)
    assert spill_order(plan, 200) == (5, 4, 2, 1)  # layers 1 and 2 attend to everything
    assert spill_order(plan, 100) == (5, 4, 2, 1)  # all of them do: the last go first
    other = decode_plan(segment(0, (1, 2), 50), segment(3, (4, 5, 6), 100), offload=(1, 2, 4, 5))
    assert spill_order(other, 1000) == (2, 1, 5, 4)
    assert spill_order(None, 1000) == spill_order(decode_plan(segment(0, (1,), 9)), 1000) == ()
