"""Prompts and the text behind them, timed.

Shapes: B batch, S tokens of a prompt, G tokens of a text, T tokens of it that are scored, V vocabulary.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from sparsekv.bench.harness import wait_for
from sparsekv.planner.evaluation.predictions import Prefilled, prefill, without_plans
from sparsekv.runtime.hf.describe import cache_inputs


def timed_prefill(model: Any, ids_BS: torch.Tensor, chunk: int | None) -> tuple[Prefilled, float]:
    """The prompts, and seconds of one of them."""
    wait_for(ids_BS.device)
    began = time.perf_counter()
    prompts = prefill(model, ids_BS, chunk)
    wait_for(ids_BS.device)
    return prompts, (time.perf_counter() - began) / len(ids_BS)


@dataclass(frozen=True, slots=True, eq=False)
class Text:
    """Text that a method generated, or read: picks [B, G], the logits of the first T rows [B, T, V], and times."""

    picked_BG: torch.Tensor
    logits_BTV: torch.Tensor
    step_seconds: float | None


@torch.no_grad()
def followed(model: Any, prompts: Prefilled, tokens: int, scored: int, text_BG: torch.Tensor | None = None) -> Text:
    """Goes on behind prompts by so many tokens at most: by a text, or greedily until all rows have ended."""
    logits_BV = prompts.logits_BKV[:, -1]
    rows, picked, seconds = [logits_BV.float()], [logits_BV.argmax(-1)], list[float]()
    going_B1 = goes_on(model, picked[0][:, None])
    while len(picked) < tokens and (text_BG is not None or bool(going_B1.any())):
        fed_B = picked[-1] if text_BG is None else text_BG[:, len(picked) - 1]
        began = time.perf_counter()
        with without_plans():
            logits_BV = model(
                input_ids=fed_B[:, None], use_cache=True, **cache_inputs(model, prompts.cache, fed_B[:, None])
            ).logits[:, -1]
        wait_for(logits_BV.device)
        seconds.append(time.perf_counter() - began)
        picked.append(logits_BV.argmax(-1))
        if len(rows) < scored:
            rows.append(logits_BV.float())
        going_B1 = going_B1 & goes_on(model, picked[-1][:, None])
    return Text(torch.stack(picked, 1), torch.stack(rows, 1), float(np.median(seconds)) if seconds else None)


def goes_on(model: Any, ids_BG: torch.Tensor) -> torch.Tensor:
    """[B, G]: True of tokens that are no end tokens."""
    ends = model.generation_config.eos_token_id
    return ~torch.isin(ids_BG, torch.tensor([] if ends is None else ends, device=ids_BG.device))


def until_end(model: Any, ids_BG: torch.Tensor) -> torch.Tensor:
    """[B, G]: True of tokens before an end token, and of the first one."""
    is_end_BG = (~goes_on(model, ids_BG)).long()
    return is_end_BG.cumsum(1) - is_end_BG == 0
