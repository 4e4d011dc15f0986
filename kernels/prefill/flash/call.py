"""The two calls into flash-attn-4: over block lists, and dense. The only file that imports it, inside its functions.

What holds in 4.0.0b36, and is relied on here:

- Tensors are [batch, tokens, heads, head size], with any strides that are multiples of 16 bytes; `out` and `lse` may be
  given. lse is [batch, heads, tokens] in float32, natural, of the scaled scores. A row that sees nothing, in an empty
  list or behind a mask, gives 0 and -inf.
- Several query heads of one KV head must not be packed into one tile (`pack_gqa`): lists are per query head.
- The tile follows from `block_size` of the lists (see limits.py); `tile_mn` is left alone, because it would also undo
  what is chosen by head size.
- `causal` means bottom-right aligned, but a mask function replaces it: mask.py aligns itself.
- What a kernel is compiled for: dtype, head size, query heads of a KV head, the mask function, key tile, which tensors
  are there, and which strides are 0. No length, no past, no width of a list. `lse` is always asked for, so that one
  kernel serves.
- Paged K/V with block lists is neither remapped nor refused there. Nothing here passes a page table.
"""

from __future__ import annotations

import torch

from sparsekv.kernels.prefill.flash.limits import check_layout
from sparsekv.kernels.prefill.flash.lists import BlockLists
from sparsekv.kernels.prefill.flash.mask import mask_mod
from sparsekv.kernels.prefill.flash.spans import Part


def attend_lists(part: Part, lists: BlockLists) -> None:
    """All heads over their lists in one launch; writes `out` and `lse` of every row.

    Raises:
        BackendError: strides that it would copy.
    """
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch
    from flash_attn.cute.interface import _flash_attn_fwd

    tensors = BlockSparseTensorsTorch(
        mask_block_cnt=lists.mask_block_cnt_BHT,
        mask_block_idx=lists.mask_block_idx_BHTE,
        full_block_cnt=lists.full_block_cnt_BHT,
        full_block_idx=lists.full_block_idx_BHTW,
        block_size=(lists.tile.query, lists.tile.key),
    )
    views = _by_token(part)
    with torch.cuda.device_of(part.q_BHSD):
        _flash_attn_fwd(
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
    from flash_attn.cute.interface import _flash_attn_fwd

    views = _by_token(part)
    # In a window, the key of the row itself is the rightmost; flash-attn-4 then asks for no `causal`.
    reach = {"causal": True} if part.window is None else {"window_size_left": part.window - 1, "window_size_right": 0}
    with torch.cuda.device_of(part.q_BHSD):
        _flash_attn_fwd(**views, lse=part.lse_BHS, softmax_scale=part.scale, **reach)


def _by_token(part: Part) -> dict[str, torch.Tensor]:
    """The same memory in the order that flash-attn-4 has; grouped heads stay grouped."""
    named = {"q": part.q_BHSD, "k": part.k_BGKD, "v": part.v_BGKD, "out": part.out_BHSD}
    for name, tensor in named.items():
        check_layout(name, tensor)
    return {name: tensor.transpose(1, 2) for name, tensor in named.items()}
