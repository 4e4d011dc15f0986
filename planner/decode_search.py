"""Filter layers by proof: candidates are run on calibration prompts, and what each does to next tokens is recorded.

First every layer alone attends to the choice of the layer before it, which says what a lost share of attention mass
does to the next token there. From that and the similarities, candidates are proposed, each with an expected divergence.
The search goes best first: what is measured next is the candidate that saves most beside the best one inside the gate,
times the chance that it stays inside. Whatever was measured, inside or outside, is built on: its neighbours, one step
away in either direction (a layer more or less in a segment, a filter layer more or less or at another layer, a budget
larger or smaller), are expected to diverge as it did, plus what the additive model says of the step. At last layers
that are still dense, filter layers among them, choose for themselves, which saves half of what they read. The search
ends when no candidate promises enough, or with the effort. A candidate is given up at the first prompt after which its
mean can no longer stay inside the gate, and prompts that were hardest so far come first.

This is done at the longest length; at the others the segments that passed are measured again, with their own budgets
and with larger ones. `choose_filter_layers` takes what is cheapest among the trials inside the gate.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
import torch

from sparsekv.planner.decode_candidates import CandidateSpace, Segments
from sparsekv.planner.decode_trials import DecodeTrials, Prefix, decode_trials
from sparsekv.planner.job import Job
from sparsekv.planner.options import Settled
from sparsekv.planner.prices import Floats
from sparsekv.planner.profile.profile_data import DecodeTrial, LengthProfile, Profile
from sparsekv.planner.progress import Progress, StageStep
from sparsekv.plans.model import ModelInfo, kv_bytes

_PREFIX_BYTES = 12 << 30  # keys and values of all prompts of a length together
_LEAST_PROMPTS = 2
_PROBE_PROMPTS = 2
_RESERVED = 0.25  # of the trials: those in which layers choose for themselves
_MOST_SHORTER = 3  # segments that are measured at shorter lengths
_RESAMPLES = 2000
_LEAST_GAIN = 0.003  # of all cached tokens; less is not worth a trial
_LEAST_PROMISE = 0.0004  # gain times the chance of it
# Deviations of the logarithm of a divergence from what was expected: of a proposal, of a step from what was measured,
# from what was given up early, and for each power of e by which the step is expected to change it.
_PROPOSAL, _STEP, _AFTER_GIVEN_UP, _CHANGE = 1.0, 0.15, 0.22, 0.3
_MOST_FALL = 0.05  # of a divergence in one step, by the additive model
_BOUND_OVER_MEAN = 1.3  # before the first trial says
_NOTHING = 1e-9  # nats


@dataclass(frozen=True, slots=True)
class Guess:
    """Holds what is expected of a candidate.

    Attributes:
        deviation: the standard deviation of the logarithm of that.
        share: cached tokens that it reads, of all; noted here, since every step of the search asks for all of them.
    """

    kl: float
    deviation: float
    share: float

    def chance(self, allowed: float) -> float:
        """That the divergence is at most this."""
        return NormalDist(math.log(self.kl + _NOTHING), self.deviation).cdf(math.log(allowed + _NOTHING))


@dataclass(frozen=True, slots=True)
class Effort:
    """Says how much is measured at a length.

    Attributes:
        prompts: at most; as many as memory has room for.
        steps: of decode, of each prompt.
        trials: for so many candidates, were all prompts run for each.
    """

    prompts: int
    steps: int
    trials: int

    @classmethod
    def on(cls, device: torch.device, samples: int) -> Effort:
        """Returns what takes a minute or so: on two CPU cores for a small model at 8K, on a GPU for a large one at 32K.

        Args:
            samples: calibration samples a length.
        """
        if device.type == "cuda":
            return cls(min(12, samples + 4), 32, 100)
        return cls(min(6, samples + 3), 16, 24)


def measure_trials(
    job: Job, profile: Profile, progress: Progress | None = None, effort: Effort | None = None
) -> Profile:
    """The profile with decode trials at every length; unchanged where there are some, or nothing to search.

    Args:
        effort: how much to measure; by device when None.

    Raises:
        UsageError, PromptError: there are no calibration prompts of a length.
    """
    loaded, options = job.subject, job.options
    effort = effort or Effort.on(loaded.model.device, options.calibration_samples)
    if not tries_decode(loaded.info, options) or any(entry.trials or not entry.reuse for entry in profile.lengths):
        return profile
    entries: list[LengthProfile] = []
    passed: list[Segments] = []
    # Nearly all is done at the longest length, which comes first.
    shares = [effort.trials] + [_MOST_SHORTER] * (len(profile.lengths) - 1)
    stage = (progress or Progress()).stage("decode trials", total=sum(shares))
    with stage as step, decode_trials(loaded) as model:
        for entry, share in zip(reversed(profile.lengths), shares, strict=True):
            prefixes = _prefixes(job, model, entry.length, effort, step)
            search = _Search(loaded.info, prefixes, model, entry, options, effort, step, share)
            if passed:
                search.repeat(passed)
            else:
                search.run()
                passed = search.passed_of_both_kinds[:_MOST_SHORTER]
            entries.append(entry.model_copy(update={"trials": tuple(search.trials)}))
            search.end()
    return profile.model_copy(update={"lengths": tuple(reversed(entries))})


def tries_decode(model: ModelInfo, options: Settled) -> bool:
    """Returns whether there is anything to search, of options that are settled."""
    return "decode" in options.phases and options.tries_decode and len(model.full_layers) > 1


def upper_bound(values: Sequence[float]) -> float:
    """The 95% upper bound of a mean, by the bootstrap; the largest value of fewer than three."""
    if len(values) < 3:
        return max(values)
    drawn = np.random.default_rng(0).integers(0, len(values), (_RESAMPLES, len(values)))
    return float(np.quantile(np.asarray(values)[drawn].mean(1), 0.95))


class _Search:
    """The trials of one length, which are `share` units of the stage."""

    def __init__(
        self,
        info: ModelInfo,
        prefixes: Sequence[Prefix],
        model: DecodeTrials,
        entry: LengthProfile,
        options: Settled,
        effort: Effort,
        step: StageStep,
        share: float,
    ) -> None:
        self._model, self._gate, self._step = model, options.decode_bound, step
        self._space = CandidateSpace(info, entry, options)
        self._prefixes = prefixes
        self._hardness = [0.0] * len(self._prefixes)
        self._guesses: dict[Segments, Guess] = {}
        self._bound_over_mean = _BOUND_OVER_MEAN
        self._tried: set[Segments] = set()
        self.trials: list[DecodeTrial] = []
        self.runs = effort.trials * len(self._prefixes)  # of a prompt, left
        self._units_a_run = share / self.runs
        self._reserved = int(_RESERVED * effort.trials) * len(self._prefixes)  # of these, for layers that choose
        self._length = entry.length

    @property
    def passed(self) -> list[Segments]:
        """Returns what stayed inside the gate, those that read least first."""
        return sorted((trial.segments for trial in self.trials if self._is_inside(trial)), key=self._space.share)

    @property
    def passed_of_both_kinds(self) -> list[Segments]:
        """The same, the best one whose filter layers attend to everything as one of the first two: which is cheaper is
        a matter of the device."""
        found = self.passed
        others = [one for one in found if not any(segment.filter_is_sparse for segment in one)]
        return list(dict.fromkeys([*found[:1], *others[:1], *found]))

    def _is_inside(self, trial: DecodeTrial) -> bool:
        return trial.prompts == len(self._prefixes) and trial.kl_bound <= self._gate

    def run(self) -> None:
        """Probes, proposals, then best first."""
        weights_J = self._weights()
        for segments in self._space.proposed(weights_J, self._gate):
            expected, share = self._space.expected(segments, weights_J), self._space.share(segments)
            self._guesses[segments] = Guess(expected, _PROPOSAL, share)
        self._best_first(self._space.neighbours, weights_J)
        self._reserved = 0
        for trial in self.trials:
            self._guess(trial, self._space.alone(trial.segments), weights_J)
        self._best_first(self._space.alone, weights_J)

    def _best_first(self, steps: Callable[[Segments], Iterable[Segments]], weights_J: Floats) -> None:
        """Measures what promises most, and guesses what its steps do, until nothing promises enough."""
        best = min(map(self._space.share, self.passed), default=1.0)
        while self._may_measure and (next_one := self._most_promising(best)):
            if self._measure(next_one):
                best = min(best, self._space.share(next_one))
            self._guess(self.trials[-1], steps(next_one), weights_J)

    @property
    def _may_measure(self) -> bool:
        return self.runs - self._reserved >= len(self._prefixes)

    def _most_promising(self, best: float) -> Segments | None:
        """Returns what to measure next, where `best` of the cached tokens are read by the best so far."""
        allowed = self._gate / self._bound_over_mean
        promises = (
            (gain * guess.chance(allowed), -guess.kl, segments)
            for segments, guess in self._guesses.items()
            if (gain := best - guess.share) >= _LEAST_GAIN
        )
        promise, _, segments = max(promises, key=lambda found: found[:2], default=(0.0, 0.0, None))
        return segments if promise >= _LEAST_PROMISE or best == 1.0 else None

    def _guess(self, trial: DecodeTrial, steps: Iterable[Segments], weights_J: Floats) -> None:
        """Returns what steps from a trial lead to, as far as nothing surer is known."""
        own = self._space.expected(trial.segments, weights_J)
        whole = trial.prompts == len(self._prefixes)
        measured = (trial.kl if whole else self._overall(trial)) + _NOTHING
        for one in steps:
            if one in self._tried:
                continue
            change = self._space.expected(one, weights_J) - own
            # Where layers stand in for each other the model is too low: what it falls by counts in proportion.
            kl = measured + change if change > 0 else measured * max(_MOST_FALL, 1.0 + change / max(own, _NOTHING))
            deviation = (_STEP if whole else _AFTER_GIVEN_UP) + _CHANGE * abs(math.log(kl / measured))
            before = self._guesses.get(one)
            if before is None or deviation < before.deviation:
                self._guesses[one] = Guess(kl, deviation, before.share if before else self._space.share(one))

    def _overall(self, trial: DecodeTrial) -> float:
        """The mean over all prompts of a trial that was given up, which began with the hardest ones."""
        hardest = sorted(self._hardness, reverse=True)
        known = sum(hardest[: trial.prompts]) / max(sum(hardest), _NOTHING)
        return trial.kl * trial.prompts / len(hardest) / max(known, 1.0 / len(hardest))

    def repeat(self, candidates: Iterable[Segments]) -> None:
        """Each with its own budgets, or the least larger ones that stay inside the gate."""
        for segments in candidates:
            for one in (segments, *self._space.larger(segments)):
                if self._measure(one):
                    break

    def _weights(self) -> Floats:
        found = {}
        for layer in self._space.full:
            few = self._prefixes[:_PROBE_PROMPTS]
            found[layer] = float(np.mean(self._run(self._space.probe(layer), few)))
        return self._space.weights(found)

    def end(self) -> None:
        """Counts what was left out as done."""
        self._step.advance(self.runs * self._units_a_run)

    def _measure(self, segments: Segments) -> bool:
        """Returns whether they were measured now, and stayed inside the gate."""
        if segments in self._tried or not self._may_measure:
            return False
        self._tried.add(segments)
        self._guesses.pop(segments, None)
        order = sorted(range(len(self._prefixes)), key=lambda number: -self._hardness[number])
        most = self._gate * len(order)
        found = self._run(segments, [self._prefixes[number] for number in order], most)
        for number, kl in zip(order, found, strict=False):
            self._hardness[number] += min(kl, self._gate)
        mean, bound = float(np.mean(found)), upper_bound(sorted(found))
        trial = DecodeTrial(segments=segments, kl=mean, kl_bound=max(mean, bound), prompts=len(found))
        self.trials.append(trial)
        if trial.prompts == len(order) and trial.kl > _NOTHING:
            self._bound_over_mean = trial.kl_bound / trial.kl
        return self._is_inside(trial)

    def _run(self, segments: Segments, prefixes: Sequence[Prefix], most: float = float("inf")) -> list[float]:
        found = self._model.divergences(segments, prefixes, most)
        self.runs -= len(found)
        self._step.advance(
            len(found) * self._units_a_run, f"{self._length} tokens, {self._space.share(segments):.0%} of them read"
        )
        return found


def _prefixes(job: Job, model: DecodeTrials, length: int, effort: Effort, step: StageStep) -> list[Prefix]:
    """Returns the first tokens of as many calibration prompts as there is room for."""
    fitting = _PREFIX_BYTES // kv_bytes(job.model.attention, length, job.subject.model.dtype.itemsize)
    prompts = job.calibration_prompts(length, max(_LEAST_PROMPTS, min(effort.prompts, fitting)))
    found = []
    for number, prompt in enumerate(prompts, start=1):
        found.append(model.prefilled(prompt, effort.steps, job.options))
        step.advance(0, f"{length} tokens, prompt {number} of {len(prompts)} prefilled")
    return found
