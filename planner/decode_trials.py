"""How far decode segments move a model's next-token distributions, measured step by step on calibration prompts.

A prompt is prefilled once, densely. Every candidate then decodes the same tokens over a copy of the prompt's keys and
values: the last token of the prompt, its answer, and then the text that dense itself goes on with.

Shapes: G KV heads, S tokens, D head size, W last tokens of a prompt, N steps, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import Cache

from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile.calibration import CalibrationPrompt
from sparsekv.planner.profile.similarity import WINDOW
from sparsekv.plans.phases import DecodeBucket, DecodePlan, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.stores.device import DeviceStore


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """A prompt whose keys and values are there, and what dense predicts after it.

    Attributes:
        keys: of every layer, keys and values of all but the last tokens, [1, G, S, D] each.
        end_1W: the tokens before the first step, which selectors with a window look at; none where W is 0.
        fed_1N: the tokens of the steps.
        dense_NV: log-probabilities after each of them, float32.
    """

    keys: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    end_1W: torch.Tensor
    fed_1N: torch.Tensor
    dense_NV: torch.Tensor

    @property
    def tokens(self) -> int:
        """Of the prompt and all steps."""
        return int(self.keys[0][0].shape[2] + self.end_1W.shape[1] + self.fed_1N.shape[1])


def prefilled(loaded: LoadedModel, prompt: CalibrationPrompt, steps: int, options: PlanOptions) -> Prefix:
    """Runs a prompt and its continuation densely.

    Args:
        loaded: the model, with nothing applied to it.
        steps: most decode steps; fewer where dense ends its text before.
        options: `prefill_chunk` and `decode_selectors`.
    """
    window = 0 if options.decode_selectors == ("last",) else WINDOW
    ids_1S = torch.from_numpy(prompt.ids.astype(np.int64))[None].to(loaded.model.device)
    first = max(1, prompt.answer_start - 1)
    body_1S, end_1W = ids_1S[:, : first - window], ids_1S[:, first - window : first]
    with torch.no_grad(), _attached(loaded, ()) as handle:
        cache = handle.new_cache(first + steps)
        chunk, tokens = options.prefill_chunk, body_1S.shape[1]
        for piece in torch.split(body_1S, piece_sizes(tokens, chunk) if chunk else [tokens], 1):
            loaded.model(input_ids=piece, past_key_values=cache, use_cache=True, logits_to_keep=1)
        keys = tuple(_cached(layer) for layer in cache.layers)
        copy = _cache_of(handle, keys, first + steps)
        _feed_end(loaded, end_1W, copy)
        fed, found = _dense_steps(loaded, copy, ids_1S[:, first : first + steps], steps)
    return Prefix(keys, end_1W, fed, found)


def divergences(
    loaded: LoadedModel, segments: Sequence[Segment], prefixes: Sequence[Prefix], most: float = math.inf
) -> list[float]:
    """KL(dense || sparse) of the next token, in nats: a mean over the steps of each prompt.

    Args:
        most: later prompts are left out once the sum is above this.

    Raises:
        PlanMismatchError, UnsupportedError: the segments are not of this model.
    """
    found: list[float] = []
    with torch.no_grad(), _attached(loaded, segments) as handle:
        for prefix in prefixes:
            if sum(found) > most:
                break
            cache = _cache_of(handle, prefix.keys, prefix.tokens)
            _feed_end(loaded, prefix.end_1W, cache)
            sparse_NV = torch.stack([_step(loaded, token_11, cache) for token_11 in prefix.fed_1N.split(1, 1)])
            kl_N = (prefix.dense_NV.exp() * (prefix.dense_NV - sparse_NV)).sum(-1).double().clamp(min=0.0)
            found.append(float(kl_N.mean()))
            del cache  # before the next one is allocated
    return found


def _attached(loaded: LoadedModel, segments: Sequence[Segment]) -> Handle:
    bucket = DecodeBucket(up_to=None, dense=not segments, segments=tuple(segments))
    plan = Plan(status="unverified", model=loaded.info, decode=DecodePlan(lengths=(bucket,)))
    return apply(loaded.model, plan, info=loaded.info)


def _cached(layer: Any) -> tuple[torch.Tensor, torch.Tensor]:
    assert isinstance(layer, SparseLayer)
    assert isinstance(layer.store, DeviceStore)
    k_BGCD, v_BGCD = layer.store.tensors
    return k_BGCD[:, :, : layer.store.length], v_BGCD[:, :, : layer.store.length]


def _cache_of(handle: Handle, keys: Sequence[tuple[torch.Tensor, torch.Tensor]], tokens: int) -> Cache:
    cache = handle.new_cache(tokens)
    for number, (k_BGSD, v_BGSD) in enumerate(keys):
        cache.update(k_BGSD, v_BGSD, number)
    return cache


def _feed_end(loaded: LoadedModel, end_1W: torch.Tensor, cache: Cache) -> None:
    if end_1W.shape[1]:
        loaded.model(input_ids=end_1W, past_key_values=cache, use_cache=True, logits_to_keep=1)


def _dense_steps(
    loaded: LoadedModel, cache: Cache, forced_1A: torch.Tensor, steps: int
) -> tuple[torch.Tensor, torch.Tensor]:
    fed: list[torch.Tensor] = []
    rows: list[torch.Tensor] = []
    forced = list(forced_1A.split(1, 1))
    while len(rows) < steps:
        token_11 = forced[len(rows)] if len(rows) < len(forced) else rows[-1].argmax().reshape(1, 1)
        if len(rows) >= len(forced) and int(token_11) == loaded.tokenizer.eos_token_id:
            break
        fed.append(token_11)
        rows.append(_step(loaded, token_11, cache))
    return torch.cat(fed, 1), torch.stack(rows)


def _step(loaded: LoadedModel, token_11: torch.Tensor, cache: Cache) -> torch.Tensor:
    """[V]"""
    logits: torch.Tensor = loaded.model(input_ids=token_11, past_key_values=cache, use_cache=True).logits
    return logits[0, -1].float().log_softmax(-1)
