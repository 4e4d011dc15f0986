"""Decode attention with torch operations, in float32.

A KV head of a batch row is one piece of work with few operations, each on one thread; KV heads run side by side where
that pays (cpu_threads.py). Tokens are gathered and converted in blocks that stay in a cache.

Shapes: B batch, H query heads, G KV heads, g lists of a row, N query heads of a KV head, D head size, T attended tokens
of a row; of the scores, tokens of all rows.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from sparsekv.kernels.cpu_threads import one_thread, spread
from sparsekv.kernels.decode.selection import ALL, Scoring, Selection
from sparsekv.kernels.keys import PLAIN, KeyView, capped_
from sparsekv.kernels.prefill.dense import attend_newest, dense_attention
from sparsekv.kernels.tiles import AttentionOutput, Chunk
from sparsekv.kernels.topk import blocks

BLOCK_ELEMENTS = 1 << 18  # of the keys that are read at once: 1 MiB as float32


@torch.no_grad()
def decode(
    q_BHQD: torch.Tensor,
    keys: KeyView,
    selection: Selection | None,
    *,
    scale: float,
    window: int | None = None,
    scoring: Scoring | None = None,
    out: torch.Tensor | None = None,
    new_B: torch.Tensor | None = None,
) -> AttentionOutput:
    """The newest tokens of each batch row; arguments as in `decode_attention`."""
    lengths = keys.lengths_B.tolist()
    if q_BHQD.shape[2] > 1 or new_B is not None:
        counts = [q_BHQD.shape[2]] * len(lengths) if new_B is None else new_B.tolist()
        return _several(q_BHQD, keys, lengths, counts, scale=scale, window=window)
    plain = selection is None and scoring is None and out is None and keys.softmax is PLAIN
    plain &= keys.scales is None
    if plain and keys.table_BP is None and len(set(lengths)) == 1:
        k_BGSD, v_BGSD = keys.contiguous(lengths[0])
        return AttentionOutput(attend_newest(q_BHQD, k_BGSD, v_BGSD, scale=scale, window=window), None)
    attended = _attend(q_BHQD, keys, selection, scoring, scale=scale, window=window)
    return attended if out is None else _into(out, attended, lengths)


def _several(
    q_BHQD: torch.Tensor, keys: KeyView, lengths: list[int], counts: list[int], *, scale: float, window: int | None
) -> AttentionOutput:  # fmt: skip
    """Several new tokens a row: in one pass over the keys where torch's attention takes them, else one by one."""
    new = q_BHQD.shape[2]
    plain = keys.softmax is PLAIN and keys.table_BP is None and keys.scales is None
    if plain and len(set(lengths)) == 1 and set(counts) == {new}:
        k_BGSD, v_BGSD = keys.contiguous(lengths[0])
        chunk = Chunk(tuple(length - new for length in lengths), tuple(lengths))
        return dense_attention(q_BHQD, k_BGSD, v_BGSD, chunk, scale=scale, window=window)
    outs = []
    for number in range(new):
        at = [
            length - count + number + 1 if number < count else 0 for length, count in zip(lengths, counts, strict=True)
        ]
        seen = replace(keys, lengths_B=torch.tensor(at, dtype=torch.int32, device=keys.lengths_B.device))
        query = q_BHQD[:, :, number : number + 1]
        outs.append(decode(query, seen, None, scale=scale, window=window).out_BHSD)
    return AttentionOutput(torch.cat(outs, 2), None)


def _into(out_BHQD: torch.Tensor, attended: AttentionOutput, lengths: list[int]) -> AttentionOutput:
    for out_HQD, found_HQD, length in zip(out_BHQD, attended.out_BHSD, lengths, strict=True):
        if length:
            out_HQD.copy_(found_HQD)
    return AttentionOutput(out_BHQD, None, attended.scores_gT)


@torch.no_grad()
def score(q_BHQD: torch.Tensor, keys: KeyView, scoring: Scoring, *, scale: float) -> torch.Tensor:
    """The scores alone, float32 [g, T]; arguments as in `decode_scores`."""
    attended = _attend(q_BHQD, keys, None, scoring, scale=scale, attends=False)
    assert attended.scores_gT is not None
    return attended.scores_gT


def _attend(
    q_BHQD: torch.Tensor,
    keys: KeyView,
    selection: Selection | None,
    scoring: Scoring | None,
    *,
    scale: float,
    window: int | None = None,
    attends: bool = True,
) -> AttentionOutput:
    """Where it does not attend, the output is 0 and no value is read."""
    (B, H, _, D), G, lengths = q_BHQD.shape, keys.kv_heads, keys.lengths_B.tolist()
    q_BGND, dtype = (q_BHQD.float() * scale).reshape(B, G, H // G, D), q_BHQD.dtype
    if keys.scales is not None:
        q_BGND, dtype = q_BGND * keys.scales.scores_G[:, None, None], keys.scales.dtype
    out_BGND = torch.zeros_like(q_BGND)
    scores_GT = q_BGND.new_empty((G, 0 if scoring is None else scoring.tokens))
    starts = [-1] * B if scoring is None else scoring.starts_B.tolist()
    call = _Call(q_BGND, keys, out_BGND if attends else None, scores_GT)
    with one_thread():
        heads = [
            _Head(b, g, tokens, count, starts[b])
            for b, length in enumerate(lengths)
            for g, (tokens, count) in enumerate(_attended(keys, selection, window, b, length))
            if count and (attends or starts[b] >= 0)
        ]
    elements = (2 if attends else 1) * D * sum(head.count for head in heads)
    spread(call.attend, heads, elements=elements, device=q_BHQD.device)
    if keys.scales is not None:
        out_BGND *= keys.scales.v_G[:, None, None]
    return AttentionOutput(
        out_BGND.view(B, H, 1, D).to(dtype),
        None,
        None if scoring is None else _by_list(scores_GT, scoring, starts, lengths),
    )


@dataclass(frozen=True, slots=True, eq=False)
class _Head:
    b: int
    g: int
    tokens: slice | torch.Tensor
    count: int  # of the tokens
    start: int  # of its scores, or -1


@dataclass(frozen=True, slots=True, eq=False)
class _Call:
    q_BGND: torch.Tensor  # scaled
    keys: KeyView
    out_BGND: torch.Tensor | None  # values are read for it alone
    scores_GT: torch.Tensor

    def attend(self, head: _Head) -> None:
        at, keys = (head.b, head.g), self.keys
        q_ND, out_BGND = self.q_BGND[at], self.out_BGND
        parts = list(blocks(head.count, q_ND.shape[1], BLOCK_ELEMENTS))
        logits_NT = q_ND.new_empty((len(q_ND), head.count))
        for part in parts:
            k_TD = keys.head(keys.k, *at, _part(head.tokens, part)).float()
            torch.mm(q_ND, k_TD.mT, out=logits_NT[:, part])
        capped_(logits_NT, keys.softmax.cap)
        p_NT, sinks_H = logits_NT.softmax(1), keys.softmax.sinks_H
        if sinks_H is not None:
            lse_N = logits_NT.logsumexp(1)
            joint_N = torch.logaddexp(lse_N, sinks_H.float().view(-1, len(q_ND))[head.g])
            p_NT.mul_((lse_N - joint_N).exp_()[:, None])
        if out_BGND is not None:
            for part in parts:
                v_TD = keys.head(keys.v, *at, _part(head.tokens, part)).float()
                out_BGND[at].addmm_(p_NT[:, part], v_TD)
        if head.start >= 0:
            torch.amax(p_NT, 0, out=self.scores_GT[head.g, head.start : head.start + head.count])


def _part(tokens: slice | torch.Tensor, part: slice) -> slice | torch.Tensor:
    if isinstance(tokens, slice):
        return slice(tokens.start + part.start, tokens.start + part.stop)
    return tokens[part]


def _attended(
    keys: KeyView, selection: Selection | None, window: int | None, b: int, length: int
) -> Iterator[tuple[slice | torch.Tensor, int]]:
    """For each KV head of one row the tokens that it attends to, ascending by part, and how many."""
    G, device = keys.kv_heads, keys.k.device
    first = 0 if window is None else max(0, length - window)
    count = ALL if selection is None else int(selection.counts_B[b])
    if selection is None or count == ALL:
        interval = slice(first, length)
        tokens = interval if keys.table_BP is None else torch.arange(first, length, device=device)
        yield from [(tokens, length - first)] * G
        return
    sink_T = torch.arange(selection.sink, device=device)
    recent_T = torch.arange(length - selection.recent, length, device=device)
    lists = selection.chosen_BgN.shape[1]
    for chosen_N in selection.chosen_BgN[b, :, :count]:
        tokens_T = torch.cat((sink_T, chosen_N, recent_T))
        tokens_T = tokens_T[tokens_T >= first]
        yield from [(tokens_T, len(tokens_T))] * (G // lists)


def _by_list(scores_GT: torch.Tensor, scoring: Scoring, starts: list[int], lengths: list[int]) -> torch.Tensor:
    """[g, T], of the rows that are scored."""
    if scoring.lists == len(scores_GT):
        return scores_GT
    best_1T = scores_GT.new_empty((1, scores_GT.shape[1]))
    rows = [slice(start, start + length) for start, length in zip(starts, lengths, strict=True) if start >= 0]

    def reduce(row: slice) -> None:
        torch.amax(scores_GT[:, row], 0, out=best_1T[0, row])

    spread(reduce, rows, elements=scores_GT.shape[0] * sum(lengths), device=scores_GT.device)
    return best_1T
