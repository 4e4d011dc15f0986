"""The copy of a request's past."""

import pytest
import torch

from sparsekv.kernels.keys import KeyView
from sparsekv.runtime.paged.plan_host import Scratch


@pytest.mark.parametrize("length", [1, 16, 17, 100, 128])
def test_a_copied_past_is_the_requests_tokens_in_order_from_pages_of_any_strides(length: int) -> None:
    k_NGDS, v_NGSD = torch.randn(2, 40, 3, 8, 16).unbind()
    pages = k_NGDS.transpose(2, 3), v_NGSD.transpose(2, 3).contiguous()
    table_P = torch.randperm(40)[:8].int()
    table_P[-(-length // 16) :] = 10_000  # behind the end anything may stand
    scratch = Scratch(128, 3 * 8, torch.float32, torch.device("cpu"))
    copied = scratch.copy(pages, table_P, length).contiguous(length)
    lengths_B = torch.tensor([length], dtype=torch.int32)
    expected = KeyView(*pages, lengths_B, table_P[None]).contiguous(length)
    for got, wanted in zip(copied, expected, strict=True):
        assert torch.equal(got, wanted)
