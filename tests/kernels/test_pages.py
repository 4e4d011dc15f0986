"""Copies of a request's pages, and back, by Triton, in its interpreter where there is no GPU."""

import pytest
import torch

from sparsekv.kernels.keys import FLOAT8, KeyView, Scales
from sparsekv.kernels.pages import copy_pages, move_rows

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.mark.parametrize("tokens_first", [True, False], ids=["tokens first", "heads first"])
@pytest.mark.parametrize(
    ("page", "size", "length"),
    [(1, 64, 300), (8, 40, 130), (16, 64, 80), (48, 40, 200), (32, 128, 130), (272, 40, 1100)],
)
def test_pages_with_keys_and_values_side_by_side_are_copied_in_order(
    tokens_first: bool, page: int, size: int, length: int
) -> None:
    used = -(-length // page)
    count = used + 35
    shape = (count, page, 3, 2 * size) if tokens_first else (count, 3, page, 2 * size)
    cache = torch.randn(shape, device=DEVICE)
    pages = (cache.transpose(1, 2) if tokens_first else cache).split(size, -1)
    table_P = torch.randperm(count, device=DEVICE)[:used].int()
    into = tuple(torch.full((3, length, size), torch.nan, device=DEVICE) for _ in range(2))
    copy_pages(pages, table_P, into)
    expected = KeyView(*pages, torch.tensor([length], dtype=torch.int32, device=DEVICE), table_P[None])
    for copied, wanted in zip(into, expected.contiguous(length), strict=True):
        assert torch.equal(copied, wanted[0])


@pytest.mark.parametrize(("page", "size", "length"), [(16, 64, 80), (48, 40, 200)])
def test_pages_in_8_bits_are_multiplied_by_the_scales_of_their_heads(page: int, size: int, length: int) -> None:
    cache = torch.randn((40, page, 3, 2 * size), device=DEVICE).to(FLOAT8)
    pages, table_P = cache.transpose(1, 2).split(size, -1), torch.randperm(40, device=DEVICE)[:5].int()
    k_G, v_G = torch.rand(2, 3, device=DEVICE) + 0.1
    into = tuple(torch.full((3, length, size), torch.nan, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    copy_pages(pages, table_P, into, (k_G, v_G))
    lengths_B, scales = torch.tensor([length], dtype=torch.int32, device=DEVICE), Scales(k_G, v_G, torch.bfloat16)
    expected = KeyView(*pages, lengths_B, table_P[None], scales=scales)
    for copied, wanted in zip(into, expected.contiguous(length), strict=True):
        assert torch.equal(copied, wanted[0])


@pytest.mark.parametrize("lists", [1, 3])
@pytest.mark.parametrize(("page", "size", "length", "count", "last"), [(16, 64, 75, 40, 11), (48, 40, 96, 3, 0)])
def test_rows_go_to_the_first_places_and_the_last_ones_where_the_request_ends(
    page: int, size: int, length: int, count: int, last: int, lists: int
) -> None:
    pages = torch.full((40, page, 3, 2 * size), torch.nan, device=DEVICE).transpose(1, 2).split(size, -1)
    table_P = torch.randperm(40, device=DEVICE)[:5].int()
    keys = tuple(torch.randn(3, length, size, device=DEVICE) for _ in range(2))
    rows_gR = torch.stack([torch.randperm(length, device=DEVICE)[:count].sort().values for _ in range(lists)])
    move_rows(keys, rows_gR, pages, table_P, last)
    places = [*range(count - last), *range(length - last, length)]
    for x_NGSD, x_GKD in zip(pages, keys, strict=True):
        for head in range(3):
            for place, row in zip(places, rows_gR[head % lists].tolist(), strict=True):
                assert torch.equal(x_NGSD[table_P[place // page], head, place % page], x_GKD[head, row])
        assert x_NGSD.isfinite().sum() == 3 * count * size
