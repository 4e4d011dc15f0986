"""What a plan may say. Each rejected case is one change to a plan that is sound without it."""

from __future__ import annotations

import copy
from typing import Any

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
REMOVED = object()


def few(tokens: int) -> Segment:
    return Segment(filter=0, layers=(1,), budget=DecodeBudget(tokens=tokens), recent=128)


def changed(path: tuple[str | int, ...], value: Any) -> dict[str, Any]:
    data = copy.deepcopy(FULL)
    place: Any = data
    for step in path[:-1]:
        place = place[step]
    if value is REMOVED:
        del place[path[-1]]
    else:
        place[path[-1]] = value
    return data


BUCKET = ("prefill", "lengths", 1)
GROUP = (*BUCKET, "heads", 0)
SEGMENTS = ("decode", "lengths", 1, "segments")
A_SHAPE = {"pattern": "a_shape", "sink": {"tokens": 1}, "window": {"tokens": 1}}

REJECTED = {
    "unknown field at the top": (("surprise",), 1, "surprise"),
    "unknown field in a record": (("model", "surprise"), 1, "surprise"),
    "unknown field of a pattern": ((*GROUP, "keep"), {"tokens": 1}, "keep"),
    "unknown pattern": ((*GROUP, "pattern"), "zigzag", "vertical_slash"),
    "no pattern": ((*GROUP, "pattern"), REMOVED, "pattern"),
    "a nested pattern": ((*GROUP, "pattern"), dict(A_SHAPE), "pattern"),
    "unknown status": (("status",), "perfect", "imported"),
    "verified without quality": (("quality",), REMOVED, "quality"),
    "an empty quality": (("quality",), {}, "quality"),
    "a length measured twice": (
        ("quality", "lengths"),
        FULL["quality"]["lengths"][:1] * 2,
        "8192",
    ),
    "a length predicted twice": (("cost", "lengths"), FULL["cost"]["lengths"] * 2, "32768"),
    "an empty cache plan": (("kv_cache",), [], "at least 1"),
    "another kind": (("kind",), "sparsekv.profile", "sparsekv.plan"),
    "boolean for an integer": (("model", "attention", 0, "heads"), True, "integer"),
    "text for an integer": (("model", "attention", 0, "heads"), "4", "integer"),
    "float for an integer": (("model", "attention", 0, "heads"), 4.0, "integer"),
    "integer for a boolean": (("prefill", "lengths", 0, "dense"), 1, "boolean"),
    "text for a boolean": (("prefill", "lengths", 0, "dense"), "yes", "boolean"),
    "boolean for a number": (("quality", "lengths", 0, "density"), True, "number"),
    "text for a number": (("quality", "lengths", 0, "density"), "0.5", "number"),
    "integer for text": (("model", "id"), 5, "string"),
    "empty text": (("model", "id"), "", "at least 1"),
    "control characters in a name": (("model", "id"), "a\x1b[31mb", "pattern"),
    "float schema version": (("schema_version",), 1.0, "integer"),
    "boolean schema version": (("schema_version",), True, "integer"),
    "tile of 32": (("prefill", "tile", "query"), 32, "64 or 128"),
    "tile of 64.0": (("prefill", "tile", "key"), 64.0, "integer"),
    "negative budget": ((*GROUP, "sink"), {"tokens": -1}, "to 0"),
    "nan budget": ((*GROUP, "sink"), {"fraction": float("nan")}, "finite"),
    "infinite budget": ((*GROUP, "sink"), {"fraction": float("inf")}, "finite"),
    "zero fraction": ((*GROUP, "sink"), {"fraction": 0.0}, "greater than 0"),
    "fraction above one": ((*GROUP, "sink"), {"fraction": 1.5}, "to 1"),
    "two budgets in one": ((*GROUP, "sink"), {"tokens": 5, "fraction": 0.5}, "exactly one"),
    "an empty budget": ((*GROUP, "sink"), {}, "exactly one"),
    "a bare number as budget": ((*GROUP, "sink"), 128, "Budget"),
    "vertical_slash without a bound": ((*BUCKET, "heads", 1, "max_tiles"), REMOVED, "required"),
    "overlapping heads": ((*BUCKET, "heads", 1, "heads"), "1-2", "heads 1 of layer 0 again"),
    "head out of range": ((*GROUP, "heads"), "0-1,4", "heads 0 to 3 of layer 0"),
    "layer out of range": ((*GROUP, "layer"), 9, "layers 0 to 8"),
    "pattern on a linear layer": ((*GROUP, "layer"), 8, "linear"),
    "huge layer": ((*GROUP, "layer"), 10**30, "1023"),
    "heads backwards": ((*GROUP, "heads"), "1-0", "ascending"),
    "heads twice": ((*GROUP, "heads"), "0-1,1", "once"),
    "no heads": ((*GROUP, "heads"), [], "at least one"),
    "negative head": ((*GROUP, "heads"), [-1], "from 0"),
    "heads beyond any model": ((*GROUP, "heads"), "0-99999", "0-99999"),
    "heads as boolean": ((*GROUP, "heads"), True, "ids"),
    "heads as words": ((*GROUP, "heads"), "all", "ids"),
    "dense and heads": ((*BUCKET, "dense"), True, "exactly one"),
    "same_as and heads": ((*BUCKET, "same_as"), 12288, "exactly one"),
    "neither dense nor heads": (("prefill", "lengths", 0, "dense"), False, "exactly one"),
    "same_as of no bucket": (("prefill", "lengths", 2, "same_as"), 4096, "12288, 131072"),
    "same_as without a target": (("prefill", "lengths", 1), {"up_to": 131072, "same_as": 131072}, "of its own"),
    "lengths descending": (("prefill", "lengths", 0, "up_to"), 200000, "ascending"),
    "lengths equal": (("prefill", "lengths", 0, "up_to"), 131072, "ascending"),
    "last length closed": (("prefill", "lengths", 2, "up_to"), 262144, "up_to: null"),
    "two open lengths": (("prefill", "lengths", 0, "up_to"), None, "last bucket only"),
    "no lengths": (("prefill", "lengths"), [], "last bucket"),
    "up_to left out": (("prefill", "lengths", 0, "up_to"), REMOVED, "required"),
    "zero length": (("prefill", "lengths", 0, "up_to"), 0, "to 1"),
    "length with a wrong suffix": (("prefill", "lengths", 0, "up_to"), "12g", "32k"),
    "groups with a gap": (("model", "attention", 1, "layers"), "9", "no group for 5"),
    "groups that overlap": (("model", "attention", 1, "layers"), "4-5", "layers 4 in two"),
    "no groups": (("model", "attention"), [], "no group for 0"),
    "sliding without window": (("model", "attention", 1, "window"), REMOVED, "window"),
    "full with window": (("model", "attention", 0, "window"), 5, "window"),
    "uneven groups": (("model", "attention", 0, "kv_heads"), 3, "multiple"),
    "a bad digest": (("model", "fingerprint", "architecture"), "abc", "pattern"),
    "filter after its segment": ((*SEGMENTS, 0, "filter"), 3, "before"),
    "filter inside a segment": ((*SEGMENTS, 1, "filter"), 2, "outside"),
    "segments descending": (
        (*SEGMENTS, 0),
        {"filter": 3, "layers": "7", "budget": {"tokens": 1}, "recent": 1},
        "ascending",
    ),
    "segments that share a layer": ((*SEGMENTS, 0, "layers"), "2,4", "share"),
    "segment out of range": ((*SEGMENTS, 2, "layers"), "9", "layers 0 to 8"),
    "segment on a linear layer": ((*SEGMENTS, 2, "layers"), "7-8", "linear"),
    "segment without recent": ((*SEGMENTS, 0, "recent"), REMOVED, "sparsekv"),
    "segment without recent tokens": ((*SEGMENTS, 0, "recent"), 0, "to 1"),
    "fraction without a bound": ((*SEGMENTS, 0, "budget"), {"fraction": 0.1}, "at_most: n"),
    "tokens with a bound": ((*SEGMENTS, 0, "budget"), {"tokens": 9, "at_most": 9}, "at_most: n"),
    "sparse lengths with other filters": (
        ("decode", "lengths", 0),
        {"up_to": 32768, "segments": [{"filter": 1, "layers": "2", "budget": {"tokens": 1}, "recent": 1}]},
        "differ",
    ),
    "segment without budget": ((*SEGMENTS, 0, "budget"), REMOVED, "required"),
    "window of zero": ((*SEGMENTS, 0, "window"), 0, "to 1"),
    "unknown selector": ((*SEGMENTS, 0, "selector"), "first", "uniform"),
    "head map of another layer": ((*SEGMENTS, 1, "heads"), {"4": [0, 1]}, "4-5"),
    "head map with a layer twice": ((*SEGMENTS, 1, "heads"), {"04": [0, 1], 4: [1, 0], "5": [0, 1]}, "integer"),
    "head map with a bad key": ((*SEGMENTS, 1, "heads"), {"x": [0, 1], "5": [0, 1]}, "integer"),
    "head map too short": ((*SEGMENTS, 1, "heads"), {"4": [0], "5": [0, 1]}, "2 entries"),
    "head map out of range": ((*SEGMENTS, 1, "heads"), {"4": [0, 2], "5": [0, 1]}, "of the 2"),
    "per_kv_head across shapes": ((*SEGMENTS, 2, "heads"), "per_kv_head", "entries"),
    "dense and segments": (("decode", "lengths", 1, "dense"), True, "exactly one"),
    "neither dense nor segments": (("decode", "lengths", 0, "dense"), False, "exactly one"),
    "offload of an always dense layer": (("decode", "offload", "layers"), "0,2", "found 0 always dense"),
    "retention of a layer twice": (("kv_cache", 1, "layers"), "0-1", "second for 1"),
    "retention out of range": (("kv_cache", 1, "layers"), "0,9", "layers 0 to 8"),
    "retention of a linear layer": (("kv_cache", 1, "layers"), "8", "linear"),
    "retention in a layer with a window": (("kv_cache", 1, "layers"), "5", "5 with a window"),
    "retention of keys that others read": (("kv_cache", 1, "layers"), "3", "no other layer to drop tokens, found 3"),
    "retention without keys": (("kv_cache", 1, "layers"), "0,6", "no other layer to drop tokens, found 6"),
    "keys of a later layer": (("model", "attention", 2, "keys_of"), 7, "earlier layer of the same shape"),
    "keys of another shape": (("model", "attention", 2, "keys_of"), 5, "earlier layer of the same shape"),
    "keys of a layer that is not there": (("model", "attention", 2, "keys_of"), 99, "found 99"),
    "retention in a layer of a segment": (("kv_cache", 1, "layers"), "0,7", "found 7 in one"),
    "retention under offload": (("kv_cache", 1, "layers"), "0,2", "not offloaded"),
    "retention without its rule": (("kv_cache", 1, "observe"), REMOVED, "observe"),
    "keep all with a rule": (("kv_cache", 0, "sink"), 4, "keep: all"),
    "keep the whole context": (("kv_cache", 1, "keep"), {"tokens": 131072 - 132}, "131072"),
    "keep a fraction that is everything": (("kv_cache", 1, "keep"), {"fraction": 1.0}, "131072"),
    "keep nothing": (
        ("kv_cache", 1),
        FULL["kv_cache"][1] | {"keep": {"tokens": 0}, "sink": 0, "recent": 0},
        "keeps nothing",
    ),
    "no prompts": (("quality", "cells", 0, "prompts"), 0, "to 1"),
    "a path as the model": (("model", "id"), "../model", "'../model'"),
    "a path as source": (("provenance", "source"), "/home/someone/plan.json", "path"),
    "nan in extensions": (("extensions", "x"), {"y": [float("nan")]}, "finite numbers"),
    "an object in extensions": (("extensions", "x"), {1, 2}, "JSON data"),
    "a huge integer in extensions": (("extensions", "x"), 1 << 63, "JSON data"),
    "half a surrogate pair": (("extensions", "x"), "\ud800", "UTF-8"),
}


@pytest.mark.parametrize("case", REJECTED, ids=str)
def test_a_plan_is_refused_for(case: str) -> None:
    path, value, said = REJECTED[case]
    with pytest.raises(ValidationError) as caught:
        Plan.model_validate(changed(path, value))
    assert said in str(caught.value)


def test_nesting_in_extensions_is_bounded_below_what_the_reader_takes() -> None:
    deep: Any = 1
    for _ in range(20):
        deep = [deep]
    with pytest.raises(ValidationError, match="levels of nesting"):
        Plan.model_validate(changed(("extensions", "x"), deep))


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
