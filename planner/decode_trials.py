"""Measures on calibration prompts how far decode segments move a model's next-token distributions.

A prompt is prefilled once, densely. Every candidate then decodes the same tokens after it: the last token of the
prompt, its answer, and the text that dense itself goes on with. As the tokens are known, all steps run as the rows of
one forward pass: in every layer each row attends to what its own step would, by its own choice of tokens. That is the
decode of the runtime up to rounding (a test compares them), in a fraction of the time of single steps.

Shapes: H query heads, G KV heads, N query heads of a KV head, S cached tokens, R rows (a step each), K = S + R, D head
size, V vocabulary; g is 1 (one choice for all heads) or G.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from transformers import Cache, DynamicCache

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.scores import scaled_scores
from sparsekv.kernels.topk import blocks, top_mask
from sparsekv.planner.evaluation.predictions import divergence, prefill
from sparsekv.planner.options import Settled
from sparsekv.planner.profile.calibration import CalibrationPrompt
from sparsekv.plans.phases import Segment
from sparsekv.runtime.hf.cache import SparseLayer, States, put_back, reserve, states_of
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A prompt whose keys and values are there, and what dense predicts after it.

    Attributes:
        cache: of all but the last tokens of the prompt; usable while the `DecodeTrials` that made it are open.
        states: the recurrent states of these tokens.
        rows_1R: the tokens of the steps.
        dense_1RV: log-probabilities after each step, float32.
        task: of the prompt.
    """

    cache: Cache
    states: States
    rows_1R: torch.Tensor
    dense_1RV: torch.Tensor
    task: str

    @property
    def past(self) -> int:
        return self.cache.get_seq_length()


class DecodeTrials:
    """Runs decode segments on a model; made by `on`."""

    def __init__(self, loaded: LoadedModel) -> None:
        self._loaded = loaded
        self._steps: Steps | None = None

    @classmethod
    @contextmanager
    def on(cls, loaded: LoadedModel) -> Iterator[Self]:
        """Trials on a model, with nothing applied to it, for the length of a `with` block."""
        trials = cls(loaded)
        with capture_attention(loaded.model, trials.attend):
            yield trials

    def attend(self, call: AttentionCall) -> torch.Tensor | None:
        return self._steps.attend(call) if self._steps else None

    def prefilled(self, prompt: CalibrationPrompt, steps: int, options: Settled) -> Prefix:
        """Runs a prompt and its continuation densely.

        Args:
            steps: most decode steps; fewer where dense ends its text before.
            options: `prefill_chunk`.
        """
        ids_1S = torch.from_numpy(prompt.ids.astype(np.int64))[None].to(self._loaded.model.device)
        cache, first = DynamicCache(), max(1, prompt.answer_start - 1)
        reserve(cache, first + steps)
        with torch.no_grad():
            prefill(self._loaded.model, ids_1S[:, :first], options.prefill_chunk, cache=cache)
            states = states_of(cache)
            rows_1R = self._continued(ids_1S[:, first : first + steps], steps, cache)
        _rewind(cache, states, first)
        dense_1RV = self._log_probabilities((), cache, states, rows_1R)
        return Prefix(cache, states, rows_1R, dense_1RV, prompt.task)

    def divergences(
        self, segments: Sequence[Segment], prefixes: Sequence[Prefix], most: float = math.inf
    ) -> list[float]:
        """KL(dense || sparse) of the next token, in nats: a mean over the steps of each prompt.

        Args:
            most: later prompts are left out once the sum is above this.
        """
        found: list[float] = []
        for prefix in prefixes:
            if sum(found) > most:
                break
            sparse_1RV = self._log_probabilities(segments, prefix.cache, prefix.states, prefix.rows_1R)
            found.append(float(divergence(prefix.dense_1RV, sparse_1RV)))
        return found

    def _continued(self, known_1R: torch.Tensor, rows: int, cache: Cache) -> torch.Tensor:
        """The tokens that are known and what dense goes on with, up to `rows` in all, or to where it ends its text."""
        tokens = fed_1S = known_1R
        while tokens.shape[1] < rows:
            fed_1S = prefill(self._loaded.model, fed_1S, None, cache=cache).logits_BKV.argmax(-1)
            if int(fed_1S) == self._loaded.tokenizer.eos_token_id:
                break
            tokens = torch.cat([tokens, fed_1S], 1)
        return tokens

    def _log_probabilities(
        self, segments: Sequence[Segment], cache: Cache, states: States, rows_1R: torch.Tensor
    ) -> torch.Tensor:
        return self.run(Steps(segments, cache.get_seq_length(), rows_1R.shape[1]), cache, states, rows_1R)

    def run(self, steps: Steps, cache: Cache, states: States, rows_1R: torch.Tensor) -> torch.Tensor:
        """[1, R, V]: log-probabilities after each of the rows, whose layers attend as the steps say. The cache is left
        as it was."""
        past, rows, self._steps = cache.get_seq_length(), rows_1R.shape[1], steps
        try:
            with torch.no_grad():
                return prefill(self._loaded.model, rows_1R, None, rows, cache).logits_BKV.float().log_softmax(-1)
        finally:
            self._steps = None
            _rewind(cache, states, past)


def _rewind(cache: Cache, states: States, tokens: int) -> None:
    """Forgets all but the first tokens: what dense attention and these steps read starts from them alone."""
    for layer in cache.layers:
        if isinstance(layer, SparseLayer):
            layer.store.truncate((tokens,) * len(layer.store.lengths))
    put_back(cache, states)


@dataclass(slots=True)
class Steps:
    """Decode steps as rows of one pass: the attention of every layer, and what filter layers chose in it."""

    segments: Sequence[Segment]
    past: int  # S
    rows: int  # R
    chosen: dict[int, torch.Tensor] = field(default_factory=dict)  # by filter layer, [g, R, K]

    def attend(self, call: AttentionCall) -> torch.Tensor | None:
        """[1, H, R, D]."""
        visible_RK = self._visible(call)
        chooses = next((segment for segment in self.segments if segment.filter == call.layer), None)
        if chooses and chooses.filter_is_sparse:
            best = [weights_GNRK.amax(1) for _, weights_GNRK in self._weights(call, visible_RK[None])]
            self.chosen[call.layer] = self._choice(chooses, torch.cat(best))
        allowed_gRK = self._allowed(call.layer, visible_RK.device)
        seen_gRK = visible_RK[None] if allowed_gRK is None else visible_RK & allowed_gRK
        outputs, best = [], []
        for part, weights_GNRK in self._weights(call, seen_gRK):
            if chooses and not chooses.filter_is_sparse:
                best.append(weights_GNRK.amax(1))
            outputs.append(weights_GNRK.flatten(1, 2).to(call.v_BGKD.dtype) @ call.v_BGKD[0, part])
        if chooses and best:
            self.chosen[call.layer] = self._choice(chooses, torch.cat(best))
        return torch.cat(outputs).view(call.q_BHSD.shape)

    def _weights(self, call: AttentionCall, seen_gRK: torch.Tensor) -> Iterator[tuple[slice, torch.Tensor]]:
        """[G, N, R, K] of some KV heads after the other: what each row gives a token that it sees."""
        k_1GKD = call.k_BGKD
        q_1GND = call.q_BHSD.unflatten(1, (k_1GKD.shape[1], -1)).flatten(2, 3)
        groups, keys = k_1GKD.shape[1:3]
        hidden_gRK = ~seen_gRK
        for part in blocks(groups, q_1GND.shape[2] * keys):
            scores_GNK = scaled_scores(q_1GND[:, part], k_1GKD[:, part], call.scale, call.softmax.cap)[0]
            hidden_G1RK = (hidden_gRK[part] if len(hidden_gRK) == groups else hidden_gRK)[:, None]
            scores_GNRK = scores_GNK.unflatten(1, (-1, self.rows)).masked_fill_(hidden_G1RK, -torch.inf)
            own = slice(part.start * scores_GNRK.shape[1], part.stop * scores_GNRK.shape[1])
            yield part, call.softmax.weights(scores_GNRK.flatten(0, 1)[None], own).view(scores_GNRK.shape)

    def _visible(self, call: AttentionCall) -> torch.Tensor:
        at_R1, at_K = self._positions(call.q_BHSD.device)
        visible_RK = at_K <= at_R1
        return visible_RK if call.window is None else visible_RK & (at_K > at_R1 - call.window)

    def _positions(self, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        at_K = torch.arange(self.past + self.rows, device=device)
        return at_K[self.past :, None], at_K

    def _allowed(self, layer: int, device: torch.device) -> torch.Tensor | None:
        """[g, R, K]: what each row of a layer attends to of what it sees; None for all."""
        segment = next((segment for segment in self.segments if layer in segment.layers), None)
        if segment is None:
            return None
        chosen_gRK = self.chosen[segment.filter].to(device)  # layers may be spread over devices
        return chosen_gRK[list(segment.heads[layer])] if isinstance(segment.heads, dict) else chosen_gRK

    def _choice(self, segment: Segment, best_GRK: torch.Tensor) -> torch.Tensor:
        """[g, R, K]: sinks, chosen and recent tokens of each row."""
        scores_gRK = best_GRK.amax(0, keepdim=True) if segment.heads == "max" else best_GRK
        device = best_GRK.device
        at_R1, at_K = self._positions(device)
        between_RK = (at_K >= segment.sink) & (at_K <= at_R1 - segment.recent)
        counts = [segment.chosen_tokens(self.past + 1 + row) for row in range(self.rows)]
        sizes = [0 if count is None else count for count in counts]
        count_R = on_device(sizes, device)
        all_R1 = on_device([count is None for count in counts], device, torch.bool)[:, None]
        free_gRK = scores_gRK.masked_fill(~between_RK, -1.0)
        top_gRK = top_mask(free_gRK, count_R.expand(len(free_gRK), -1), max(sizes))
        return top_gRK | ~between_RK | all_R1
