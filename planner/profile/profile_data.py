"""The profile of a model: the input of every compile, kept in a file of its own, with its digest.

Every number is rounded to six significant digits when it enters, so that what is in memory is what the file says.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, model_validator

from sparsekv.planner.options import KNOWN_FAMILIES, Family, PlanOptions
from sparsekv.plans.errors import PlanMismatchError, UsageError
from sparsekv.plans.model import OTHER_WEIGHTS, ModelInfo, same_architecture
from sparsekv.plans.patterns import Budget, Pattern, TileShape
from sparsekv.plans.phases import Segment
from sparsekv.plans.schema import BackendName, DtypeName
from sparsekv.plans.types import Digest, Index, Natural, Part, Positive, Text, format_length, rounded

# Bounds that nothing measured comes near: what is computed from a file stays finite, and takes seconds.
MAX_MEASURED = 1e12
MAX_TOKENS = 1 << 24
MAX_LENGTHS = 64
LEAST_SHARE = 1e-9  # every pattern computes a few tiles a row

Tokens = Annotated[int, Field(strict=True, ge=1, le=MAX_TOKENS)]
Measured = Annotated[float, Field(strict=True, ge=0.0, le=MAX_MEASURED, allow_inf_nan=False), AfterValidator(rounded)]
PartOfAll = Annotated[float, Field(strict=True, ge=0.0, le=1.0, allow_inf_nan=False), AfterValidator(rounded)]
TileShare = Annotated[float, Field(strict=True, ge=LEAST_SHARE, le=1.0, allow_inf_nan=False), AfterValidator(rounded)]

Row = tuple[Measured, ...]
Table = tuple[Row, ...]


class Candidate(Part):
    """One range of the search space, brought to one density."""

    family: Family
    range: Text
    density: Annotated[float, Field(gt=0.0, le=1.0)]


class ScoreParts(Part):
    """One layer: a row a slot, an entry a head; in a slot every head has a candidate of its own.

    Attributes:
        candidates: positions in the candidates of the length.
        damage: what the candidate does to the divergence of the answer from dense, in nats a token (sensitivity.py).
        tiles, columns: whole tiles and single columns computed, as shares of the causal tiles.
    """

    layer: Index
    candidates: tuple[tuple[Natural, ...], ...] = ()
    damage: Table = ()
    tiles: tuple[tuple[TileShare, ...], ...] = ()
    columns: tuple[tuple[PartOfAll, ...], ...] = ()


SCORES = ("damage", "tiles", "columns")


class LayerScores(ScoreParts):
    """Means over the calibration prompts; damage is that of the worst hard task where it is larger there.

    Attributes:
        worst: the largest damage on one of the prompts.
        patterns: positions in the patterns of the length.
        weight: what the damage of this layer is multiplied by, where whole plans were measured.
    """

    worst: Table
    patterns: tuple[tuple[Natural, ...], ...]
    weight: Annotated[float, Field(strict=True, gt=0.0, le=MAX_MEASURED), AfterValidator(rounded)] = 1.0


class TokenChoice(Part):
    """Says how decode statistics choose tokens by the newest query: with each budget, among all between the first
    `sink` and the last `recent` tokens, which are attended to in any case."""

    sink: Natural
    recent: Positive
    budgets: Annotated[tuple[Budget, ...], Field(min_length=1)]


class Reuse(TokenChoice):
    """Says how well the tokens that layer i chooses serve layer j, at one length.

    `kept[b][j][i]`, i <= j: the share of layer j's attention mass on the first `sink` tokens, the choice of layer i
    (with budget b) and the last `recent` tokens; worst row of a prompt, mean over prompts.
    `importance[j]`: how much attention of layer j moves the residual, || attention output || / (|| attention output ||
    + || residual ||).
    """

    importance: tuple[PartOfAll, ...]
    kept: tuple[Table, ...]


class DecodeTrial(Part):
    """Holds what decode segments did to next tokens at one length, on calibration prompts that were prefilled densely.

    Attributes:
        kl: mean divergence from dense over decode steps and prompts, in nats.
        kl_bound: the 95% upper bound of that mean, over prompts.
        prompts: that were run; fewer than of others where it was given up, and biased towards those that diverge most.
    """

    segments: Annotated[tuple[Segment, ...], Field(min_length=1)]
    kl: Measured
    kl_bound: Measured
    prompts: Positive


class LengthProfile(Part):
    """Everything measured at one context length.

    Attributes:
        prompt_weights: what the damage on each calibration prompt was multiplied by before the mean and the worst.
        trials: there where the model was at hand to measure them.
    """

    length: Tokens
    prompt_tokens: tuple[Positive, ...]
    prompt_weights: tuple[Measured, ...] = ()
    candidates: tuple[Candidate, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    layers: tuple[LayerScores, ...] = ()
    reuse: Reuse | None = None
    trials: tuple[DecodeTrial, ...] = ()

    @property
    def densities(self) -> tuple[float, ...]:
        """The ladder of densities that candidates were brought to, ascending."""
        return tuple(sorted({candidate.density for candidate in self.candidates}))


class Profile(Part):
    """Holds what one profiling run found, and what it was run with."""

    kind: Literal["sparsekv.profile"] = "sparsekv.profile"
    schema_version: Literal[4] = 4
    model: ModelInfo
    device: Text
    dtype: DtypeName
    backend: BackendName
    tile: TileShape
    preset: Literal["minference"] | None = None
    seed: Natural
    samples: Positive
    tasks: tuple[Text, ...] = ()
    calibration: Digest
    versions: dict[Text, Text] = Field(default_factory=dict)
    lengths: Annotated[tuple[LengthProfile, ...], Field(min_length=1, max_length=MAX_LENGTHS)]

    @model_validator(mode="before")
    @classmethod
    def _without_reads(cls, data: Any) -> Any:
        """Older files say what a step of the model reads."""
        return {name: value for name, value in data.items() if name != "reads"} if isinstance(data, dict) else data


def check_model(profile: Profile, model: ModelInfo, *, weights: bool = True) -> None:
    """Refuses a profile of another model; `weights` off compares the architecture alone."""
    found, expected = profile.model.fingerprint, model.fingerprint
    if not same_architecture(found.architecture, expected.architecture):
        other = "other architecture"
    elif weights and found.weights != expected.weights:
        other = OTHER_WEIGHTS
    else:
        return
    raise PlanMismatchError(
        f"expected a profile of {model.id}, found one of {profile.model.id}, with {other}; "
        "profile this model again (leave --profile out)"
    )


def for_profile(options: PlanOptions, profile: Profile) -> tuple[PlanOptions, Profile]:
    """The options as far as an earlier profile leaves them open, and the lengths of it that are asked for."""
    fixed: dict[str, Any] = {"tile": profile.tile, "preset": profile.preset}
    searched = {candidate.family for entry in profile.lengths for candidate in entry.candidates}
    _check_agrees(options, profile, fixed)
    _check_holds(options, profile, searched)
    ordered = (*KNOWN_FAMILIES, *sorted(searched.difference(KNOWN_FAMILIES)))
    fixed["families"] = options.families or tuple(family for family in ordered if family in searched)
    lengths = options.lengths or tuple(entry.length for entry in profile.lengths)
    own = tuple(entry for entry in profile.lengths if entry.length in lengths)
    return options.but(lengths=lengths, levels=(), **fixed), profile.model_copy(update={"lengths": own})


def _check_agrees(options: PlanOptions, profile: Profile, fixed: dict[str, Any]) -> None:
    for name, found in (fixed | {"calibration_samples": profile.samples, "prompts": ()}).items():
        given = getattr(options, name)
        if options.is_given(name) and given != found:
            raise UsageError(
                f"expected {options.flag_of(name)} as in the profile ({found or 'none'}), found {given!r:.80}; leave "
                "it out, or profile again (leave --profile out)"
            )
    if profile.preset and options.is_given("target_density"):
        raise UsageError(
            f"expected no {options.flag_of('target_density')} beside --profile of a search with --preset "
            f"{profile.preset}, which has a target of its own; leave it out, or profile again without the preset"
        )


def _check_holds(options: PlanOptions, profile: Profile, searched: Collection[Family]) -> None:
    held = {
        "prefill": any(entry.layers for entry in profile.lengths),
        "decode": any(entry.reuse for entry in profile.lengths),
    }
    phases = options.profiled_phases
    missing = [phase for phase in phases if not held[phase]]
    if missing:
        usable = [phase for phase in phases if held[phase]]
        advice = f"add --only {usable[0]}, or profile again" if usable else "profile again"
        by_retain = " (a plan with --retain leaves such a one)" if usable == ["prefill"] else ""
        raise UsageError(
            f"expected a profile of {' and '.join(phases)}, found none of {missing[0]}{by_retain}; {advice} "
            "(leave --profile out)"
        )
    unknown = [family for family in options.families if family not in searched]
    if options.families and "prefill" in options.phases and unknown:
        raise UsageError(
            f"expected families among those of the profile ({', '.join(sorted(searched))}), found "
            f"{', '.join(unknown)}; leave them out, or profile again (leave --profile out)"
        )
    known = [entry.length for entry in profile.lengths]
    absent = sorted(set(options.lengths) - set(known))
    if absent:
        raise UsageError(
            f"expected lengths that the profile has ({', '.join(map(format_length, known))}), "
            f"found {', '.join(map(format_length, absent))}; leave them out, or profile again"
        )
