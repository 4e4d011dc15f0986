"""Plan file, schema version 1: the whole plan, and the names of its parts in one place."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, model_validator

from sparsekv.plans.budget import Budget, fraction, tokens
from sparsekv.plans.decode import DecodeBucket, DecodePlan, HeadMap, Offload, Segment
from sparsekv.plans.fit import check_fit
from sparsekv.plans.layers import LayerSet, format_ids, parse_ids
from sparsekv.plans.model import AttentionGroup, Fingerprint, ModelInfo
from sparsekv.plans.parts import Digest, ExactInt, FieldError, JsonObject, Part
from sparsekv.plans.patterns import Adaptive, AShape, BlockSparse, Dense, Pattern, TileShape, VerticalSlash
from sparsekv.plans.prefill import HeadGroup, PrefillBucket, PrefillPlan, Reuse
from sparsekv.plans.records import (
    Cost,
    Estimate,
    Measurement,
    Prediction,
    Provenance,
    Quality,
    Retention,
    Score,
    Target,
)

KIND = "sparsekv.plan"
SCHEMA_VERSION = 1

Status = Literal["imported", "unverified", "verified"]


class Plan(Part):
    """One plan: a model, what each phase computes of it, what that was measured to cost and to keep.

    A phase that is absent runs dense. `integrity` is set by `sign`; the writer always signs.
    """

    kind: Literal["sparsekv.plan"] = "sparsekv.plan"
    schema_version: Annotated[Literal[1], ExactInt] = 1
    status: Status
    model: ModelInfo
    targets: tuple[Target, ...] = ()
    prefill: PrefillPlan | None = None
    decode: DecodePlan | None = None
    kv_cache: Annotated[tuple[Retention, ...], Field(min_length=1)] | None = None
    quality: Quality | None = None
    cost: Cost | None = None
    provenance: Provenance = Field(default_factory=Provenance)
    extensions: JsonObject = Field(default_factory=dict)
    integrity: Digest | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        check_fit(self.model, self.prefill, self.decode, self.kv_cache or ())
        if self.status == "verified" and self.quality is None:
            raise FieldError("expected a measured quality in a verified plan, found none", "status")
        return self


def to_data(part: BaseModel) -> dict[str, Any]:
    """`part` as plain JSON data in field order: what the writer writes and integrity is computed over."""
    return part.model_dump(mode="json")


__all__ = [
    "KIND",
    "SCHEMA_VERSION",
    "AShape",
    "Adaptive",
    "AttentionGroup",
    "BlockSparse",
    "Budget",
    "Cost",
    "DecodeBucket",
    "DecodePlan",
    "Dense",
    "Estimate",
    "Fingerprint",
    "HeadGroup",
    "HeadMap",
    "LayerSet",
    "Measurement",
    "ModelInfo",
    "Offload",
    "Pattern",
    "Plan",
    "Prediction",
    "PrefillBucket",
    "PrefillPlan",
    "Provenance",
    "Quality",
    "Retention",
    "Reuse",
    "Score",
    "Segment",
    "Status",
    "Target",
    "TileShape",
    "VerticalSlash",
    "format_ids",
    "fraction",
    "parse_ids",
    "to_data",
    "tokens",
]
