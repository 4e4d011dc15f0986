"""Defines what is asked of keys and values wherever they lie, in three protocols: a source that attention reads
(`KeySource`), one that forward passes append to (`KVStore`), and the whole store of a layer (`WholeStore`), which
captured steps run over too. Stores know logical token positions and physical slots, and no policy. A new store
implements `WholeStore` in a file beside this one.

A length belongs to a layer and a row: every store counts the tokens of each batch row by itself. The position of a
token does not depend on what a store still has of those before it.

Shapes: B batch, G KV heads, S tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol

import torch

from sparsekv.kernels.decode.selection import Selection
from sparsekv.kernels.decode.slots import SlotMap
from sparsekv.kernels.keys import FLOAT8, KeyView, Scales, in_8_bits, scaled
from sparsekv.kernels.topk import blocks
from sparsekv.plans.errors import ShapeError

_LEAST_MARGIN, _MOST_MARGIN = 256, 65_536
_LEAST_ROWS = 512


@dataclass(frozen=True, slots=True)
class Layout:
    batch: int
    heads: int  # KV heads
    size: int  # of a head
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, k_BGSD: torch.Tensor) -> Layout:
        batch, heads, _, size = k_BGSD.shape
        return cls(batch, heads, size, k_BGSD.dtype, k_BGSD.device)

    @property
    def token_bytes(self) -> int:
        """Bytes of the keys, or of the values, of one token of a row."""
        return self.heads * self.size * self.dtype.itemsize

    def bytes(self, tokens: int) -> int:
        return 2 * self.batch * tokens * self.token_bytes

    def check(self, cached: torch.Tensor | None) -> None:
        """Raises ShapeError unless tokens of this layout fit to the [B, G, *, D] of `cached`."""
        ours = (self.batch, self.heads, self.size)
        if cached is not None and ours != (expected := (cached.shape[0], cached.shape[1], cached.shape[3])):
            raise ShapeError(
                f"the cache holds (batch, KV heads, head size) = {expected}, the new tokens have {ours}; "
                f"start a new cache for another batch"
            )

    def empty(self, tokens: int) -> torch.Tensor:
        """Room for the keys, or the values, of so many tokens: [B, G, S, D] on the device."""
        return torch.empty((self.batch, self.heads, tokens, self.size), dtype=self.dtype, device=self.device)


@dataclass(slots=True)
class Bytes:
    """Bytes that one store has allocated; outlives the store, so that they can be read when the cache is gone."""

    device: int = 0
    host: int = 0  # for what would otherwise be on the compute device


@dataclass(slots=True)
class HostReads:
    """Reads of contexts in host memory by decode steps: a step of every layer counts, and every row and list. Captured
    steps count on the device: `collect` adds their counts."""

    steps: int = 0
    chosen: int = 0  # tokens that lie on the host, as far as no whole context was read
    fetched: int = 0  # of these, those that had to be copied to the device
    _on_device: dict[torch.device, torch.Tensor] = field(default_factory=dict, compare=False, repr=False)

    @torch.inference_mode(False)  # else it could not be written to under torch.no_grad()
    def on_device(self, device: torch.device) -> torch.Tensor:
        """Where captured steps on a device count, int64 [3]: steps, chosen, fetched. Its address does not change."""
        if device not in self._on_device:
            self._on_device[device] = torch.zeros(3, dtype=torch.int64, device=device)
        return self._on_device[device]

    def collect(self) -> HostReads:
        """Itself, with what was counted on devices so far. Waits for them."""
        for counts_3 in self._on_device.values():
            steps, chosen, fetched = counts_3.tolist()
            self.steps, self.chosen, self.fetched = self.steps + steps, self.chosen + chosen, self.fetched + fetched
            counts_3.zero_()
        return self

    @contextmanager
    def uncounted(self) -> Iterator[None]:
        """Inside it, devices count in vain."""
        before = {device: counts_3.clone() for device, counts_3 in self._on_device.items()}
        try:
            yield
        finally:
            for device, counts_3 in self._on_device.items():
                counts_3.copy_(before[device]) if device in before else counts_3.zero_()

    def reset(self) -> None:
        self.steps = self.chosen = self.fetched = 0
        for counts_3 in self._on_device.values():
            counts_3.zero_()


Gathered = tuple[KeyView, Selection, int | None]
"""Keys and values of at least the selected tokens, the selection counted in them, and the window that is left to apply:
None once the store has left out what lies outside it."""


class KeySource(Protocol):
    """Keys and values of one layer, the newest tokens' included, for attention to read."""

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        """Keys and values of all tokens on the compute device; `lengths_B` int32 there."""

    def gather(
        self, selection: Selection, lengths_B: torch.Tensor, window: int | None = None, slots: SlotMap | None = None
    ) -> Gathered:
        """All tokens without a copy, where they lie on the device: kernels read the selected ones there. Layers that
        take the same choice share the slots of a hot set."""
        return self.view(lengths_B), selection, window


class Resident(KeySource):
    """Keys and values that lie on the compute device, contiguous or in pages."""

    def __init__(self, keys: KeyView) -> None:
        self._keys = keys

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        return self._keys


class Seen(KeySource):
    """Keys and values of a source with what it does not know of them: their softmax, and their scales."""

    def __init__(self, source: KeySource, seen: Callable[[KeyView], KeyView]) -> None:
        self._source, self._seen = source, seen

    def view(self, lengths_B: torch.Tensor) -> KeyView:
        return self._seen(self._source.view(lengths_B))

    def gather(
        self, selection: Selection, lengths_B: torch.Tensor, window: int | None = None, slots: SlotMap | None = None
    ) -> Gathered:
        keys, selected, left = self._source.gather(selection, lengths_B, window, slots)
        return self._seen(keys), selected, left


class KVStore(KeySource, Protocol):
    bytes: Bytes  # allocated now

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each batch row; none before the first append."""

    @property
    def cached(self) -> tuple[int, ...]:
        """Tokens of each batch row in memory."""
        return self.lengths

    def append(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Adds to each row the tokens that follow those it has.

        Raises:
            ShapeError: batch, heads or head size differ from what is cached.
        """

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        """Memory for the next tokens' keys and values, written piece by piece: [B, G, tokens, D] each.

        They do not count before `commit`; another call of this store between the two makes the room invalid.

        Raises:
            ShapeError: the layout differs from that of what is cached.
        """
        return layout.empty(tokens), layout.empty(tokens)

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Counts what was written to `room`, whose two tensors these are."""
        self.append(k_BGSD, v_BGSD)

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        """Makes room for `tokens` in all, so that the store does not grow on the way there.

        The memory is allocated now if its layout is known: given, or that of what is cached; else at the first append.
        An empty store takes exactly so much, one with tokens may take more, since growing copies.

        Raises:
            UsageError: host memory does not suffice.
        """

    def truncate(self, lengths: Sequence[int]) -> None:
        """Forgets what a row has beyond its length, as if it had never been added, also by an append that failed. The
        memory stays.

        Raises:
            UnsupportedError: the store has no rows of different lengths.
        """


class HotRows(NamedTuple):
    """Rows on the device of a layer in host memory, as kernels and slot tables of a captured step are made for."""

    slots: int
    ring: int  # behind the slots

    @property
    def all(self) -> int:
        return self.slots + self.ring


class CachedRows(NamedTuple):
    """Rows of an evicting layer that kernels of a captured step are made for."""

    all: int

    @classmethod
    def of(cls, rows: int) -> CachedRows:
        """A power of two: few graphs serve all prompts."""
        return cls(max(_LEAST_ROWS, 1 << (rows - 1).bit_length()))


StepRows = HotRows | CachedRows | None
"""Rows that a captured step is made for; None where they are all tokens of the capacity."""


class StepMemory(NamedTuple):
    k_BGRD: torch.Tensor
    v_BGRD: torch.Tensor
    rows_PBGRD: torch.Tensor | None = None  # both of them, of a layer in host memory
    host_CBPGD: torch.Tensor | None = None  # the rest of it


class Binding:
    """One captured step at work on one cache. A store in host memory holds it until other steps write to the store."""


class WholeStore(KVStore, Protocol):
    """All keys and values of one layer, over which captured steps can run."""

    @property
    def keys(self) -> torch.Tensor | None:
        """[B, G, *, D]: those on the device; None before the first append. Another tensor once the memory is."""

    @property
    def capacity(self) -> int:
        """Tokens, or rows of an evicting layer, that there is room for."""

    def step_rows(self, length: int = 0) -> StepRows:
        """The rows of a captured step, now or at `length` tokens."""

    def step_memory(self) -> StepMemory:
        """Where a captured step reads and writes, until `bound` is another object."""

    def prepare(self, length: int) -> None:
        """Makes room for a captured step at which a row has so many tokens."""
        self.reserve(length)

    def bind(self, binding: Binding) -> object:
        """Captured steps write to the store from here on; gives `bound`."""
        return self.bound

    @property
    def bound(self) -> object:
        """An object that stays the same while the memory is in use that captured steps were bound to."""
        return self.keys

    def advance(self, tokens: int) -> None:
        """Counts what a captured step has written."""


def grown(capacity: int, needed: int, reserved: int = 0) -> int:
    """Tokens to allocate so that `needed` fit: unchanged if they do, else what was reserved, else an eighth more,
    within bounds. One append in many then copies the store, and a long context has no long empty end."""
    if needed <= capacity:
        return capacity
    if needed <= reserved:
        return reserved
    return needed + min(max(needed // 8, _LEAST_MARGIN), _MOST_MARGIN)


def check_tokens_fit(cached: torch.Tensor | None, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
    """Raises ShapeError unless the rows fit together, and to the [B, G, *, D] of `cached`."""
    if k_BGSD.dim() != 4 or k_BGSD.shape != v_BGSD.shape:
        raise ShapeError(
            f"keys and values must both be [batch, KV heads, tokens, head size]; "
            f"found {tuple(k_BGSD.shape)} and {tuple(v_BGSD.shape)}"
        )
    if cached is not None and (*k_BGSD.shape[:2], k_BGSD.shape[3]) != (*cached.shape[:2], cached.shape[3]):
        Layout.of(k_BGSD).check(cached)  # made for its message: a layer of a short prompt has no time for it


_EXPONENT = 0x7F80_0000  # bits of a float32
_AT_ONCE = 16_384  # tokens: rounding a long prompt in pieces bounds the device memory it takes
Pair = tuple[torch.Tensor, torch.Tensor]


@dataclass(slots=True)
class Float8:
    """Keys and values of one layer in 8 bits (e4m3). Stores have their bytes; scales are found and applied here.

    A scale of each KV head, for keys and for values, is fixed by the first tokens that a cache gets, so that captured
    steps read it at one address and eviction, host memory and copies of rows move bytes as they are. Scales of each
    token would hardly be more accurate: e4m3 has its full precision over a range of 2^15, in which a head's values lie
    together. The largest of the first tokens becomes 4 to 8 of at most 448: later ones may be 56 times as large before
    they are cut off, and one that is 256 times smaller still has all its bits. Scales are powers of two, under which a
    number rounds alike: answers do not depend on how many of the first tokens came together, but for numbers that
    leave this range.
    """

    scales: Scales | None = None  # None before the first tokens

    @staticmethod
    def layout(layout: Layout) -> Layout:
        return replace(layout, dtype=torch.uint8)

    @torch.no_grad()
    def rounded(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> Pair:
        """The bytes of new tokens, whose first ones fix the scales."""
        if self.scales is None:
            self.scales = Scales(_power_of_two(k_BGSD), _power_of_two(v_BGSD), k_BGSD.dtype)
        return _in_pieces(k_BGSD, self.scales.k_G), _in_pieces(v_BGSD, self.scales.v_G)

    def read(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> Pair:
        assert self.scales is not None, "there are tokens"
        k_G, v_G, dtype = self.scales.k_G, self.scales.v_G, self.scales.dtype
        return scaled(k_BGSD, k_G, dtype), scaled(v_BGSD, v_G, dtype)

    def fill(self, room: Pair, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        """Writes tokens to a store's room, and what they were rounded to in their own place."""
        for piece in blocks(k_BGSD.shape[2], 1, _AT_ONCE):
            new = k_BGSD[:, :, piece], v_BGSD[:, :, piece]
            written = self.rounded(*new)
            for into, x_BGSD, bytes_, read in zip(room, new, written, self.read(*written), strict=True):
                into[:, :, piece].copy_(bytes_)
                x_BGSD.copy_(read)

    def view(self, keys: KeyView) -> KeyView:
        return replace(keys, k=keys.k.view(FLOAT8), v=keys.v.view(FLOAT8), scales=self.scales)


def _in_pieces(x_BGSD: torch.Tensor, scale_G: torch.Tensor) -> torch.Tensor:
    stored_BGSD = torch.empty_like(x_BGSD, dtype=torch.uint8)
    for piece in blocks(x_BGSD.shape[2], 1, _AT_ONCE):
        stored_BGSD[:, :, piece] = in_8_bits(x_BGSD[:, :, piece], scale_G)
    return stored_BGSD


def _power_of_two(x_BGSD: torch.Tensor) -> torch.Tensor:
    """[G]: the scale by which the largest number of a head becomes 4 to 8; 1 where it is 0 or none."""
    largest_G = x_BGSD.abs().amax((0, 2, 3)).float()
    scale_G = (largest_G.view(torch.int32) & _EXPONENT).view(torch.float32) / 4
    return torch.where(scale_G.isfinite() & (scale_G > 0), scale_G, 1.0)
