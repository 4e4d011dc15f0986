"""A KV store on the device that evicts: some tokens of each prompt stay, and the newest of those generated behind it.

Rows in memory: those of the prompt in its order, then a circular buffer of generated tokens. While a prompt is under
way its tokens follow in order, and nothing is evicted; once it is complete, `evict` moves the rows that stay to memory
of their size and frees the rest. `lengths` counts all tokens, `cached` the rows: positions stay what they were, as keys
are rotated before they are stored.

Shapes: B batch, G KV heads, S tokens, K tokens that stay cached, D head size; g is 1 or G; R evicting layers.
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
from sparsekv.runtime.stores.store import Bytes, CachedRows, Gathered, Layout, StepMemory, StepRows, WholeStore

_FAILED = (
    "expected a cache whose passes all ended, found one that failed {}; reset() the cache, or start a new one, and run "
    "the whole prompt again"
)


class GeneratedRows(NamedTuple):
    """The rows of generated tokens: the oldest makes room for the newest."""

    first: int  # row
    begin: int  # tokens so far where they began
    most: int  # rows


class EvictingStore(WholeStore):
    """Keys and values of one layer, of equally long rows; so many of the newest generated tokens stay."""

    lengths: tuple[int, ...] = ()

    def __init__(self, generated: int) -> None:
        self.bytes = Bytes()
        self._generated = generated
        self._rows = DeviceStore(self.bytes)
        self._prompt_rows = 0  # rows before the generated ones
        self._complete = 0  # tokens so far where these began
        self._prompt_at: int | None = 0  # tokens before the prompt under way; None while tokens are generated
        self._lost = False  # whether a step that did not end may have written over a generated token

    @property
    def length(self) -> int:
        return max(self.lengths, default=0)

    @property
    def cached(self) -> tuple[int, ...]:
        return (self.rows,) * len(self.lengths)

    @property
    def rows(self) -> int:
        return self._rows.length

    def rows_after(self, generated: int) -> int:
        return self._prompt_rows + min(self.length + generated - self._complete, self._generated)

    @property
    def prompt_tokens(self) -> int:
        """Tokens of the prompt under way; 0 where there is none, or it has just begun."""
        return 0 if self._prompt_at is None else self.length - self._prompt_at

    @property
    def keys(self) -> torch.Tensor | None:
        return self._rows.keys

    @property
    def tensors(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows.tensors

    @property
    def generated(self) -> GeneratedRows:
        return GeneratedRows(self._prompt_rows, self._complete, self._generated)

    @property
    def capacity(self) -> int:
        return self._rows.capacity

    def step_rows(self, length: int = 0) -> CachedRows:
        return CachedRows.of(self.capacity)

    def step_memory(self) -> StepMemory:
        return StepMemory(*self.tensors)

    def prepare(self, length: int) -> None:
        self._rows.reserve(self._prompt_rows + self._generated)

    def advance(self, tokens: int) -> None:
        self._rows.advance(self.rows_after(tokens) - self.rows)
        self._lost = False
        self.lengths = tuple(length + tokens for length in self.lengths)

    # --- between passes -----------------------------------------------------------------------------------------------

    def begin_prompt(self) -> None:
        """Puts generated tokens in their order. Raises UsageError where a failed step has overwritten one of them."""
        if self._prompt_at is not None:
            return
        if self._lost:
            raise UsageError(_FAILED.format("over a generated token that a layer was to keep"))
        self._prompt_at, turned = self.length, (self.length - self._complete) % self._generated
        if self.length - self._complete <= self._generated:
            return
        self._complete = self.length - self._generated
        for x_BGCD in self.tensors:
            generated_BGSD = x_BGCD.narrow(2, self._prompt_rows, self._generated)
            generated_BGSD.copy_(generated_BGSD.roll(-turned, 2))

    @torch.inference_mode(False)  # else what is allocated there could not be written to under torch.no_grad()
    def evict(self, rows_BgK: torch.Tensor | None) -> None:
        """The prompt is complete: evicts all rows but these, int64 ascending, of every KV head or one for all (None:
        all stay), and makes room for generated tokens."""
        if rows_BgK is not None:
            self._move(rows_BgK)
        self._prompt_rows, self._complete, self._prompt_at = self.rows, self.length, None

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
        """Goes on generating. Until the token is written, the one that it replaces counts as lost."""
        if self.length:
            self._prompt_at = None
            self._lost |= self.length - self._complete >= self._generated

    # --- as every store -----------------------------------------------------------------------------------------------

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Copies the new tokens behind the old ones, or over the oldest generated one."""
        made = self.length - self._complete
        if self._prompt_at is not None or made < self._generated:
            self._rows.append(k_BGSD, v_BGSD)
        else:
            for x_BGCD, new_BG1D in zip(self.tensors, (k_BGSD, v_BGSD), strict=True):
                x_BGCD[:, :, self._prompt_rows + made % self._generated].copy_(new_BG1D.detach()[:, :, 0])
            self._lost = False
        self._count(k_BGSD)

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        return self._rows.room(tokens, layout)

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        self._rows.commit(k_BGSD, v_BGSD)
        self._count(k_BGSD)

    def _count(self, k_BGSD: torch.Tensor) -> None:
        self.lengths = (self.length + k_BGSD.shape[2],) * k_BGSD.shape[0]

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Notes the size for the first tokens; memory is allocated when they come, and let go of layer by layer."""
        if self.keys is None:
            self._rows.reserve(tokens)

    def truncate(self, lengths: Sequence[int]) -> None:
        """Takes back the tokens of a failed pass. Raises UsageError where it had evicted tokens by then."""
        length = max(lengths, default=0)
        if length == self.length:
            return
        if length and length < (self._complete if self._prompt_at is None else self._prompt_at):
            raise UsageError(_FAILED.format("behind a prompt of which tokens were evicted already"))
        self._lost |= self._prompt_at is None and self.length - self._complete > self._generated
        if not length:
            self._prompt_rows = self._complete = self._prompt_at = 0
            self._lost = False
        made = length - self._complete
        rows = self._prompt_rows + (made if self._prompt_at is not None else min(made, self._generated))
        self._rows.truncate([rows] * len(self.lengths))
        self.lengths = tuple(lengths) if length else ()

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """All rows, and the memory behind them, without a copy; `lengths_B` counts all tokens."""
        evicted = self.length - self.rows
        return KeyView(*self.tensors, lengths_B - evicted if evicted else lengths_B)

    def gather(
        self, selection: Selection, lengths_B: torch.Tensor, window: int | None = None, slots: SlotMap | None = None
    ) -> Gathered:
        raise AssertionError("an evicting layer attends to all that it has: it is in no segment")


class StepEviction:
    """The evicting layers of one captured step: their rows, and the place of the next token. Both follow from the
    lengths, which the step reads on the device, and from three numbers of each store, which are written when another
    cache is served or another prompt was evicted from."""

    def __init__(self, kinds: Sequence[StepRows], lengths_B: torch.Tensor) -> None:
        layers = [layer for layer, kind in enumerate(kinds) if isinstance(kind, CachedRows)]
        self._numbers = {layer: number for number, layer in enumerate(layers)}
        self._lengths_B = lengths_B
        self._generated_3R1 = lengths_B.new_ones((3, len(layers), 1))
        self._rows_RB = self._next_RB = lengths_B
        self._bound: list[GeneratedRows] = []

    def serves(self, stores: Sequence[WholeStore]) -> bool:
        return _generated(stores) == self._bound

    def bind(self, stores: Sequence[WholeStore]) -> None:
        self._bound = _generated(stores)
        generated_R3 = torch.tensor(self._bound, dtype=torch.int32, device="cpu").view(-1, 3)
        generated_3R1 = generated_R3.T.contiguous()[..., None]
        if self._generated_3R1.is_cuda:
            generated_3R1 = generated_3R1.pin_memory()  # which is not reused before the copy has read it
        self._generated_3R1.copy_(generated_3R1, non_blocking=True)

    def begin(self) -> None:
        if not self._numbers:
            return
        first_R1, begin_R1, count_R1 = self._generated_3R1
        made_RB = self._lengths_B - begin_R1
        self._rows_RB = first_R1 + torch.minimum(made_RB, count_R1)
        self._next_RB = first_R1 + (made_RB - 1) % count_R1 + 1

    def __contains__(self, layer: int) -> bool:
        return layer in self._numbers

    def rows(self, layer: int) -> torch.Tensor:
        return self._rows_RB[self._numbers[layer]]

    def behind_next(self, layer: int) -> torch.Tensor:
        """int32 [B]: one more than the row of the new token."""
        return self._next_RB[self._numbers[layer]]


def _generated(stores: Sequence[WholeStore]) -> list[GeneratedRows]:
    return [store.generated for store in stores if isinstance(store, EvictingStore)]
