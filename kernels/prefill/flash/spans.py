"""What each launch computes: which batch rows, which rows and keys of them, which heads. Views only, nothing is copied.

Batch rows of other places or lengths get launches of their own, with keys cut to their length. flash-attn-4 could take
them in one launch (`seqused_k`), but it then reads whole key tiles past the length, and a NaN among values there
reaches the output through a product with a weight of 0. Cut tensors are read as zeros past their end. Prefill of one
prompt, and of prompts of one length, is one launch.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import torch

from sparsekv.kernels.tiles import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """Neighbouring batch rows with the same past and the same length."""

    rows: slice
    past: int
    length: int

    @property
    def queries(self) -> int:
        """Query rows that are not padding."""
        return self.length - self.past


def spans(chunk: Chunk) -> Iterator[Span]:
    """Cuts the batch where past or length changes."""
    first = 0
    for (past, length), alike in groupby(zip(chunk.past, chunk.lengths, strict=True)):
        stop = first + sum(1 for _ in alike)
        yield Span(slice(first, stop), past, length)
        first = stop


@dataclass(frozen=True, slots=True)
class HeadRun:
    """Query heads of one launch, and the KV heads they read: whole groups, or a single head."""

    heads: slice
    kv_heads: slice


def dense_runs(heads: Sequence[int], group: int) -> Iterator[HeadRun]:
    """Cuts dense heads into launches that need no copy of K and V.

    A launch maps query heads to KV heads by division, so an arbitrary choice of heads would break the grouping.
    Neighbouring whole groups keep it. What is left goes head by head: some heads of a group in one launch would be a
    kernel of its own for every number of heads, ten seconds of compilation each, and save little, as one head of the
    lengths that are not listed fills the GPU.

    Args:
        heads: dense query heads, ascending.
        group: query heads of a KV head.
    """
    dense = set(heads)
    whole = [kv for kv in sorted({head // group for head in heads}) if dense.issuperset(_members(kv, group))]
    for first, stop in _runs(whole):
        yield HeadRun(slice(first * group, stop * group), slice(first, stop))
    for head in sorted(dense.difference(*(_members(kv, group) for kv in whole))):
        yield HeadRun(slice(head, head + 1), slice(head // group, head // group + 1))


def _members(kv_head: int, group: int) -> range:
    return range(kv_head * group, (kv_head + 1) * group)


def _runs(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Neighbouring numbers as (first, stop)."""
    for _, run in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in run]
        yield found[0], found[-1] + 1


@dataclass(frozen=True, slots=True)
class Part:
    """Tensors of one launch. The last query row is the last key: past is K - S."""

    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    v_BGKD: torch.Tensor
    out_BHSD: torch.Tensor  # written
    lse_BHS: torch.Tensor  # written, float32, natural
    scale: float
    window: int | None

    @property
    def past(self) -> int:
        """Keys before the first query row."""
        return self.k_BGKD.shape[2] - self.q_BHSD.shape[2]

    def at(self, span: Span) -> Part:
        """The rows and keys of a span."""
        rows, real, known = span.rows, slice(0, span.queries), slice(0, span.length)
        return replace(
            self,
            q_BHSD=_batch_rows(self.q_BHSD, rows)[:, :, real],
            k_BGKD=_batch_rows(self.k_BGKD, rows)[:, :, known],
            v_BGKD=_batch_rows(self.v_BGKD, rows)[:, :, known],
            out_BHSD=_batch_rows(self.out_BHSD, rows)[:, :, real],
            lse_BHS=_batch_rows(self.lse_BHS, rows)[:, :, real],
        )

    def of(self, run: HeadRun) -> Part:
        """These heads."""
        return replace(
            self,
            q_BHSD=self.q_BHSD[:, run.heads],
            k_BGKD=self.k_BGKD[:, run.kv_heads],
            v_BGKD=self.v_BGKD[:, run.kv_heads],
            out_BHSD=self.out_BHSD[:, run.heads],
            lse_BHS=self.lse_BHS[:, run.heads],
        )


def _batch_rows(x_BX: torch.Tensor, rows: slice) -> torch.Tensor:
    """One row of an expanded batch keeps a stride of 0, which would be compiled for: give it one of its own."""
    return x_BX[rows.start].unsqueeze(0) if rows.stop - rows.start == 1 else x_BX[rows]
