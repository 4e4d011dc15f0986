"""Chooses which layers of a model with indexers use theirs (IndexCache, arXiv 2603.12201): the fewest within the loss.

One pass over each calibration prompt tells which tokens every layer chooses in the last rows, and one pass a layer what
reusing the least similar choice does to the output: a layer's importance is that divergence over the share of its
choice that was lost. From both the dynamic programme of filter layers gives the best layers of every number. Those, and
as many at even distances, run on all prompts, by bisection; the smaller divergence counts.

Shapes: L layers, J layers that attend, I layers that choose, R rows, K tokens of a choice, S keys, A rows of the
answer, V vocabulary.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import chain

import numpy as np
import torch

from sparsekv.planner.decode_search import anchor_layers, upper_bound
from sparsekv.planner.evaluation.predictions import divergence, prefill
from sparsekv.planner.job import Job
from sparsekv.planner.options import Settled
from sparsekv.planner.prices import Floats
from sparsekv.planner.profile.calibration import CalibrationPrompt, digest_of_calibration, mix_of, over_prompts
from sparsekv.planner.progress import Progress, StageStep
from sparsekv.planner.records import versions
from sparsekv.plans.errors import UsageError
from sparsekv.plans.phases import IndexSharing
from sparsekv.plans.schema import Plan, Provenance
from sparsekv.plans.types import format_length
from sparsekv.runtime.hf.describe import config_of
from sparsekv.runtime.hf.generate import check_numbers
from sparsekv.runtime.hf.index_sharing import indexers_of, share, sources_of

_ROWS = 64  # of a prompt, the last: its question and answer


@dataclass(frozen=True, slots=True, eq=False)
class SharingSearch:
    """The choices of a model's layers on calibration prompts, and what patterns lose on them.

    Attributes:
        kept_JI: share of layer j's choice that layer i's has, at the longest length.
        importance_J: nats that a layer loses with all of its choice, at that length.
        losses: of the patterns that were run, in nats.
    """

    job: Job
    dense: Sequence[torch.Tensor]  # [1, A, V] of each prompt, log-probabilities
    kept_JI: Floats
    step: StageStep
    importance_J: list[float] = field(default_factory=list)
    losses: dict[str, float] = field(default_factory=dict)

    @classmethod
    @contextmanager
    def on(cls, job: Job, progress: Progress) -> Iterator[SharingSearch]:
        """The search on a job's model, with nothing applied to it.

        Raises:
            UsageError: a length is no longer than a choice.
            UnsupportedError: layers share choices already.
        """
        topk, layers = int(config_of(job.subject.model).index_topk), len(indexers_of(job.subject.model))
        if short := [length for length in job.options.lengths if length <= topk]:
            raise UsageError(
                f"expected --lengths above the {topk} tokens that an indexer chooses, found "
                f"{format_length(min(short))}: up to there every layer attends to everything"
            )
        with progress.stage("index sharing", total=2 * layers) as step:
            prompts = job.prompts
            dense = [_read(job, prompt) for prompt in chain.from_iterable(prompts.values())]
            check_numbers(job.subject.model, "logits", *dense)
            longest = prompts[max(prompts)]
            kept_JI = np.mean([_kept(job, prompt) for prompt in longest], 0)
            step.advance(layers, "choices compared")
            search = cls(job, dense, kept_JI, step)
            search.importance_J.extend(search._importance(layer, longest) for layer in range(layers))
            yield search

    def plan(self, options: Settled) -> Plan:
        """The plan of the fewest choosing layers within the loss; for each that missed its test, of more of them,
        within half of what that one lost. Where a length is dense, every layer chooses."""
        most, least = options.loss, 1
        for _ in range(max(options.missed.values(), default=0)):
            missed = self._fewest(most, least)
            most, least = self._loss(missed) / 2, missed.count("F") + 1
        pattern = "F" * len(self.importance_J) if options.dense else self._fewest(most, least)
        sharing = IndexSharing(pattern=pattern, lengths=options.lengths)
        return Plan(
            status="unverified", model=self.job.model, index_sharing=sharing, provenance=self._provenance(options)
        )

    def _fewest(self, most: float, least: int) -> str:
        """Returns the pattern of the fewest choosing layers within the loss, at least so many; all lose nothing."""
        layers = len(self.importance_J)
        counts = range(min(least, layers), layers + 1)
        inside = bisect_left(counts, True, key=lambda count: self._loss(self._best(count)) <= most)
        return self._best(counts[inside])

    def _best(self, count: int) -> str:
        layers = len(self.importance_J)
        even = [layers * number // count for number in range(count)]
        # of what is lost, so that a layer that chooses counts as one that loses nothing
        anchors = anchor_layers(self.kept_JI - 1.0, self.importance_J, range(layers), count)
        letters = [["F" if layer in choosing else "S" for layer in range(layers)] for choosing in (anchors, even)]
        return min(map("".join, letters), key=lambda pattern: (self._loss(pattern), pattern))

    def _loss(self, pattern: str) -> float:
        """The largest bound of the mean divergence over the prompts of a length."""
        if "S" not in pattern:
            return 0.0
        if pattern not in self.losses:
            sources, dense = sources_of(IndexSharing(pattern=pattern)), iter(self.dense)
            bounds = []
            for prompts in self.job.prompts.values():
                nats = [self._divergence(sources, prompt, next(dense)) for prompt in prompts]
                mean = float(over_prompts(np.array(nats), [prompt.task for prompt in prompts]))
                bounds.append(max(mean, upper_bound(sorted(nats))))
            self.losses[pattern] = max(bounds)
            self.step.advance(0, f"{pattern.count('F')} of {len(pattern)} layers choose: {max(bounds):.4f} nats")
        return self.losses[pattern]

    def _importance(self, layer: int, prompts: Sequence[CalibrationPrompt]) -> float:
        source = int(self.kept_JI[layer, : max(1, layer)].argmin())
        lost = 1.0 - float(self.kept_JI[layer, source])  # nothing of the first layer, which always chooses
        dense = self.dense[-len(prompts) :]  # the longest come last
        pairs = zip(prompts, dense, strict=True)
        nats = [self._divergence({layer: source}, prompt, log_1AV) for prompt, log_1AV in pairs] if lost else [0.0]
        self.step.advance(1, f"layer {layer}")
        return float(np.mean(nats)) / max(lost, 1e-9)

    def _divergence(self, sources: dict[int, int], prompt: CalibrationPrompt, dense_1AV: torch.Tensor) -> float:
        undo = share(self.job.subject.model, sources)
        try:
            return float(divergence(dense_1AV, _read(self.job, prompt)))
        finally:
            undo()

    def _provenance(self, options: Settled) -> Provenance:
        return Provenance(
            versions=versions(),
            seed=options.seed,
            calibration=digest_of_calibration(self.job.prompts),
            mix=mix_of(options.tasks, options.calibration_samples),
            settings={"loss": options.loss}
            | ({"missed": {str(length): times for length, times in options.missed.items()}} if options.missed else {}),
        )


@torch.no_grad()
def _read(job: Job, prompt: CalibrationPrompt) -> torch.Tensor:
    """[1, A, V]: log-probabilities of the tokens of the answer and of the one behind it."""
    model, first = job.subject.model, prompt.answer_start
    ids_1S = torch.from_numpy(prompt.ids.astype(np.int64))[None].to(model.device)
    return prefill(model, ids_1S, job.step, len(prompt.ids) - first + 1).logits_BKV.float().log_softmax(-1)


def _kept(job: Job, prompt: CalibrationPrompt) -> Floats:
    """[J, I]: the share of a layer's choice that an earlier one's has, over the last rows of a prompt."""
    indexers = indexers_of(job.subject.model)
    choices_L: dict[int, torch.Tensor] = {}

    def keep(layer: int, module: object, given: object, choice_1SK: torch.Tensor) -> None:
        choices_L[layer] = choice_1SK[0, -_ROWS:].long()

    with ExitStack() as hooks:
        for layer, indexer in enumerate(indexers):
            hooks.callback(indexer.register_forward_hook(partial(keep, layer)).remove)
        _read(job, prompt)
    kept_JI = np.eye(len(indexers))
    for layer in range(len(indexers)):
        own_RK = choices_L[layer]
        is_own_RS = own_RK.new_zeros(len(own_RK), len(prompt.ids), dtype=torch.bool).scatter_(1, own_RK, True)
        for earlier in range(layer):
            kept_JI[layer, earlier] = is_own_RS.gather(1, choices_L[earlier].to(own_RK.device)).float().mean()
    return kept_JI
