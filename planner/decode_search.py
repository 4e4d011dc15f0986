"""Filter layers by proof: candidates decode calibration prompts, and what each does to next tokens is recorded.

Candidates come from rules of others: filters at even distances, and Kascade's anchor layers, which the similarities of
layers give; one to four of them, with three budgets, and a larger one where none of these is inside the loss. Each is
measured. From the one that reads least inside the loss a round of moves of one layer follows: segments merge, a dense
layer joins the segment before it, a segment gets half its budget, a layer chooses for itself. A move that stays inside
the loss is kept, and the next one goes on from there. A candidate is given up at the first prompt after which its mean
can no longer stay inside; prompts that were hardest so far come first.

This is done at the longest length; at the others the segments that passed are measured again, with their own budgets
and with larger ones. `choose_filter_layers` takes what is cheapest among the trials inside the loss.

Shapes: J layers that attend, I layers that choose.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, pairwise

import numpy as np
import torch

from sparsekv.planner.decode_trials import DecodeTrials, Prefix
from sparsekv.planner.filter_layers import Segments, segments_of, with_budget
from sparsekv.planner.job import Job
from sparsekv.planner.options import Settled
from sparsekv.planner.predict import decode_share
from sparsekv.planner.prices import Floats
from sparsekv.planner.profile.calibration import over_prompts
from sparsekv.planner.profile.profile_data import DecodeTrial, LengthProfile, Profile
from sparsekv.planner.progress import Progress, StageStep
from sparsekv.plans.model import ModelInfo, kv_bytes
from sparsekv.plans.patterns import Budget

_EVEN = (1, 2, 3, 4)  # filter layers
_ANCHORS = ((0, 2), (0, 3), (1, 1), (1, 2))  # the first layer, and filter layers
_BUDGETS, _BELOW = (2.0, 1.0, 0.5), (1.0, 0.5, 0.25)  # of the usual one, and of one that was asked for
_WIDER = (4.0,)  # of the usual one, where all these lose too much
_HALF = 0.5  # of a segment's budget, in one move
_LARGER = (2.0, 4.0)  # budgets at shorter lengths
_MOST_CHOSEN = 0.7  # share of the context; more is not worth a choice
_MOST_SHORTER = 3  # segments that are measured at shorter lengths
_PREFIX_BYTES = 12 << 30  # keys and values of all prompts of a length together
_LEAST_PROMPTS = 2
_RESAMPLES = 2000


def effort_on(device: torch.device, samples: int) -> tuple[int, int]:
    """Prompts at a length at most, of so many calibration samples, and steps of each: what takes a minute or so, on two
    CPU cores for a small model at 8K, on a GPU for a large one at 32K."""
    return (min(12, samples + 4), 32) if device.type == "cuda" else (min(6, samples + 3), 16)


def measure_trials(job: Job, profile: Profile, progress: Progress | None = None) -> Profile:
    """The profile with decode trials at every length; unchanged where there are some, or nothing to search.

    Args:
        profile: with decode statistics, where decode is planned.

    Raises:
        UsageError, PromptError: there are no calibration prompts of a length.
    """
    loaded, options = job.subject, job.options
    searches = "decode" in options.phases and not options.filter_layers and len(loaded.info.full_layers) > 1
    if not searches or any(entry.trials or not entry.reuse for entry in profile.lengths):
        return profile
    entries: list[LengthProfile] = []
    passed: list[Segments] = []
    stage = (progress or Progress()).stage("decode trials", total=len(profile.lengths))
    with stage as step, DecodeTrials.on(loaded) as model:
        for entry in reversed(profile.lengths):
            prefixes = _prefixes(job, model, entry.length, step)
            search = _Search(loaded.info, prefixes, model, entry, options, step)
            if passed:
                search.repeat(passed)
            else:
                search.run()
                passed = sorted(search.passed, key=search.share)[:_MOST_SHORTER]
            entries.append(entry.model_copy(update={"trials": tuple(search.trials)}))
            step.advance(1, f"{entry.length} tokens")
    return profile.model_copy(update={"lengths": tuple(reversed(entries))})


def upper_bound(values: Sequence[float]) -> float:
    """The 95% upper bound of a mean, by the bootstrap; the largest value of fewer than three."""
    if len(values) < 3:
        return max(values)
    drawn = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    return float(np.quantile(np.asarray(values)[drawn].mean(1), 0.95))


class _Search:
    """The trials of one length."""

    def __init__(
        self,
        info: ModelInfo,
        prefixes: Sequence[Prefix],
        model: DecodeTrials,
        entry: LengthProfile,
        options: Settled,
        step: StageStep,
    ) -> None:
        self._info, self._model, self._entry, self._step = info, model, entry, step
        self._prefixes, self._most = prefixes, options.phase_loss
        self._hardness = [0.0] * len(prefixes)
        self._budget = options.decode_budget
        self._factors = (_BUDGETS, _WIDER) if options.any_budget else (_BELOW,)
        self._tried: set[Segments] = set()
        self.trials: list[DecodeTrial] = []

    def run(self) -> None:
        """Every candidate, then moves from the best. Where a budget loses too much, smaller ones lose more."""
        for factors in self._factors:
            for wide in () if self.passed else candidates(self._info, self._entry, self._budget):
                all(self._measure(tuple(with_budget(one, factor) for one in wide)) for factor in factors)
        best = min(self.passed, key=self.share, default=())
        for move in moves(self._info.full_layers):
            changed = move(best)
            if changed and self._measure(changed):
                best = changed

    def repeat(self, passed: Iterable[Segments]) -> None:
        """Each with its own budgets, or the least larger ones that stay inside the loss."""
        for segments in passed:
            for factor in (1.0, *_LARGER):
                grown = tuple(with_budget(one, factor) for one in segments)
                largest = max(one.budget.resolve(self._entry.length) for one in grown)
                if largest <= _MOST_CHOSEN * self._entry.length and self._measure(grown):
                    break

    @property
    def passed(self) -> list[Segments]:
        return [trial.segments for trial in self.trials if trial.kl_bound <= self._most]

    def share(self, segments: Segments) -> float:
        return decode_share(segments, self._entry.length, self._info)

    def _measure(self, segments: Segments) -> bool:
        """True where they were measured now, and stayed inside the loss."""
        if segments in self._tried:
            return False
        self._tried.add(segments)
        order = sorted(range(len(self._prefixes)), key=lambda number: -self._hardness[number])
        found = self._model.divergences(segments, [self._prefixes[n] for n in order], self._most * len(order))
        for number, kl in zip(order, found, strict=False):
            self._hardness[number] += min(kl, self._most)
        self._step.advance(0, f"{self._entry.length} tokens, {self.share(segments):.0%} of them read")
        if len(found) < len(order):
            return False
        mean = float(over_prompts(np.array(found), [self._prefixes[n].task for n in order]))
        bound = max(mean, upper_bound(sorted(found)))
        self.trials.append(DecodeTrial(segments=segments, kl=mean, kl_bound=bound, prompts=len(found)))
        return bound <= self._most


def candidates(model: ModelInfo, entry: LengthProfile, budget: Budget) -> list[Segments]:
    """By rule, each once: filters at even distances, and anchors from the first layer or from the second, as Kascade
    has them.

    Args:
        entry: with decode statistics.
        budget: of each filter.
    """
    reuse, full = entry.reuse, model.full_layers
    assert reuse is not None
    even = (tuple(full[len(full) * number // count] for number in range(count)) for count in _EVEN)
    kept_JI = reuse.kept[min(1, len(reuse.kept) - 1)]
    anchors = (anchor_layers(kept_JI, reuse.importance, full[first:], count) for first, count in _ANCHORS)
    shapes = dict.fromkeys(chain(even, anchors))
    wide = dict.fromkeys(segments_of(one, full, reuse, budget, entry.length) for one in shapes)
    return [segments for segments in wide if segments]


Move = Callable[[Segments], Segments]
"""Gives segments one step away, none where it does not apply."""


def moves(full: Sequence[int]) -> Iterator[Move]:
    """One round of each layer, from the last on, and of each segment's budget, three times. Half a budget saves more
    than a layer that chooses for itself, which may need all of it."""
    for move in (merged, joined, lowered, halved, halved, alone, partial(merged, growth=2.0), halved):
        for layer in reversed(full):
            yield partial(move, layer=layer)


def merged(segments: Segments, layer: int, growth: float = 1.0) -> Segments:
    """Without the filter `layer`, which follows the one before it, with all that followed it."""
    numbers = {one.filter: number for number, one in enumerate(segments)}
    number = numbers.get(layer, 0)
    if not number:
        return ()
    before, own = segments[number - 1 : number + 1]
    larger = max(before, own, key=lambda one: one.budget.most)
    layers = tuple(sorted({*before.layers, layer, *own.layers}))
    both = with_budget(larger.model_copy(update={"filter": before.filter, "layers": layers}), growth)
    return _legal((*segments[: number - 1], both, *segments[number + 1 :]))


def lowered(segments: Segments, layer: int) -> Segments:
    """With the dense `layer` as the filter in place of the next one, which follows it."""
    numbers = [number for number, one in enumerate(segments) if one.filter > layer]
    if not numbers or any(layer in (one.filter, *one.layers) for one in segments):
        return ()
    number = numbers[0]
    own = segments[number]
    changes = {"filter": layer, "layers": tuple(sorted({own.filter, *own.layers}))}
    return _legal((*segments[:number], own.model_copy(update=changes), *segments[number + 1 :]))


def joined(segments: Segments, layer: int) -> Segments:
    """With a dense layer in the segment before it; none where it is sparse, chooses, or would cross another segment."""
    before = [number for number, one in enumerate(segments) if one.filter < layer]
    if not before or any(layer in (one.filter, *one.layers) for one in segments):
        return ()
    own = segments[before[-1]]
    grown = own.model_copy(update={"layers": tuple(sorted((*own.layers, layer)))})
    return _legal((*segments[: before[-1]], grown, *segments[before[-1] + 1 :]))


def alone(segments: Segments, layer: int) -> Segments:
    """With a dense layer that chooses for itself: a filter layer, or one outside all segments."""
    if not segments or any(layer in one.layers for one in segments):
        return ()
    numbers = {one.filter: number for number, one in enumerate(segments)}
    if layer in numbers:
        own = segments[numbers[layer]]
        grown = own.model_copy(update={"layers": (layer, *own.layers)})
        return _legal((*segments[: numbers[layer]], grown, *segments[numbers[layer] + 1 :]))
    nearest = min(segments, key=lambda one: abs(one.filter - layer))
    own = nearest.model_copy(update={"filter": layer, "layers": (layer,)})
    return _legal(tuple(sorted((*segments, own), key=lambda one: one.filter)))


def halved(segments: Segments, layer: int) -> Segments:
    """With half the budget in the segment whose filter is `layer`."""
    changed = tuple(with_budget(one, _HALF) if one.filter == layer else one for one in segments)
    return changed if changed != segments else ()


def _legal(segments: Segments) -> Segments:
    """The segments if a plan may have them, in their order (see `Segment` and `DecodeBucket`); else none."""
    ordered = all(one.filter < after.filter and one.layers[-1] < after.layers[0] for one, after in pairwise(segments))
    dense = {one.filter for one in segments if not one.filter_is_sparse}
    is_legal = ordered and not any(dense.intersection(one.layers) for one in segments)
    return segments if is_legal else ()


Similarities = Sequence[Sequence[float]] | Floats


def anchor_layers(
    kept_JI: Similarities, importance_J: Sequence[float], rest: Sequence[int], count: int
) -> tuple[int, ...]:
    """Kascade's anchor layers (arXiv 2512.16391): those that maximise the similarity, weighted by importance, of every
    layer to the anchor before it.

    Args:
        kept_JI: share of layer j's attention mass that the choice of layer i holds.
        rest: layers with full attention, ascending, of which the first is the first anchor.
        count: of anchors; fewer where there are fewer layers.
    """

    def similarity(first: int, *layers: int) -> float:
        return sum(importance_J[layer] * min(kept_JI[layer][first], 1.0) for layer in layers)

    best: dict[int, tuple[float, tuple[int, ...]]] = {len(rest): (0.0, ())}
    for _ in range(min(count, len(rest))):  # from the last segment to the first: best of everything from a position on
        longer: dict[int, tuple[float, tuple[int, ...]]] = {}
        for start in range(len(rest)):
            options = [
                (score + similarity(*rest[start:end]), (rest[start], *anchors))
                for end, (score, anchors) in best.items()
                if end > start
            ]
            if options:
                longer[start] = max(options)
        best = longer
    return best[0][1] if 0 in best else ()


def _prefixes(job: Job, model: DecodeTrials, length: int, step: StageStep) -> list[Prefix]:
    """Returns the first tokens of as many calibration prompts as there is room for."""
    most, steps = effort_on(job.subject.model.device, job.options.calibration_samples)
    fitting = _PREFIX_BYTES // kv_bytes(job.model.attention, length, job.subject.model.dtype.itemsize)
    prompts = job.calibration_prompts(length, max(_LEAST_PROMPTS, min(most, fitting)))
    found = []
    for number, prompt in enumerate(prompts, start=1):
        found.append(model.prefilled(prompt, steps, job.options))
        step.advance(0, f"{length} tokens, prompt {number} of {len(prompts)} prefilled")
    return found
