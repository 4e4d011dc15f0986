"""Layer weights corrected by what whole plans do: the additive model of damage is a guess, this is the measurement.

The plan that the allocation gives runs on a few calibration prompts, and again with each of its layers dense
(neighbouring layers together where there are many): what the divergence falls by is what those layers contribute. Where
the prediction gives them too large or too small a share, the weight of their damage is corrected, and the allocation is
solved again. It stops when the divergence of the whole plan falls no more, and keeps the weights of the best plan; they
become a part of the profile, so that a later compile without the model gives the same plan.

A pass with some layers dense begins at the first of them, from its captured input: on average half of the layers run.

Shapes: B batch (1), H query heads, S rows, T scored rows, V vocabulary, N groups of layers, P prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from sparsekv.kernels.backends import Fallback, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.keys import full_view
from sparsekv.kernels.tiles import Chunk
from sparsekv.planner.allocate import at_target
from sparsekv.planner.job import Job
from sparsekv.planner.options import Settled
from sparsekv.planner.predict import Choice, ScoreTables
from sparsekv.planner.profile.calibration import CalibrationPrompt, over_prompts
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.planner.progress import Progress, prefill_work
from sparsekv.plans.patterns import Pattern, TileShape
from sparsekv.plans.types import rounded
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.hf.describe import decoder_of, last_norm_of, logits_of
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import AttentionCall, ObservedInput, capture_attention, captured_inputs

_MOST_FACTOR = 2.0  # of a weight in one round: what one prompt more would change is not to be followed
_LEAST_SHARE = 1e-3
# At 32 layers and 32K tokens of an 8B model that is about twenty passes of a second a round.
_MOST_GROUPS = 16
# The first ones, which are of different tasks: fewer where they are long.
_PROMPTS, _LEAST_PROMPTS, _TOKENS = 4, 2, 1 << 16

Floats = npt.NDArray[np.float64]
LayerPatterns = Mapping[int, tuple[Pattern, ...]]


def refine(job: Job, profile: Profile, progress: Progress | None = None) -> Profile:
    """The profile with corrected layer weights; unchanged without a target density or without rounds."""
    options = job.options
    if not refines(options):
        return profile
    loaded, prompts = job.subject, job.prompts
    targets = dict(zip(options.lengths, options.target_density, strict=True))
    entries = [entry for entry in profile.lengths if entry.layers]
    found = {}
    total = sum(prefill_work(entry.length) for entry in entries)
    with (progress or Progress()).stage("refine", total=total) as step, torch.no_grad():
        for entry in entries:
            some = prompts[entry.length][: max(_LEAST_PROMPTS, min(_PROMPTS, _TOKENS // entry.length))]
            runs = [_Run(loaded, prompt, profile.tile, profile.backend) for prompt in some]
            found[entry.length] = _refined(entry, targets[entry.length], options, runs)
            step.advance(prefill_work(entry.length), f"{entry.length} tokens")
    return profile.model_copy(update={"lengths": tuple(found.get(one.length, one) for one in profile.lengths)})


def refines(options: Settled) -> bool:
    """Returns whether there is anything to refine, of options that are settled."""
    return "prefill" in options.phases and bool(options.target_density and options.refine_rounds)


def _refined(entry: LengthProfile, target: float, options: Settled, runs: Sequence[_Run]) -> LengthProfile:
    rounds, best, least = options.refine_rounds or 0, entry, np.inf
    now, groups = entry, np.array_split(np.arange(len(entry.layers)), min(_MOST_GROUPS, len(entry.layers)))
    weight_P, tasks = np.array(entry.prompt_weights[: len(runs)]), [run.task for run in runs]
    for number in range(rounds + 1):
        tables = ScoreTables.of(now)
        choice = at_target(tables, options.families, target)
        if choice is None:
            return entry  # too little for mandatory tiles: the allocation says so
        patterns = _patterns_of(now, tables, choice)
        # Groups take many passes, for another round alone: after a first one, only once it is known to be better.
        parts = [{entry.layers[row].layer for row in rows} for rows in groups] if number < rounds else []
        found = [run.divergences(patterns, () if number else parts) for run in runs]
        whole = float(over_prompts(weight_P * [one for one, _ in found], tasks))
        if not whole < least:
            break
        best, least = now, whole
        if parts:
            if number:
                found = [run.divergences(patterns, parts) for run in runs]
            without_PN = np.array([without_N for _, without_N in found])
            measured_N = np.maximum(whole - over_prompts(weight_P[:, None] * without_PN, tasks), 0.0)
            predicted_L = tables.take(tables.damage_LCH, choice, 0.0).sum(1)
            now = _corrected(now, groups, np.array([predicted_L[rows].sum() for rows in groups]), measured_N)
    return best


def _patterns_of(entry: LengthProfile, tables: ScoreTables, choice: Choice) -> LayerPatterns:
    """Returns the patterns of every profiled layer, in order."""
    return {
        scores.layer: tuple(tables.pattern(choice, row, head) for head in range(len(scores.patterns[0])))
        for row, scores in enumerate(entry.layers)
    }


def _corrected(
    entry: LengthProfile, groups: Sequence[npt.NDArray[np.int64]], predicted_N: Floats, measured_N: Floats
) -> LengthProfile:
    """Weights towards the measured shares, by the square root of the ratio and at most a factor."""
    shares = [np.maximum(part_N / max(part_N.sum(), 1e-30), _LEAST_SHARE) for part_N in (measured_N, predicted_N)]
    ratio_N = np.sqrt(shares[0] / shares[1])
    factor_N = np.clip(ratio_N, 1 / _MOST_FACTOR, _MOST_FACTOR)
    layers = list(entry.layers)
    for rows, factor in zip(groups, factor_N.tolist(), strict=True):
        for row in rows.tolist():
            layers[row] = layers[row].model_copy(update={"weight": rounded(layers[row].weight * factor)})
    return entry.model_copy(update={"layers": tuple(layers)})


class _Run:
    """One calibration prompt: its prefill by some patterns, its answer dense over what that left."""

    def __init__(self, loaded: LoadedModel, prompt: CalibrationPrompt, tile: TileShape, backend: str) -> None:
        self._model: Any = loaded.model
        self._tile, self._backend = tile, backend
        self._end, self.task = prompt.answer_start, prompt.task
        self._ids_1S = torch.from_numpy(prompt.ids.astype(np.int64)).to(loaded.model.device)[None]
        self._rows = slice(prompt.answer_rows.start, prompt.answer_rows.stop)
        self._patterns: LayerPatterns = {}
        self._dense_TV: torch.Tensor | None = None

    def divergences(self, patterns: LayerPatterns, groups: Sequence[Set[int]] = ()) -> tuple[float, Floats]:
        """KL(dense || sparse) a token of the answer; and with each of these groups of layers dense instead: [N]."""
        decoder: Any = decoder_of(self._model)
        without = []
        with capture_attention(self._model, self._attend):
            if self._dense_TV is None:
                self._patterns = {}
                self._dense_TV = self._forward()
            self._patterns = patterns
            with captured_inputs(self._model) as inputs:
                whole = self._divergence(self._forward())
            for group in groups:
                self._patterns = {number: own for number, own in patterns.items() if number not in group}
                without.append(self._divergence(self._from(min(group), inputs, decoder)))
        return whole, np.array(without)

    def _forward(self) -> torch.Tensor:
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
        assert self._dense_TV is not None
        kl_T = (self._dense_TV.exp() * (self._dense_TV - sparse_TV)).sum(-1).double()
        return float(kl_T.mean().clamp(min=0.0))

    def _attend(self, call: AttentionCall) -> torch.Tensor | None:
        patterns, end = self._patterns.get(call.layer), self._end
        if patterns is None:
            return None
        q_BHSD, k_BGSD, v_BGSD = call.q_BHSD, call.k_BGKD, call.v_BGKD
        chunk, keys = Chunk.uniform(1, 0, end), (k_BGSD[:, :, :end], v_BGSD[:, :, :end])
        how: dict[str, Any] = {"scale": call.scale, "softmax": call.softmax, "backend": self._backend}
        cap = call.softmax.cap
        index = build_index(patterns, q_BHSD[:, :, :end], keys[0], chunk, self._tile, scale=call.scale, cap=cap)
        prompt = prefill_attention(q_BHSD[:, :, :end], *keys, index, chunk, **how)
        rest, whole = Chunk.uniform(1, end, call.chunk.longest), full_view(k_BGSD, v_BGSD)
        dense = LayerProgram(call.layer, q_BHSD.shape[1], k_BGSD.shape[1], None)
        whole, fallback = replace(whole, softmax=call.softmax), Fallback(self._backend)
        answer = prefill(dense, q_BHSD[:, :, end:], whole, rest, scale=call.scale, fallback=fallback)
        return torch.cat([prompt.out_BHSD, answer], 2)
