"""A KV store on the device that evicts: some tokens of each prompt stay, and the newest of those generated behind it.

Rows in memory: those of the prompt in its order, then a circular buffer of generated tokens. While a prompt is under
way its tokens follow in order, and nothing is evicted; once it is complete, `evict` moves the rows that stay to memory
of their size and frees the rest. `lengths` counts all tokens, `cached` the rows: positions stay what they were, as keys
are rotated before they are stored.

Shapes: B batch, G KV heads, S tokens, K tokens that stay cached, D head size; g is 1 or G.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import SlotMap
from sparsekv.kernels.keys import KeyView
from sparsekv.plans.errors import UsageError
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.store import Bytes, Layout


class Ring(NamedTuple):
    """Where generated tokens go."""

    first: int  # row
    complete: int  # tokens so far where it began
    rows: int


class EvictingStore:
    """Keys and values of one layer, of batch rows that are equally long.

    Args:
        generated: how many of the newest generated tokens stay.
    """

    def __init__(self, generated: int) -> None:
        self.lengths: tuple[int, ...] = ()
        self.bytes = Bytes()
        self._generated = generated
        self._rows = DeviceStore(self.bytes)
        self._prompt_rows = 0  # rows before the ring
        self._complete = 0  # tokens so far where the ring began
        self._prompt_at: int | None = 0  # tokens before the prompt under way; None while tokens are generated

    @property
    def length(self) -> int:
        """All tokens so far."""
        return max(self.lengths, default=0)

    @property
    def cached(self) -> int:
        """Rows in memory."""
        return self._rows.length

    def cached_after(self, generated: int) -> int:
        """Rows in memory once so many tokens more are generated."""
        return self._prompt_rows + min(self.length + generated - self._complete, self._generated)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt under way; 0 where there is none, or it has just begun."""
        return 0 if self._prompt_at is None else self.length - self._prompt_at

    @property
    def keys(self) -> torch.Tensor | None:
        """As of DeviceStore, of the rows."""
        return self._rows.keys

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """As of DeviceStore, of the rows."""
        return self._rows.tensors

    @property
    def ring(self) -> Ring:
        """Of the tokens that are generated."""
        return Ring(self._prompt_rows, self._complete, self._generated)

    @property
    def capacity(self) -> int:
        """Rows that there is memory for."""
        return self._rows.capacity

    def prepare(self, length: int) -> None:
        """Makes room for captured steps, whatever the length."""
        self._rows.reserve(self._prompt_rows + self._generated)

    def advance(self, tokens: int) -> None:
        """Counts the token that a captured step has written."""
        self._rows.advance(self.cached_after(tokens) - self.cached)
        self.lengths = tuple(length + tokens for length in self.lengths)

    # --- between passes -----------------------------------------------------------------------------------------------

    def begin_prompt(self) -> None:
        """What follows is a prompt, whole or in pieces: generated tokens are put in their order."""
        if self._prompt_at is not None:
            return
        self._prompt_at, turned = self.length, (self.length - self._complete) % self._generated
        if self.length - self._complete <= self._generated:
            return
        self._complete = self.length - self._generated
        for x_BGCD in self.tensors:
            ring_BGSD = x_BGCD.narrow(2, self._prompt_rows, self._generated)
            ring_BGSD.copy_(ring_BGSD.roll(-turned, 2))

    @torch.inference_mode(False)  # else what is allocated there could not be written to under torch.no_grad()
    def evict(self, rows_BgK: torch.Tensor | None) -> None:
        """The prompt is complete: evicts all rows but these, and makes room for what is generated.

        Args:
            rows_BgK: int64, ascending, of every KV head or one for all; all rows stay when None.
        """
        if rows_BgK is not None:
            self._move(rows_BgK)
        self._prompt_rows, self._complete, self._prompt_at = self.cached, self.length, None

    def _move(self, rows_BgK: torch.Tensor) -> None:
        k_BGCD, v_BGCD = self.tensors
        layout, fewer = Layout.of(k_BGCD), DeviceStore(self.bytes)
        index_BGKD = rows_BgK[..., None].expand(-1, layout.heads, -1, layout.size)
        fewer.reserve(rows_BgK.shape[2] + self._generated, layout)
        room = fewer.room(rows_BgK.shape[2], layout)
        for x_BGCD, into_BGKD in zip((k_BGCD, v_BGCD), room, strict=True):
            torch.gather(x_BGCD, 2, index_BGKD, out=into_BGKD)
        fewer.commit(*room)
        self._rows = fewer

    def resume(self) -> None:
        """No prompt came after all: tokens are generated as before."""
        if self.length:
            self._prompt_at = None

    # --- as every store -----------------------------------------------------------------------------------------------

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Copies the new tokens behind the old ones, or over the oldest generated one. Raises ShapeError when they do
        not fit."""
        made = self.length - self._complete
        if self._prompt_at is not None or made < self._generated:
            self._rows.append(k_BGSD, v_BGSD)
        else:
            for x_BGCD, new_BG1D in zip(self.tensors, (k_BGSD, v_BGSD), strict=True):
                x_BGCD[:, :, self._prompt_rows + made % self._generated].copy_(new_BG1D.detach()[:, :, 0])
        self._count(k_BGSD)

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """The memory behind the rows, for tokens of a prompt. Raises ShapeError when the layout does not fit."""
        return self._rows.room(tokens, layout)

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Counts the tokens written."""
        self._rows.commit(k_BGSD, v_BGSD)
        self._count(k_BGSD)

    def _count(self, k_BGSD: torch.Tensor) -> None:
        self.lengths = (self.length + k_BGSD.shape[2],) * k_BGSD.shape[0]

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Takes note of the size for the first tokens; memory is allocated when they come, since it is let go of layer
        by layer."""
        if self.keys is None:
            self._rows.reserve(tokens)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Takes back what a failed pass has added.

        Raises:
            UsageError: it had evicted tokens by then.
        """
        length = max(lengths, default=0)
        if length == self.length:
            return
        if length and length < (self._complete if self._prompt_at is None else self._prompt_at):
            raise UsageError(
                "expected a cache whose passes all ended, found one that failed behind a prompt of which tokens were "
                "evicted already; reset() the cache, or start a new one, and run the whole prompt again"
            )
        if not length:
            self._prompt_rows = self._complete = self._prompt_at = 0
        made = length - self._complete
        rows = self._prompt_rows + (made if self._prompt_at is not None else min(made, self._generated))
        self._rows.truncate([rows] * len(self.lengths))
        self.lengths = tuple(lengths) if length else ()

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All rows, and the memory behind them, without a copy; `lengths_B` counts all tokens."""
        evicted = self.length - self.cached
        return KeyView(*self.tensors, lengths_B - evicted if evicted else lengths_B)

    def gather(
        self,
        selection: Selection,
        lengths_B: torch.Tensor,
        window: int | None = None,
        slots: SlotMap | None = None,
    ) -> tuple[KeyView, Selection, int | None]:
        """Never: an evicting layer is in no segment."""
        raise AssertionError("an evicting layer attends to all that it has")
