"""A kernel is launched by what Triton compiled for arguments like these, and only like these."""

from types import SimpleNamespace

import pytest
import torch

from sparsekv.kernels.triton_support import QuickKernel

LONG = 1 << 31


class Compiled:
    def __init__(self, launches: list[tuple[object, ...]]) -> None:
        self._launches = launches

    def __getitem__(self, grid: tuple[int, ...]):
        return lambda *args: self._launches.append((grid, *args))


class Kernel:
    """Compiles at every launch of its own."""

    params = tuple(
        SimpleNamespace(name=name, is_constexpr=name.isupper(), has_default=False) for name in ("x", "n", "scale", "D")
    )

    def __init__(self) -> None:
        self.compiled: list[tuple[object, ...]] = []
        self.launches: list[tuple[object, ...]] = []

    def __getitem__(self, grid: tuple[int, ...]):
        def launch(*args: object, **options: object) -> Compiled:
            self.compiled.append((grid, *args, options))
            return Compiled(self.launches)

        return launch


@pytest.fixture
def kernel(monkeypatch: pytest.MonkeyPatch) -> Kernel:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    return Kernel()


def test_a_second_launch_has_its_own_grid_and_numbers_and_the_options_that_are_parameters(kernel: Kernel) -> None:
    quick, x = QuickKernel(kernel), torch.zeros(64)
    quick[(3, 2)](x, 34, 0.5, D=64, num_warps=4)
    quick[(5, 2)](x, 35, 0.25, D=64, num_warps=4)
    assert len(kernel.compiled) == 1
    assert kernel.launches == [((5, 2, 1), x, 35, 0.25, 64)]


@pytest.mark.parametrize(
    ("x", "n", "options"),
    [
        (torch.zeros(64).half(), 34, {}),
        (torch.zeros(64)[1:], 34, {}),
        (torch.zeros(64), 32, {}),
        (torch.zeros(64), 1, {}),
        (torch.zeros(64), LONG + 2, {}),
        (torch.zeros(64), -LONG - 2, {}),
        (torch.zeros(64), 34, {"D": 128}),
        (torch.zeros(64), 34, {"num_warps": 8}),
    ],
    ids=["dtype", "alignment", "multiple of 16", "one", "long", "long, negative", "constant", "warps"],
)
def test_what_triton_compiles_for_is_told_apart(kernel: Kernel, x: torch.Tensor, n: int, options: dict) -> None:
    quick = QuickKernel(kernel)
    quick[(1, 1)](torch.zeros(64), 34, 0.5, **{"D": 64, "num_warps": 4})
    quick[(1, 1)](x, n, 0.5, **{"D": 64, "num_warps": 4} | options)
    assert len(kernel.compiled) == 2


def test_devices_are_told_apart(kernel: Kernel, monkeypatch: pytest.MonkeyPatch) -> None:
    quick = QuickKernel(kernel)
    quick[(1, 1)](torch.zeros(64), 34, 0.5, D=64)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    quick[(1, 1)](torch.zeros(64), 34, 0.5, D=64)
    assert len(kernel.compiled) == 2
