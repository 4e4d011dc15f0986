"""How a plan recognises its model: one digest of what the model is, one of a sample of its weights.

The first must fit for a plan to mean anything. The second only says whether the plan's quality was measured on these
very weights: plans carry over to fine-tunes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

from pydantic import ValidationError

from sparsekv.plans.errors import PlanMismatchError
from sparsekv.plans.layers import format_ids
from sparsekv.plans.model import AttentionGroup, ModelInfo
from sparsekv.plans.schema import Plan
from sparsekv.plans.signature import canonical_json

_SHAPE = ("kind", "heads", "kv_heads", "head_dim", "window")


def architecture_fingerprint(facts: Mapping[str, Any]) -> str:
    """The digest of what a model is; `facts` is JSON data, in any order.

    Raises:
        ValueError: the facts hold NaN or an infinity.
    """
    return "sha256:" + hashlib.sha256(canonical_json(dict(facts))).hexdigest()


def weights_fingerprint(samples: Iterable[tuple[str, bytes]]) -> str:
    """The digest of named samples of weights, in any order.

    Raises:
        ValueError: a name comes twice.
    """
    by_name: dict[str, bytes] = {}
    for name, data in samples:
        if name in by_name:
            raise ValueError(f"expected each weight sampled once, found {name!r} again")
        by_name[name] = data
    state = hashlib.sha256()
    for part in chain.from_iterable((name.encode(), by_name[name]) for name in sorted(by_name)):
        state.update(len(part).to_bytes(8, "little"))  # so that no two lists of samples run into the same bytes
        state.update(part)
    return "sha256:" + state.hexdigest()


def differences(expected: ModelInfo, found: ModelInfo) -> tuple[str, ...]:
    """What differs between the model of a plan and another one, a line each; empty when the architecture fits."""
    if expected.fingerprint.architecture == found.fingerprint.architecture and _same_shapes(expected, found):
        return ()
    lines = [
        f"{name.replace('_', ' ')}: plan {getattr(expected, name)}, model {getattr(found, name)}"
        for name in ("model_type", "layers", "context_length", "rope")
        if getattr(expected, name) != getattr(found, name)
    ]
    lines += _shapes(expected, found)
    return tuple(lines) or ("architecture fingerprint: another one, in something that the plan does not name",)


def check_model(plan: Plan, found: ModelInfo, allow_mismatch: bool = False) -> list[str]:
    """What a user should be warned of before `plan` runs on `found`; empty when it is the very model.

    Raises:
        PlanMismatchError: the architecture differs and `allow_mismatch` is off, or the plan names layers or heads
            that the model does not have.
    """
    different = differences(plan.model, found)
    if different and not allow_mismatch:
        listed = "\n".join(f"  {line}" for line in different)
        raise PlanMismatchError(
            f"expected {plan.model.id}, the model of this plan, found {found.id}, which differs:\n{listed}\n"
            "Run the plan on its own model, plan this one, or go on anyway with --allow-mismatch."
        )
    if different:
        _check_fits(plan, found)
        return [f"this plan is for another architecture ({line})" for line in different]
    return _weight_warnings(plan, found)


def _same_shapes(expected: ModelInfo, found: ModelInfo) -> bool:
    # Asked even where the digests agree: a sealed plan may have been given other shapes by hand.
    return (expected.model_type, expected.layers) == (found.model_type, found.layers) and not _shapes(expected, found)


def _shapes(expected: ModelInfo, found: ModelInfo) -> list[str]:
    ours, theirs = _by_layer(expected), _by_layer(found)
    where: dict[str, list[int]] = {}
    for layer in sorted(ours.keys() & theirs.keys()):
        for name in _SHAPE:
            mine, other = getattr(ours[layer], name), getattr(theirs[layer], name)
            if mine != other:
                line = f"{name.replace('_', ' ')}: plan {mine or 'none'}, model {other or 'none'}"
                where.setdefault(line, []).append(layer)
    shared = len(ours.keys() & theirs.keys())
    return [line if len(at) == shared else f"{line} (layers {format_ids(at)})" for line, at in where.items()]


def _by_layer(model: ModelInfo) -> dict[int, AttentionGroup]:
    return {layer: group for group in model.attention for layer in group.layers}


def _check_fits(plan: Plan, found: ModelInfo) -> None:
    try:
        Plan.model_validate(dict(plan) | {"model": found})
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise PlanMismatchError(f"{found.id} cannot run this plan at all: {reason}; plan this model instead") from None


def _weight_warnings(plan: Plan, found: ModelInfo) -> list[str]:
    ours, theirs = plan.model.fingerprint.weights, found.fingerprint.weights
    if ours == theirs or theirs is None:
        return []
    if ours is None:
        return ["this plan does not say which weights it was made for; its quality was not measured on these"]
    return [
        f"{found.id} has other weights than the {plan.model.id} that this plan was made for (a fine-tune, or "
        "another --dtype?); the plan runs, but its quality was not measured on these weights: `sparsekv verify` does"
    ]
