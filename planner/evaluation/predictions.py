"""Modes that are compared with dense (a plan, or a phase of it), and the predictions of a model, with or without one
applied, for texts after prompts.

Shapes: B batch, S tokens of a prompt, K of its rows, R tokens of a reply, A tokens of a text, G tokens of a
continuation, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel

from sparsekv.planner.evaluation.batches import Batch
from sparsekv.planner.evaluation.results import Spent
from sparsekv.planner.tasks import matches
from sparsekv.plans.errors import GateError
from sparsekv.plans.schema import PhaseName, Plan
from sparsekv.plans.types import KVDtype
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.describe import CACHE_NAME, cache_inputs, config_of, takes_one_piece
from sparsekv.runtime.hf.generate import piece_sizes
from sparsekv.runtime.hf.load import LoadedModel
from sparsekv.runtime.model_config import rope_switch
from sparsekv.runtime.stores.pinned import HostMemory

DENSE = "dense"  # beside the names of modes


@dataclass(frozen=True, slots=True)
class PlanMode:
    """A plan at work: prefill alone, decode alone, or both."""

    plan: Plan
    phase: PhaseName = "both"
    backend: str = "auto"
    kv_dtype: KVDtype | None = None  # of `apply`; the plan's own when None

    @property
    def dense_prefill(self) -> bool:
        """Prompts run dense, so that the logits of their last row are no result of the mode."""
        return self.phase == "decode"

    def check(self, length: int, spent: Spent) -> None:
        """Refuses a sample of which everything was computed although budgets leave some out: it tells nothing of what
        that loses."""
        prefill = self.plan.prefill if self.phase != "decode" else None
        decode = self.plan.decode if self.phase != "prefill" else None
        skips = {
            "prefill": prefill and prefill.skips_at(length) and spent.tiles >= spent.causal_tiles > 0,
            "decode": decode and decode.bucket(length).is_sparse_at(length) and spent.attended >= spent.cached > 0,
        }
        for phase in (phase for phase, is_whole in skips.items() if is_whole):
            raise GateError(
                f"expected {phase} of {length} tokens to be sparse, as the plan has it, found that everything was "
                "computed; `sparse` is for runs, not for measurements"
            )

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """Switches it on for the length of a `with` block, which gets what tells what was computed so far."""
        with self.applied(model) as handle:
            yield lambda: spent_by(handle)

    def applied(self, model: PreTrainedModel, memory: HostMemory | None = None) -> Handle:
        """The plan applied; arguments as in `apply`."""
        return apply(
            model,
            self.plan,
            prefill=self.phase != "decode",
            decode=self.phase != "prefill",
            backend=self.backend,
            memory=memory,
            kv_dtype=self.kv_dtype or self.plan.kv_dtype,
            sparse="always",
        )


def spent_by(handle: Handle) -> Spent:
    stats = handle.stats()
    prefill = stats.prefill_tiles_computed, stats.prefill_tiles_causal
    return Spent(*prefill, stats.decode_tokens_attended, stats.decode_tokens_cached)


# Of an unmodified model that goes on behind a past. cuDNN, which torch prefers on Hopper, makes a plan for every number
# of keys that it has not met: a tenth of a second a step.
without_plans = partial(sdpa_kernel, [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])


class Prefilled(NamedTuple):
    """The result of prompts: the logits of their last rows, and the cache."""

    logits_BKV: torch.Tensor
    cache: Any


def prefill(model: Any, ids_BS: torch.Tensor, chunk: int | None, keep: int = 1, cache: Any = None) -> Prefilled:
    """Runs prompts, in pieces of at most `chunk` tokens; the logits are those of the last `keep` rows."""
    tokens = after = ids_BS.shape[1]
    logits = []
    sizes = piece_sizes(tokens, chunk, rope_switch(config_of(model))) if chunk else [tokens]
    for piece in torch.split(ids_BS, sizes, 1):
        after -= piece.shape[1]
        rows = max(1, min(piece.shape[1], keep - after))  # rows of this piece among the last `keep` of all
        out = model(input_ids=piece, use_cache=True, logits_to_keep=rows, **cache_inputs(model, cache, piece))
        cache = out[CACHE_NAME]
        if keep > after:
            logits.append(out.logits)
    return Prefilled(torch.cat(logits, 1), cache)


def prefill_turns(
    model: Any, batch: Batch, chunk: int | None, dense: Callable[[], AbstractContextManager[None]] = nullcontext
) -> Prefilled:
    """Runs the prompts of a batch, and of a conversation each reply token by token, as it is generated, and the prompt
    behind it: under `dense` where it is shorter than the median of such prompts."""
    prompts, sizes = prefill(model, batch.prompt_BS, chunk), sorted(ids_BS.shape[1] for _, ids_BS in batch.later)
    for reply_BR, prompt_BS in batch.later:
        with without_plans():
            for token_B1 in reply_BR.split(1, 1):
                model(input_ids=token_B1, use_cache=True, **cache_inputs(model, prompts.cache, token_B1))
        with dense() if prompt_BS.shape[1] < sizes[len(sizes) // 2] else nullcontext():
            prompts = prefill(model, prompt_BS, chunk, cache=prompts.cache)
    return prompts


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


def answered(loaded: LoadedModel, batch: Batch, picked_BA: torch.Tensor) -> list[bool | None]:
    """True of each answer that greedy generation gives; None where a sample has no text to compare (perplexity).

    Args:
        picked_BA: [B, A + 1], the likeliest tokens.
    """
    whole_B = (picked_BA[:, :-1] == batch.answer_BA).all(1).tolist()
    right: list[bool | None] = []
    for sample, whole, after in zip(batch.samples, whole_B, picked_BA[:, -1].tolist(), strict=True):
        text: Any = loaded.tokenizer.decode([*sample.answer_ids.tolist(), after])
        right.append(whole and matches(text, sample.answer) if sample.answer else None)
    return right


def divergence(dense_BAV: torch.Tensor, sparse_BAV: torch.Tensor) -> torch.Tensor:
    """[B]: mean KL(dense || sparse) of next-token log-probabilities of each sample, over all rows, in nats."""
    kl_BA = (dense_BAV.exp() * (dense_BAV - sparse_BAV)).sum(-1).double()
    return kl_BA.mean(1).clamp(min=0.0)
