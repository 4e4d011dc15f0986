"""KV cache eviction by layer: what each share of a layer's tokens does to next tokens, one budget of bytes over all.

Every layer alone keeps smaller and smaller shares of calibration prompts, at the longest planned length, and reads the
answer and the text that dense itself goes on with. The least total damage at a share of the cache's bytes is an
allocation like that of prefill (allocate.py); bytes that it leaves are spent in proportion. Damages of single layers do
not add up: what each share of a layer adds is measured again beside what the others keep by then, and allocated again.
Layouts that people settle by hand are run at the same bytes, and of all, what diverges least is taken: every layer
alike; the first three whole and the others alike (as in forks of vLLM, 2024); PyramidKV's pyramid (2024). For vLLM,
layouts of few groups of layers.

Shapes: B batch, H query heads, G KV heads, S tokens of a prompt, W observed queries, R rows of a text, K = S + R; g is
1 (one choice for all heads) or G; L layers, C shares.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from sparsekv.kernels.methods import EvictionScore, method_of
from sparsekv.kernels.tiles import has_triton
from sparsekv.planner.allocate import solve
from sparsekv.planner.decode_trials import DecodeTrials, Prefix, Steps
from sparsekv.planner.evaluation.predictions import divergence
from sparsekv.planner.job import Job
from sparsekv.planner.options import Settled
from sparsekv.planner.profile.calibration import CalibrationPrompt
from sparsekv.planner.progress import Progress
from sparsekv.plans.errors import UsageError
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.phases import BUILT_IN_SCORE, RECENT, SINK, Eviction
from sparsekv.runtime.core.select import rows_to_cache
from sparsekv.runtime.core.state import Observed
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import AttentionCall

_SHARES = (0.7, 0.5, 0.35, 0.25, 0.17, 0.11, 0.07, 0.04, 0.02)
_GENERATED, _OBSERVED = 512, 256
_WHOLE_FIRST = 3  # layers
_MOST_GROUPS = 12  # of layers in vLLM: each costs a step its block table
_FEW_LAYOUTS = 3  # that are tried out
_STEEPNESS = 20  # of the pyramid: the mean over the least
_HALVINGS = 16  # of the factor by which a layout grows
_STEPS = {"cuda": 64}  # rows of a text
_FEW_STEPS = 24

Layout = Mapping[int, float]
"""The share of the tokens between sinks and recent ones that each layer keeps; layers that are not named keep all."""


def search_eviction(job: Job, progress: Progress | None = None) -> tuple[tuple[Eviction, ...], tuple[str, ...]]:
    """The layers' rules for `retain` of the cache's bytes, and a remark for each thing to know."""
    options, length = job.options, job.options.lengths[-1]
    layers = tuple(layer for layer in job.model.full_layers if layer not in job.model.sharing)
    prompts, runs = job.calibration_prompts(length, options.samples_at(length)), 2 if options.few_groups else 3
    with (
        EvictionTrials.on(job.subject) as model,
        (progress or Progress()).stage("eviction", total=runs * len(prompts)) as step,
    ):

        def mean(runs: Sequence[Layout]) -> np.ndarray:
            found = np.zeros(len(runs))
            for prompt in prompts:
                found += np.array(model.damages(prompt, runs, options)) / len(prompts)
                step.advance()
            return found

        damage_LC = damage_beside({}, layers, mean)
        alone = allocated(layers, damage_LC, options, length)
        if options.few_groups:
            layouts = in_few_groups(layers, damage_LC, options, length)
        else:
            beside = allocated(layers, damage_beside(alone, layers, mean), options, length)
            layouts = {"by damage": beside, "by damage alone": alone, **by_hand(layers, _retain(options), length)}
        together = mean(list(layouts.values()))
    name, layout = list(layouts.items())[int(together.argmin())]
    others = [f"{other} {kl:.3g}" for other, kl in zip(layouts, together, strict=True) if other != name]
    remark = (
        f"{1 - _spent(layers, layout, length):.0%} of the cache is evicted; of {len(layouts)} layouts of as many bytes "
        f'"{name}" is nearest to dense: {together.min():.3g} nats on calibration prompts ({", ".join(others)})'
    )
    return rules_of(job.model, layout, options.score), (remark,)


def damage_beside(layout: Layout, layers: Sequence[int], mean: Callable[[Sequence[Layout]], np.ndarray]) -> np.ndarray:
    """[L, C]: what each share of each layer adds to the divergence where the other layers keep what the layout says."""
    runs = [{**layout, layer: share} for layer in layers for share in _SHARES]
    without = [{other: share for other, share in layout.items() if other != layer} for layer in layers]
    damages = mean([*runs, *without])
    damage_LC: np.ndarray = damages[: len(runs)].reshape(len(layers), -1) - damages[len(runs) :, None]
    return damage_LC.clip(min=0.0)


# --- layouts ----------------------------------------------------------------------------------------------------------


def allocated(layers: Sequence[int], damage_LC: np.ndarray, options: Settled, length: int) -> Layout:
    """The least damage at `options.retain` of the bytes of these layers, all of which are spent."""
    cost_C = np.array([rule_of((0,), share).kept_tokens(length) / length for share in _SHARES])
    shape_LC1 = (*damage_LC.shape, 1)
    cost_LC1, damage_LC1 = np.broadcast_to(cost_C[:, None], shape_LC1), damage_LC[..., None]
    every_LC1, budget = np.ones(shape_LC1, dtype=bool), _retain(options) * len(layers)
    allocation = solve(cost_LC1, damage_LC1, every_LC1, every_LC1[:, 0], budget)
    if allocation is None:
        raise UsageError(
            f"expected --retain of at least {cost_C.min():.3f}, which the first {SINK} and last {RECENT} tokens and "
            f"{_SHARES[-1]:.0%} of the others take at {length} tokens, found {_retain(options):g}; raise it, or plan "
            "longer --lengths"
        )
    slots = {layer: int(slot) for layer, slot in zip(layers, allocation.choice[:, 0], strict=True) if slot >= 0}
    return filled(layers, {layer: _SHARES[slot] for layer, slot in slots.items()}, _retain(options), length)


def filled(layers: Sequence[int], layout: Layout, retain: float, length: int) -> Layout:
    """Returns the layout with the bytes that it leaves of a budget: every layer keeps more, in proportion.

    Damages within noise count as none, so that the least total may cost less than the budget; on other prompts they are
    not none.
    """

    def grown(factor: float) -> Layout:
        more = {layer: factor * share for layer, share in layout.items()}
        return {layer: share for layer, share in more.items() if share < 1.0}

    least, most = 1.0, 1.0 / min(layout.values(), default=1.0)
    for _ in range(_HALVINGS):
        middle = (least + most) / 2
        fits = _spent(layers, grown(middle), length) <= retain
        least, most = (middle, most) if fits else (least, middle)
    return grown(least)


def in_few_groups(layers: Sequence[int], damage_LC: np.ndarray, options: Settled, length: int) -> dict[str, Layout]:
    """One share for some layers, all tokens for the others, since vLLM has block tables for each group of layers. The
    layers that lose least by a share, as few as the bytes ask for; of all shares those of which the least damage is
    expected. And every layer alike."""
    layouts, expected = dict[str, Layout](), dict[str, float]()
    for slot, share in enumerate(_SHARES):
        kept = rule_of((0,), share).kept_tokens(length) / length
        few = _fewest(len(layers), kept, _retain(options))
        least = sorted(damage_LC[:, slot].argsort(kind="stable")[:few].tolist())
        if few:
            name = f"{few} layers keep {share:.0%}"
            layouts[name], expected[name] = {layers[at]: share for at in least}, float(damage_LC[least, slot].sum())
    best = sorted(layouts, key=expected.__getitem__)[:_FEW_LAYOUTS]
    hand = by_hand(layers, _retain(options), length)
    return {name: layouts[name] for name in best} | {name: hand[name] for name in hand.keys() & {"evenly"}}


def _fewest(count: int, kept: float, share: float) -> int:
    """The number of layers that evict to `kept` of their tokens, so that all take `share` of the bytes, in
    groups of as many layers as the rarer kind has, the last of each kind padded; 0 where all of them are too few."""
    for few in range(1, count + 1):
        size = min(few, count - few) or few
        dropping, whole = -(-few // size), -(-(count - few) // size)
        if dropping + whole <= _MOST_GROUPS and (dropping * kept + whole) * size <= share * count:
            return few
    return 0


def by_hand(layers: Sequence[int], retain: float, length: int) -> dict[str, Layout]:
    """Layouts by hand for a share of the bytes, without those that would cache less than nothing."""
    edges, count = (SINK + RECENT) / length, len(layers)
    later = layers[_WHOLE_FIRST:]
    least = max(retain / _STEEPNESS, edges)
    kept = np.linspace(2 * retain - least, least, count).clip(max=1.0)
    shares: dict[str, dict[int, float]] = {
        "evenly": dict.fromkeys(layers, retain - edges),
        "behind whole first layers": dict.fromkeys(later, (retain * count - _WHOLE_FIRST) / max(1, len(later)) - edges),
        "as a pyramid": dict(zip(layers, (kept - edges).tolist(), strict=True)),
    }
    return {name: layout for name, layout in shares.items() if layout and min(layout.values()) >= 0}


def rule_of(layers: tuple[int, ...], share: float, score: str | None = None) -> Eviction:
    """Keeps a share of all tokens, and the first and last ones; by a score from outside of each head by itself."""
    return Eviction(
        layers=layers,
        keep=fraction(round(share, 4)) if round(share, 4) else tokens(0),
        sink=SINK,
        recent=RECENT,
        generated=_GENERATED,
        score=score or BUILT_IN_SCORE,
        observe=method_of(EvictionScore, score).observe if score else _OBSERVED,
        heads="per_kv_head" if score else "max",
    )


def rules_of(model: ModelInfo, layout: Layout, score: str | None = None) -> tuple[Eviction, ...]:
    """Layers of equal shares together, ascending; first those that keep all, up to the context."""
    together: dict[float, list[int]] = {}
    context = model.context_length
    for layer, share in layout.items():
        if rule_of((layer,), share).kept_tokens(context) < context:
            together.setdefault(round(share, 4), []).append(layer)
    dropping = {layer for layers in together.values() for layer in layers}
    whole = tuple(layer for layer in model.full_layers if layer not in dropping)
    shares = sorted(together.items(), key=lambda entry: entry[1])
    every = [rule_of(tuple(layers), share, score) for share, layers in shares]
    return (*((Eviction(layers=whole, keep="all"),) if whole else ()), *every)


def _spent(layers: Sequence[int], layout: Layout, length: int) -> float:
    kept = [rule_of((0,), layout[layer]).kept_tokens(length) if layer in layout else length for layer in layers]
    return sum(kept) / (len(layers) * length)


def _retain(options: Settled) -> float:
    assert options.retain is not None
    return options.retain


# --- trials -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class _EvictingSteps(Steps):
    """Steps as rows of one pass, over the tokens that layers cache of the prompt."""

    cached_gS: dict[int, torch.Tensor] = field(default_factory=dict)

    def attend(self, call: AttentionCall) -> torch.Tensor | None:
        """[1, H, R, D]; None where everything is attended to."""
        return Steps.attend(self, call) if call.layer in self.cached_gS else None

    def _allowed(self, layer: int, device: torch.device) -> torch.Tensor | None:
        cached_gS = self.cached_gS[layer]
        text_gR = cached_gS.new_ones((len(cached_gS), self.rows))
        return torch.cat((cached_gS, text_gR), 1)[:, None].expand(-1, self.rows, -1)


class EvictionTrials(DecodeTrials):
    """Runs texts over what layers keep of prompts; made by `on`."""

    def __init__(self, loaded: LoadedModel) -> None:
        super().__init__(loaded)
        self._observed: dict[int, Observed] = {}
        self._until = self._newest = 0

    def attend(self, call: AttentionCall) -> torch.Tensor | None:
        if call.chunk.longest <= self._until:
            newest = Observed(call.q_BHSD[:, :, -self._newest :], call.scale, call.softmax)
            self._observed[call.layer] = newest.before(self._observed.get(call.layer), self._newest)
        return super().attend(call)

    def damages(self, prompt: CalibrationPrompt, layouts: Sequence[Layout], options: Settled) -> list[float]:
        """KL(dense || what layers keep) of the next token of a text behind the prompt, in nats, for each layout."""
        prefix = self.observed(prompt, options)
        rows: dict[tuple[int, float], torch.Tensor] = {}
        damages = []
        for layout in layouts:
            for layer, share in layout.items():
                if (layer, share) not in rows:
                    rows[layer, share] = self.cached(prefix, layer, rule_of((layer,), share, options.score))
            kept = {layer: rows[layer, share] for layer, share in layout.items()}
            steps = _EvictingSteps((), prefix.past, prefix.rows_1R.shape[1], cached_gS=kept)
            sparse_1RV = self.run(steps, prefix.cache, prefix.states, prefix.rows_1R)
            damages.append(float(divergence(prefix.dense_1RV, sparse_1RV)))
        return damages

    def observed(self, prompt: CalibrationPrompt, options: Settled) -> Prefix:
        """Runs a prompt densely, and watches its last queries."""
        self._observed, self._until = {}, max(1, prompt.answer_start - 1)
        self._newest = rule_of((0,), 1.0, options.score).observe or 0
        prefix = self.prefilled(prompt, _STEPS.get(self._loaded.model.device.type, _FEW_STEPS), options)
        self._until = 0
        return prefix

    def cached(self, prefix: Prefix, layer: int, rule: Eviction) -> torch.Tensor:
        """bool [g, S]: the tokens that a rule caches of the prompt that was observed last."""
        store: Any = prefix.cache.layers[layer].store  # type: ignore[union-attr]
        cached: tuple[torch.Tensor, ...] = store.tensors
        k_1GSD, v_1GSD = (x_1GSD[:, :, : prefix.past] for x_1GSD in cached)
        backend = "triton" if k_1GSD.is_cuda and has_triton() else "reference"
        newest = self._observed[layer].before(None, rule.observe or 0)
        cached_1gK = rows_to_cache(rule, prefix.past, newest, k_1GSD, v_1GSD, layer=layer, backend=backend)
        if cached_1gK is None:
            return k_1GSD.new_ones((1, prefix.past), dtype=torch.bool)
        mask_gS = k_1GSD.new_zeros((cached_1gK.shape[1], prefix.past), dtype=torch.bool)
        return mask_gS.scatter_(1, cached_1gK[0], True)
