"""Plans for the tiny models, in few words."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, Pattern, TileShape, tokens
from sparsekv.plans.phases import (
    DecodeBucket,
    DecodeBudget,
    DecodePlan,
    Eviction,
    HeadGroup,
    Offload,
    PrefillBucket,
    PrefillPlan,
    Segment,
)
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.describe import config_of, describe_model
from sparsekv.runtime.model_config import heads_of_layer, linear_layers


def info_of(model: PreTrainedModel) -> ModelInfo:
    """The model's description, under a name."""
    return describe_model(model, "tests/tiny")


def plan_for(
    model: PreTrainedModel, prefill: PrefillPlan | None = None, decode: DecodePlan | None = None, *drops: Eviction
) -> Plan:
    """An unverified plan of the two phases, and of evicting layers."""
    return Plan(status="unverified", model=info_of(model), prefill=prefill, decode=decode, kv_cache=drops or None)


def drops(layers: tuple[int, ...], keep: Budget | int, **options: Any) -> Eviction:
    """Evicting layers; a whole number is a budget in tokens. Two sinks, three recent, eight generated."""
    usual = {"sink": 2, "recent": 3, "generated": 8, "score": "attention_sum", "observe": 5, "heads": "max"}
    return Eviction(layers=layers, keep=tokens(keep) if isinstance(keep, int) else keep, **usual | options)


def every_head(model: PreTrainedModel, *patterns: Pattern, tile: int = 64) -> PrefillPlan:
    """The patterns dealt out to the heads of every layer that attends in turn, at every length."""
    config: Any = config_of(model)
    groups = []
    for layer in sorted({*range(config.num_hidden_layers)} - {*linear_layers(config)}):
        for number, pattern in enumerate(patterns):
            mine = tuple(range(number, heads_of_layer(config, layer), len(patterns)))
            groups.append(HeadGroup(layer=layer, heads=mine, pattern=pattern))
    bucket = PrefillBucket(up_to=None, heads=tuple(groups))
    return PrefillPlan(tile=TileShape(query=tile, key=tile), lengths=(bucket,))


def segment(filter_layer: int, layers: tuple[int, ...], budget: DecodeBudget | int, **options: Any) -> Segment:
    """A decode segment; a whole number is a budget in tokens. Two sinks, three recent tokens."""
    spend = DecodeBudget(tokens=budget) if isinstance(budget, int) else budget
    return Segment(filter=filter_layer, layers=layers, budget=spend, **{"sink": 2, "recent": 3} | options)


def decode_plan(*segments: Segment, offload: tuple[int, ...] = (), hot: int = 16) -> DecodePlan:
    """The segments at every length."""
    moved = Offload(layers=offload, hot=tokens(hot)) if offload else None
    return DecodePlan(lengths=(DecodeBucket(up_to=None, segments=segments),), offload=moved)


EVERYTHING = DecodeBudget(fraction=1.0, at_most=1 << 20)
