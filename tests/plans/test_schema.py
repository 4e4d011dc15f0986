"""What a plan may say; what it may not is in test_refusals.py."""

from __future__ import annotations

import json

import pytest
from plans_samples import full_plan, small_plan
from pydantic import ValidationError

from sparsekv.plans.patterns import AShape, BlockSparse, Budget, Dense, TileShape, tokens
from sparsekv.plans.phases import (
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    HeadGroup,
    PrefillBucket,
    PrefillPlan,
    Segment,
    first_sparse,
)
from sparsekv.plans.schema import Plan, to_data

FULL = to_data(full_plan())


def few(tokens: int) -> Segment:
    return Segment(filter=0, layers=(1,), budget=DecodeBudget(tokens=tokens), recent=128)


DEEP = json.loads("[" * 20 + "]" * 20)


@pytest.mark.parametrize(
    ("value", "said"), [(DEEP, "levels of nesting"), ([float("nan")], "finite numbers"), ({1, 2}, "JSON data")]
)
def test_extensions_hold_data_that_a_reader_takes(value: object, said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        Plan.model_validate(FULL | {"extensions": {"x": value}})


def test_data_of_a_plan_makes_the_same_plan() -> None:
    assert Plan.model_validate(FULL) == full_plan()


def test_plans_cannot_be_changed_in_place() -> None:
    with pytest.raises(ValidationError):
        small_plan().status = "verified"  # type: ignore[misc]


@pytest.mark.parametrize("written", ["0-1,3", "3,0-1", "0,1,3", " 0 - 1, 3", [3, 0, 1], (0, 1, 3)])
def test_sets_of_heads_have_one_form(written: object) -> None:
    group = HeadGroup.model_validate({"layer": 0, "heads": written, "pattern": "dense"})
    assert group.heads == (0, 1, 3)
    assert to_data(group) == {"layer": 0, "heads": "0-1,3", "pattern": "dense"}


def test_floats_are_rounded_when_they_enter() -> None:
    assert Budget(fraction=1 / 3).fraction == 0.333333
    assert Budget(fraction=1).fraction == 1.0


class TestPrefill:
    static = AShape(sink=tokens(64), window=tokens(256))
    keep = BlockSparse(keep=tokens(512))

    def test_equal_patterns_of_a_layer_are_one_group_in_one_order(self) -> None:
        groups = [
            HeadGroup(layer=1, heads=(0,), pattern=self.keep),
            HeadGroup(layer=0, heads=(2,), pattern=self.static),
            HeadGroup(layer=0, heads=(1,), pattern=self.keep),
            HeadGroup(layer=0, heads=(0,), pattern=self.static),
        ]
        bucket = PrefillBucket(up_to=None, heads=tuple(groups))
        assert [(g.layer, g.heads) for g in bucket.heads] == [(0, (0, 2)), (0, (1,)), (1, (0,))]
        assert bucket == PrefillBucket(up_to=None, heads=tuple(reversed(groups)))

    def test_heads_that_no_group_names_are_dense(self) -> None:
        bucket = PrefillBucket(up_to=None, heads=(HeadGroup(layer=3, heads=(1,), pattern=self.static),))
        assert bucket.patterns(3, 3) == (Dense(), self.static, Dense())
        assert bucket.patterns(0, 2) == (Dense(), Dense())

    @pytest.mark.parametrize(("length", "up_to"), [(1, 1024), (1024, 1024), (1025, 4096), (4096, 4096), (4097, 4096)])
    def test_a_length_finds_its_bucket_through_same_as(self, length: int, up_to: int) -> None:
        sparse = (HeadGroup(layer=0, heads=(0,), pattern=self.static),)
        lengths = (
            PrefillBucket(up_to=1024, dense=True),
            PrefillBucket(up_to=4096, heads=sparse),
            PrefillBucket(up_to=None, same_as=4096),
        )
        assert PrefillPlan(tile=TileShape(), lengths=lengths).bucket(length).up_to == up_to


def test_decode_lengths_find_their_bucket() -> None:
    segment = Segment(filter=0, layers=(1,), budget=DecodeBudget(tokens=1), recent=1)
    plan = DecodePlan(lengths=(DecodeBucket(up_to=8, dense=True), DecodeBucket(up_to=None, segments=(segment,))))
    assert (plan.bucket(8).dense, plan.bucket(9).dense) == (True, False)


def test_a_plan_is_dense_unless_a_bucket_is_sparse_or_tokens_are_dropped() -> None:
    bare = small_plan(prefill=None, decode=None)
    assert bare.is_dense
    assert not small_plan().is_dense
    assert not bare.model_copy(update={"kv_cache": full_plan().kv_cache}).is_dense


def test_a_model_knows_its_layers() -> None:
    model = full_plan().model
    assert model.layers == 9
    assert [model.group_of(layer).kind for layer in (4, 5, 6, 8)] == ["full", "sliding", "full", "linear"]
    with pytest.raises(IndexError, match="layer 9"):
        model.group_of(9)
    assert model.sharing == {3, 6}
    assert model.largest_head == 128


@pytest.mark.parametrize(
    ("buckets", "start"),
    [
        ([PrefillBucket(up_to=None, dense=True)], None),
        ([PrefillBucket(up_to=4096, dense=True), PrefillBucket(up_to=None, same_as=8192)], 4097),
        ([DecodeBucket(up_to=None, segments=(few(100),))], 4 + 100 + 128 + 1),
        ([DecodeBucket(up_to=200, segments=(few(100),)), DecodeBucket(up_to=None, segments=(few(10),))], 201),
        ([DecodeBucket(up_to=64, dense=True), DecodeBucket(up_to=None, dense=True)], None),
    ],
)
def test_the_first_sparse_length_is_the_least_at_which_not_everything_is_computed(buckets, start) -> None:
    assert first_sparse(buckets) == start
