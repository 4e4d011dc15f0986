"""What a plan says about itself: retention rules, targets, measured quality, predicted cost, provenance."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import AfterValidator, Field, model_validator

from sparsekv.plans.budget import Budget
from sparsekv.plans.layers import LayerSet
from sparsekv.plans.parts import (
    Count,
    Digest,
    FieldError,
    JsonObject,
    Length,
    Natural,
    NonNegative,
    Part,
    Positive,
    Real,
    Share,
    Text,
    in_order,
)

BackendName = Literal["flash", "triton", "cpu", "reference"]
DtypeName = Literal["bfloat16", "float16", "float32"]


class Target(Part):
    """A device that cost and crossover were measured on."""

    device: Text
    count: Count = 1
    tensor_parallel: Count = 1
    backend: BackendName
    dtype: DtypeName


class Retention(Part):
    """Which rows of the cache some layers keep: all, or the `keep` best by `score`, which is lossy.

    The first `sink` and the last `recent` tokens always stay; the score is summed over the last `observe` queries.
    """

    layers: LayerSet
    keep: Literal["all"] | Budget
    sink: Natural | None = None
    recent: Natural | None = None
    score: Literal["attention_sum"] | None = None
    observe: Positive | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Retention:
        rule = (self.sink, self.recent, self.score, self.observe)
        if self.keep == "all":
            if any(value is not None for value in rule):
                raise FieldError("expected no sink, recent, score or observe beside `keep: all`")
        elif any(value is None for value in rule):
            raise FieldError("expected sink, recent, score and observe beside a budget in `keep`")
        elif self.keep.tokens is not None and (self.sink or 0) + (self.recent or 0) > self.keep.tokens:
            raise FieldError(f"expected `keep` to hold sink and recent tokens, found {self.keep.tokens} tokens")
        return self


class Score(Part):
    """One task, dense and sparse on the same samples; `interval` is the 95% interval of sparse - dense, paired."""

    dense: NonNegative
    sparse: NonNegative
    samples: Positive
    interval: tuple[Real, Real]

    @model_validator(mode="after")
    def _ordered(self) -> Score:
        if self.interval[0] > self.interval[1]:
            raise FieldError(f"expected [low, high], found {list(self.interval)}", "interval")
        return self


class Measurement(Part):
    """Held-out prompts through the plan. `kl` is the mean divergence of next-token logits from dense, in nats."""

    lengths: Annotated[tuple[Length, ...], Field(min_length=1)]
    density: Share
    output_error: NonNegative | None = None
    kl: NonNegative | None = None
    tasks: Annotated[dict[Text, Score], AfterValidator(in_order)] = Field(default_factory=dict)


class Quality(Part):
    """What was measured for each phase alone and for both; an absent one was not measured."""

    prefill: Measurement | None = None
    decode: Measurement | None = None
    both: Measurement | None = None

    @model_validator(mode="after")
    def _not_empty(self) -> Quality:
        if self.prefill is self.decode is self.both is None:
            raise FieldError("expected a measurement of prefill, decode or both, found none")
        return self


class Estimate(Part):
    """Attention of the whole model: dense and sparse, in microseconds, and the share of tiles or tokens computed."""

    dense_us: NonNegative
    sparse_us: NonNegative
    density: Share


class Prediction(Part):
    """Predicted cost at one context length: a whole prefill, one decode step."""

    length: Length
    prefill: Estimate | None = None
    decode: Estimate | None = None


class Cost(Part):
    """Predicted from the profile and the device-cost file, never timed while the plan is written."""

    device: Text
    backend: BackendName
    lengths: tuple[Prediction, ...] = ()


class Provenance(Part):
    """Where a plan comes from. No paths and no times: two compiles of the same inputs give the same bytes.

    `profile`, `device_cost` and `calibration` are digests of those inputs; `source` names what an import was made of.
    """

    versions: Annotated[dict[Text, Text], AfterValidator(in_order)] = Field(default_factory=dict)
    command: Text | None = None
    preset: Text | None = None
    seed: Natural | None = None
    calibration: Digest | None = None
    profile: Digest | None = None
    device_cost: Digest | None = None
    source: Text | None = None
    settings: JsonObject = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_paths(self) -> Provenance:
        if self.source is not None and self.source.startswith(("/", "~", "\\", "file:")):
            raise FieldError(f"expected a name that means the same elsewhere, found the path {self.source!r}", "source")
        return self
