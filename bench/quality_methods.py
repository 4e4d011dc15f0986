"""The methods of the table of quality: a plan, and others held to its density, its share of tokens read, or its bytes.

Prefill, all through our kernels: `MInference` has vertical_slash at a published ratio, 1000 columns to 6096 diagonals,
scaled in each head to one density; XAttention, FlexPrefill and FlashPrefill are rules of tile_rules.py. The one knob of
each (density, tau, gamma, alpha) is searched for until prompts of all tasks, of the calibration split, come to the
plan's density on them. Decode: Quest's pages in plain torch; OmniKV's and Kascade's filter layers, from the
similarities of a profile, run as plans. Budgets are those that read the plan's share. Eviction: see eviction_rules.py.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch

from sparsekv.bench import ruler_suite
from sparsekv.bench.baselines import (
    PAGE,
    QUEST_DENSE,
    FilterRuleName,
    QuestPages,
    StepRule,
    decode_plan,
    fitted_at_densities,
    prefill_plan,
    segments_by_rule,
)
from sparsekv.bench.eviction_rules import Evicted, EvictionRule, ObservedPrompt, cached_share
from sparsekv.bench.tile_rules import ScoreKind, cumulative_mass, max_threshold
from sparsekv.planner.evaluation import Mode, PlanMode
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.tasks import Kit, Split, make_sample, prepare
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import TileShape, VerticalSlash, last_q_for, tokens
from sparsekv.plans.phases import Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import LoadedModel

Group = Literal["plan", "prefill", "decode", "eviction"]
PLAN, PLAN_PREFILL, PLAN_DECODE = "plan", "plan, prefill", "plan, decode"
EVICTION_PEERS: Mapping[str, EvictionRule] = {"SnapKV": "snapkv", "expected attention": "expected_attention"}
_HALVINGS = 6  # of the interval of a knob's logarithm
_MASSES, _ALPHAS = (0.05, 9.0), (0.1, 12.0)  # -log(1 - mass), -log(alpha)
_SHARES = (0.5, 0.25)  # of the bytes, without plans that evict
_SHARE = re.compile(r"0?\.[0-9]{1,6}", re.ASCII)


@dataclass(frozen=True, slots=True)
class Rule:
    """A method whose steps go on from a shared dense prefill, in plain torch: its time says nothing.

    Attributes:
        made: the rule, and the share of the cached tokens that stays.
        observes: of eviction, what has to be seen of the prompt.
    """

    group: Group
    made: Callable[[ObservedPrompt], tuple[StepRule, float]]
    observes: tuple[str, ...] = ()
    setting: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """A method that runs as a mode, with a prefill of its own unless it is a plan's decode alone."""

    group: Group
    mode: Mode
    setting: str = ""


Method = Rule | Run


@dataclass(frozen=True, slots=True)
class Inputs:
    """Holds what the methods are made from.

    Attributes:
        evicting: plans with `kv_cache`, by the share of the bytes that names them.
        profile: of the model, for filter layers by the rules of others.
    """

    loaded: LoadedModel
    plan: Plan
    evicting: Mapping[str, Plan]
    profile: Profile | None = None
    backend: str = "auto"
    seed: int = 0
    chunk: int | None = None

    @property
    def own(self) -> tuple[str, ...]:
        """The names of our methods, whatever the length."""
        return (PLAN, PLAN_PREFILL, PLAN_DECODE, *(f"plan, evicting to {name}" for name in self.evicting))

    def of_plan(self, length: int) -> dict[str, Method]:
        """The whole plan, and its phases that are sparse."""
        found: dict[str, Method] = {PLAN: Run("plan", PlanMode(self.plan, "both", self.backend))}
        if self.plan.prefill and self.plan.prefill.bucket(length).is_sparse_at(length):
            found[PLAN_PREFILL] = Run("prefill", PlanMode(self.plan, "prefill", self.backend))
        if self._segments(length):
            found[PLAN_DECODE] = Run("decode", PlanMode(self.plan, "decode", self.backend))
        return found

    def evictions(self, length: int) -> dict[str, Method]:
        """Ours and others at equal bytes."""
        layers = len(self.loaded.info.full_layers)
        found: dict[str, Method] = {}
        shares = {} if self.evicting else {f"{share:g}": share for share in _SHARES}
        for name, plan in self.evicting.items():
            rules = plan.evicting

            def by_plan(seen: ObservedPrompt, rules: Any = rules) -> tuple[StepRule, float]:
                masks = seen.by_plan(rules)
                return Evicted(masks), cached_share(masks, layers)

            found[f"plan, evicting to {name}"] = Rule("eviction", by_plan, ("attention_sum",))
            lost = sum(1.0 - rule.kept_tokens(length) / length for rule in rules.values())
            shares[name] = 1.0 - lost / layers
        for name, share in shares.items():
            for peer, rule in EVICTION_PEERS.items():
                found[f"{peer}, {name}"] = _evicting(rule, share, layers)
        return found

    def decode_peers(self, length: int, tell: Callable[[str], None]) -> dict[str, Method]:
        """Others that read as many tokens as the plan."""
        share = share_read(self._segments(length), len(self.loaded.info.full_layers), length)
        if share == 1.0:
            tell(f"the plan's decode is dense at {length} tokens: nothing to hold other methods to")
            return {}
        budget = quest_budget(share, len(self.loaded.info.full_layers), length)
        quest = QuestPages(tokens(budget))
        found: dict[str, Method] = {"Quest": Rule("decode", lambda _: (quest, 1.0), setting=f"{budget} tokens")}
        entry = next((one for one in self.profile.lengths if one.length == length), None) if self.profile else None
        if self.profile is None or entry is None or entry.reuse is None:
            tell(f"no --profile with decode statistics at {length} tokens: OmniKV and Kascade are left out")
            return found
        rules: Mapping[str, FilterRuleName] = {"OmniKV": "omnikv", "Kascade": "kascade"}
        for name, rule in rules.items():
            segments: tuple[Segment, ...] = ()
            budget = max(1, round(share * length))
            for _ in range(2):  # the filter layers depend on the budget, it on how many layers follow
                segments = segments_by_rule(self.profile, entry, rule, tokens(budget))
                budget = budget_for(share, segments, len(self.loaded.info.full_layers), length)
            segments = segments_by_rule(self.profile, entry, rule, tokens(budget))
            if segments:
                plan, setting = decode_plan(self.loaded.info, segments), f"{budget} tokens, {len(segments)} filters"
                found[name] = Run("decode", PlanMode(plan, "decode", self.backend), setting)
        return found

    def prefill_peers(
        self, length: int, known: Mapping[str, float], tell: Callable[[str], None]
    ) -> tuple[dict[str, Method], dict[str, float]]:
        """Others at the plan's density on prompts of all tasks, and what their knobs are set to.

        Args:
            known: knobs that an earlier run has found, and the density as "density".
        """
        if PLAN_PREFILL not in (own := self.of_plan(length)):
            tell(f"the plan's prefill is dense at {length} tokens: nothing to hold other methods to")
            return {}, {}
        prompts, tile = list(self._tuning_prompts(length)), self.plan.prefill.tile  # type: ignore[union-attr]
        ours, knobs = own[PLAN_PREFILL], dict(known)
        assert isinstance(ours, Run)
        target = knobs["density"] = known.get("density") or self._density(ours.mode, prompts)
        found: dict[str, Method] = {}
        for name, (knob, made) in self._knobs(tile, prompts[0]).items():
            if name not in knobs:
                tell(f"{name} at {length} tokens: searching its setting at a density of {target:.3f}")
                low, high = _ALPHAS if name == "FlashPrefill" else _MASSES
                knobs[name] = self._tuned(made, low, high, target, prompts)
            setting = math.exp(-knobs[name])
            shown = setting if name == "FlashPrefill" else 1.0 - setting
            found[name] = Run("prefill", made(knobs[name]), f"{knob} {shown:.4g}")
        return found, knobs

    def _knobs(self, tile: TileShape, ids_1S: torch.Tensor) -> dict[str, tuple[str, Callable[[float], Mode]]]:
        """By method, the name of its knob and what makes it; MInference's heads are fitted on one prompt."""
        model = self.loaded.info
        ratio = VerticalSlash.in_ratio(1000, 6096, last_q=last_q_for(ids_1S.shape[1]))

        def in_ratio(knob: float) -> Mode:
            (patterns,) = fitted_at_densities(self.loaded, ids_1S, ratio, [1.0 - math.exp(-knob)], tile)
            return PlanMode(prefill_plan(model, tile, patterns), "prefill", self.backend)

        def mass(score: ScoreKind) -> Callable[[float], Mode]:
            return lambda knob: cumulative_mass(score, 1.0 - math.exp(-knob), tile)

        return {
            "MInference": ("density", in_ratio),
            "XAttention": ("tau", mass("antidiagonal")),
            "FlexPrefill": ("gamma", mass("pooled")),
            "FlashPrefill": ("alpha", lambda knob: max_threshold(math.exp(-knob), tile)),
        }

    def _tuned(
        self, made: Callable[[float], Mode], low: float, high: float, target: float, prompts: Sequence[torch.Tensor]
    ) -> float:
        """The knob that comes nearest to a density, which grows with it."""
        tried: dict[float, float] = {}
        for _ in range(_HALVINGS):
            middle = math.sqrt(low * high)
            tried[middle] = self._density(made(middle), prompts)
            low, high = (middle, high) if tried[middle] < target else (low, middle)
        return min(tried, key=lambda knob: abs(tried[knob] - target))

    def _density(self, mode: Mode, prompts: Sequence[torch.Tensor]) -> float:
        model: Any = self.loaded.model
        with mode.running(model) as spent, torch.no_grad():
            for ids_1S in prompts:
                model(input_ids=ids_1S, use_cache=False, logits_to_keep=1)
            computed = spent()
        return computed.density

    def _tuning_prompts(self, length: int) -> Iterator[torch.Tensor]:
        kit: Kit = prepare(self.loaded.tokenizer, Split.CALIBRATION)
        for task in ruler_suite.RULER_SUITE.values():
            sample = make_sample(task, kit, length, self.seed, 0)
            yield torch.from_numpy(sample.prompt_ids.astype(np.int64))[None].to(self.loaded.model.device)

    def _segments(self, length: int) -> tuple[Segment, ...]:
        decode = self.plan.decode
        return decode.bucket(length).segments if decode and decode.bucket(length).is_sparse_at(length) else ()


def _evicting(rule: EvictionRule, share: float, layers: int) -> Rule:
    def made(seen: ObservedPrompt) -> tuple[StepRule, float]:
        masks = seen.by_rule(rule, share)
        return Evicted(masks), cached_share(masks, layers)

    return Rule("eviction", made, (rule,))


# --- budgets ----------------------------------------------------------------------------------------------------------


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


def quest_budget(share: float, layers: int, length: int) -> int:
    """The tokens of pages that Quest reads beside their bounds so that all layers read a share; a page at least."""
    own = 1.0 - (1.0 - share) * layers / max(1, layers - QUEST_DENSE)
    return max(PAGE, round((own - 1.0 / PAGE) * length))


def check_shares(given: Sequence[str]) -> dict[str, str]:
    """SHARE=FILE of plans that evict."""
    found: dict[str, str] = {}
    for one in given:
        name, _, place = one.partition("=")
        if not (_SHARE.fullmatch(name) and 0.0 < float(name) < 1.0 and place) or name in found:
            told = f"expected --evict SHARE=FILE, each share once and below 1, found {one!r:.60}"
            raise UsageError(f"{told}; write 0.5=half.yaml")
        found[name] = place
    return found
