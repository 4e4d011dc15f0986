"""Choices with a stated share of tokens that were not chosen lately, for timing decode with random weights.

Random weights choose at random, so that next to nothing is found in a hot set. The choice is made and timed as always;
what is attended to is then a list of this kernel's, which changes by so many tokens a step.

Shapes: B batch, g lists of a row, N listed tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import no_type_check
from unittest.mock import patch

import torch
import triton
import triton.language as tl

from sparsekv.kernels.decode.selection import Selection
from sparsekv.runtime.core.program import SegmentProgram
from sparsekv.runtime.core.state import DecodeState

_STEP = 0x5E3779B1  # odd, so that multiples of it pass through all numbers below a power of two


def span_of(segment: SegmentProgram, tokens: int) -> int:
    """Tokens among which a list of this segment is drawn: the largest power of two of those that may be chosen."""
    return 1 << (max(2, tokens - segment.sink - segment.recent).bit_length() - 1)


class MissRate:
    """Puts another list in place of every choice, with `share` of new tokens in each step; the others are those of the
    step before. A token comes back after all others.

    Args:
        share: of the chosen tokens, above 0 and up to 1.
        tokens: cached when the first step begins; new ones are drawn from `span_of` them.
    """

    def __init__(self, share: float, tokens: int) -> None:
        self._millis = max(1, round(1000 * share))
        self._tokens = tokens
        self._lists: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by filter layer: lists, and tokens so far

    def __call__(self, segment: SegmentProgram, selection: Selection) -> Selection:
        """The list in place of the choice: as many tokens, none of them a sink or recent."""
        batch, lists, most = selection.chosen_BgN.shape
        if segment.filter not in self._lists:
            device = selection.chosen_BgN.device
            with torch.inference_mode(False):
                cursor_Bg = torch.zeros((batch, lists), dtype=torch.int64, device=device)
                list_BgN = torch.full((batch, lists, most), -1, dtype=torch.int32, device=device)
            self._lists[segment.filter] = (list_BgN, cursor_Bg)
        list_BgN, cursor_Bg = self._lists[segment.filter]
        span = span_of(segment, self._tokens)
        with torch.cuda.device_of(list_BgN):
            swap_kernel[(lists, batch)](
                list_BgN, cursor_Bg, selection.counts_B, segment.sink, span, most, self._millis,
                STEP=_STEP, BLOCK_N=triton.next_power_of_2(most), num_warps=8,
            )  # fmt: skip
        return Selection(list_BgN, selection.counts_B, selection.sink, selection.recent)


@contextmanager
def swapped_choices(miss_rate: MissRate | None) -> Iterator[None]:
    """Steps that are captured inside follow the lists of a miss rate in place of their choices, unless it is None."""
    real = DecodeState.choose

    def choose(self: DecodeState, segment: SegmentProgram, selection: Selection | None) -> None:
        if miss_rate is not None and selection is not None:
            selection = miss_rate(segment, selection)
        real(self, segment, selection)

    with patch.object(DecodeState, "choose", choose):
        yield


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
