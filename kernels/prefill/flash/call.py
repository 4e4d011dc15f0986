"""The two calls into flash-attn-4, over block lists and dense, and what each computes: views only, nothing is copied;
and the lists, into which an index is lowered: tiles that need no mask, and tiles that do.

The only file that imports it, inside its functions: from its own package, or from the copy of a host (see limits.py).

What holds in 4.0.0b36, and is relied on here:

- Tensors are [batch, tokens, heads, head size], with any strides that are multiples of 16 bytes; `out` and `lse` may be
  given. lse is [batch, heads, tokens] in float32, natural, of the scaled scores. A row that sees nothing, in an empty
  list or behind a mask, gives 0 and -inf.
- It walks, for each query tile of each query head, first `mask_block_idx[:mask_block_cnt]` with the mask function, then
  `full_block_idx[:full_block_cnt]` without any mask, each from its last entry to its first. Only the first tile it
  walks of each list is checked against the end of K, so lists must ascend: the one tile that may reach past the end is
  the last of its list. Entries beyond the counts are never read, which is why lists need not be wider than the widest
  row, and why the whole tiles of an index without a window are its own list: not even copied.
- Several query heads of one KV head must not be packed into one tile (`pack_gqa`): lists are per query head.
- The tile follows from `block_size` of the lists (see limits.py); `tile_mn` is left alone, because it would also undo
  what is chosen by head size.
- `causal` means bottom-right aligned, but a mask function replaces it: `mask_mod` aligns itself.
- What a kernel is compiled for: dtype, head size, query heads of a KV head, the mask function, key tile, which tensors
  are there, and which strides are 0. No length, no past, no width of a list. `lse` is always asked for, so that one
  kernel serves.
- Paged K/V with block lists is neither remapped nor refused there. Nothing here passes a page table.

Batch rows of another past or length get launches of their own, with keys cut to their length. flash-attn-4 could take
them in one launch (`seqused_k`), but it then reads whole key tiles past the length, and a NaN among values there
reaches the output through a product with a weight of 0. Cut tensors are read as zeros past their end. Prefill of one
prompt, and of prompts of one length, is one launch.

Shapes: B batch, H query heads, G KV heads, S query rows, K keys, D head size, T query tiles, W listed key tiles, E
masked tiles of a row.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import groupby
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl

from sparsekv.kernels.device_cache import on_device
from sparsekv.kernels.prefill.flash.limits import check_layout, is_aligned, package
from sparsekv.kernels.prefill.triton import _count_entries_below
from sparsekv.kernels.tiles import Chunk, TileIndex
from sparsekv.kernels.triton_support import quick
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.types import id_spans


@dataclass(frozen=True, slots=True)
class BlockLists:
    """Key tiles of every query tile, in the two lists of flash-attn-4; both ascend and they share no tile."""

    tile: TileShape
    full_block_cnt_BHT: torch.Tensor  # int32
    full_block_idx_BHTW: torch.Tensor  # int32; every key of these is visible to every row of the query tile
    mask_block_cnt_BHT: torch.Tensor  # int32
    mask_block_idx_BHTE: torch.Tensor  # int32; the diagonal, the ragged end, the edge of the window

    def at(self, batch_rows: slice, queries: int, keys: int) -> BlockLists:
        """The lists of these batch rows, for that many query rows and keys: flash-attn-4 refuses lists that are wider
        than the keys or longer than the queries."""
        here = (batch_rows, slice(None), slice(0, -(-queries // self.tile.query)))
        width = slice(0, -(-keys // self.tile.key))
        return replace(
            self,
            full_block_cnt_BHT=self.full_block_cnt_BHT[here],
            full_block_idx_BHTW=self.full_block_idx_BHTW[(*here, width)],
            mask_block_cnt_BHT=self.mask_block_cnt_BHT[here],
            mask_block_idx_BHTE=self.mask_block_idx_BHTE[(*here, width)],
        )


def lower(index: TileIndex, chunk: Chunk, *, window: int | None = None, list_dense: bool = False) -> BlockLists:
    """Sorts the listed tiles of every row by whether they need a mask.

    One launch, in which a program serves one query tile of one head: it counts how many entries of its list lie below
    each of four bounds, which says where the masked entries before the whole ones end, where the whole ones end, and so
    on. A tile that no row sees is in no list; entries past the counts are not written.

    Args:
        index: tiles of each head; single columns are not looked at.
        list_dense: gives dense heads lists of every tile they see (then W may have to grow up to `widest`); without it
            their lists are empty, for launches of their own.
    """
    lists = empty_lists(index, chunk, window=window, list_dense=list_dense)
    B, H, T = index.counts_BHT.shape
    if not B * H * T:
        return lists
    device, masked = index.counts_BHT.device, lists.mask_block_idx_BHTE.shape[3]
    past_B, lengths_B = chunk.on_device(device)
    # As many lanes wherever the chunk begins: else the first prompt of an engine would wait for a kernel of its own.
    lanes = triton.next_power_of_2(2 * -(-index.tile.query // index.tile.key) + 2)
    with torch.cuda.device_of(index.counts_BHT):
        lists_kernel[(T, H, B)](
            index.tiles_BHTW.contiguous(), index.counts_BHT.contiguous(), index.dense_H.contiguous(), past_B,
            lengths_B, lists.full_block_cnt_BHT, lists.full_block_idx_BHTW, lists.mask_block_cnt_BHT,
            lists.mask_block_idx_BHTE,
            window or 0, H, T, index.tiles_BHTW.shape[3], lists.full_block_idx_BHTW.shape[3], masked,
            TILE_M=index.tile.query, TILE_N=index.tile.key, MASKED=lanes,
            WINDOWED=window is not None, LIST_DENSE=list_dense,
            WRITE_FULL=lists.full_block_idx_BHTW is not index.tiles_BHTW, SCAN=128, num_warps=1,
        )  # fmt: skip
    return lists


def empty_lists(index: TileIndex, chunk: Chunk, *, window: int | None, list_dense: bool) -> BlockLists:
    """Memory for what `lower` finds; the whole tiles may be the index's own list."""
    shape, new = index.counts_BHT.shape, index.counts_BHT.new_empty
    listed, masked = index.tiles_BHTW.shape[3], most_masked(chunk, index.tile, window)
    width = max(1, listed, widest(chunk, index.tile, window) if list_dense else 0)
    # Without a window and without dense heads in it, the whole tiles of a row are the first of its list as it stands.
    as_it_stands = window is None and not list_dense and listed > 0
    return BlockLists(
        tile=index.tile,
        full_block_cnt_BHT=new(shape),
        full_block_idx_BHTW=index.tiles_BHTW if as_it_stands else new((*shape, width)),
        mask_block_cnt_BHT=new(shape),
        mask_block_idx_BHTE=new((*shape, min(masked, width))),
    )


def widest(chunk: Chunk, tile: TileShape, window: int | None) -> int:
    """The most key tiles that a dense row sees."""
    tiles = chunk.key_tiles(tile)
    return tiles if window is None else min(tiles, -(-(tile.query + window - 2) // tile.key) + 1)


def most_masked(chunk: Chunk, tile: TileShape, window: int | None) -> int:
    """The most tiles of a row that need a mask: those the diagonal crosses, and as many on the edge of a window."""
    aligned = all(past % tile.key == 0 for past in chunk.past)
    crossed = -(-tile.query // tile.key) + (not aligned or tile.query % tile.key != 0)
    return crossed if window is None else crossed + -(-tile.query // tile.key) + 1


@triton.jit
@no_type_check
def _entries(list_ptr, at, listed, first, is_dense, keep):
    """Entries `at` of a row's list; the list of a dense head is `first`, `first` + 1, and so on."""
    return tl.where(
        is_dense != 0, first + at, tl.load(list_ptr + at, mask=keep & (at < listed) & (is_dense == 0), other=0)
    )


@quick
@triton.jit(do_not_specialize=["window", "heads", "rows", "listed", "width", "masked"])
@no_type_check
def lists_kernel(
    tiles_ptr, counts_ptr, dense_ptr, past_ptr, lengths_ptr, full_cnt_ptr, full_idx_ptr, mask_cnt_ptr, mask_idx_ptr,
    window, heads, rows, listed, width, masked,
    TILE_M: tl.constexpr, TILE_N: tl.constexpr, MASKED: tl.constexpr, WINDOWED: tl.constexpr,
    LIST_DENSE: tl.constexpr, WRITE_FULL: tl.constexpr, SCAN: tl.constexpr,
):  # fmt: skip
    """Grid: (T, H, B)."""
    row, head, batch = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    at_row = (batch * heads + head).to(tl.int64) * rows + row
    list_ptr = tiles_ptr + at_row * listed
    length = tl.load(lengths_ptr + batch)
    first_row = tl.load(past_ptr + batch) + row * TILE_M
    last_row = tl.minimum(first_row + TILE_M, length) - 1

    # [start, stop) is what the rows see, and [whole_start, whole_stop) what every one of them sees.
    stop = tl.where(first_row < length, last_row // TILE_N + 1, 0)
    start = 0
    whole_start = 0
    if WINDOWED:
        start = tl.minimum(tl.maximum(first_row - window + 1, 0) // TILE_N, stop)
        whole_start = (tl.maximum(last_row - window + 1, 0) + TILE_N - 1) // TILE_N
    whole_stop = tl.minimum(tl.maximum((first_row + 1) // TILE_N, whole_start), stop)
    whole_start = tl.minimum(whole_start, whole_stop)

    # From bounds to positions in the list.
    first = start
    is_dense = tl.load(dense_ptr + head).to(tl.int32)
    if is_dense == 0:
        start, whole_start, whole_stop, stop = _count_entries_below(
            list_ptr, tl.load(counts_ptr + at_row), start, whole_start, whole_stop, stop, SCAN
        )
    elif LIST_DENSE:
        whole_start -= first
        whole_stop -= first
        stop -= first
        start = 0
    else:
        start = 0
        whole_start = 0
        whole_stop = 0
        stop = 0

    before = whole_start - start
    whole = whole_stop - whole_start
    tl.store(full_cnt_ptr + at_row, whole)
    tl.store(mask_cnt_ptr + at_row, before + stop - whole_stop)
    slot_E = tl.arange(0, MASKED)
    at_E = start + slot_E + tl.where(slot_E < before, 0, whole)
    mask_E = _entries(list_ptr, at_E, listed, first, is_dense, slot_E < masked)
    tl.store(mask_idx_ptr + at_row * masked + slot_E, mask_E, mask=slot_E < masked)
    if WRITE_FULL:
        lanes = tl.arange(0, SCAN)
        for begin in range(0, whole, SCAN):
            slot_W = begin + lanes
            full_W = _entries(list_ptr, whole_start + slot_W, listed, first, is_dense, slot_W < whole)
            tl.store(full_idx_ptr + at_row * width + slot_W, full_W, mask=slot_W < whole)


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent batch rows with the same past and the same length."""

    rows: slice
    past: int
    length: int

    @property
    def queries(self) -> int:
        return self.length - self.past


def spans(chunk: Chunk) -> Iterator[Span]:
    first = 0
    for (past, length), alike in groupby(zip(chunk.past, chunk.lengths, strict=True)):
        stop = first + sum(1 for _ in alike)
        yield Span(slice(first, stop), past, length)
        first = stop


@dataclass(frozen=True, slots=True)
class HeadRange:
    """Query heads of one launch, and the KV heads they read: whole groups, or a single head."""

    heads: slice
    kv_heads: slice


def dense_ranges(heads: Sequence[int], group: int) -> Iterator[HeadRange]:
    """Cuts dense heads into launches that need no copy of K and V.

    A launch maps query heads to KV heads by division, so an arbitrary choice of heads would break the grouping.
    Adjacent whole groups keep it. What is left goes head by head: some heads of a group in one launch would be a
    kernel of its own for every number of heads, ten seconds of compilation each, and save little, as one head of the
    lengths that are not listed fills the GPU.

    Args:
        heads: dense query heads, ascending.
    """
    dense = set(heads)
    whole = [kv for kv in sorted({head // group for head in heads}) if dense.issuperset(_members(kv, group))]
    for first, last in id_spans(whole):
        yield HeadRange(slice(first * group, (last + 1) * group), slice(first, last + 1))
    for head in sorted(dense.difference(*(_members(kv, group) for kv in whole))):
        yield HeadRange(slice(head, head + 1), slice(head // group, head // group + 1))


def _members(kv_head: int, group: int) -> range:
    return range(kv_head * group, (kv_head + 1) * group)


@dataclass(frozen=True, slots=True)
class CallPart:
    """Tensors of one launch. The last query row is the last key: past is K - S."""

    q_BHSD: torch.Tensor
    k_BGKD: torch.Tensor
    v_BGKD: torch.Tensor
    out_BHSD: torch.Tensor  # written
    lse_BHS: torch.Tensor  # written, float32, natural
    scale: float
    window: int | None
    past_1: torch.Tensor | None = None  # of a captured call, int32: its keys go on behind the last row's

    @property
    def past(self) -> int:
        return self.k_BGKD.shape[2] - self.q_BHSD.shape[2]

    def at(self, span: Span) -> CallPart:
        rows, real, known = span.rows, slice(0, span.queries), slice(0, span.length)
        if self._is(span):  # as every prompt of one row: fifteen views less
            return self
        return replace(
            self,
            q_BHSD=_batch_rows(self.q_BHSD, rows)[:, :, real],
            k_BGKD=_batch_rows(self.k_BGKD, rows)[:, :, known],
            v_BGKD=_batch_rows(self.v_BGKD, rows)[:, :, known],
            out_BHSD=_batch_rows(self.out_BHSD, rows)[:, :, real],
            lse_BHS=_batch_rows(self.lse_BHS, rows)[:, :, real],
        )

    def _is(self, span: Span) -> bool:
        batch, _, queries, _ = self.q_BHSD.shape
        whole = span.rows == slice(0, batch) and (queries, self.k_BGKD.shape[2]) == (span.queries, span.length)
        return whole and all(x.stride(0) and is_aligned(x) for x in (self.q_BHSD, self.k_BGKD, self.v_BGKD))

    def of(self, own: HeadRange) -> CallPart:
        return replace(
            self,
            q_BHSD=self.q_BHSD[:, own.heads],
            k_BGKD=self.k_BGKD[:, own.kv_heads],
            v_BGKD=self.v_BGKD[:, own.kv_heads],
            out_BHSD=self.out_BHSD[:, own.heads],
            lse_BHS=self.lse_BHS[:, own.heads],
        )


def _batch_rows(x_BX: torch.Tensor, rows: slice) -> torch.Tensor:
    """One row of an expanded batch keeps a stride of 0, which would be compiled for: give it one of its own."""
    return x_BX[rows.start].unsqueeze(0) if rows.stop - rows.start == 1 else x_BX[rows]


def attend_lists(part: CallPart, lists: BlockLists) -> None:
    """All heads over their lists in one launch; writes `out` and `lse` of every row.

    Raises:
        BackendError: strides that it would copy.
    """
    ignore_argument_warnings()
    tensors = _module("block_sparsity").BlockSparseTensorsTorch(
        mask_block_cnt=lists.mask_block_cnt_BHT,
        mask_block_idx=lists.mask_block_idx_BHTE,
        full_block_cnt=lists.full_block_cnt_BHT,
        full_block_idx=lists.full_block_idx_BHTW,
        block_size=(lists.tile.query, lists.tile.key),
    )
    views = _by_token(part)
    if part.window is None:
        past_1 = on_device((part.past,), part.q_BHSD.device, torch.int32) if part.past_1 is None else part.past_1
        views["aux_tensors"] = [past_1]
    with torch.cuda.device_of(part.q_BHSD):
        _module("interface")._flash_attn_fwd(
            **views,
            lse=part.lse_BHS,
            softmax_scale=part.scale,
            mask_mod=mask_mod(part.window),
            block_sparse_tensors=tensors,
            pack_gqa=False,
        )


def attend_dense(part: CallPart) -> None:
    """These heads over every causal key of the window; writes their `out` and `lse`.

    Raises:
        BackendError: strides that it would copy.
    """
    ignore_argument_warnings()
    views = _by_token(part)
    # In a window, the key of the row itself is the rightmost; flash-attn-4 then asks for no `causal`.
    reach = {"causal": True} if part.window is None else {"window_size_left": part.window - 1, "window_size_right": 0}
    with torch.cuda.device_of(part.q_BHSD):
        _module("interface")._flash_attn_fwd(**views, lse=part.lse_BHS, softmax_scale=part.scale, **reach)


@lru_cache
def _module(name: str) -> Any:
    return import_module(f"{package().module}.{name}")


_OWN_ARGUMENT = r"Argument aux_data .*cannot be converted to a JitArgument"


def _by_token(part: CallPart) -> dict[str, Any]:
    """The same memory in the order that flash-attn-4 has; grouped heads stay grouped."""
    named = {"q": part.q_BHSD, "k": part.k_BGKD, "v": part.v_BGKD, "out": part.out_BHSD}
    for name, tensor in named.items():
        check_layout(name, tensor)
    return {name: tensor.transpose(1, 2) for name, tensor in named.items()}


def ignore_argument_warnings() -> None:
    """Silences what the compiler of flash-attn-4 says of an argument of its own at every compilation, nothing else."""
    # asked each time: a caller's catch_warnings takes filters away again
    if not any(message is not None and message.pattern == _OWN_ARGUMENT for _, message, *_ in warnings.filters):
        warnings.filterwarnings("ignore", _OWN_ARGUMENT, UserWarning)


def causal(row: Any, key: Any) -> Any:
    """Returns whether a row sees a key, both as positions in the sequence: tensors of any kind, or integers."""
    return key <= row


def causal_in_window(row: Any, key: Any, window: Any) -> Any:
    """The same within the layer's own window."""
    return (key <= row) & (row - key < window)


@lru_cache(maxsize=16)  # the same function object for the same window: flash-attn-4 hashes functions to find its kernel
def mask_mod(window: int | None) -> Callable[..., Any]:
    """Returns what a row sees, as flash-attn-4 wants it: (batch, head, row, key, lengths, aux tensors), vectors of one
    element.

    flash-attn-4 counts the row from the first query row and the key from key 0. Without a window the past is the first
    auxiliary tensor, as the keys of a captured call go on behind the last row's. With one, every launch has its keys
    cut to the length, so the offset is keys - queries, which the kernel knows at run time; the window is a number in
    the code, one compilation for each. No compilation depends on past or length.
    """
    # No annotations on the functions below: the compiler of cute.jit would read them, as strings.
    from cutlass import Int32, cute

    scalar_to_ssa = _module("utils").scalar_to_ssa

    if window is None:

        @cute.jit
        def seen(batch, head, row, key, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
            return causal(row + scalar_to_ssa(aux_tensors[0][0], Int32), key)

    else:

        @cute.jit
        def seen(batch, head, row, key, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
            past = scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
            return causal_in_window(row + past, key, scalar_to_ssa(window, Int32))

    # Hashing the source would miss that the predicate itself is defined elsewhere.
    seen.__cute_hash__ = f"sparsekv causal, window {window}"
    mask: Callable[..., Any] = seen
    return mask
