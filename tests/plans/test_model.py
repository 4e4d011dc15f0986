"""When a plan is of another model, and what the user is told."""

from __future__ import annotations

import pytest
from plans_samples import digest_of, model_info, small_plan

from sparsekv.plans.errors import PlanMismatchError
from sparsekv.plans.model import (
    AttentionGroup,
    Fingerprint,
    architecture_fingerprint,
    differences,
    same_architecture,
    weights_fingerprint,
)
from sparsekv.plans.schema import check_model

OTHER = Fingerprint(architecture=digest_of("f"), weights=digest_of("b"))
OTHER_WEIGHTS = Fingerprint(architecture=digest_of("a"), weights=digest_of("e"))
DIGEST = architecture_fingerprint({"a": 1}, {"f": 1})
OLD = f"sha256:{DIGEST.split(':')[2]:0<64}"
UNKNOWN_WEIGHTS = Fingerprint(architecture=digest_of("a"))


def test_the_architecture_digest_depends_on_facts_not_on_order() -> None:
    one = architecture_fingerprint({"a": 1, "b": [1, 2], "c": {"d": 1.5, "e": None}}, {"f": 1})
    assert one == architecture_fingerprint({"c": {"e": None, "d": 1.5}, "b": [1, 2], "a": 1}, {"f": 1})
    assert one != architecture_fingerprint({"a": 2, "b": [1, 2], "c": {"d": 1.5, "e": None}}, {"f": 1})
    with pytest.raises(ValueError, match="not JSON compliant"):
        architecture_fingerprint({"a": float("nan")}, {})


@pytest.mark.parametrize("other", [DIGEST, OLD], ids=["this version", "the version before"])
def test_digests_of_two_versions_are_compared_by_what_both_cover(other: str) -> None:
    assert same_architecture(DIGEST, other)
    assert not same_architecture(architecture_fingerprint({"a": 2}, {"f": 1}), other)
    assert same_architecture(architecture_fingerprint({"a": 1}, {"f": 2}), other) == (other == OLD)


def test_digests_of_unknown_kinds_are_of_other_architectures() -> None:
    assert not same_architecture(DIGEST, OLD.replace("sha256", "sha256-all"))
    assert not same_architecture(OLD, OLD.replace("sha256", "sha256-all"))


def test_the_weights_digest_depends_on_names_and_bytes_not_on_order() -> None:
    one = weights_fingerprint([("a", b"12"), ("b", b"3")])
    assert one == weights_fingerprint(iter([("b", b"3"), ("a", b"12")]))
    others = [[("a", b"1"), ("b", b"23")], [("a", b"12"), ("c", b"3")], [("a", b"12")], [("a1", b"2"), ("b", b"3")], []]
    assert len({one, *map(weights_fingerprint, others)}) == 6
    with pytest.raises(ValueError, match="'a' again"):
        weights_fingerprint([("a", b"1"), ("a", b"1")])


def test_another_model_is_refused_with_what_differs() -> None:
    found = model_info(layers=32, heads=32, kv_heads=8, model_type="qwen3", id="other/model", fingerprint=OTHER)
    with pytest.raises(PlanMismatchError) as caught:
        check_model(small_plan(), found)
    message = str(caught.value)
    assert caught.value.exit_code == 3
    for line in (
        "example/model",
        "qwen3",
        "layers: plan 12, model 32",
        "  heads: plan 4, model 32\n",
        "kv heads: plan 2, model 8",
    ):
        assert line in message
    assert message.endswith("\nRun the plan on its own model, or plan this one.")


def test_differences_of_some_layers_name_them() -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    groups = (
        AttentionGroup(layers=(0, 2, 3), kind="full", **shape),
        AttentionGroup(layers=(1, 4, 5, 6, 7, 8, 9, 10, 11), kind="sliding", window=512, **shape),
    )
    found = differences(model_info(), model_info(attention=groups, fingerprint=OTHER))
    assert ["1,4-11" in line for line in found] == [True, True]


def test_linear_layers_that_the_plan_does_not_name_are_refused() -> None:
    shape = {"heads": 4, "kv_heads": 2, "head_dim": 64}
    groups = (
        AttentionGroup(layers=(0, 2, 3), kind="full", **shape),
        AttentionGroup(layers=(1, 4, 5, 6, 7, 8, 9, 10, 11), kind="linear", **shape),
    )
    with pytest.raises(PlanMismatchError, match="1,4-11"):
        check_model(small_plan(), model_info().model_copy(update={"attention": groups}))


def test_rope_and_context_are_named_when_the_digest_differs() -> None:
    found = model_info(rope={"rope_type": "default", "rope_theta": 5e5}, context_length=8192, fingerprint=OTHER)
    lines = differences(model_info(), found)
    assert lines[0] == "context length: plan 131072, model 8192"
    assert "500000.0" in lines[1]


def test_shapes_edited_by_hand_are_found_although_the_digests_agree() -> None:
    assert differences(model_info(), model_info(heads=8)) == ("heads: plan 4, model 8",)
    assert differences(model_info(), model_info(layers=13)) == ("layers: plan 12, model 13",)


def test_other_weights_only_warn() -> None:
    warnings = check_model(small_plan(), model_info(id="my/tune", fingerprint=OTHER_WEIGHTS))
    assert len(warnings) == 1
    assert "my/tune" in warnings[0]
    assert "float32 checkpoint in float16" in warnings[0]


def test_a_weights_digest_of_another_kind_says_so_and_does_not_claim_other_weights() -> None:
    newer = model_info(fingerprint=Fingerprint(architecture=digest_of("a"), weights=weights_fingerprint([])))
    (warning,) = check_model(small_plan(), newer)
    assert "fingerprint of another kind" in warning
    assert "sparsekv verify" in warning


def test_weights_that_nobody_knows_are_said_so() -> None:
    plan = small_plan(model=model_info(fingerprint=UNKNOWN_WEIGHTS))
    assert "weights" in check_model(plan, model_info())[0]
    assert check_model(small_plan(), model_info(fingerprint=UNKNOWN_WEIGHTS)) == []
