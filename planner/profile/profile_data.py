"""What profiling found out about a model: the input of every compile, kept in a file of its own.

Every number is rounded to six significant digits when it enters, so that what is in memory is what the file says.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from sparsekv.planner.options import Family, PlanOptions, asked, flag_of
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Budget, Pattern, TileShape
from sparsekv.plans.schema import BackendName, DtypeName
from sparsekv.plans.types import (
    Count,
    Digest,
    FieldError,
    Index,
    Length,
    Natural,
    NonNegative,
    Part,
    Positive,
    Text,
    format_length,
)

Row = tuple[NonNegative, ...]
Table = tuple[Row, ...]


class SelectorChoice(Part):
    """A way to weigh the rows before a decode step in the choice of tokens."""

    selector: Literal["last", "uniform", "exponential"]
    window: Count


class Candidate(Part):
    """One ray of the search space, brought to one density."""

    family: Family
    ray: Text
    density: Annotated[float, Field(gt=0.0, le=1.0)]


class ScoreParts(Part):
    """One layer: a row a candidate, an entry a head. `tiles` and `columns` are shares of the causal tiles."""

    layer: Index
    error: Table = ()
    tail_error: Table = ()
    mass: Table = ()
    tiles: Table = ()
    columns: Table = ()


SCORES = tuple(name for name in ScoreParts.model_fields if name != "layer")


class LayerScores(ScoreParts):
    """Means over the calibration prompts. `patterns` are positions in the pattern list of the length."""

    patterns: tuple[tuple[Natural, ...], ...]

    @model_validator(mode="after")
    def _rectangular(self) -> LayerScores:
        shape = [len(row) for row in self.patterns]
        for name in SCORES:
            found = [len(row) for row in getattr(self, name)]
            if found != shape:
                raise FieldError(f"expected {len(shape)} rows of {shape[:1]} heads, found {found}", name)
        return self


class TokenChoice(Part):
    """How decode statistics choose tokens: each selector, with each budget, among all between the first `sink` and the
    last `recent` tokens, which are attended to in any case."""

    sink: Natural
    recent: Positive
    budgets: tuple[Budget, ...]
    selectors: tuple[SelectorChoice, ...]


class Reuse(TokenChoice):
    """How well the tokens that layer i chooses serve layer j, at one length.

    `kept[s][b][j][i]`, i <= j: the share of layer j's attention mass on the first `sink` tokens, the choice of layer i
    (with selector s and budget b) and the last `recent` tokens; worst row of a prompt, mean over prompts.
    `importance[j]`: how much attention of layer j moves the residual, || attention output || / (|| attention output ||
    + || residual ||).
    """

    importance: Row
    kept: tuple[tuple[Table, ...], ...]

    @model_validator(mode="after")
    def _triangular(self) -> Reuse:
        layers = range(len(self.importance))
        fits = [len(self.kept) == len(self.selectors)]
        fits += [len(tables) == len(self.budgets) for tables in self.kept]
        fits += [[len(row) for row in table] == [j + 1 for j in layers] for tables in self.kept for table in tables]
        if not all(fits):
            raise FieldError("expected a lower triangle of layers for each selector and budget", "kept")
        return self


class LengthProfile(Part):
    """Everything measured at one context length."""

    length: Length
    prompt_tokens: tuple[Positive, ...]
    candidates: tuple[Candidate, ...] = ()
    patterns: tuple[Pattern, ...] = ()
    layers: tuple[LayerScores, ...] = ()
    reuse: Reuse | None = None

    @property
    def densities(self) -> tuple[float, ...]:
        """The ladder of densities that candidates were brought to, ascending."""
        return tuple(sorted({candidate.density for candidate in self.candidates}))

    @model_validator(mode="after")
    def _consistent(self) -> LengthProfile:
        for number, scores in enumerate(self.layers):
            if len(scores.patterns) != len(self.candidates):
                message = f"expected {len(self.candidates)} candidates, found {len(scores.patterns)}"
                raise FieldError(message, "layers", number)
            if any(position >= len(self.patterns) for row in scores.patterns for position in row):
                raise FieldError(f"expected positions below {len(self.patterns)}", "layers", number)
        return self


class Profile(Part):
    """What one profiling run found, and what it was run with."""

    kind: Literal["sparsekv.profile"] = "sparsekv.profile"
    schema_version: Literal[2] = 2
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
    lengths: tuple[LengthProfile, ...]


def for_profile(options: PlanOptions, profile: Profile) -> tuple[PlanOptions, Profile]:
    """The options as far as a profile that was made earlier leaves them open, and the lengths of it that are asked for.

    Raises:
        UsageError: something was asked for that was not profiled, or that contradicts what was.
    """
    reuse = next((entry.reuse for entry in profile.lengths if entry.reuse), None)
    fixed: dict[str, Any] = {"tile": profile.tile, "preset": profile.preset}
    fixed |= {"decode_sink": reuse.sink, "decode_recent": reuse.recent} if reuse else {}
    _check_agrees(options, profile, fixed)
    _check_holds(options, profile)
    lengths = options.lengths or tuple(entry.length for entry in profile.lengths)
    own = tuple(entry for entry in profile.lengths if entry.length in lengths)
    settled = replace(options, lengths=lengths, levels=(), **fixed)
    return settled, profile.model_copy(update={"lengths": own})


def _check_agrees(options: PlanOptions, profile: Profile, fixed: dict[str, Any]) -> None:
    given = asked(options)
    for name, found in (fixed | {"samples": profile.samples, "prompts": ()}).items():
        if name in given and given[name] != found:
            raise UsageError(
                f"expected {flag_of(name)} as in the profile ({found or 'none'}), found {given[name]!r:.80}; leave it "
                "out, or profile again (leave --profile out)"
            )
    targets = [flag_of(name) for name in ("target_density", "target_speedup") if name in given]
    if profile.preset and targets:
        raise UsageError(
            f"expected no {targets[0]} beside --profile of a search with --preset {profile.preset}, which has a target "
            "of its own; leave it out, or profile again without the preset"
        )


def _check_holds(options: PlanOptions, profile: Profile) -> None:
    held = {
        "prefill": any(entry.layers for entry in profile.lengths),
        "decode": any(entry.reuse for entry in profile.lengths),
    }
    missing = [phase for phase in options.phases if not held[phase]]
    if missing:
        usable = [phase for phase in options.phases if held[phase]]
        advice = f"add --only {usable[0]}, or profile again" if usable else "profile again"
        raise UsageError(
            f"expected a profile of {' and '.join(options.phases)}, found none of {missing[0]}; {advice} "
            "(leave --profile out)"
        )
    searched = {candidate.family for entry in profile.lengths for candidate in entry.candidates}
    unknown = [family for family in options.families if family not in searched]
    if "families" in asked(options) and "prefill" in options.phases and unknown:
        raise UsageError(
            f"expected --families among those of the profile ({', '.join(sorted(searched))}), found "
            f"{', '.join(unknown)}; leave them out, or profile again (leave --profile out)"
        )
    known = [entry.length for entry in profile.lengths]
    absent = sorted(set(options.lengths) - set(known))
    if absent:
        raise UsageError(
            f"expected lengths that the profile has ({', '.join(map(format_length, known))}), "
            f"found {', '.join(map(format_length, absent))}; leave them out, or profile again"
        )
