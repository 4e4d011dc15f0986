"""Feeding a model prompts with their answers, and what it would have said at each answer token.

A model's greedy continuation is the answer exactly when, fed the answer, it picks every next token of it. So one
forced pass tells both what it generates and how its distributions move, on the same context as dense. With
`stepwise` the answer is fed token by token, as decode does; otherwise all at once, in the prefill.

Shapes: B batch, S tokens of a prompt, A tokens of the answer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from sparsekv.planner.tasks import Sample, matches
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.load import LoadedModel


@dataclass(frozen=True, slots=True, eq=False)
class Batch:
    """Samples whose prompts are equally long, and whose answers are."""

    samples: tuple[Sample, ...]
    prompt_BS: torch.Tensor
    answer_BA: torch.Tensor

    @classmethod
    def of(cls, samples: Sequence[Sample], device: torch.device) -> Batch:
        """The samples as tensors on the model's device."""

        def stacked(rows: Iterable[Any]) -> torch.Tensor:
            return torch.from_numpy(np.stack(list(rows)).astype(np.int64)).to(device)

        prompts, answers = (s.prompt_ids for s in samples), (s.answer_ids for s in samples)
        return cls(tuple(samples), stacked(prompts), stacked(answers))


def batches(samples: Iterable[Sample], size: int, device: torch.device) -> Iterator[Batch]:
    """Groups samples of equal shape, at most `size` together; the order within a shape is kept."""
    ordered = sorted(samples, key=_shape)
    for _, group in groupby(ordered, key=_shape):
        alike = list(group)
        for first in range(0, len(alike), size):
            yield Batch.of(alike[first : first + size], device)


def forced_logits(loaded: LoadedModel, batch: Batch, *, stepwise: bool, chunk: int | None = None) -> torch.Tensor:
    """What the model predicts for every token of the answer and for the one after it: [B, A + 1, V], float32.

    Args:
        loaded: the model, with a plan applied or not.
        batch: prompts and answers.
        stepwise: feed the answer token by token.
        chunk: most tokens fed at once before that; None is all.
    """
    answers = batch.answer_BA.shape[1]
    first = batch.prompt_BS if stepwise else torch.cat([batch.prompt_BS, batch.answer_BA], 1)
    with torch.no_grad():
        logits_BAV, cache = _prefill(loaded.model, first, 1 if stepwise else answers + 1, chunk, stepwise)
        if not stepwise:
            return logits_BAV.float()
        rows = [logits_BAV]
        for token_B1 in torch.split(batch.answer_BA, 1, 1):
            step = loaded.model(input_ids=token_B1, past_key_values=cache, use_cache=True)
            rows.append(step.logits)
        return torch.cat(rows, 1).float()


def answered(loaded: LoadedModel, batch: Batch, logits_BAV: torch.Tensor) -> list[bool | None]:
    """Whether greedy generation gives each answer; None where a sample has no text to compare (perplexity)."""
    picked_BA = logits_BAV.argmax(-1)
    whole_B = (picked_BA[:, :-1] == batch.answer_BA).all(1).tolist()
    after_B = picked_BA[:, -1].tolist()
    return [
        None if not sample.answer else whole and _ends(loaded, sample, after)
        for sample, whole, after in zip(batch.samples, whole_B, after_B, strict=True)
    ]


def log_likelihood(batch: Batch, logits_BAV: torch.Tensor) -> list[float]:
    """Mean negative log-likelihood of the answer tokens of each sample, in nats."""
    log_BAV = logits_BAV[:, :-1].log_softmax(-1)
    nll_BA = -log_BAV.gather(-1, batch.answer_BA[..., None])[..., 0]
    means: list[float] = nll_BA.double().mean(1).tolist()
    return means


def divergence(dense_BAV: torch.Tensor, sparse_BAV: torch.Tensor) -> list[float]:
    """Mean KL(dense || sparse) of the next-token distributions at the answer's positions, in nats."""
    dense, sparse = dense_BAV[:, :-1].log_softmax(-1), sparse_BAV[:, :-1].log_softmax(-1)
    kl_BA = (dense.exp() * (dense - sparse)).sum(-1).double()
    means: list[float] = kl_BA.mean(1).clamp(min=0.0).tolist()
    return means


def _prefill(
    model: Any, ids_BS: torch.Tensor, keep: int, chunk: int | None, use_cache: bool
) -> tuple[torch.Tensor, Any]:
    tokens = ids_BS.shape[1]
    pieces = torch.split(ids_BS, piece_sizes(tokens, chunk) if chunk else [tokens], 1)
    use_cache = use_cache or len(pieces) > 1
    cache, logits = None, []
    for place, piece in enumerate(pieces):
        # Rows still wanted: those of this piece among the last `keep` of all.
        after = sum(later.shape[1] for later in pieces[place + 1 :])
        wanted = max(1, min(piece.shape[1], keep - after))
        out = model(input_ids=piece, past_key_values=cache, use_cache=use_cache, logits_to_keep=wanted)
        cache = out.past_key_values
        if keep > after:
            logits.append(out.logits)
    return torch.cat(logits, 1), cache


def _ends(loaded: LoadedModel, sample: Sample, after: int) -> bool:
    text: Any = loaded.tokenizer.decode([*sample.answer_ids.tolist(), after])
    return matches(text, sample.answer)


def _shape(sample: Sample) -> tuple[int, int]:
    return len(sample.prompt_ids), len(sample.answer_ids)
