"""Computes what a model, with or without something applied to it, predicts for texts after prompts.

Shapes: B batch, S tokens of a prompt, K of its rows, R tokens of a reply, A tokens of a text, G tokens of a
continuation, V vocabulary.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from sparsekv.planner.evaluation.batches import Batch
from sparsekv.planner.tasks import matches
from sparsekv.runtime.hf.describe import CACHE_NAME, cache_inputs, config_of, takes_one_piece
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.model_config import rope_switch

# Of an unmodified model that goes on behind a past. cuDNN, which torch prefers on Hopper, makes a plan for every number
# of keys that it has not met: a tenth of a second a step.
without_plans = partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class Prefilled(NamedTuple):
    """Holds what prompts left: the logits of their last rows, and the cache."""

    logits_BKV: torch.Tensor
    cache: Any


def prefill(model: Any, ids_BS: torch.Tensor, chunk: int | None, keep: int = 1, cache: Any = None) -> Prefilled:
    """Runs prompts, in pieces of at most `chunk` tokens; the logits are those of the last `keep` rows."""
    tokens = after = ids_BS.shape[1]
    logits = []
    sizes = piece_sizes(tokens, chunk, rope_switch(config_of(model))) if chunk else [tokens]
    for piece in torch.split(ids_BS, sizes, 1):
        after -= piece.shape[1]
        wanted = max(1, min(piece.shape[1], keep - after))  # rows of this piece among the last `keep` of all
        out = model(input_ids=piece, use_cache=True, logits_to_keep=wanted, **cache_inputs(model, cache, piece))
        cache = out[CACHE_NAME]
        if keep > after:
            logits.append(out.logits)
    return Prefilled(torch.cat(logits, 1), cache)


def prefill_turns(model: Any, batch: Batch, chunk: int | None) -> Prefilled:
    """Runs the prompts of a batch, and of a conversation each reply token by token, as it is generated, and the prompt
    behind it."""
    found = prefill(model, batch.prompt_BS, chunk)
    for reply_BR, prompt_BS in batch.later:
        with without_plans():
            for token_B1 in reply_BR.split(1, 1):
                model(input_ids=token_B1, use_cache=True, **cache_inputs(model, found.cache, token_B1))
        found = prefill(model, prompt_BS, chunk, cache=found.cache)
    return found


def after_prompt(model: Any, prompts: Prefilled, text_BA: torch.Tensor, *, stepwise: bool) -> torch.Tensor:
    """[B, A + 1, V], float32: the logits for every token of a text and for the one after; the cache grows with it.

    Args:
        text_BA: at least one token.
        stepwise: feed the text token by token, as decode does; else in one pass, where the model can.
    """
    rows = [prompts.logits_BKV]
    stepwise = stepwise or takes_one_piece(config_of(model).model_type)
    for piece in torch.split(text_BA, 1 if stepwise else text_BA.shape[1], 1):
        rows.append(model(input_ids=piece, use_cache=True, **cache_inputs(model, prompts.cache, piece)).logits)
    return torch.cat(rows, 1).float()


def continued(model: Any, prompts: Prefilled, tokens: int) -> torch.Tensor:
    """[B, G, V], float32: the logits of so many tokens, each the likeliest; the cache grows with them."""
    rows = [prompts.logits_BKV]
    while len(rows) < tokens:
        picked_B1 = rows[-1].argmax(-1)
        rows.append(model(input_ids=picked_B1, use_cache=True, **cache_inputs(model, prompts.cache, picked_B1)).logits)
    return torch.cat(rows, 1).float()


def until_end(model: Any, ids_BG: torch.Tensor) -> torch.Tensor:
    """[B, G]: which tokens come before an end token, or are the first one."""
    ends = model.generation_config.eos_token_id
    is_end_BG = torch.isin(ids_BG, torch.tensor([] if ends is None else ends, device=ids_BG.device)).long()
    return is_end_BG.cumsum(1) - is_end_BG == 0


def answered(loaded: LoadedModel, batch: Batch, picked_BA: torch.Tensor) -> list[bool | None]:
    """Returns whether greedy generation gives each answer; None where a sample has no text to compare (perplexity).

    Args:
        picked_BA: [B, A + 1], the likeliest tokens.
    """
    whole_B = (picked_BA[:, :-1] == batch.answer_BA).all(1).tolist()
    found: list[bool | None] = []
    for sample, whole, after in zip(batch.samples, whole_B, picked_BA[:, -1].tolist(), strict=True):
        text: Any = loaded.tokenizer.decode([*sample.answer_ids.tolist(), after])
        found.append(whole and matches(text, sample.answer) if sample.answer else None)
    return found


def log_likelihood(answer_BA: torch.Tensor, log_BAV: torch.Tensor) -> torch.Tensor:
    """[B]: mean negative log-likelihood of the answer tokens of each sample, in nats."""
    return -log_BAV[:, :-1].gather(-1, answer_BA[..., None])[..., 0].double().mean(1)


def divergence(dense_BAV: torch.Tensor, sparse_BAV: torch.Tensor) -> torch.Tensor:
    """[B]: mean KL(dense || sparse) of next-token log-probabilities of each sample, over all rows, in nats."""
    kl_BA = (dense_BAV.exp() * (dense_BAV - sparse_BAV)).sum(-1).double()
    return kl_BA.mean(1).clamp(min=0.0)
