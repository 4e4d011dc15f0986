"""A KV store in the memory of the compute device, contiguous, and one row of it as a store of a batch of one.

Shapes: B batch, G KV heads, S tokens, C allocated tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from sparsekv.kernels.keys import KeyView
from sparsekv.runtime.stores.store import Bytes, KVStore, Layout, StepMemory, WholeStore, check_tokens_fit, grown


class Forks:
    """First tokens of rows that are the same, as one row became a copy of another: they are not copied again."""

    def __init__(self) -> None:
        self._same_BB: torch.Tensor | None = None  # int64 on the host: first tokens of two rows that are the same

    @property
    def any(self) -> bool:
        return self._same_BB is not None

    def same_as(self, rows: Sequence[int], lengths: Sequence[int]) -> list[int]:
        """Counts the first tokens that each row shares with row `rows[i]`; lengths are tokens of the rows."""
        if len(rows) != len(lengths):
            return [0] * len(rows)
        return [
            lengths[row] if row == source else 0 if self._same_BB is None else int(self._same_BB[row, source])
            for row, source in enumerate(rows)
        ]

    def select(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Row i becomes a copy of row `rows[i]`, all of them at once; lengths are tokens of the rows as they were."""
        if self._same_BB is None:
            self._same_BB = torch.zeros((len(lengths), len(lengths)), dtype=torch.int64, device="cpu")
        self._same_BB.diagonal().copy_(torch.tensor(lengths, device="cpu"))
        index_B = torch.tensor(rows, device="cpu")
        self._same_BB = self._same_BB[index_B][:, index_B]

    def truncate(self, lengths: Sequence[int]) -> None:
        """Rows have only so many tokens left; other ones may follow."""
        if not any(lengths):
            self._same_BB = None
        elif self._same_BB is not None:
            left_B = torch.tensor(lengths, device="cpu")
            self._same_BB = torch.minimum(self._same_BB, torch.minimum(left_B[:, None], left_B))


class DeviceStore(WholeStore):
    """Keys and values beside their queries; views cost nothing. `counts` has the allocated bytes."""

    lengths: tuple[int, ...] = ()

    def __init__(self, counts: Bytes | None = None) -> None:
        self.bytes = Bytes() if counts is None else counts
        self._kv_BGCD: tuple[torch.Tensor, torch.Tensor] | None = None
        self._reserved = 0
        self._forks = Forks()

    @property
    def length(self) -> int:
        """Tokens of the longest row."""
        return max(self.lengths, default=0)

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        check_tokens_fit(self.keys, k_BGSD, v_BGSD)
        tokens, start = k_BGSD.shape[2], max(self.lengths, default=0)
        if self._kv_BGCD is None or start + tokens > self.capacity:
            self._grow(start + tokens, Layout.of(k_BGSD))
        new = (k_BGSD.detach(), v_BGSD.detach()) if torch.is_grad_enabled() else (k_BGSD, v_BGSD)
        for room_BGCD, new_BGSD in zip(self.tensors, new, strict=True):
            if self.lengths.count(start) == len(self.lengths):
                room_BGCD.narrow(2, start, tokens).copy_(new_BGSD)
                continue
            for row, length in enumerate(self.lengths):
                room_BGCD[row, :, length : length + tokens].copy_(new_BGSD[row])
        self._count(tokens)

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        if self._is_ragged:
            layout.check(self.keys)
            return super().room(tokens, layout)
        self.hold(self.length + tokens, layout)
        k_BGCD, v_BGCD = self.tensors
        return k_BGCD.narrow(2, self.length, tokens), v_BGCD.narrow(2, self.length, tokens)

    def hold(self, tokens: int, layout: Layout, row: int | None = None) -> None:
        """Makes room for so many tokens in all, at least in this row. Raises ShapeError for another layout."""
        layout.check(self.keys)
        self._grow(tokens, layout)

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        if self._is_ragged:
            super().commit(k_BGSD, v_BGSD)
        else:
            self._count(k_BGSD.shape[2])

    def _count(self, tokens: int) -> None:
        self.lengths = tuple(map(tokens.__add__, self.lengths or (0,) * self.tensors[0].shape[0]))

    @property
    def _is_ragged(self) -> bool:
        return len(set(self.lengths)) > 1

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        if self.length == 0:
            self._reserved = max(self._reserved, tokens)
        known = layout if self._kv_BGCD is None else Layout.of(self._kv_BGCD[0])
        if known is not None:
            self._grow(max(tokens, self._reserved), known)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Counts so many tokens; the memory stays."""
        self.lengths = tuple(lengths) if any(lengths) else ()
        self._forks.truncate(lengths)

    @torch.inference_mode(False)  # else what is allocated there could not be written to under torch.no_grad()
    def select(self, rows: Sequence[int]) -> None:
        """Row i becomes a copy of row `rows[i]`, all of them at once; in place where as many are left."""
        if not self.lengths:
            return
        same, changed = self._forks.same_as(rows, self.lengths), [row for row, of in enumerate(rows) if row != of]
        if len(rows) == len(self.lengths):
            begin = min((same[row] for row in changed), default=0)
            end = max((self.lengths[rows[row]] for row in changed), default=0)
            self._copy_rows(changed, [rows[row] for row in changed], slice(begin, max(begin, end)))
        else:
            self._put(*(x_BGCD[list(rows)] for x_BGCD in self.tensors))
        self._forks.select(rows, self.lengths)
        self.lengths = tuple(self.lengths[row] for row in rows)

    def _copy_rows(self, into: Sequence[int], sources: Sequence[int], tokens: slice) -> None:
        if not into:
            return
        into_b, sources_b = torch.tensor((into, sources), device=self.tensors[0].device)
        for x_BGCD in self.tensors:
            part_BGSD = x_BGCD[:, :, tokens]
            part_BGSD.index_copy_(0, into_b, part_BGSD.index_select(0, sources_b))

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        return KeyView(*self.tensors, lengths_B)

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values with the memory behind them, [B, G, C, D] without gaps; others once the store has grown."""
        assert self._kv_BGCD is not None, "nothing was appended to this store yet"
        return self._kv_BGCD

    @property
    def capacity(self) -> int:
        return 0 if self._kv_BGCD is None else self._kv_BGCD[0].shape[2]

    def advance(self, tokens: int) -> None:
        self._count(tokens)

    def step_rows(self, length: int = 0) -> None:
        """All tokens of the capacity."""

    def step_memory(self) -> StepMemory:
        return StepMemory(*self.tensors)

    @property
    def keys(self) -> torch.Tensor | None:
        return self._kv_BGCD and self._kv_BGCD[0]

    @torch.inference_mode(False)  # else what was allocated there could not be written to under torch.no_grad()
    def _grow(self, needed: int, layout: Layout) -> None:
        old, capacity = self._kv_BGCD, self.capacity if self._kv_BGCD else -1
        larger = grown(capacity, needed, self._reserved)
        if larger == capacity:
            return
        self._put(layout.empty(larger), layout.empty(larger))
        for old_BGCD, larger_BGCD in zip(old or (), self.tensors, strict=False):
            larger_BGCD[:, :, : self.length].copy_(old_BGCD[:, :, : self.length])

    def _put(self, k_BGCD: torch.Tensor, v_BGCD: torch.Tensor) -> None:
        self._kv_BGCD, self.bytes.device = (k_BGCD, v_BGCD), 2 * k_BGCD.untyped_storage().nbytes()


class RowStore(KVStore):
    """A row of `whole`, which may be empty and will have `batch` rows: tokens that are added here are there."""

    def __init__(self, whole: DeviceStore, row: int, batch: int) -> None:
        self.bytes = whole.bytes
        self._whole = whole
        self._row = row
        self._batch = batch

    @property
    def lengths(self) -> tuple[int, ...]:
        return (self._whole.lengths[self._row] if self._whole.lengths else 0,)

    def append(self, k_1GSD: torch.Tensor, v_1GSD: torch.Tensor) -> None:
        check_tokens_fit(None, k_1GSD, v_1GSD)
        room_1GSD = self.room(k_1GSD.shape[2], Layout.of(k_1GSD))
        for there_1GSD, new_1GSD in zip(room_1GSD, (k_1GSD, v_1GSD), strict=True):
            there_1GSD.copy_(new_1GSD.detach())
        self.commit(k_1GSD, v_1GSD)

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        (length,) = self.lengths
        self._whole.hold(length + tokens, replace(layout, batch=layout.batch * self._batch), self._row)
        k_1GCD, v_1GCD = self._memory
        return k_1GCD.narrow(2, length, tokens), v_1GCD.narrow(2, length, tokens)

    def commit(self, k_1GSD: torch.Tensor, v_1GSD: torch.Tensor) -> None:
        self.truncate((self.lengths[0] + k_1GSD.shape[2],))

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Nothing to do: room is made for all rows together."""

    def truncate(self, lengths: Sequence[int]) -> None:
        whole = list(self._whole.lengths or (0,) * self._batch)
        (whole[self._row],) = lengths
        self._whole.truncate(whole)

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        return KeyView(*self._memory, lengths_B)

    @property
    def _memory(self) -> tuple[torch.Tensor, torch.Tensor]:
        """[1, G, C, D] each."""
        k_BGCD, v_BGCD = self._whole.tensors
        return k_BGCD[self._row : self._row + 1], v_BGCD[self._row : self._row + 1]
