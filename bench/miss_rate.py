"""Choices with a stated share of tokens that were not chosen lately, for timing decode with random weights.

Random weights choose at random, so that next to nothing is found in a hot set. The choice is made and timed as always;
what is attended to is then a list of this kernel's, which changes by so many tokens a step.

Shapes: B batch, g lists of a row, N listed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from typing import Any, no_type_check
from unittest import mock

import torch
import triton
import triton.language as tl

from sparsekv.kernels.decode.choose import choose
from sparsekv.runtime.core import select
from sparsekv.runtime.core.program import SegmentProgram

_STEP = 0x5E3779B1  # odd, so that multiples of it pass through all numbers below a power of two


def span_of(segment: SegmentProgram, tokens: int) -> int:
    """Tokens among which a list of this segment is drawn: the largest power of two of those that may be chosen."""
    return _span(segment.sink, segment.recent, tokens)


def _span(sink: int, recent: int, tokens: int) -> int:
    return 1 << (max(2, tokens - sink - recent).bit_length() - 1)


@contextmanager
def swapped_choices(share: float, tokens: int, filters: int) -> Iterator[None]:
    """Within it another list is in place of every choice, with `share` of new tokens in each step; the others are those
    of the step before, and a token comes back after all others.

    Args:
        share: of the chosen tokens, above 0 and up to 1.
        tokens: cached when the first step begins; new ones are drawn from `span_of` them.
        filters: layers that choose in a step, one after the other.
    """
    millis, layers = max(1, round(1000 * share)), cycle(range(filters))
    lists: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by filter layer: lists, and tokens so far

    def swapped(
        scores_gT: torch.Tensor, scoring: Any, lengths_B: torch.Tensor, counts_B: torch.Tensor, **how: Any
    ) -> torch.Tensor:
        chosen_BgN = choose(scores_gT, scoring, lengths_B, counts_B, **how)
        layer = next(layers)
        if layer not in lists:
            with torch.inference_mode(False):
                cursor_Bg = chosen_BgN.new_zeros(chosen_BgN.shape[:2], dtype=torch.int64)
                lists[layer] = torch.full_like(chosen_BgN, -1), cursor_Bg
        swap(*lists[layer], counts_B, how["sink"], _span(how["sink"], how["recent"], tokens), millis)
        return lists[layer][0]

    with mock.patch.object(select, "choose", swapped):
        yield


def swap(
    list_BgN: torch.Tensor, cursor_Bg: torch.Tensor, counts_B: torch.Tensor, sink: int, span: int, millis: int
) -> None:
    """Makes room in lists for so many thousandths of new tokens, and writes these."""
    batch, lists, most = list_BgN.shape
    with torch.cuda.device_of(list_BgN):
        swap_kernel[(lists, batch)](
            list_BgN, cursor_Bg, counts_B, sink, span, most, millis,
            STEP=_STEP, BLOCK_N=triton.next_power_of_2(most), num_warps=8,
        )  # fmt: skip


@no_type_check
@triton.jit(do_not_specialize=["sink", "span", "most", "millis"])
def swap_kernel(list_ptr, cursor_ptr, counts_ptr, sink, span, most, millis, STEP: tl.constexpr, BLOCK_N: tl.constexpr):
    """Grid: (lists, batch). The oldest tokens of a list make room for the next of a sequence without repetition."""
    row = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
    lanes_N = tl.arange(0, BLOCK_N)
    count = tl.maximum(tl.load(counts_ptr + tl.program_id(1)), 0)
    cursor = tl.load(cursor_ptr + row)
    new = (count * millis + 999) // 1000
    new = tl.where(cursor == 0, count, new)
    age_N = (lanes_N - cursor % tl.maximum(count, 1) + count) % tl.maximum(count, 1)
    token_N = sink + (((cursor + age_N) * STEP) & (span - 1))
    at_N = list_ptr + row.to(tl.int64) * most + lanes_N
    tl.store(at_N, token_N.to(tl.int32), mask=(lanes_N < count) & (age_N < new))
    tl.store(at_N, tl.full([BLOCK_N], -1, tl.int32), mask=(lanes_N >= count) & (lanes_N < most))
    tl.store(cursor_ptr + row, cursor + new)
