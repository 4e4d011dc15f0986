"""Methods of a comparison, each brought to a share or a time at one length.

The reference is the plan, or one compiled from a profile; without either the first method. Others are held to the share
of the causal tiles that it computes (prefill), of the cached tokens that its steps read (decode), or of the bytes that
it keeps (eviction): what a method's budget has to be for that is searched for on calibration prompts of the tasks.

All of them are classes of the registry (kernels/methods.py): prefill rules and filter rules run as plans, selectors and
scores in plain torch behind a dense prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch

from sparsekv.bench import ruler_suite
from sparsekv.bench.compare_file import CompareFile, Held, Searched
from sparsekv.bench.eviction_rules import Evicted, ExpectedAttention, ObservedPrompt, SnapKV, cached_share
from sparsekv.bench.filter_rules import Even, FilterRule, Kascade, OmniKV
from sparsekv.bench.published_rules import FlexPrefill, MInference, SkipSoftmax, Stem, scaled, searched
from sparsekv.bench.selectors import Quest, Selecting, StepRule, TopK, TopKByHead
from sparsekv.bench.text_runs import followed, timed_prefill
from sparsekv.bench.tile_rules import FlashPrefill, LineRatio, StreamingLLM, XAttention
from sparsekv.kernels.methods import (
    DecodeSelector,
    EvictionScore,
    Method,
    PrefillRule,
    code_of,
    register,
    registry,
)
from sparsekv.planner.allocate import allocate
from sparsekv.planner.evaluation import PlanMode
from sparsekv.planner.filter_layers import choose_filter_layers
from sparsekv.planner.job import head_shape
from sparsekv.planner.options import PlanOptions, settle
from sparsekv.planner.prices import shipped_prices
from sparsekv.planner.profile.profile_data import Profile, for_profile
from sparsekv.planner.records import check_same, difference
from sparsekv.planner.tasks import Split, make_sample, prepare
from sparsekv.plans.errors import UsageError, did_you_mean
from sparsekv.plans.files import content_digest, executed_digest
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import Pattern, TileShape, tokens
from sparsekv.plans.phases import DecodeBucket, DecodePlan, HeadGroup, PrefillBucket, PrefillPlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.load import LoadedModel

OURS = "sparsekv"
AS_GIVEN, TIME = "its own share", "its own time"  # of the reference: what others are held to, beside shares
Phase = Literal["prefill", "decode", "eviction"]
Prompts = Sequence[torch.Tensor]
KINDS: Mapping[Phase, tuple[type[Method], ...]] = {
    "prefill": (PrefillRule,),
    "decode": (DecodeSelector, FilterRule),
    "eviction": (EvictionScore,),
}
_PREFILL: tuple[type[Method], ...] = (
    MInference,
    LineRatio,
    XAttention,
    FlexPrefill,
    FlashPrefill,
    SkipSoftmax,
    Stem,
    StreamingLLM,
)
_DECODE: tuple[type[Method], ...] = (Quest, OmniKV, Kascade, Even, TopK, TopKByHead)
BUILT_IN: tuple[type[Method], ...] = (*_PREFILL, *_DECODE, SnapKV, ExpectedAttention)
_TRIALS, _NEAR = 9, 0.02  # of the search for a budget: runs at most, and how near is enough


@dataclass(frozen=True, slots=True)
class Entrant:
    """A method at one setting; either a mode, or steps behind a shared dense prefill.

    Attributes:
        steps: gives the rule of its steps and, of eviction, the share of the bytes that stays.
        score: of eviction, by which it is known what has to be observed.
        cached: the share of the bytes of a plan that evicts.
    """

    phase: Phase
    setting: str
    mode: PlanMode | None = None
    steps: Callable[[ObservedPrompt], tuple[StepRule, float | None]] | None = None
    score: EvictionScore | None = None
    cached: float | None = None
    budget: float | None = None

    @staticmethod
    def of_dense(info: ModelInfo) -> PlanMode:
        """Dense by this runtime, whose steps are captured where those of a plan are."""
        return PlanMode(_decode_plan(info, ()), "decode")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entrants:
    """The methods of one comparison, and what they are made from.

    Attributes:
        names: of registered methods.
        plans: further plans by their names; ours is `OURS`.
        profile: ours is compiled from it at each share; filter rules read it.
        shares: what is held to; none for that of the reference.
        at_time: held to the time of the reference instead.
    """

    loaded: LoadedModel
    phase: Phase
    names: tuple[str, ...]
    plans: Mapping[str, Plan] = field(default_factory=dict)
    profile: Profile | None = None
    shares: tuple[float, ...] = ()
    at_time: bool = False
    tasks: tuple[ruler_suite.RulerTask, ...] = ()
    seed: int = 0
    chunk: int | None = None
    backend: str = "auto"
    tell: Callable[[str], None] = print

    @property
    def reference(self) -> str:
        """The method that the others are compared with."""
        if OURS in self.plans or (self.profile is not None and self.shares and self.phase != "eviction"):
            return OURS
        return next(iter((*self.names, *self.plans)))

    def at(self, length: int, file: CompareFile) -> dict[tuple[str, str], Entrant]:
        """Every method at one length, by its name and what it is held to; what was searched for is in the file from
        then on."""
        found: dict[tuple[str, str], Entrant] = {}
        for share in self.shares or (None,):
            label = TIME if self.at_time else AS_GIVEN if share is None else f"{share:g}"
            found |= {(name, label): one for name, one in self._all(length, share, label, file).items()}
        return found

    def _all(self, length: int, share: float | None, label: str, file: CompareFile) -> dict[str, Entrant]:
        held = {one.method: one for one in file.all(Held).values() if (one.at, one.length) == (label, length)}
        entrants = {name: self._of_plan(plan, length) for name, plan in self.plans.items()}
        if share is not None and self.profile is not None and OURS not in entrants and self.reference == OURS:
            entrants = {OURS: self._compiled(self.profile, length, share), **entrants}
        prompts = [] if held.keys() >= {*self.names, *entrants} else list(self._prompts(length))
        target = next((one.target for one in held.values()), None) or self._target(entrants.get(OURS), share, prompts)
        for name in self.names:
            self.tell(f"{name} at {format_length(length)}: held to {target:.4g}")
            entrants[name] = self._held(registry()[name], length, target, prompts, held.get(name), file)
        for name, one in entrants.items():
            made_by = self._made_by(name)
            if name in held:
                check_same(file, difference(f"code or plan of {name}", held[name].made_by, made_by))
            else:
                named: dict[str, Any] = {"method": name, "at": label, "length": length}
                file.add(Held(**named, target=target, budget=one.budget, setting=one.setting, made_by=made_by))
        return entrants

    def _made_by(self, name: str) -> str | None:
        """Digest of the plan, or of the code of a method from outside."""
        if name in self.plans:
            return executed_digest(self.plans[name])
        method = registry().get(name)
        return None if method is None or type(method) in BUILT_IN else content_digest({"code": code_of(method)})

    # --- the share or time that is held to ---

    def _target(self, ours: Entrant | None, share: float | None, prompts: Prompts) -> float:
        if share is not None:
            return share
        if ours is None:
            raise UsageError("expected a plan whose share or time others are held to, found none; give --at SHARE")
        if self.at_time:
            return self._seconds(ours, prompts)
        return ours.cached or ours.budget or self._density(ours, prompts)

    def _fitted(self, make: Callable[[float], Entrant], target: float, prompts: Prompts) -> Entrant:
        """The entrant whose share or time is nearest, by bisection of its budget."""
        measure = self._seconds if self.at_time else self._density
        low, high, budget, tried = 0.0, 1.0, 0.5 if self.at_time else target, dict[float, float]()
        for _ in range(_TRIALS):
            budget = float(f"{budget:.4g}")
            tried[budget] = measure(make(budget), prompts)
            if abs(tried[budget] / target - 1.0) < _NEAR:
                break
            low, high = (budget, high) if tried[budget] < target else (low, budget)
            budget = (low + high) / 2
        return make(min(tried, key=lambda one: abs(tried[one] - target)))

    @torch.no_grad()
    def _density(self, entrant: Entrant, prompts: Prompts) -> float:
        model: Any = self.loaded.model
        assert entrant.mode is not None
        with entrant.mode.running(model) as spent:
            for ids_1S in prompts:
                model(input_ids=ids_1S, use_cache=False, logits_to_keep=1)
            return spent().density

    @torch.no_grad()
    def _seconds(self, entrant: Entrant, prompts: Prompts) -> float:
        """The median time of a prompt, or of a step, without the first."""
        assert entrant.mode is not None
        seconds = []
        with entrant.mode.running(self.loaded.model):
            for ids_1S in (prompts[0], *prompts):
                prefilled, took = timed_prefill(self.loaded.model, ids_1S, self.chunk)
                if self.phase != "prefill":
                    took = followed(self.loaded.model, prefilled, 8, 1, ids_1S[:, :8]).step_seconds or took
                seconds.append(took)
        return float(np.median(seconds[1:]))

    def _prompts(self, length: int) -> Iterator[torch.Tensor]:
        """A calibration prompt of each task."""
        kit = prepare(self.loaded.tokenizer, Split.CALIBRATION)
        for task in self.tasks:
            ids = make_sample(task, kit, length, self.seed, 0).prompt_ids.astype(np.int64)
            yield torch.from_numpy(ids)[None].to(self.loaded.model.device)

    # --- entrants ---

    def _of_plan(self, plan: Plan, length: int) -> Entrant:
        kept, layers = plan.model_copy(update={"kv_cache": ()}), len(self.loaded.info.full_layers)
        if self.phase == "prefill" and plan.prefill and plan.prefill.bucket(length).is_sparse_at(length):
            return Entrant("prefill", "the plan", PlanMode(kept, "prefill", self.backend))
        decode = plan.decode.bucket(length) if plan.decode else None
        if self.phase == "decode" and decode and decode.is_sparse_at(length):
            share = share_read(decode.segments, layers, length)
            return Entrant("decode", "the plan", PlanMode(kept, "decode", self.backend), budget=share)
        if self.phase == "eviction" and plan.evicting:
            lost = sum(1.0 - rule.kept_tokens(length) / length for rule in plan.evicting.values())
            alone = plan.model_copy(update={"decode": None})
            mode = PlanMode(alone, "decode", self.backend)
            return Entrant("eviction", "the plan", mode, cached=1.0 - lost / layers)
        raise UsageError(
            f"expected a plan that is sparse in {self.phase} at {format_length(length)}, found a dense one; `sparsekv "
            "show` says where it is sparse"
        )

    def _compiled(self, profile: Profile, length: int, share: float) -> Entrant:
        """Ours, from a profile, at a share or as near to it as the search comes."""
        info, compiled = self.loaded.info, PlanOptions(lengths=(length,), verify="none")
        if self.phase == "prefill":
            asked, own = for_profile(compiled.but(phases=("prefill",), target_density=(share,)), profile)
            prices = shipped_prices(head_shape(own.model))
            prefill = allocate(own, prices, settle(asked, own.model.context_length, "cpu"))
            plan = Plan(status="unverified", model=info, prefill=prefill)
            return Entrant("prefill", "compiled from the profile", PlanMode(plan, "prefill", self.backend))
        shares: dict[float, tuple[Segment, ...]] = {}
        for loss in (0.0002, 0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05):
            asked, own = for_profile(compiled.but(phases=("decode",), loss=loss), profile)
            bucket = choose_filter_layers(own, settle(asked, own.model.context_length, "cpu")).bucket(length)
            shares[share_read(bucket.segments, len(info.full_layers), length)] = bucket.segments
        nearest = min(shares, key=lambda one: abs(one - share))
        return self._segmented(shares[nearest], "compiled from the profile", nearest)

    def _segmented(self, segments: tuple[Segment, ...], setting: str, share: float) -> Entrant:
        mode = PlanMode(_decode_plan(self.loaded.info, segments), "decode", self.backend)
        return Entrant("decode", setting, mode, budget=share)

    def _held(
        self, method: Method, length: int, target: float, prompts: Prompts, known: Held | None, file: CompareFile
    ) -> Entrant:
        budget = known.budget if known else None
        match method:
            case PrefillRule():
                rule = partial(self._of_rule, method)
                if isinstance(method, MInference):
                    if length not in file.all(Searched):
                        file.add(Searched(length=length, prefill=searched(self.loaded, length, self.backend)))
                    rule = partial(self._scaled, method, file.all(Searched)[length].prefill, length)
                return rule(budget) if budget else self._fitted(rule, target, prompts)
            case FilterRule():
                rule = partial(self._filtered, method, length)
                return self._fitted(rule, target, prompts) if self.at_time and not budget else rule(budget or target)
            case DecodeSelector():
                return self._selecting(method, target)
            case EvictionScore():
                return self._evicting(method, target)
        raise AssertionError(method)

    def _of_rule(self, rule: PrefillRule, budget: float) -> Entrant:
        plan = _prefill_plan(self.loaded.info, self.tile, rule.pattern(budget))
        return Entrant("prefill", rule.setting(budget), PlanMode(plan, "prefill", self.backend), budget=budget)

    def _scaled(self, rule: MInference, plan: PrefillPlan, length: int, budget: float) -> Entrant:
        prefill = scaled(plan, LineRatio.scale(budget), length)
        mode = PlanMode(Plan(status="unverified", model=self.loaded.info, prefill=prefill), "prefill", self.backend)
        return Entrant("prefill", rule.setting(budget), mode, budget=budget)

    @property
    def tile(self) -> TileShape:
        plan = self.plans.get(OURS)
        if plan is not None and plan.prefill is not None:
            return plan.prefill.tile
        return self.profile.tile if self.profile is not None else TileShape()

    def _filtered(self, rule: FilterRule, length: int, share: float) -> Entrant:
        entry = next((one for one in self.profile.lengths if one.length == length), None) if self.profile else None
        if self.profile is None or entry is None or entry.reuse is None:
            raise UsageError(
                f"expected --set profile=FILE with decode statistics at {format_length(length)} for the method "
                f"{rule.name}, found none; give it, or leave the method out"
            )
        layers, budget = len(self.loaded.info.full_layers), max(1, round(share * length))
        for _ in range(2):  # the filter layers depend on the budget, it on how many layers follow
            segments = rule.segments(self.profile, entry, tokens(budget))
            budget = budget_for(share, segments, layers, length)
        segments = rule.segments(self.profile, entry, tokens(budget))
        return self._segmented(segments, f"{budget} tokens, {len(segments)} filters", share)

    def _selecting(self, selector: DecodeSelector, share: float) -> Entrant:
        layers = len(self.loaded.info.full_layers)
        own = 1.0 - (1.0 - share) * layers / max(1, layers - selector.dense_layers)
        return Entrant("decode", "", steps=lambda seen: (Selecting(selector, own), None))

    def _evicting(self, score: EvictionScore, share: float) -> Entrant:
        layers = len(self.loaded.info.full_layers)

        def steps(seen: ObservedPrompt) -> tuple[StepRule, float]:
            masks = seen.by_score(score, share)
            return Evicted(masks), cached_share(masks, layers)

        return Entrant("eviction", "", steps=steps, score=score)


# --- plans and shares -------------------------------------------------------------------------------------------------


def _prefill_plan(model: ModelInfo, tile: TileShape, pattern: Pattern) -> Plan:
    """One pattern in every head of the layers with full attention, at every length."""
    groups = tuple(
        HeadGroup(layer=layer, heads=tuple(range(model.by_layer[layer].heads)), pattern=pattern)
        for layer in model.full_layers
    )
    bucket = PrefillBucket(up_to=None, heads=groups)
    return Plan(status="unverified", model=model, prefill=PrefillPlan(tile=tile, lengths=(bucket,)))


def _decode_plan(model: ModelInfo, segments: tuple[Segment, ...]) -> Plan:
    """These segments at every length; dense without any."""
    bucket = DecodeBucket(up_to=None, segments=segments, dense=not segments)
    return Plan(status="unverified", model=model, decode=DecodePlan(lengths=(bucket,)))


def share_read(segments: Sequence[Segment], layers: int, length: int) -> float:
    """The share of the cached tokens of so many layers that a step reads."""
    read = sum(segment.read_tokens(layer, length) for segment in segments for layer in segment.layers)
    return (read / length + layers - sum(len(segment.layers) for segment in segments)) / layers


def budget_for(share: float, segments: Sequence[Segment], layers: int, length: int) -> int:
    """The tokens that each filter layer chooses so that all layers read a share; one where they read more anyway."""
    followers = sum(len(segment.layers) for segment in segments)
    if not followers:
        return max(1, round(share * length))
    edges = segments[0].sink + segments[0].recent
    return max(1, round((1.0 - (1.0 - share) * layers / followers) * length) - edges)


def chosen_methods(phase: Phase, names: Sequence[str], has_profile: bool) -> tuple[str, ...]:
    """The methods of a phase: those named, or all that are built in and whose inputs are there."""
    register(BUILT_IN)
    known = {name: one for name, one in registry().items() if isinstance(one, KINDS[phase])}
    for name in names:
        if name not in known:
            raise UsageError(
                f"methods: expected some of {', '.join(known)} for --phase {phase}, files of methods, or NAME=PLAN, "
                f"found {name!r:.60}{did_you_mean(name, known)}"
            )
    whole = (name for name, one in known.items() if not isinstance(one, TopK))
    return tuple(names) or tuple(name for name in whole if has_profile or not isinstance(known[name], FilterRule))


def check_timed(phase: Phase, names: Sequence[str]) -> None:
    """Raises UsageError where a method cannot be held to a time: selectors and scores run in plain torch."""
    untimed = [name for name in names if isinstance(registry()[name], DecodeSelector | EvictionScore)]
    if untimed or phase == "eviction":
        raise UsageError(
            f"at: expected shares for --phase {phase} with {', '.join(untimed) or 'plans'}, which no time is measured "
            "for, found time; give --at SHARE, or --methods of prefill rules, filter rules and plans alone"
        )
