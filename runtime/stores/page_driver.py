"""Address space and physical pages of a device, apart from each other: what virtual memory of a GPU is made of.

A driver reserves addresses, creates pages, and maps pages to addresses.

Shapes: B batch, G KV heads, C tokens that there are addresses for, D head size.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from sparsekv.plans.errors import SparseKVError, install_command


class PageError(SparseKVError):
    """A call of the driver's virtual memory failed; what it had done was taken back."""


class PageDriver(Protocol):
    """Calls of one device. All sizes and addresses are multiples of the granularity.

    Raises:
        PageError, torch.OutOfMemoryError: a call failed; the message names it.
    """

    device: torch.device
    granularity: int  # bytes of the smallest page

    def reserve(self, nbytes: int) -> int:
        """The address of so many bytes without memory."""

    def free(self, address: int, nbytes: int) -> None:
        """Gives addresses back, where nothing is mapped."""

    def create(self, nbytes: int) -> Any:
        """A handle of memory without an address."""

    def release(self, handle: Any) -> None:
        """Frees memory that is mapped nowhere."""

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        """Puts all memory of a handle at an address."""

    def allow(self, address: int, nbytes: int) -> None:
        """Makes memory that was mapped since readable and writable."""

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes away what one `map` has put there."""

    def settle(self) -> None:
        """Waits until nothing on the device reads or writes what is about to be unmapped."""

    def relieve(self) -> None:
        """Gives memory back that nobody uses, for `create` to be tried again."""

    def available(self) -> int:
        """Bytes that `create`, and everything else, could have."""

    def enter(self) -> None:
        """Called once by every other thread before it calls anything else."""

    def tensor(
        self, address: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, owner: object
    ) -> torch.Tensor:
        """A tensor there, which keeps its owner alive. The first page is mapped."""


class Pages:
    """Physical memory with one handle."""

    __slots__ = ("handle", "nbytes", "users")

    def __init__(self, handle: Any, nbytes: int) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.users = 1  # places where it is mapped


class CudaPages:
    def __init__(self, device: torch.device) -> None:
        from cuda.bindings import driver

        self.device = device
        self._cu: Any = driver
        torch.zeros(1, device=device)  # torch's context is the device's primary one
        self._context = self._call("cuDevicePrimaryCtxRetain", device.index)
        self._prop = driver.CUmemAllocationProp()
        self._prop.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._prop.location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._prop.location.id = device.index
        self._access = driver.CUmemAccessDesc()
        self._access.location = self._prop.location
        self._access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        least = driver.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        self.granularity: int = self._call("cuMemGetAllocationGranularity", self._prop, least)

    def _call(self, name: str, *args: Any) -> Any:
        error, *found = getattr(self._cu, name)(*args)
        if error == self._cu.CUresult.CUDA_SUCCESS:
            return found[0] if found else None
        told = f"{name} failed: {error.name}"
        if error == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY and name == "cuMemCreate":
            raise torch.OutOfMemoryError(f"{told}, for {args[0]:,} bytes of keys and values")
        raise PageError(f"expected the CUDA driver to map memory for keys and values, found that {told}")

    def reserve(self, nbytes: int) -> int:
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        return int(self._call("cuMemCreate", nbytes, self._prop, 0))

    def release(self, handle: Any) -> None:
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        self._call("cuMemUnmap", address, nbytes)

    def settle(self) -> None:
        torch.cuda.synchronize(self.device)

    def relieve(self) -> None:
        torch.cuda.empty_cache()

    def available(self) -> int:
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    def enter(self) -> None:
        self._call("cuCtxSetCurrent", self._context)

    def tensor(
        self, address: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, owner: object
    ) -> torch.Tensor:
        array = _Array(address, size, stride, dtype.itemsize, owner)
        return torch.as_tensor(array, device=self.device).view(dtype)


class _Array:
    """Memory as other libraries take it, of integers: there is no name of bfloat16."""

    def __init__(
        self, address: int, size: tuple[int, ...], stride: tuple[int, ...], itemsize: int, owner: object
    ) -> None:
        self.owner = owner
        self.__cuda_array_interface__ = {
            "shape": size,
            "strides": tuple(itemsize * step for step in stride),
            "typestr": f"<i{itemsize}",
            "data": (address, False),
            "version": 3,
        }


def why_not(device: torch.device) -> str:
    """The reason why a device's keys and values cannot lie in virtual memory; empty where they can."""
    if device.type != "cuda":
        return f"{device.type} has none"
    if torch.version.hip is not None:
        return "it is used by CUDA's driver alone, not by ROCm"
    try:
        from cuda.bindings import driver
    except ImportError:
        return f"cuda.bindings is not installed: {install_command('virtual')}"
    torch.cuda.init()
    supported = driver.CUdevice_attribute.CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED
    error, found = driver.cuDeviceGetAttribute(supported, index_of(device))
    if error != driver.CUresult.CUDA_SUCCESS or not found:
        return "the device does not support it"
    return ""


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index
