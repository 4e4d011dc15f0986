"""Plan file, schema version 1: the plan, its records, its JSON Schema, and what this version executes of it."""

from __future__ import annotations

from functools import partial
from itertools import chain, pairwise
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, BaseModel, Field, ValidationError, model_validator

from sparsekv.plans.errors import PlanMismatchError
from sparsekv.plans.model import ModelInfo, check_fit, check_sharing, differences
from sparsekv.plans.phases import DecodeBucket, DecodePlan, Eviction, IndexSharing, PrefillBucket, PrefillPlan
from sparsekv.plans.quality import Quality, each_once
from sparsekv.plans.types import (
    Count,
    Digest,
    ExactInt,
    FieldError,
    Index,
    JsonObject,
    KVDtype,
    Length,
    Natural,
    NonNegative,
    Part,
    Positive,
    Share,
    Text,
    format_length,
    in_order,
    rounded,
)

KIND = "sparsekv.plan"
SCHEMA_FILE = "sparsekv-plan-v1.schema.json"
"""The schema file that editors look for beside a plan; `sparsekv schema` prints it."""
NOTHING_SPARSE = "nothing in it is sparse, so that there is nothing to verify"

Status = Literal["imported", "unverified", "verified"]
BackendName = Literal["flash", "triton", "cpu", "reference"]
DtypeName = Literal["bfloat16", "float16", "float32"]
HostName = Literal["transformers", "vllm"]
PhaseName = Literal["prefill", "decode", "both"]


class Target(Part):
    """A device that the plan was measured on, and the program that ran the model there.

    `kv_dtype` is that of keys and values in a cache, where it is not the model's. Older plans name the host that their
    crossovers were measured for, and its `chunk`: most tokens of a prompt that it prefills at once.
    """

    device: Text
    count: Count = 1
    tensor_parallel: Count = 1
    host: HostName = "transformers"
    backend: BackendName
    dtype: DtypeName
    chunk: Length | None = None
    kv_dtype: Literal["fp8"] | None = None


class Estimate(Part):
    """Attention of the whole model: dense and sparse, in microseconds, and the share of tiles or tokens computed."""

    dense_us: NonNegative
    sparse_us: NonNegative
    density: Share

    @property
    def gain(self) -> float:
        return self.dense_us / max(self.sparse_us, 1e-9)


CountedShare = Annotated[float, Field(strict=True, ge=0.0, le=1.0), AfterValidator(partial(rounded, digits=3))]


class LayerCounts(Part):
    """Whole tiles and single columns that each head of a layer computed on calibration prompts, as shares of its causal
    tiles; a dense head has a share of 1."""

    layer: Index
    tiles: tuple[CountedShare, ...]
    columns: tuple[CountedShare, ...]

    @model_validator(mode="after")
    def _consistent(self) -> LayerCounts:
        if len(self.tiles) != len(self.columns):
            raise FieldError(f"expected an entry a head in both, found {len(self.tiles)} and {len(self.columns)}")
        return self


class Prediction(Part):
    """Predicted cost at one context length: a whole prefill, one decode step.

    `computed` has the counts of layers with sparse heads, the same on every device.
    """

    length: Length
    prefill: Estimate | None = None
    computed: tuple[LayerCounts, ...] = ()
    decode: Estimate | None = None


class Cost(Part):
    """Predicted from the profile and the prices of a device, never timed while the plan is written."""

    device: Text
    backend: BackendName
    lengths: Annotated[tuple[Prediction, ...], AfterValidator(each_once)] = ()

    def at(self, length: int) -> Prediction | None:
        return next((entry for entry in self.lengths if entry.length == length), None)


class Provenance(Part):
    """Says where a plan comes from. No paths and no times: two compiles of the same inputs give the same bytes.

    `profile`, `device_cost` and `calibration` are digests of those inputs; `mix` tells how many calibration prompts a
    length there were of each task at most; `prompts` is the digest of the caller's that were set aside, to verify on;
    `source` names what an import was made of.
    """

    versions: Annotated[dict[Text, Text], AfterValidator(in_order)] = Field(default_factory=dict)
    preset: Text | None = None
    seed: Natural | None = None
    calibration: Digest | None = None
    prompts: Digest | None = None
    mix: Annotated[dict[Text, Positive], AfterValidator(in_order)] = Field(default_factory=dict)
    profile: Digest | None = None
    device_cost: Digest | None = None
    source: Text | None = None
    settings: JsonObject = Field(default_factory=dict)

    @model_validator(mode="after")
    def _no_paths(self) -> Provenance:
        if self.source is not None and self.source.startswith(("/", "~", "\\", "file:")):
            raise FieldError(f"expected a name that means the same elsewhere, found the path {self.source!r}", "source")
        return self


class Plan(Part):
    """One plan: a model, what each phase computes of it, what that was measured to cost and to keep.

    A phase that is absent runs dense. `integrity` is the digest of the rest, which the writer sets.
    """

    kind: Literal["sparsekv.plan"] = "sparsekv.plan"
    schema_version: Annotated[Literal[1], ExactInt] = 1
    status: Status
    model: ModelInfo
    targets: tuple[Target, ...] = ()
    prefill: PrefillPlan | None = None
    decode: DecodePlan | None = None
    kv_cache: Annotated[tuple[Eviction, ...], Field(min_length=1)] | None = None
    index_sharing: IndexSharing | None = None
    quality: Quality | None = None
    cost: Cost | None = None
    provenance: Provenance = Field(default_factory=Provenance)
    extensions: JsonObject = Field(default_factory=dict)
    integrity: Digest | None = None

    def __repr__(self) -> str:
        lengths = ", ".join(map(format_length, self.planned_lengths)) or "any length"
        return f"Plan({self.status}, {self.model.id}, {lengths})"

    __str__ = __repr__

    @model_validator(mode="after")
    def _consistent(self) -> Plan:
        check_fit(self.model, self.prefill, self.decode, self.kv_cache or ())
        check_sharing(self.model, self.index_sharing, (self.prefill, self.decode, self.kv_cache))
        if self.status == "verified" and self.quality is None:
            raise FieldError("expected a measured quality in a verified plan, found none", "status")
        self._check_counts()
        return self

    def _check_counts(self) -> None:
        for entry in self.cost.lengths if self.cost else ():
            for counts in entry.computed:
                heads = self.model.group_of(counts.layer).heads if counts.layer < self.model.layers else 0
                if len(counts.tiles) != heads:
                    raise FieldError(
                        f"expected counts of the {heads} heads of layer {counts.layer} of {self.model.layers}, found "
                        f"{len(counts.tiles)}; plan again, or remove `cost`",
                        "cost",
                    )

    @property
    def status_text(self) -> str:
        """Returns the status in words: with the cut of prompts that it is proven for, where prompts were cut."""
        cut = self.quality.cut if self.quality and self.status == "verified" else None
        return self.status if cut is None else f"{self.status} for prompts {cut_text(cut)}"

    @property
    def evicting(self) -> dict[int, Eviction]:
        return {layer: rule for rule in self.kv_cache or () if rule.is_lossy for layer in rule.layers}

    @property
    def buckets(self) -> tuple[PrefillBucket | DecodeBucket, ...]:
        """The length buckets of both phases."""
        prefill, decode = self.prefill, self.decode
        return (*(prefill.lengths if prefill else ()), *(decode.lengths if decode else ()))

    @property
    def kv_dtype(self) -> KVDtype:
        """Returns in what cached keys and values were when it was measured."""
        return "fp8" if self.targets and all(target.kv_dtype == "fp8" for target in self.targets) else "auto"

    @property
    def planned_lengths(self) -> tuple[int, ...]:
        """The context lengths that it was made for, ascending: ends of sparse buckets, or lengths of its cost. Imported
        plans name none."""
        if self.index_sharing:
            return self.index_sharing.lengths
        ends = {bucket.up_to for bucket in self.buckets if bucket.up_to is not None and not bucket.dense}
        timed = {entry.length for entry in self.cost.lengths} if self.cost else set()
        return tuple(sorted(ends or timed))

    @property
    def evaluated_lengths(self) -> tuple[int, ...]:
        """Two lengths inside the bucket of each planned one, ascending: 70% or, if more, halfway to it; and its end."""
        ends = self.planned_lengths
        inside = (max(end * 7 // 10, (low + end) // 2) for low, end in pairwise((0, *ends)))
        return tuple(chain.from_iterable(zip(inside, ends, strict=True)))

    @property
    def reuses(self) -> bool:
        """True where layers attend to the choice of an earlier layer's indexer, at every length."""
        return self.index_sharing is not None and bool(self.index_sharing.reused)

    def is_sparse_at(self, length: int, phase: PhaseName = "both") -> bool:
        """True where a phase computes less than the model does, or evicts tokens, at a context of that length."""
        phases = {"prefill": self.prefill, "decode": self.decode}
        parts = [part for name, part in phases.items() if part and phase in (name, "both")]
        evicts = any(rule.kept_tokens(length) < length for rule in self.evicting.values())
        sparse = any(part.bucket(length).is_sparse_at(length) for part in parts)
        return sparse or self.reuses or (evicts and phase != "prefill")

    @property
    def is_dense(self) -> bool:
        """True where all layers compute as the model does, at every length."""
        return not self.evicting and not self.reuses and all(bucket.dense for bucket in self.buckets)


SCHEMA_VERSION: int = Plan.model_fields["schema_version"].default


def cut_text(chunk: int | None) -> str:
    return "whole" if chunk is None else f"in chunks of {format_length(chunk)}"


def to_data(part: BaseModel) -> dict[str, Any]:
    """`part` as plain JSON data in field order: what the writer writes and integrity is computed over."""
    return part.model_dump(mode="json")


def unsupported(plan: Plan) -> list[str]:
    """The fields of a valid plan that this version cannot execute, a line each."""
    return [
        f"targets[{number}].tensor_parallel: {target.tensor_parallel} ranks; only 1 is executed"
        for number, target in enumerate(plan.targets)
        if target.tensor_parallel > 1
    ]


def check_model(plan: Plan, found: ModelInfo, allow_mismatch: bool = False, option: str = "") -> list[str]:
    """Warnings before `plan` runs on `found`; empty when it is the model that was planned.

    Args:
        option: what turns `allow_mismatch` on where this is called, as a user gives it; empty where nothing does.
    """
    different = differences(plan.model, found)
    if not different:
        return _weight_warnings(plan, found)
    unfit = _why_unfit(plan, found)
    if not allow_mismatch:
        listed = "\n".join(f"  {line}" for line in different)
        anyway = f", plan this one, or go on anyway with {option}" if option and not unfit else ", or plan this one"
        raise PlanMismatchError(
            f"expected {plan.model.id}, the model of this plan, found {found.id}, which differs:\n{listed}\n"
            f"Run the plan on its own model{anyway}."
        )
    if unfit:
        raise PlanMismatchError(f"{found.id} cannot run this plan at all: {unfit}; plan this model instead")
    return [f"this plan is for another architecture ({line})" for line in different]


def _why_unfit(plan: Plan, found: ModelInfo) -> str:
    """The layers or heads of a plan that another model lacks, in a sentence; empty where it has them all."""
    try:
        Plan.model_validate(dict(plan) | {"model": found})
    except ValidationError as error:
        return error.errors()[0]["msg"].removeprefix("Value error, ")
    return ""


def _weight_warnings(plan: Plan, found: ModelInfo) -> list[str]:
    difference = plan.model.fingerprint.weights_difference(found.fingerprint)
    told = {
        "unknown": (
            "this plan does not say which weights it was made for, or by a fingerprint of another kind: whether its "
            "quality was measured on these is not known; `sparsekv verify` measures it"
        ),
        "other": (
            f"{found.id} has other weights than the {plan.model.id} that this plan was made for (a fine-tune, another "
            "quantisation, or a float32 checkpoint in float16?); the plan runs, but its quality was not measured on "
            "these weights: `sparsekv verify` does"
        ),
    }
    return [told[difference]] if difference else []


_ALWAYS = ("kind", "schema_version", "integrity")


def json_schema() -> dict[str, Any]:
    """The schema of version 1 (JSON Schema 2020-12). What fields say about each other, only the reader checks."""
    schema = Plan.model_json_schema(mode="validation")
    schema["required"] = [*_ALWAYS, *(name for name in schema["required"] if name not in _ALWAYS)]
    schema["$defs"]["HeadGroup"] = _flat(schema["$defs"]["HeadGroup"], schema["$defs"])
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "$id": SCHEMA_FILE, **schema}


def _flat(group: dict[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    """A head group as it stands in a file: the pattern's fields beside `layer` and `heads`."""
    own = {name: group["properties"][name] for name in ("layer", "heads")}
    members = []
    for reference in group["properties"]["pattern"]["oneOf"]:
        pattern = definitions.pop(reference["$ref"].removeprefix("#/$defs/"))
        required = [*own, "pattern", *pattern.get("required", ())]
        members.append(pattern | {"properties": own | pattern["properties"], "required": required})
    return {"description": group["description"], "oneOf": members}
