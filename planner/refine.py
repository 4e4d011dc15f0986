"""Damage corrected by what whole plans do: the additive model of damage is a guess, this is the measurement.

The plan that the allocation gives runs on calibration prompts. Where its answers diverge from dense by more or less
than predicted, the damage of all layers is multiplied, and the allocation is solved again, until the plan that was
measured stays inside the loss and near it. Right answers count too: on calibration a plan may lose one point net, and
eight in a task, beside the same kernels with every tile.

On a GPU the plan then runs with each of its layers dense (neighbouring layers together where there are many): what the
divergence falls by is what those layers contribute. Where the prediction gives them too large or too small a share, the
weight of their damage is corrected. That is kept where the plan inside the loss becomes sparser; where a density is
asked for instead of a loss, where its divergence falls.

All weights become a part of the profile, so that a later compile without the model gives the same plan. A pass with
some layers dense begins at the first of them, from its captured input: on average half of the layers run.

Shapes: B batch (1), H query heads, S rows, T scored rows, V vocabulary, N groups of layers, P prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsekv.kernels.backends import Fallback, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.keys import full_view
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.allocate import at_loss, at_target
from sparsekv.planner.evaluation.predictions import divergence
from sparsekv.planner.job import Job
from sparsekv.planner.options import Settled
from sparsekv.planner.predict import Choice, ScoreTables
from sparsekv.planner.profile.calibration import CalibrationPrompt, over_prompts
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.plans.patterns import Dense, Pattern, TileShape
from sparsekv.plans.types import rounded
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.hf.describe import config_of, decoder_of, last_norm_of, logits_of
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import AttentionCall, ObservedInput, capture_attention, captured_inputs
from sparsekv.runtime.model_config import rope_switch

_MOST_FACTOR = 2.0  # of a weight in one round: what one prompt more would change is not to be followed
_LEAST_SHARE = 1e-3
# At 32 layers and 32K tokens of an 8B model that is about twenty passes of a second a round.
_MOST_GROUPS = 16
# The first prompts, which are of different tasks: fewer where they are long, and for the passes of groups.
_PROMPTS, _LEAST_PROMPTS, _TOKENS = 8, 3, 1 << 18
_GROUP_PROMPTS, _LEAST_GROUP_PROMPTS, _GROUP_TOKENS = 4, 2, 1 << 16
_MEASUREMENTS = 4  # of the level of damage
_NEAR = 0.7  # of the loss
_LEAST_RISE, _MOST_FALL = 1.5, 8.0  # of the level in one step: how far it has to rise is what was measured
_NET_POINTS, _TASK_POINTS = 0.01, 0.08  # of right answers, that may be lost

Floats = npt.NDArray[np.float64]
LayerPatterns = Mapping[int, tuple[Pattern, ...]]


def refine(job: Job, profile: Profile, progress: Progress | None = None) -> Profile:
    """The profile with corrected layer weights; unchanged where nothing is to be corrected."""
    options = job.options
    by_loss = not options.target_density and options.preset is None
    if "prefill" not in options.phases or not (by_loss or (options.target_density and options.refine_rounds)):
        return profile
    loaded, prompts = job.subject, job.prompts
    entries = [entry for entry in profile.lengths if entry.layers]
    found = {}
    total = sum(prefill_work(entry.length) for entry in entries)
    with (progress or Progress()).stage("refine", total=total) as step, torch.no_grad():
        for entry in entries:
            some = prompts[entry.length][: max(_LEAST_PROMPTS, min(_PROMPTS, _TOKENS // entry.length))]
            runs = [_Run(loaded, prompt, profile.tile, profile.backend, job.step) for prompt in some]
            found[entry.length] = _Refinement(options, entry.length, runs).refined(entry)
            step.advance(prefill_work(entry.length), f"{entry.length} tokens")
    return profile.model_copy(update={"lengths": tuple(found.get(one.length, one) for one in profile.lengths)})


@dataclass(frozen=True, slots=True)
class _Plan:
    """A plan that was run: its weights, its choice, and what ranks it beside others, less being better."""

    entry: LengthProfile
    choice: Choice
    rank: float


class _Refinement:
    """The plans of one length that are run."""

    def __init__(self, options: Settled, length: int, runs: Sequence[_Run]) -> None:
        self._options, self._runs = options, runs
        self._target, self._loss = options.target_at(length), options.phase_loss
        few = max(_LEAST_GROUP_PROMPTS, min(_GROUP_PROMPTS, _GROUP_TOKENS // length))
        self._few = runs[:few]

    def refined(self, entry: LengthProfile) -> LengthProfile:
        best = self._planned(entry)
        for _ in range(self._options.refine_rounds):
            further = self._planned(self._corrected(best))
            if not further.rank < best.rank:
                break
            best = further
        return best.entry

    def _planned(self, entry: LengthProfile) -> _Plan:
        if self._target is None:
            return self._inside_loss(entry)
        choice = at_target(ScoreTables.of(entry), self._options.families, self._target).choice
        return _Plan(entry, choice, self._measured(entry, choice)[0])

    def _inside_loss(self, entry: LengthProfile) -> _Plan:
        """The sparsest plan, of some levels of damage, that was measured to be inside the loss; where none was, one of
        twice the last level."""
        level, outside, inside = 1.0, 0.0, np.inf
        best: _Plan | None = None
        for _ in range(_MEASUREMENTS):
            levelled = _scaled(entry, [level] * len(entry.layers))
            choice, predicted = at_loss(ScoreTables.of(levelled), self._options.families, self._loss)
            if best is not None and np.array_equal(choice, best.choice):
                break
            divergence, keeps_answers = self._measured(levelled, choice)
            ratio = divergence / max(predicted, 1e-30)
            if keeps_answers and divergence <= self._loss:
                inside, best = level, self._sparse(levelled, choice)
                if ratio >= _NEAR:
                    break
            else:
                outside, ratio = level, max(ratio, _LEAST_RISE)
            following = level * max(ratio, 1.0 / _MOST_FALL)
            level = following if outside < following < inside else (outside * inside) ** 0.5
        if best is None:
            levelled = _scaled(entry, [2.0 * outside] * len(entry.layers))
            choice, _ = at_loss(ScoreTables.of(levelled), self._options.families, self._loss)
            best = self._sparse(levelled, choice)
        return best

    def _sparse(self, entry: LengthProfile, choice: Choice) -> _Plan:
        return _Plan(entry, choice, ScoreTables.of(entry).density(choice))

    def _measured(self, entry: LengthProfile, choice: Choice) -> tuple[float, bool]:
        """The divergence beyond rounding, and whether right answers stay."""
        patterns = _patterns_of(entry, choice)
        divergence_P, lost_P = np.array([run.measured(patterns) for run in self._runs]).T
        tasks = [run.task for run in self._runs]
        of_tasks = [lost_P[[own == task for own in tasks]].mean() for task in set(tasks)]
        keeps_answers = lost_P.mean() <= _NET_POINTS and max(of_tasks) <= _TASK_POINTS
        return float(over_prompts(divergence_P, tasks)), bool(keeps_answers)

    def _corrected(self, plan: _Plan) -> LengthProfile:
        """Weights towards the measured shares, by the square root of the ratio and at most a factor."""
        entry, tables, tasks = plan.entry, ScoreTables.of(plan.entry), [run.task for run in self._few]
        groups = np.array_split(np.arange(len(entry.layers)), min(_MOST_GROUPS, len(entry.layers)))
        parts = [{entry.layers[row].layer for row in rows} for rows in groups]
        patterns = _patterns_of(entry, plan.choice)
        weight_P1 = np.array(entry.prompt_weights[: len(tasks)])[:, None]
        without_PN = weight_P1 * np.array([run.divergences(patterns, parts) for run in self._few])
        whole, *without_N = over_prompts(without_PN, tasks)
        measured_N = np.maximum(whole - np.array(without_N), 0.0)
        predicted_L = tables.take(tables.damage_LCH, plan.choice, 0.0).sum(1)
        predicted_N = np.array([predicted_L[rows].sum() for rows in groups])
        shares = [np.maximum(part_N / max(part_N.sum(), 1e-30), _LEAST_SHARE) for part_N in (measured_N, predicted_N)]
        factor_N = np.clip(np.sqrt(shares[0] / shares[1]), 1 / _MOST_FACTOR, _MOST_FACTOR)
        return _scaled(entry, np.repeat(factor_N, [len(rows) for rows in groups]).tolist())


def _scaled(entry: LengthProfile, factors: Sequence[float]) -> LengthProfile:
    """With the weight of each layer multiplied."""
    layers = [
        scores.model_copy(update={"weight": rounded(scores.weight * factor)})
        for scores, factor in zip(entry.layers, factors, strict=True)
    ]
    return entry.model_copy(update={"layers": tuple(layers)})


def _patterns_of(entry: LengthProfile, choice: Choice) -> LayerPatterns:
    """The patterns of every profiled layer, in order, as the plan has them: by shares of the context."""
    tables = ScoreTables.of(entry)
    return {
        scores.layer: tuple(
            tables.pattern(choice, row, head).of_context(entry.length) for head in range(len(scores.patterns[0]))
        )
        for row, scores in enumerate(entry.layers)
    }


class _Run:
    """One calibration prompt: its prefill by some patterns, its answer dense over what that left."""

    def __init__(
        self, loaded: LoadedModel, prompt: CalibrationPrompt, tile: TileShape, backend: str, step: int | None
    ) -> None:
        self._model: Any = loaded.model
        self._tile, self._backend = tile, backend
        self._end, self.task = prompt.answer_start, prompt.task
        rotates = rope_switch(config_of(loaded.model))
        self._steps = piece_sizes(self._end, step, rotates) if step else [self._end]
        self._ids_1S = torch.from_numpy(prompt.ids.astype(np.int64)).to(loaded.model.device)[None]
        self._rows = slice(prompt.answer_rows.start, prompt.answer_rows.stop)
        self._patterns: LayerPatterns = {}
        self._rounding: tuple[float, bool] | None = None
        self._dense_TV = self._forward({})

    def measured(self, patterns: LayerPatterns) -> tuple[float, int]:
        """KL(dense || sparse) a token of the answer beyond that of the same kernels with every tile; and 1 where the
        answer is right with every tile but not by the patterns, -1 where it is the other way round."""
        if self._rounding is None:
            whole = {layer: (Dense(),) * len(heads) for layer, heads in patterns.items()}
            self._rounding = self._whole(whole)
        (floor, was_right), (divergence, is_right) = self._rounding, self._whole(patterns)
        return max(0.0, divergence - floor), was_right - is_right

    def _whole(self, patterns: LayerPatterns) -> tuple[float, bool]:
        with capture_attention(self._model, self._attend):
            sparse_TV = self._forward(patterns)
            answer_T = self._ids_1S[0, self._rows.start + 1 : self._rows.stop + 1].to(sparse_TV.device)
            return self._divergence(sparse_TV), bool((sparse_TV.argmax(-1) == answer_T).all())

    def divergences(self, patterns: LayerPatterns, groups: Sequence[Set[int]]) -> list[float]:
        """KL(dense || sparse) a token of the answer; and with each of these groups of layers dense instead."""
        decoder: Any = decoder_of(self._model)
        with capture_attention(self._model, self._attend):
            with captured_inputs(self._model) as inputs:
                found = [self._divergence(self._forward(patterns))]
            for group in groups:
                self._patterns = {number: own for number, own in patterns.items() if number not in group}
                found.append(self._divergence(self._from(min(group), inputs, decoder)))
        return found

    def _forward(self, patterns: LayerPatterns) -> torch.Tensor:
        self._patterns = patterns
        hidden_1SE = decoder_of(self._model)(input_ids=self._ids_1S, use_cache=False).last_hidden_state
        return self._log_probabilities(hidden_1SE[:, self._rows])

    def _from(self, layer: int, inputs: Mapping[int, ObservedInput], decoder: Any) -> torch.Tensor:
        hidden_1SE, shared = inputs[layer].hidden_BSE, inputs[layer].shared
        for number in range(layer, len(decoder.layers)):
            hidden_1SE = inputs[number].run(decoder.layers[number], hidden_1SE, shared)
        return self._log_probabilities(last_norm_of(self._model)(hidden_1SE[:, self._rows]))

    def _log_probabilities(self, rows_1TE: torch.Tensor) -> torch.Tensor:
        return logits_of(self._model, rows_1TE[0]).float().log_softmax(-1)

    def _divergence(self, sparse_TV: torch.Tensor) -> float:
        return float(divergence(self._dense_TV[None], sparse_TV[None]))

    def _attend(self, call: AttentionCall) -> torch.Tensor | None:
        patterns, end = self._patterns.get(call.layer), self._end
        if patterns is None:
            return None
        q_BHSD, k_BGSD, v_BGSD = call.q_BHSD, call.k_BGKD, call.v_BGKD
        prompt = [
            self._in_step(call, patterns, Chunk.uniform(1, stop - rows, stop))
            for rows, stop in zip(self._steps, accumulate(self._steps), strict=True)
        ]
        rest, whole = Chunk.uniform(1, end, call.chunk.longest), full_view(k_BGSD, v_BGSD)
        dense = LayerProgram(call.layer, q_BHSD.shape[1], k_BGSD.shape[1], None)
        whole, fallback = replace(whole, softmax=call.softmax), Fallback(self._backend)
        answer = prefill(dense, q_BHSD[:, :, end:], whole, rest, scale=call.scale, fallback=fallback)
        return torch.cat([*prompt, answer], 2)

    def _in_step(self, call: AttentionCall, patterns: Sequence[Pattern], chunk: Chunk) -> torch.Tensor:
        q_BHSD = call.q_BHSD[:, :, chunk.past[0] : chunk.longest]
        k_BGSD, v_BGSD = (x[:, :, : chunk.longest] for x in (call.k_BGKD, call.v_BGKD))
        how: dict[str, Any] = {"scale": call.scale, "softmax": call.softmax}
        index = build_index(patterns, q_BHSD, k_BGSD, chunk, self._tile, layer=call.layer, **how)
        return prefill_attention(q_BHSD, k_BGSD, v_BGSD, index, chunk, backend=self._backend, **how).out_BHSD
