"""Filter layers by proof: candidates are run on calibration prompts, and what each does to next tokens is recorded.

First every layer alone attends to the choice of the layer before it, which says what a lost share of attention mass
does to the next token there. From that and the similarities, candidates are proposed. They are measured from the
sparsest on, until one stays inside the gate; that one is then refined step by step: a dense layer made sparse, a filter
layer dropped, a budget cut, the least expected divergence for the tokens saved first; at last layers that are still
dense, filter layers among them, choose for themselves, which saves half of what they read. A candidate is given up at
the first prompt after which its mean can no longer stay inside the gate, and prompts that were hardest so far come
first.

This is done at the longest length; at the others the segments that passed are measured again, with their own budgets
and with larger ones. `choose_filter_layers` takes what is cheapest among the trials inside the gate.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from sparsekv.planner.decode_candidates import CandidateSpace, Segments
from sparsekv.planner.decode_trials import Prefix, divergences, prefilled
from sparsekv.planner.filter_layers import Floats
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.calibration import calibration_prompts
from sparsekv.planner.profile.mix import with_tasks
from sparsekv.planner.profile.profile_data import DecodeTrial, LengthProfile, Profile
from sparsekv.planner.progress import Progress, Step
from sparsekv.runtime.hf.load import LoadedModel

_PREFIX_BYTES = 12 << 30  # keys and values of all prompts of a length together
_LEAST_PROMPTS = 2
_PROBE_PROMPTS = 2
_RESERVED = 4  # trials in which layers choose for themselves
_MOST_SHORTER = 3  # segments that are measured at shorter lengths
_RESAMPLES = 2000


@dataclass(frozen=True, slots=True)
class Effort:
    """How much is measured at a length.

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
        """What takes a minute or so: on two CPU cores for a small model at 8K, on a GPU for a large one at 32K.

        Args:
            samples: calibration samples a length.
        """
        if device.type == "cuda":
            return cls(min(12, samples + 4), 32, 50)
        return cls(min(4, samples + 1), 16, 18)


def measure_decode(
    loaded: LoadedModel,
    profile: Profile,
    options: PlanOptions,
    progress: Progress | None = None,
    effort: Effort | None = None,
) -> Profile:
    """The profile with decode trials at every length; unchanged where there are some, or nothing to search.

    Args:
        loaded: the model that was profiled, with nothing applied to it.
        profile: with decode statistics, where decode is planned.
        options: settled.
        effort: how much to measure; by device when None.

    Raises:
        UsageError, PromptError: there are no calibration prompts of a length.
    """
    effort = effort or Effort.on(loaded.model.device, options.samples or 1)
    by_trials = options.filter_rule == "dp" and options.decode_loss is None
    wanted = "decode" in options.phases and by_trials and len(loaded.info.full_layers) > 1
    if not wanted or any(entry.trials or not entry.reuse for entry in profile.lengths):
        return profile
    options = options if options.prompts else with_tasks(loaded, options, profile.tasks)
    entries: list[LengthProfile] = []
    passed: list[Segments] = []
    total = effort.trials * effort.prompts * len(profile.lengths)
    with (progress or Progress()).stage("decode trials", total=total) as step:
        for entry in reversed(profile.lengths):
            search = _Search(loaded, entry, options, effort, step)
            if passed:
                search.repeat(passed)
            else:
                search.run()
                passed = search.passed[:_MOST_SHORTER]
            entries.append(entry.model_copy(update={"trials": tuple(search.trials)}))
            step.advance(search.runs)
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
        self, loaded: LoadedModel, entry: LengthProfile, options: PlanOptions, effort: Effort, step: Step
    ) -> None:
        self._loaded, self._gate, self._step = loaded, options.decode_bound, step
        self._space = CandidateSpace(loaded.info, entry, options)
        self._prefixes = _prefixes(loaded, entry.length, options, effort)
        self._hardness = [0.0] * len(self._prefixes)
        self._tried: set[Segments] = set()
        self.trials: list[DecodeTrial] = []
        self.runs = effort.trials * len(self._prefixes)  # of a prompt, left
        self._reserved = min(_RESERVED, effort.trials // 4) * len(self._prefixes)  # of these, for layers that choose
        self._length = entry.length

    @property
    def passed(self) -> list[Segments]:
        """What stayed inside the gate, those that read least first."""
        return sorted((trial.segments for trial in self.trials if self._is_inside(trial)), key=self._space.share)

    def _is_inside(self, trial: DecodeTrial) -> bool:
        return trial.prompts == len(self._prefixes) and trial.kl_bound <= self._gate

    def run(self) -> None:
        """Probes, candidates from the sparsest on, refinement."""
        weights_J = self._weights()
        for segments in self._space.proposed(weights_J, self._gate):
            if self._measure(segments):
                break
        while self.passed and self._refined(self.passed[0], self._space.smaller, weights_J):
            pass
        self._reserved = 0
        for segments in self._space.all_alone(self.passed[0]) if self.passed else ():
            self._measure(segments)
        while self.passed and self._refined(self.passed[0], self._space.alone, weights_J):
            pass

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

    def _refined(self, segments: Segments, steps: Callable[[Segments], Iterable[Segments]], weights_J: Floats) -> bool:
        """Measures steps from these segments until one stays inside the gate."""

        def price(smaller: Segments) -> float:
            more = self._space.expected(smaller, weights_J) - self._space.expected(segments, weights_J)
            return more / (self._space.share(segments) - self._space.share(smaller))

        return any(self._measure(one) for one in sorted(steps(segments), key=price))

    def _measure(self, segments: Segments) -> bool:
        """Whether they were measured now, and stayed inside the gate."""
        if segments in self._tried or self.runs - self._reserved < len(self._prefixes):
            return False
        self._tried.add(segments)
        order = sorted(range(len(self._prefixes)), key=lambda number: -self._hardness[number])
        most = self._gate * len(order)
        found = self._run(segments, [self._prefixes[number] for number in order], most)
        for number, kl in zip(order, found, strict=False):
            self._hardness[number] += min(kl, self._gate)
        mean, bound = float(np.mean(found)), upper_bound(sorted(found))
        trial = DecodeTrial(segments=segments, kl=mean, kl_bound=max(mean, bound), prompts=len(found))
        self.trials.append(trial)
        return self._is_inside(trial)

    def _run(self, segments: Segments, prefixes: Sequence[Prefix], most: float = float("inf")) -> list[float]:
        found = divergences(self._loaded, segments, prefixes, most)
        self.runs -= len(found)
        self._step.advance(len(found), f"{self._length} tokens, {self._space.share(segments):.0%} of them read")
        return found


def _prefixes(loaded: LoadedModel, length: int, options: PlanOptions, effort: Effort) -> list[Prefix]:
    """Of as many calibration prompts as there is room for."""
    own = sum(2 * len(group.layers) * group.kv_heads * group.head_dim for group in loaded.info.attention)
    fitting = _PREFIX_BYTES // (own * length * loaded.model.dtype.itemsize)
    count = max(_LEAST_PROMPTS, min(effort.prompts, fitting))
    alone = replace(options, lengths=(length,), verify_lengths=(length,), samples=count)
    prompts = calibration_prompts(loaded.tokenizer, alone)[length]
    return [prefilled(loaded, prompt, effort.steps, options) for prompt in prompts]
