"""Which keys of a partly visible tile a row sees: written once, for flash-attn-4 and for the emulator.

flash-attn-4 calls a mask function with the row counted from the first query row and the key from key 0: by itself it is
not aligned to the end of the keys. Every launch here has its keys cut to the length, so the offset is keys - queries,
which the kernel knows at run time: no compilation depends on past or length, and no tensor has to carry them. The
window is a number in the code, one compilation for each window of a model.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any


def causal(row: Any, key: Any) -> Any:
    """Row and key as positions in the sequence: tensors of any kind, or integers."""
    return key <= row


def causal_in_window(row: Any, key: Any, window: Any) -> Any:
    """The same within the layer's own window."""
    return (key <= row) & (row - key < window)


def visible(row: Any, key: Any, window: int | None) -> Any:
    """What `mask_mod` computes, for the emulator."""
    return causal(row, key) if window is None else causal_in_window(row, key, window)


@lru_cache(maxsize=16)  # the same function object for the same window: flash-attn-4 hashes functions to find its kernel
def mask_mod(window: int | None) -> Callable[..., Any]:
    """The predicate as flash-attn-4 wants it: (batch, head, row, key, lengths, aux tensors), vectors of one element."""
    # No annotations on the functions below: the compiler of cute.jit would read them, as strings.
    from cutlass import Int32, cute
    from flash_attn.cute.utils import scalar_to_ssa

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
