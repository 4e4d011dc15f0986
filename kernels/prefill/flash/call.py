"""The two calls into flash-attn-4, over block lists and dense, and what each computes: views only, nothing is copied.

The only file that imports it, inside its functions: from its own package, or from the copy of a host (see limits.py).

What holds in 4.0.0b36, and is relied on here:

- Tensors are [batch, tokens, heads, head size], with any strides that are multiples of 16 bytes; `out` and `lse` may be
  given. lse is [batch, heads, tokens] in float32, natural, of the scaled scores. A row that sees nothing, in an empty
  list or behind a mask, gives 0 and -inf.
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

Shapes: B batch, H query heads, G KV heads, S query rows, K keys, D head size.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from importlib import import_module
from itertools import groupby
from typing import Any

import torch

from sparsekv.kernels.prefill.flash.limits import check_layout, package
from sparsekv.kernels.prefill.flash.lists import BlockLists
from sparsekv.kernels.tiles import Chunk


@dataclass(frozen=True, slots=True)
class Span:
    """Adjacent batch rows with the same past and the same length."""

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
        group: query heads of a KV head.
    """
    dense = set(heads)
    whole = [kv for kv in sorted({head // group for head in heads}) if dense.issuperset(_members(kv, group))]
    for first, stop in _ranges(whole):
        yield HeadRange(slice(first * group, stop * group), slice(first, stop))
    for head in sorted(dense.difference(*(_members(kv, group) for kv in whole))):
        yield HeadRange(slice(head, head + 1), slice(head // group, head // group + 1))


def _members(kv_head: int, group: int) -> range:
    return range(kv_head * group, (kv_head + 1) * group)


def _ranges(numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Adjacent numbers as (first, stop)."""
    for _, adjacent in groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        found = [number for _, number in adjacent]
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

    def of(self, own: HeadRange) -> Part:
        """These heads."""
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


def attend_lists(part: Part, lists: BlockLists) -> None:
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
    with torch.cuda.device_of(part.q_BHSD):
        _module("interface")._flash_attn_fwd(
            **views,
            lse=part.lse_BHS,
            softmax_scale=part.scale,
            mask_mod=mask_mod(part.window),
            block_sparse_tensors=tensors,
            pack_gqa=False,
        )


def attend_dense(part: Part) -> None:
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


def _by_token(part: Part) -> dict[str, torch.Tensor]:
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
    """Whether a row sees a key, both as positions in the sequence: tensors of any kind, or integers."""
    return key <= row


def causal_in_window(row: Any, key: Any, window: Any) -> Any:
    """The same within the layer's own window."""
    return (key <= row) & (row - key < window)


@lru_cache(maxsize=16)  # the same function object for the same window: flash-attn-4 hashes functions to find its kernel
def mask_mod(window: int | None) -> Callable[..., Any]:
    """What a row sees, as flash-attn-4 wants it: (batch, head, row, key, lengths, aux tensors), vectors of one element.

    flash-attn-4 counts the row from the first query row and the key from key 0. Every launch here has its keys cut to
    the length, so the offset is keys - queries, which the kernel knows at run time: no compilation depends on past or
    length, and no tensor has to carry them. The window is a number in the code, one compilation for each window.
    """
    # No annotations on the functions below: the compiler of cute.jit would read them, as strings.
    from cutlass import Int32, cute

    scalar_to_ssa = _module("utils").scalar_to_ssa

    if window is None:

        @cute.jit
        def seen(batch, head, row, key, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
            past = scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
            return causal(row + past, key)

    else:

        @cute.jit
        def seen(batch, head, row, key, seqlen_info, aux_tensors):  # type: ignore[no-untyped-def]
            past = scalar_to_ssa(seqlen_info.seqlen_k - seqlen_info.seqlen_q, Int32)
            return causal_in_window(row + past, key, scalar_to_ssa(window, Int32))

    # Hashing the source would miss that the predicate itself is defined elsewhere.
    seen.__cute_hash__ = f"sparsekv causal, window {window}"
    mask: Callable[..., Any] = seen
    return mask
