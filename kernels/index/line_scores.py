"""How much attention each column and each diagonal gets (MInference 1.0, section 3.2, algorithm 2).

Estimated from the last queries of each batch row: softmax in float32 over all keys they may see.

Shapes: B batch, H query heads, h the heads asked for, G KV heads, N heads of one KV head, L sampled queries, S keys,
P = S + L - 1 (keys behind L - 1 empty ones), D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import torch

from sparsekv.kernels.cpu_threads import for_each
from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.index.layout import IndexCall, Layout, LineScores, take_heads
from sparsekv.kernels.scores import scaled_scores
from sparsekv.kernels.topk import BLOCK_ELEMENTS, blocks

# Sampled rows, and elements of their scores, that are worked on at once; where it is not a GPU's whole memory that
# limits them, but the reach of a core's cache.
_AT_ONCE = {"cpu": (64, 1 << 20)}
UNSEEN = -1.0  # score of a line that no query of the batch row can reach; a real one has 0 or more


@dataclass(frozen=True, slots=True)
class _Sample:
    """The sampled queries: row l of batch row b is token last[b] - (L - 1 - l)."""

    q_BHLD: torch.Tensor
    positions_BL: torch.Tensor
    used_BhL: torch.Tensor | None  # False for rows beyond a head's own sample or before the chunk; None if all count

    @property
    def rows(self) -> int:
        """L."""
        return self.positions_BL.shape[1]


def score_lines(heads: Sequence[int], last_q: Sequence[int], call: IndexCall) -> LineScores:
    """Scores of the columns and diagonals of these heads.

    Args:
        heads: query heads, ascending.
        last_q: how many of the last queries each of them samples; short chunks sample what they have.
        call: the layer's queries and keys.
    """
    layout, keys, sample = call.layout, call.layout.chunk.longest, _take_sample(last_q, call)
    vertical_BhS = torch.empty((layout.batch, len(heads), keys), dtype=torch.float32, device=layout.device)
    shifted_BhS = torch.empty_like(vertical_BhS)
    rows, elements = _AT_ONCE.get(layout.device.type, (sample.rows, BLOCK_ELEMENTS))
    rows = min(rows, sample.rows)
    by_kv_head = [list(own) for _, own in groupby(range(len(heads)), lambda number: heads[number] // layout.group_size)]
    elements_each = layout.batch * rows * (keys + sample.rows - 1)
    parts = [own[part] for own in by_kv_head for part in blocks(len(own), elements_each, elements)]

    def fill(part: list[int]) -> None:
        into = on_device(part, layout.device)
        vertical_BhS[:, into], shifted_BhS[:, into] = _sum_lines(part, heads, sample, call, rows)

    if layout.device.type == "cpu":
        for_each(fill, parts)
    else:
        for part in parts:
            fill(part)
    return _by_offset(vertical_BhS, shifted_BhS, layout)


def _take_sample(last_q: Sequence[int], call: IndexCall) -> _Sample:
    chunk, device = call.layout.chunk, call.layout.device
    most = max(1, min(max(last_q), max(chunk.rows)))
    back_L = torch.arange(most - 1, -1, -1, device=device)
    past_B1, length_B1 = on_device([chunk.past, chunk.lengths], device).unsqueeze(-1)
    positions_BL = length_B1 - 1 - back_L
    rows_BL = (positions_BL - past_B1).clamp(min=0)
    q_BHLD = call.q_BHSD.gather(2, rows_BL[:, None, :, None].expand(-1, call.q_BHSD.shape[1], -1, call.q_BHSD.shape[3]))
    limits = [[min(own, rows) for own in last_q] for rows in chunk.rows]
    every = all(limit == most for row in limits for limit in row)
    used_BhL = None if every else back_L < on_device(limits, device).unsqueeze(-1)
    return _Sample(q_BHLD, positions_BL, used_BhL)


def _sum_lines(
    part: list[int], heads: Sequence[int], sample: _Sample, call: IndexCall, most_rows: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Columns and shifted diagonals of heads of one KV head, summed over the sample: [B, h, S] each."""
    q_BhLD = take_heads(sample.q_BHLD, [heads[number] for number in part])
    k_BSD = call.k_BGKD[:, heads[part[0]] // call.layout.group_size, : call.layout.chunk.longest]
    k_B1PD = torch.nn.functional.pad(k_BSD[:, None], (0, 0, sample.rows - 1, 0))
    used_BhL = None if sample.used_BhL is None else take_heads(sample.used_BhL, part)
    vertical, shifted = [], []
    for rows in blocks(sample.rows, 1, most_rows):
        weights_BhRP = _weights(q_BhLD[:, :, rows], k_B1PD, rows, sample, call)
        if used_BhL is not None:
            weights_BhRP.masked_fill_(~used_BhL[:, :, rows].unsqueeze(-1), 0.0)
        vertical.append(weights_BhRP[..., sample.rows - 1 :].sum(-2))
        shifted.append(_sum_diagonals(weights_BhRP, rows.start, call.layout.chunk.longest))
    return _total(vertical), _total(shifted)


def _weights(q_BhRD: torch.Tensor, k_B1PD: torch.Tensor, rows: slice, sample: _Sample, call: IndexCall) -> torch.Tensor:
    """Softmax of some sampled queries, with L - 1 empty keys in front: [B, heads of the part, R, P]."""
    chunk, window = call.layout.chunk, call.layout.window
    scores_B1XP = scaled_scores(q_BhRD.flatten(1, 2)[:, None], k_B1PD, call.scale)
    scores_BhRP = torch.unflatten(scores_B1XP[:, 0], 1, q_BhRD.shape[1:3])
    empty = sample.rows - 1
    scores_BhRP[..., :empty] = -torch.inf
    # Keys that every sampled row sees need no mask.
    first = 0 if window is not None else max(0, min(chunk.lengths) - sample.rows)
    key_X = torch.arange(first, chunk.longest, device=call.layout.device)
    position_BR1 = sample.positions_BL[:, rows].unsqueeze(-1)
    hidden_BRX = key_X > position_BR1
    if window is not None:
        hidden_BRX |= position_BR1 - key_X >= window
    scores_BhRP[..., empty + first :].masked_fill_(hidden_BRX[:, None], -torch.inf)
    return scores_BhRP.softmax(-1)


def _sum_diagonals(weights_BhRP: torch.Tensor, first_row: int, keys: int) -> torch.Tensor:
    """Entry c of [B, h, S] sums row l at key c - (L - 1 - l): reading each row one further aligns the diagonals."""
    batch, heads, rows, padded = weights_BhRP.shape
    strides = (heads * rows * padded, rows * padded, padded + 1, 1)
    return weights_BhRP.contiguous().as_strided((batch, heads, rows, keys), strides, first_row).sum(-2)


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0)


def _by_offset(vertical_BhS: torch.Tensor, shifted_BhS: torch.Tensor, layout: Layout) -> LineScores:
    """Entry c of the shifted sums is offset last - c; keys and offsets beyond a batch row become UNSEEN."""
    key_S = torch.arange(layout.chunk.longest, device=layout.device)
    length_B1 = on_device(layout.chunk.lengths, layout.device)[:, None]
    source_BhS = (length_B1 - 1 - key_S).clamp(min=0)[:, None].expand(shifted_BhS.shape)
    beyond_B1S = (key_S >= length_B1)[:, None]
    return LineScores(
        vertical_BhS.masked_fill_(beyond_B1S, UNSEEN),
        shifted_BhS.gather(-1, source_BhS).masked_fill_(beyond_B1S, UNSEEN),
    )
