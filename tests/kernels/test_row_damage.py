"""The damage of heads by Triton, in its interpreter where there is no GPU, against the formula in float64."""

from collections.abc import Callable

import pytest
import torch

from sparsekv.kernels.row_damage import head_damage

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
Tensors = tuple[torch.Tensor, ...]


def drawn(batch: int, heads: int, rows: int, size: int, dtype: torch.dtype, device: str = DEVICE) -> Tensors:
    """Arguments of `head_damage`; every fifth row and the last one weigh nothing and hold NaN."""
    draws = torch.Generator(device).manual_seed(rows * size)
    shape = (batch, heads, rows, size)
    out, dense, g = (torch.randn(shape, generator=draws, device=device) for _ in range(3))
    square = g.square().mean(-1)
    weight = torch.rand(batch, 1, rows, generator=draws, device=device) + 0.5
    for nothing in (slice(0, None, 5), slice(rows - 1, None)):
        weight[..., nothing] = 0.0
        for poisoned in (out, dense, g, square):
            poisoned[:, :, nothing] = torch.nan
    return out.to(dtype), (out + dense / 8).to(dtype), g, square, weight


def formula(given: Tensors) -> torch.Tensor:
    """[H], float64."""
    out, dense, g, square, weight = (one.double() for one in given)
    off = out - dense
    damage = 0.25 * ((off * g).sum(-1).square() + off.square().sum(-1) * square)
    return torch.where(weight > 0, damage * weight, 0.0).sum((0, 2))


def as_drawn(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def token_major(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.transpose(1, 2).contiguous().transpose(1, 2)


def part_of_more(tensor: torch.Tensor) -> torch.Tensor:
    """Some heads and tokens of a tensor that holds NaN besides."""
    batch, heads, rows = tensor.shape[:3]
    more = torch.full((batch, heads + 3, rows + 7, *tensor.shape[3:]), torch.nan).to(tensor)
    more[:, 1 : heads + 1, 2 : rows + 2] = tensor
    return more[:, 1 : heads + 1, 2 : rows + 2]


def apart(tensor: torch.Tensor) -> torch.Tensor:
    """Elements that are no neighbours in any dimension, with NaN between them."""
    more = torch.full([2 * size for size in tensor.shape], torch.nan).to(tensor)
    some = more[(slice(None, None, 2),) * tensor.ndim]
    return some.copy_(tensor)


@pytest.mark.parametrize(
    ("batch", "heads", "rows", "size"),
    [(1, 2, 1, 16), (1, 3, 67, 40), (2, 2, 300, 16), (3, 2, 45, 80), (2, 1, 33, 96), (1, 2, 64, 128), (1, 1, 20, 200)],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_damage_is_that_of_the_formula_and_rows_of_no_weight_are_not_read(
    batch: int, heads: int, rows: int, size: int, dtype: torch.dtype
) -> None:
    given = drawn(batch, heads, rows, size, dtype)
    found = head_damage(*given)
    assert found.shape == (heads,)
    torch.testing.assert_close(found, formula(given).float(), rtol=1e-5, atol=0.0)


@pytest.mark.parametrize("placed", [token_major, part_of_more, apart])
def test_tensors_are_read_as_they_lie(placed: Callable[[torch.Tensor], torch.Tensor]) -> None:
    given = drawn(2, 3, 50, 48, torch.bfloat16)
    for moved in range(5):
        some = [placed(one) if number == moved else one for number, one in enumerate(given)]
        torch.testing.assert_close(head_damage(*some), formula(given).float(), rtol=1e-5, atol=0.0)


def test_one_row_of_weight_that_is_not_finite_shows_in_its_head_alone() -> None:
    out, *others = drawn(2, 3, 50, 48, torch.float16)
    out[1, 1, 7, 3] = torch.inf
    assert head_damage(out, *others).isfinite().tolist() == [True, False, True]


@pytest.mark.gpu
@pytest.mark.parametrize("placed", [as_drawn, token_major])
def test_a_large_layer_has_the_damage_of_the_formula_and_the_same_bits_in_every_call(
    placed: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    out, dense, g, square, weight = drawn(1, 32, 4096, 128, torch.bfloat16)
    given = (placed(out), placed(dense), placed(g), square, weight)
    found = head_damage(*given)
    torch.testing.assert_close(found, formula(given).float(), rtol=1e-5, atol=0.0)
    assert all(torch.equal(head_damage(*given), found) for _ in range(20))


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("batch", "heads", "rows", "strides"),
    [(3, 1, 64, (1 << 30, 0, 128, 1)), (1, 3, 64, (0, 1 << 30, 128, 1)), (1, 1, 1030, (0, 0, 1 << 21, 1))],
    ids=["batch rows", "heads", "rows"],
)
def test_offsets_beyond_32_bits_are_reached(batch: int, heads: int, rows: int, strides: tuple[int, ...]) -> None:
    out, *others = drawn(batch, heads, rows, 128, torch.bfloat16)
    memory = torch.empty((1 << 31) + (1 << 24), dtype=torch.bfloat16, device=DEVICE)  # 4.3 GB
    far = memory.as_strided(out.shape, strides).copy_(out)
    expected = formula((out, *others)).float()
    torch.testing.assert_close(head_damage(far, *others), expected, rtol=1e-5, atol=0.0)
