"""The Hugging Face cache over our KV stores.

A cache stays the `Cache` object that `generate` or the user made; only its layers are ours. So several turns, and
callers that keep their own reference, go on working.

Shapes: B batch, G KV heads, S tokens, D head size.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy, deepcopy
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache
from transformers.cache_utils import CacheLayerMixin, LinearAttentionLayer
from transformers.modeling_outputs import MoeModelOutputWithPast

from sparsekv.kernels.keys import Scales
from sparsekv.plans.errors import UnsupportedError, UsageError
from sparsekv.runtime.core.state import DecodeState, Remembered
from sparsekv.runtime.hf.describe import CACHE_NAME
from sparsekv.runtime.hf.placement import FixedRows
from sparsekv.runtime.stores.device import DeviceStore
from sparsekv.runtime.stores.store import Bytes, Float8, KVStore, Layout
from sparsekv.runtime.stores.virtual import VirtualStore

_EXPECTED = "sparsekv_expected_tokens"

States = dict[int, LinearAttentionLayer]
"""The recurrent states of a cache, by layer."""


class CacheOwner:
    """Who a cache works for: what `apply` or `capture_attention` attached to the model, or a captured step."""

    float8 = False  # whether the stores that it gives hold keys and values in 8 bits

    def __init__(self) -> None:
        self.open = True
        self.bytes: list[Bytes] = []

    @property
    def fixed_rows(self) -> FixedRows:
        """The layers whose rows stay as they are, in caches to come."""
        return FixedRows()

    def new_store(self, layer: int) -> KVStore:
        return DeviceStore()

    def new_state(self) -> DecodeState:
        """State that the layers of one cache share in decode steps."""
        return DecodeState(())


class CacheProgress:
    """The progress of forward passes over one cache. A pass that did not end is undone before the next one."""

    def __init__(self, state: DecodeState) -> None:
        self.state = state
        # when the pass began that has not ended: tokens of each row and the padding, of layers that it may have changed
        self._before: tuple[dict[int, tuple[tuple[int, ...], int]], Remembered] | None = None

    def undo(self, layers: Sequence[SparseLayer]) -> None:
        """Takes back what a pass that did not end has left in these layers."""
        cached, before = self._before or ({}, Remembered({}, {}, {}))
        for layer in layers:
            if layer.layer in cached:
                lengths, padding = cached[layer.layer]
                layer.store.truncate(lengths)  # may refuse, now and the next time
                layer.padding = padding
                self.state.restore(layer.layer, before)
                del cached[layer.layer]

    def begin(self, layers: Sequence[SparseLayer]) -> None:
        self.undo(layers)
        self._before = {layer.layer: (layer.store.lengths, layer.padding) for layer in layers}, self.state.remembered

    def end(self) -> None:
        self._before = None

    @property
    def failed(self) -> bool:
        return self._before is not None

    def columns(self, layer: SparseLayer) -> int:
        """Columns that count: tokens of the longest row of a layer, and padding."""
        before = self._before[0].get(layer.layer) if self._before else None
        lengths, padding = before or (layer.store.lengths, layer.padding)
        return max(lengths, default=0) + padding


def attention_dtype(new: torch.Tensor) -> torch.dtype:
    """In which tokens attend: that of autocast where it is on, as in torch's own attention, else their own."""
    kind = new.device.type
    return torch.get_autocast_dtype(kind) if is_autocast(kind) else new.dtype


def is_autocast(kind: str) -> bool:
    """Returns whether autocast is on for a kind of device; some, such as "meta", have none."""
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


class SparseLayer(CacheLayerMixin):
    """One layer of a cache: a KV store, and the decode state and progress that the layers share. All that attends over
    the cache is cast to the dtype of its first tokens, so that autocast may be on in some passes and off in others."""

    is_sliding = False
    is_compileable = False
    is_croppable = False
    supports_early_init = False

    def __init__(self, owner: CacheOwner, layer: int, progress: CacheProgress) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.owner = owner
        self.layer = layer
        self.progress = progress
        self.reserved = 0  # tokens to make room for
        self._start()

    @property
    def state(self) -> DecodeState:
        return self.progress.state

    @property
    def cached(self) -> tuple[int, ...]:
        return self.store.cached

    def _start(self) -> None:
        self.is_initialized = False
        self.padding = 0  # columns that ran beyond the tokens of the longest row
        self.picked = 0  # times that its rows were picked anew
        self.needs_grad = False  # whether autograd made any of the cached keys and values
        self.dtype: torch.dtype | None = None  # of what is cached, or has its memory already
        self.store = self.owner.new_store(self.layer)
        self.store.reserve(self.reserved)
        self.float8 = Float8() if self.owner.float8 else None
        self.fixed_rows = self.owner.fixed_rows

    @torch.inference_mode(False)  # else the copy could not be written to under torch.no_grad()
    def __deepcopy__(self, memo: dict[int, Any]) -> SparseLayer:
        """A cache of its own for the same owner, so that one prefix can serve several continuations."""
        copied = SparseLayer(self.owner, self.layer, deepcopy(self.progress, memo))
        copied.is_initialized, copied.needs_grad = self.is_initialized, self.needs_grad
        copied.padding, copied.picked = self.padding, self.picked
        copied.dtype, copied.fixed_rows, copied.float8 = self.dtype, self.fixed_rows, copy(self.float8)
        copied.store = deepcopy(self.store, memo)
        copied.reserved = self.reserved
        return copied

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Nothing to do: stores allocate on their first append."""
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Adds the new tokens to the store and returns them alone: our attention function reads the store."""
        check_owner_open(self.owner)
        self.needs_grad |= key_states.requires_grad or value_states.requires_grad
        self.dtype = self.dtype or attention_dtype(key_states)
        k_BGSD, v_BGSD = key_states.to(self.dtype), value_states.to(self.dtype)
        self.is_initialized = True
        if self.float8 is None:
            self.store.append(k_BGSD, v_BGSD)
            return k_BGSD, v_BGSD
        written = self.float8.rounded(k_BGSD, v_BGSD)
        self.store.append(*written)
        return self.float8.read(*written)

    @property
    def scales(self) -> Scales | None:
        return None if self.float8 is None else self.float8.scales

    def stored(self, layout: Layout) -> Layout:
        return layout if self.float8 is None else self.float8.layout(layout)

    def dtype_for(self, new: torch.Tensor) -> torch.dtype:
        return self.dtype or attention_dtype(new)

    def room(self, tokens: int, layout: Layout) -> tuple[torch.Tensor, torch.Tensor]:
        check_owner_open(self.owner)
        self.dtype = layout.dtype
        if self.float8 is not None:
            return layout.empty(tokens), layout.empty(tokens)
        return self.store.room(tokens, layout)

    def commit(self, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> None:
        self.is_initialized = True
        if self.float8 is None:
            return self.store.commit(k_BGSD, v_BGSD)
        room = self.store.room(k_BGSD.shape[2], self.stored(Layout.of(k_BGSD)))
        self.float8.fill(room, k_BGSD, v_BGSD)
        self.store.commit(*room)

    def reserve(self, tokens: int, layout: Layout | None = None) -> None:
        self.reserved = max(self.reserved, tokens)
        if layout is not None and self.dtype is None:
            self.dtype = layout.dtype
        self.store.reserve(tokens, None if layout is None else self.stored(layout))

    def expect(self, wanted: Sequence[int], layout: Layout) -> None:
        """Makes room for so many tokens of each row meanwhile; of a store in virtual memory."""
        if self.dtype in (None, layout.dtype):
            assert isinstance(self.store, VirtualStore)
            self.dtype = layout.dtype
            self.store.expect(wanted, self.stored(layout))

    def get_seq_length(self) -> int:
        """Columns that ran, but for those of a pass that has not ended: tokens of each row, and padding."""
        return self.progress.columns(self)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """Keys and their offset, for masks; none is ever built."""
        return self.get_seq_length() + query_length, 0

    def get_max_length(self) -> int:
        return -1

    def reset(self) -> None:
        self.store.bytes.device = self.store.bytes.host = 0  # of whoever still reads them
        self._start()
        self.state.reset()
        self.progress.end()

    def crop(self, tokens_to_remove: int) -> None:
        """Refused: the choices of filter layers cannot be taken back. Removing nothing is fine."""
        if tokens_to_remove:
            raise UnsupportedError(
                "assisted generation and cropping cannot be right with a sparsekv cache yet; generate without an "
                "assistant or prompt lookup, or close the handle first"
            )

    def batch_repeat_interleave(self, repeats: int) -> None:
        self.batch_select_indices(torch.arange(len(self.store.lengths), device="cpu").repeat_interleave(repeats))

    def reorder_cache(self, beam_idx: torch.Tensor) -> None:
        self.batch_select_indices(beam_idx)

    def batch_select_indices(self, indices: torch.Tensor) -> None:
        """Row i becomes a copy of row `indices[i]`, all of them at once, or of the i-th that a mask marks."""
        self.fixed_rows.refuse("the rows of a cache as they are", "others asked for", "run them in a new cache")
        self.progress.undo([self])
        if not self.store.lengths:
            return
        columns, rows_B = self.get_seq_length(), torch.arange(len(self.store.lengths), device="cpu")[indices.cpu()]
        if not len(rows_B):
            raise UsageError(
                "expected one row of the cache or more, found none selected; reset() a cache to start anew"
            )
        store: Any = self.store
        store.select(rows_B.tolist())
        self.set_columns(columns)
        self.picked += 1
        self.state.select(self.layer, rows_B)

    def set_columns(self, columns: int) -> None:
        self.padding = columns - max(self.store.lengths, default=0)


@dataclass
class DecoderOutput(MoeModelOutputWithPast):
    """The output of a decoder, as every head reads it: of mixtures too, and where layers share keys and values."""

    shared_kv_states: Any = None


def decoder_output(hidden_BSE: torch.Tensor, cache: Cache | None) -> DecoderOutput:
    fields: dict[str, Any] = {"last_hidden_state": hidden_BSE, CACHE_NAME: cache}
    return DecoderOutput(**fields)


def sparse_cache(given: Any, owner: CacheOwner, layers: int, linear: Collection[int] = ()) -> Cache:
    """The cache to run with: `given` if it is the owner's, else an empty DynamicCache with our layers, and
    transformers' own where there is a recurrent state."""
    cache = DynamicCache() if given is None else given
    if isinstance(cache, Cache) and attending(cache):
        _check_owned(cache, owner)
    else:
        _check_empty(cache)
        progress = CacheProgress(owner.new_state())
        cache.layers = [
            LinearAttentionLayer() if layer in linear else SparseLayer(owner, layer, progress)
            for layer in range(layers)
        ]
        cache.layer_class_to_replicate = None
        reserve(cache, getattr(cache, _EXPECTED, 0))
    owner.bytes = [layer.store.bytes for layer in attending(cache)]
    return cache


def reserve(cache: Cache, tokens: int) -> None:
    """Tells a cache how many tokens it will have in all, prompt and answer, so that its memory is allocated once. A
    cache without a plan takes note of it for when it is used under one. A cache may still grow beyond."""
    ours = attending(cache)
    for layer in ours:
        layer.reserve(tokens)
    if not ours:
        setattr(cache, _EXPECTED, tokens)


def states_of(cache: Cache) -> States:
    return {at: deepcopy(layer) for at, layer in enumerate(cache.layers) if isinstance(layer, LinearAttentionLayer)}


def put_back(cache: Cache, states: States) -> None:
    """Recurrent states as they were when they were copied; keys and values are for others to truncate."""
    for at, state in states.items():
        cache.layers[at] = deepcopy(state)


def take_back(cache: Cache, lengths: Sequence[int], columns: int) -> None:
    """Forgets the tokens of the rows beyond these lengths, in every layer; `columns` are left, padding included."""
    ours = attending(cache)
    assert len(ours) == len(cache.layers), "a recurrent state cannot be taken back"
    ours[0].progress.undo(ours)
    for layer in ours:
        layer.store.truncate(lengths)
        layer.set_columns(columns)


def fixed_rows_of(cache: Any, coming: FixedRows) -> FixedRows:
    """The layers of a cache whose rows stay as they are; `coming` where it has yet to become one of ours."""
    ours = attending(cache)
    return ours[0].fixed_rows if ours else coming


def check_owner_open(owner: CacheOwner) -> None:
    if not owner.open:
        raise UsageError(
            "expected the plan of this cache to be applied still, but its handle was closed or suspended; "
            "start a new cache, or keep the handle open over all turns"
        )


def progress_of(cache: Cache) -> CacheProgress:
    return first_of(cache).progress


def first_of(cache: Cache) -> SparseLayer:
    return next(layer for layer in cache.layers if isinstance(layer, SparseLayer))


def attending(cache: Any) -> list[SparseLayer]:
    """The layers of a cache that are ours; others have a recurrent state."""
    return [layer for layer in getattr(cache, "layers", ()) if isinstance(layer, SparseLayer)]


def begin_pass(cache: Cache, layers: int) -> tuple[int, ...]:
    """The tokens of the rows of a cache whose first `layers` are about to run, without those of a failed pass. Raises
    UsageError where rows differ between layers, or a failed pass has left its tokens in a recurrent state."""
    ours = attending(cache)
    if progress_of(cache).failed and len(ours) < len(cache.layers):
        raise UsageError(
            "expected a cache whose passes all ended, found one that failed: a recurrent state cannot be taken back; "
            "reset() the cache, or start a new one, and run the whole prompt again"
        )
    progress_of(cache).begin(ours)
    if len({layer.picked for layer in ours}) > 1:
        raise UsageError(
            "expected a cache with the same rows in every layer, found one whose rows were picked anew in some layers "
            "and then not in others, as where memory runs out; reset() the cache, or start a new one"
        )
    every = {layer.store.lengths for layer in ours if layer.layer < layers}
    if len(every) > 1:
        tokens = [max(lengths, default=0) for lengths in every]
        raise UsageError(
            f"expected a cache with the same tokens in every layer, found {min(tokens)} to {max(tokens)} of them: not "
            f"all layers ran before; reset() the cache, or start a new one, and run the whole prompt again"
        )
    return ours[0].store.lengths


def _check_owned(cache: Cache, owner: CacheOwner) -> None:
    former = first_of(cache).owner
    check_owner_open(former)
    if former is not owner:
        raise UsageError(
            "expected a cache made under this handle, found one made under another; start a new cache for each apply()"
        )


def _check_empty(cache: Any) -> None:
    if type(cache) is not DynamicCache or cache.offloading:
        raise UnsupportedError(
            f"expected no cache or an empty DynamicCache, found {type(cache).__name__}; "
            f"leave {CACHE_NAME} and cache_implementation unset (a plan's decode.offload moves KV to the host)"
        )
    if cache.get_seq_length() > 0:
        raise UsageError(
            f"expected an empty cache, found one with {cache.get_seq_length()} tokens that were cached before apply(); "
            f"run the whole prompt under the handle"
        )
