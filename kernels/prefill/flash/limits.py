"""The limits of flash-attn-4 (4.0.0b36) with block lists, each with its reason. Nothing here imports it.

- Generations. Compute capability 9.x runs one query tile of 128 rows at a time. On 10.x and 11.x two query tiles share
  their key tiles, so lists have to be per 256 rows; ours are per 128. 12.x and 8.x have no block lists: 12.x refuses
  them, 8.x ignores them in silence, which would be dense attention without a mask.
- Key tiles. A list entry must be exactly one key tile of the kernel. At head sizes up to 128 that is 128 keys, or 64
  when the lists say so; above 128 shared memory holds 112 (up to 192) or 80 (up to 256) keys, which lists of 128 do not
  fit, while 64 does. A copy that does not ask the lists takes no key tiles of 64, and so no larger heads.
- Alignment. Tensors are read by bulk copies of 16 bytes: head size and strides are multiples of 8 elements. Where they
  are not, flash-attn-4 copies the tensor in silence; here that is refused.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec

import torch

from sparsekv.plans.errors import BackendError, install_command
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.types import installed_version

QUERY_TILE = 128
_LARGEST_HEAD = 256
_LARGEST_HEAD_OF_128_KEYS = 128
_SMALLEST_HEAD = 16  # of the Triton kernel that does the single columns
_ALIGNED_BYTES = 16


@dataclass(frozen=True, slots=True)
class FlashPackage:
    module: str
    distribution: str  # whose release counts
    # What the block lists mean is not part of flash-attn-4's public interface: another release could read them
    # otherwise, and give wrong numbers without an error. A release goes in here once
    # tests/kernels/prefill/test_flash_gpu.py passed.
    tested: tuple[str, ...]
    asks_lists: bool  # for the size of their tiles


FLASH_ATTN_4 = FlashPackage("flash_attn.cute", "flash-attn-4", ("4.0.0b36",), asks_lists=True)
_OF_HOSTS: list[FlashPackage] = []  # of this process


def offer_package(of_host: FlashPackage) -> None:
    """A host says that it brings a copy along, which serves this process where flash-attn-4 is not installed."""
    _OF_HOSTS[:] = [of_host]


def package() -> FlashPackage:
    return _OF_HOSTS[0] if _OF_HOSTS and not _installed("flash_attn") else FLASH_ATTN_4


def device_obstacle(device: torch.device) -> str | None:
    """The reason why this GPU or this installation cannot run it; None when it can."""
    if device.type != "cuda" or torch.version.hip is not None or not torch.cuda.is_available():
        return "it needs an NVIDIA GPU of the Hopper generation"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 9:
        return f"it needs compute capability 9.0 (Hopper), found {major}.{minor}"
    if major in (10, 11):
        return f"flash-attn-4 takes lists per 256 query rows on compute capability {major}.{minor}, ours are per 128"
    if major > 11:
        return f"flash-attn-4 has no block lists on compute capability {major}.{minor}"
    if not _installed(package().module):
        return f"the package flash-attn-4 was not installed when this process started ({install_command('flash')})"
    return None


def shape_obstacle(dtype: torch.dtype, head_dim: int, tile: TileShape | None) -> str | None:
    """The reason why it does not take such tensors; None when it does. Without a tile, of any tile."""
    if dtype not in (torch.float16, torch.bfloat16):
        return f"it takes float16 and bfloat16, found {dtype}"
    flash = package()
    largest = _LARGEST_HEAD if flash.asks_lists else _LARGEST_HEAD_OF_128_KEYS
    if head_dim % 8 or not _SMALLEST_HEAD <= head_dim <= largest:
        return f"it takes head sizes that are multiples of 8 from {_SMALLEST_HEAD} to {largest}, found {head_dim}"
    if tile is None:
        return None
    if tile.query != QUERY_TILE:
        return f"it takes query tiles of {QUERY_TILE} rows, found tiles of {tile.query} x {tile.key}"
    if not flash.asks_lists and tile.key < 128:
        return f"the flash-attn-4 in {flash.distribution} takes key tiles of 128, found {tile.key}"
    if tile.key > 64 and head_dim > _LARGEST_HEAD_OF_128_KEYS:
        return (
            f"head sizes above {_LARGEST_HEAD_OF_128_KEYS} take key tiles of 64, found {tile.key} and head size "
            f"{head_dim}"
        )
    return None


def untested() -> str | None:
    """The reason why the installed release is not chosen by itself; None for one that was tested."""
    flash = package()
    release = (installed_version(flash.distribution) or "of an unknown release").partition("+")[0]
    if release in flash.tested:
        return None
    return (
        f"{flash.distribution} {release} was not tested with these block lists, {' and '.join(flash.tested)} was "
        f"({install_command('flash')}); --set backend=flash uses it all the same"
    )


def is_aligned(tensor: torch.Tensor) -> bool:
    step = _ALIGNED_BYTES // tensor.element_size()
    return not tensor.data_ptr() % _ALIGNED_BYTES and not any(stride % step for stride in tensor.stride()[:-1])


def check_layout(name: str, tensor: torch.Tensor) -> None:
    """Raises BackendError for memory that flash-attn-4 would copy, or write to in another place."""
    if not is_aligned(tensor):
        raise BackendError(
            f"the flash backend needs {name} at multiples of {_ALIGNED_BYTES} bytes, found strides {tensor.stride()} "
            f"at address {tensor.data_ptr():#x}: call .contiguous() before attention"
        )


@lru_cache
def _installed(module: str) -> bool:
    """Also false where an older flash-attn, without the `cute` kernels, has the name. Asked once: every layer of every
    chunk asks, and looking for what is not there reads the folders of `sys.path`."""
    try:
        return find_spec(module) is not None
    except ImportError:  # none at all, or one that cannot be imported
        return False
