"""The flash backend beside Triton's, as rows of the table of goals; `check_kernels.py` calls it.

What a goal is held against is dense flash-attn-4 in the same process. On a CPU the emulator stands in for flash-attn-4:
then numbers mean nothing, and this only shows that the script runs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass

import torch
from flash_timing import ROUNDS, flash, flash_obstacle, over_lists, part_of, row_index
from kernel_timing import TILE, Shape

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.prefill.flash import emulator
from sparsekv.kernels.prefill.flash.call import Part
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.planner.bench.timing import measure

# Share of the dense rate that the computed tiles reach, by whole tiles a row.
FLASH_GOALS, TRITON_GOAL = {16: 0.85, 32: 0.89, 64: 0.93}, 0.65
COLUMNS_GOAL = 1.08


@dataclass(frozen=True)
class Goal:
    """One row: what was measured, and whether that is enough."""

    what: str
    tokens: int
    milliseconds: float
    found: float
    goal: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        return self.found <= self.goal if self.at_most else self.found >= self.goal


def reach(shape: Shape, device: str, rows: tuple[int, ...] = (16, 32, 64), columns: int = 1024) -> list[Goal]:
    """The goals that attention alone can reach or miss, and what each backend reaches."""
    obstacle = flash_obstacle(device, shape.dtype, shape.dim, TILE)
    if obstacle:
        print(f"no flash rows: {obstacle}", file=sys.stderr)
        return []
    q, k, v = shape.tensors(device)
    chunk, scale = Chunk((0,), (shape.tokens,)), shape.dim**-0.5
    part = part_of(q, k, v, scale)
    dense_ms: list[float] = []
    goals = []
    for whole in rows:
        index = row_index(shape, whole, 0, device)
        tiles = float(index.counts_BHT.sum())
        times = measure(
            {
                "dense": _dense(part),
                "flash": lambda index=index: flash(q, k, v, index, chunk, scale=scale),
                "triton": lambda index=index: _triton(q, k, v, index, chunk, scale),
                "lists": over_lists(part, index, chunk),
            },
            torch.device(device),
            ROUNDS,
        )
        dense_ms.append(times["dense"])
        for name, timed, goal in (
            ("flash", "flash", FLASH_GOALS.get(whole, 0.0)),
            ("triton", "triton", TRITON_GOAL),
            ("flash, lists made before", "lists", FLASH_GOALS.get(whole, 0.0)),
        ):
            flops = 4.0 * shape.dim * TILE.query * TILE.key * tiles
            rate = flops / times[timed] / (shape.dense_flops / times["dense"])
            what = f"{name}, {whole} whole tiles a row and the diagonal: rate over dense"
            goals.append(Goal(what, shape.tokens, times[timed], rate, goal))
    middle = statistics.median(dense_ms)
    goals.append(Goal("dense flash-attn-4: TFLOP/s", shape.tokens, middle, shape.dense_flops / middle / 1e9, 0.0))
    return goals + _column_goals(shape, device, part, columns)


def _column_goals(shape: Shape, device: str, part: Part, columns: int) -> list[Goal]:
    """32 tiles, the diagonal and the columns, over 40 tiles that are not masked at all."""
    chunk = Chunk((0,), (shape.tokens,))
    forty = row_index(shape, 40, 0, device, diagonal=False)
    index = row_index(shape, 32, columns, device)
    tensors = (part.q_BHSD, part.k_BGKD, part.v_BGKD)
    times = measure(
        {
            "forty": over_lists(part, forty, chunk),
            "flash": lambda: flash(*tensors, index, chunk, scale=part.scale),
            "triton": lambda: _triton(*tensors, index, chunk, part.scale),
        },
        torch.device(device),
        ROUNDS,
    )
    forty_ms = times["forty"]
    found = [Goal("flash, 40 whole tiles a row, no mask: ms", shape.tokens, forty_ms, forty_ms, 0.0)]
    for name, goal in (("flash", COLUMNS_GOAL), ("triton", 0.0)):
        what = f"{name}, 32 tiles, the diagonal and {columns} columns: time over that"
        found.append(Goal(what, shape.tokens, times[name], times[name] / forty_ms, goal, at_most=True))
    return found


def _triton(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, index: TileIndex, chunk: Chunk, scale: float) -> object:
    return prefill_attention(q, k, v, index, chunk, scale=scale, backend="triton")


def _dense(part: Part) -> Callable[[], object]:
    """Dense causal flash-attn-4 as a user calls it, on tensors in its own order."""
    if not part.q_BHSD.is_cuda:
        return lambda: emulator.attend_dense(part)
    from flash_attn.cute import flash_attn_func

    q, k, v = (x.transpose(1, 2).contiguous() for x in (part.q_BHSD, part.k_BGKD, part.v_BGKD))
    return lambda: flash_attn_func(q, k, v, causal=True)


def print_goals(title: str, goals: list[Goal]) -> None:
    """One table."""
    print(f"\n{title}\n{'':84} {'tokens':>7} {'ms':>9} {'found':>8} {'goal':>9}")
    for goal in goals:
        wanted = f"{'<=' if goal.at_most else '>='} {goal.goal:.2f}" if goal.goal else ""
        verdict = "" if not goal.goal else "reached" if goal.reached else "MISSED"
        line = f"{goal.what:84} {goal.tokens:7} {goal.milliseconds:9.3f} {goal.found:8.3f} {wanted:>9} {verdict}"
        print(line.rstrip(), flush=True)
