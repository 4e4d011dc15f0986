"""The methods of curves: which modes each has at a length, one a point of its curve.

Ours: `plan` is the plan file as it is; `sparsekv` is compiled from a profile, for prefill at every density, for decode
at every bound on the divergence, and beyond these with larger budgets in the densest and smaller ones in the sparsest.

Baselines of prefill (tile_rules.py and here): `vertical_slash` has a published ratio of MInference, 1000 columns to
6096 diagonals, scaled in each head until one calibration prompt costs the density; `vertical_slash_by_head` takes the
best ratio of each head from the profile, every head at the same density; `minference` is compiled from a profile of
`--preset minference`. `bfloat16` is dense rounded, of a float32 model.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal, cast

import numpy as np
import torch

from sparsekv.bench.baselines import (
    ExactTopK,
    FilterRuleName,
    QuestPages,
    Rounded,
    SamePattern,
    StepwiseRule,
    decode_plan,
    fitted_at_densities,
    prefill_plan,
    segments_by_rule,
    static_at_density,
)
from sparsekv.bench.tile_rules import ScoreKind, cumulative_mass, max_threshold
from sparsekv.planner.allocate import allocate, at_target
from sparsekv.planner.evaluation import Mode, PlanMode
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.job import head_shape
from sparsekv.planner.options import FAMILIES, Family, Phase, PlanOptions, density_for, settle
from sparsekv.planner.predict import DENSE, ScoreTables
from sparsekv.planner.prices import Prices, shipped_prices
from sparsekv.planner.profile.calibration import Calibration
from sparsekv.planner.profile.profile_data import LengthProfile, Profile, for_profile
from sparsekv.planner.profile.search_space import ROUNDING
from sparsekv.plans import patterns
from sparsekv.plans.errors import UsageError, did_you_mean
from sparsekv.plans.patterns import AShape, Budget, TileShape, VerticalSlash, fraction, last_q_for
from sparsekv.plans.phases import DecodeBudget, PrefillPlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel

_AROUND = (0.25, 2.0)  # times the default density of a length
_STEPS, _MOST = 8, 0.9
_MASSES = (0.3, 0.5, 0.7, 0.8, 0.9, 0.95, 0.98)
_ALPHAS = (0.5, 0.2, 0.1, 0.05, 0.02, 0.01, 0.003)
BUDGETS = (0.0125, 0.025, 0.05, 0.1, 0.2)
_DECODE_LOSSES = (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05)
# Budgets of the densest segments found, and of the sparsest.
_SCALES = ((0, 2.0), (0, 4.0), (-1, 4.0), (-1, 2.0), (-1, 0.5), (-1, 0.25), (-1, 0.125))
_SINK = 128  # StreamingLLM's needs four tokens; a tile is computed anyway

Modes = Iterator[tuple[str, Mode]]


@dataclass(frozen=True, slots=True)
class CurveInputs:
    """Holds what the methods work from.

    Attributes:
        plan, profile, preset: a plan file, a profile of our search, and one of `--preset minference`; as far as given.
        densities: of prefill methods that take one; empty for a ladder by length.
        budgets: of decode methods, shares of the context.
        task: whose calibration prompt vertical_slash is fitted on.
    """

    loaded: LoadedModel
    plan: Plan | None = None
    profile: Profile | None = None
    preset: Profile | None = None
    densities: tuple[float, ...] = ()
    budgets: tuple[float, ...] = BUDGETS
    task: str = "quote_text"
    seed: int = 0

    @property
    def tile(self) -> TileShape:
        """Returns the tile of the plan, else of the profile, else the default: all methods but MInference's preset
        compute the same."""
        if self.plan is not None and self.plan.prefill is not None:
            return self.plan.prefill.tile
        return self.profile.tile if self.profile is not None else TileShape()

    def ladder(self, length: int, family: Family) -> tuple[float, ...]:
        """The densities that were asked for, or a ladder around the default of the length and the mandatory tiles
        alone; these take the place of what is less."""
        least = round(patterns.mandatory_density(length, self.tile, family) + 5e-5, 4)
        low, high = (share * density_for(length) for share in _AROUND)
        ladder = np.geomspace(max(low, least), min(high, _MOST), _STEPS).tolist()
        asked = self.densities or (least, *ladder)
        return tuple(sorted({round(max(density, least), 4) for density in asked if density < 1.0} or {least}))


# --- ours -------------------------------------------------------------------------------------------------------------


def _the_plan(phase: Phase, inputs: CurveInputs, length: int) -> Modes:
    assert inputs.plan is not None
    if getattr(inputs.plan, phase) is not None:
        yield "as it is", PlanMode(inputs.plan, phase)


def _compiled_prefill(inputs: CurveInputs, length: int) -> Modes:
    assert inputs.profile is not None
    asked = PlanOptions(lengths=(length,), phases=("prefill",), verify="none")
    ladder, before = inputs.ladder(length, "vertical_slash"), None
    for density in ladder:
        options, own = for_profile(asked.but(target_density=(density,)), inputs.profile)
        tables = ScoreTables.of(own.lengths[0])
        least = tables.density(at_target(tables, options.families, density).choice)
        if least > density * (1.0 + ROUNDING) and density != ladder[-1]:
            continue  # less than anything profiled
        prefill = allocate(own, _prices(own), settle(options, own.model.context_length, "cpu"))
        if prefill != before:
            before = prefill
            yield _density(density), PlanMode(_plan_of(inputs, prefill), "prefill")


def _preset(inputs: CurveInputs, length: int) -> Modes:
    assert inputs.preset is not None
    asked = PlanOptions(lengths=(length,), phases=("prefill",), verify="none")
    options, own = for_profile(asked, inputs.preset)
    prefill = allocate(own, _prices(own), settle(options, own.model.context_length, "cpu"))
    yield "preset", PlanMode(_plan_of(inputs, prefill), "prefill")


def _compiled_decode(inputs: CurveInputs, length: int) -> Modes:
    found: dict[tuple[Segment, ...], str] = {}
    for name, options in _decode_options(length):
        asked, own = for_profile(options, cast(Profile, inputs.profile))
        bucket = choose_filter_layers(own, settle(asked, own.model.context_length, "cpu")).bucket(length)
        if bucket.segments:
            found.setdefault(bucket.segments, name)
    compiled = list(found.items())
    for number, factor in _SCALES if compiled else ():
        segments, name = compiled[number]
        scaled = tuple(_with_share(segment, factor, length) for segment in segments)
        found.setdefault(scaled, f"{name}, budgets x {factor:g}")
    for segments, name in found.items():
        yield name, PlanMode(decode_plan(inputs.loaded.info, segments), "decode")


def _decode_options(length: int) -> Iterator[tuple[str, PlanOptions]]:
    base = PlanOptions(lengths=(length,), phases=("decode",), verify="none")
    for loss in _DECODE_LOSSES:
        yield f"at most {loss:g} nats", base.but(loss=loss)


def _with_share(segment: Segment, share: float, length: int) -> Segment:
    budget = DecodeBudget(tokens=min(length, max(1, round(segment.budget.resolve(length) * share))))
    return segment.model_copy(update={"budget": budget})


def _plan_of(inputs: CurveInputs, prefill: PrefillPlan) -> Plan:
    return Plan(status="unverified", model=inputs.loaded.info, prefill=prefill)


def _prices(profile: Profile) -> Prices:
    """Prices that ship: curves are the same on every device."""
    return shipped_prices(head_shape(profile.model), profile.tile)


# --- prefill of others ------------------------------------------------------------------------------------------------


def _streaming(inputs: CurveInputs, length: int) -> Modes:
    patterns = AShape.widening(_SINK, length)
    for density in inputs.ladder(length, "a_shape"):
        pattern = static_at_density(patterns, length, density, inputs.tile)
        yield _density(density), SamePattern(pattern, inputs.tile).mode(inputs.loaded.info)


def _vertical_slash(inputs: CurveInputs, length: int) -> Modes:
    loaded, ladder = inputs.loaded, inputs.ladder(length, "vertical_slash")
    (prompt,) = Calibration(loaded.tokenizer, (), (inputs.task,), inputs.seed).prompts(length, 1)
    ids_1S = torch.from_numpy(prompt.ids[: prompt.answer_start].astype(np.int64))[None].to(loaded.model.device)
    patterns = VerticalSlash.in_ratio(1000, 6096, last_q=last_q_for(length))
    fitted = fitted_at_densities(loaded, ids_1S, patterns, ladder, inputs.tile)
    for density, by_layer in zip(ladder, fitted, strict=True):
        plan = prefill_plan(loaded.info, inputs.tile, by_layer)
        yield _density(density), PlanMode(plan, "prefill")


def _by_head(inputs: CurveInputs, length: int) -> Modes:
    """Algorithm 1 of MInference (section 3.2) over our own ratios: for each head the least damage at one density."""
    entry = _entry(inputs, length)
    tables = ScoreTables.of(entry)
    own_LCH = tables.of_families(FAMILIES)
    densities_C = np.array([candidate.density for candidate in entry.candidates])
    present_LH = tables.present_LH
    for density in sorted({one.density for one in entry.candidates if one.family in FAMILIES}):
        usable_LCH = own_LCH & np.isclose(densities_C[tables.candidate_LCH], density)
        best_LH = np.where(usable_LCH, tables.damage_LCH, np.inf).argmin(1)
        choice = np.where(usable_LCH.any(1), best_LH, DENSE)
        if (choice == DENSE)[present_LH].any():
            continue  # some heads have no candidate there: not one density
        patterns = {
            scores.layer: tuple(tables.pattern(choice, row, int(head)) for head in np.flatnonzero(present_LH[row]))
            for row, scores in enumerate(entry.layers)
        }
        plan = prefill_plan(inputs.loaded.info, cast(Profile, inputs.profile).tile, patterns)
        yield _density(density), PlanMode(plan, "prefill")


def _cumulative(score: ScoreKind, knob: str, inputs: CurveInputs, length: int) -> Modes:
    for mass in _MASSES:
        yield f"{knob} {mass:g}", cumulative_mass(score, mass, inputs.tile)


def _max_threshold(inputs: CurveInputs, length: int) -> Modes:
    for alpha in _ALPHAS:
        yield f"alpha {alpha:g}", max_threshold(alpha, inputs.tile)


def _density(density: float) -> str:
    return f"density {density:g}"


# --- decode of others -------------------------------------------------------------------------------------------------


def _by_rule(rule: FilterRuleName, inputs: CurveInputs, length: int) -> Modes:
    entry, profile = _entry(inputs, length), cast(Profile, inputs.profile)
    for share, budget in _budgets(inputs):
        if segments := segments_by_rule(profile, entry, rule, budget):
            yield share, PlanMode(decode_plan(inputs.loaded.info, segments), "decode")


def _top_k(heads: Literal["max", "per_kv_head"], inputs: CurveInputs, length: int) -> Modes:
    for share, budget in _budgets(inputs):
        yield share, StepwiseRule(ExactTopK(budget, heads))


def _quest(inputs: CurveInputs, length: int) -> Modes:
    for share, budget in _budgets(inputs):
        yield share, StepwiseRule(QuestPages(budget))


def _bfloat16(inputs: CurveInputs, length: int) -> Modes:
    if inputs.loaded.model.dtype != torch.float32:
        raise UsageError(
            f"expected float32 for the method bfloat16, found {inputs.loaded.model.dtype}; --dtype float32"
        )
    yield "dense, rounded", Rounded()


def _budgets(inputs: CurveInputs) -> Iterator[tuple[str, Budget]]:
    return ((f"budget {share:g}", fraction(share)) for share in inputs.budgets)


def _entry(inputs: CurveInputs, length: int) -> LengthProfile:
    return next(entry for entry in cast(Profile, inputs.profile).lengths if entry.length == length)


# --- which there are --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Method:
    """Says how a method makes its modes at a length, which of the inputs it needs, and whether it has to be named."""

    modes: Callable[[CurveInputs, int], Modes]
    needs: Literal["plan", "profile", "preset"] | None = None
    named: bool = False


METHODS: Mapping[Phase, Mapping[str, Method]] = {
    "prefill": {
        "plan": Method(partial(_the_plan, "prefill"), "plan"),
        "sparsekv": Method(_compiled_prefill, "profile"),
        "vertical_slash_by_head": Method(_by_head, "profile"),
        "vertical_slash": Method(_vertical_slash),
        "streamingllm": Method(_streaming),
        "minference": Method(_preset, "preset"),
        "xattention": Method(partial(_cumulative, "antidiagonal", "tau")),
        "flexprefill": Method(partial(_cumulative, "pooled", "gamma")),
        "flashprefill": Method(_max_threshold),
    },
    "decode": {
        "plan": Method(partial(_the_plan, "decode"), "plan"),
        "sparsekv": Method(_compiled_decode, "profile"),
        "omnikv": Method(partial(_by_rule, "omnikv"), "profile"),
        "kascade": Method(partial(_by_rule, "kascade"), "profile"),
        "even": Method(partial(_by_rule, "even"), "profile"),
        "top_k": Method(partial(_top_k, "max")),
        "top_k_by_head": Method(partial(_top_k, "per_kv_head")),
        "quest": Method(_quest),
        "bfloat16": Method(_bfloat16, named=True),
    },
}
_FLAGS = {"plan": "--plan FILE", "profile": "--profile FILE", "preset": "--profile FILE of --preset minference"}


@dataclass(frozen=True, slots=True)
class CurveMode:
    """One point to be measured."""

    phase: Phase
    method: str
    setting: str
    mode: Mode

    @property
    def name(self) -> str:
        return f"{self.phase}: {self.method}, {self.setting}"

    def key(self, length: int) -> tuple[int, str, str, str]:
        return length, self.phase, self.method, self.setting


def chosen_methods(phases: Sequence[Phase], names: Sequence[str], given: Collection[str]) -> dict[Phase, list[str]]:
    """The methods to measure: those named, or all whose inputs are there.

    Args:
        given: which of "plan", "profile" and "preset" there are.
    """
    known = {name: method for phase in phases for name, method in METHODS[phase].items()}
    for name in names:
        if name not in known:
            meant = did_you_mean(name, known)
            raise UsageError(f"methods: expected some of {', '.join(known)}, found {name!r:.40}{meant}")
        if (needed := known[name].needs) and needed not in given:
            raise UsageError(f"expected {_FLAGS[needed]} for the method {name}, found none; give it, or leave it out")

    def is_on(name: str) -> bool:
        return name in names if names else known[name].needs in (None, *given) and not known[name].named

    return {phase: [name for name in METHODS[phase] if is_on(name)] for phase in phases}


def check_profiled(
    methods: Mapping[Phase, Sequence[str]], profiles: Mapping[str, Profile], lengths: tuple[int, ...]
) -> None:
    """Refuses lengths and phases that the profiles of chosen methods lack, before there is a model."""
    for phase, names in methods.items():
        needed = {METHODS[phase][name].needs for name in names}
        for profile in (one for kind, one in profiles.items() if kind in needed):
            for_profile(PlanOptions(lengths=lengths, phases=(phase,)), profile)


def curve_modes(methods: Mapping[Phase, Sequence[str]], inputs: CurveInputs, length: int) -> tuple[CurveMode, ...]:
    """Every point of the methods at a length; `check_profiled` has seen them."""
    return tuple(
        CurveMode(phase, name, setting, mode)
        for phase, names in methods.items()
        for name in names
        for setting, mode in METHODS[phase][name].modes(inputs, length)
    )
