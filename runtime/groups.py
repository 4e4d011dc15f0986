"""Attention of a long call in groups of heads, each group's output taking the place of its queries.

The output of a layer is as large as its queries: 8.6 GB at 1M tokens of an 8B model. In groups only one group's lies
beside them. Keys and values are never repeated: a group is whole KV heads with all their query heads.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from sparsekv.runtime.engine import LayerCall


def attend_in_groups(call: LayerCall, attend: Callable[[LayerCall], torch.Tensor], most_bytes: int) -> torch.Tensor:
    """`attend(call)`, in as few groups as keep each output within `most_bytes` (or at one KV head, if that is more).

    Calls whose queries somebody else may still read, and those of small outputs, are one group.

    Returns:
        [B, H, S, D]: the call's queries, overwritten, if there was more than one group.
    """
    kv_heads = call.k_BGSD.shape[1]
    per_head = call.q_BHSD.numel() * call.q_BHSD.element_size() // kv_heads
    groups = max(1, most_bytes // max(per_head, 1))
    if not call.q_is_spare or groups >= kv_heads:
        return attend(call)
    count = -(-kv_heads // groups)
    for part in call.cut(-(-kv_heads // count)):
        part.q_BHSD.copy_(attend(part))
    return call.q_BHSD
