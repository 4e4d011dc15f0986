"""Address space and physical pages of a device, apart from each other: what virtual memory of a GPU is made of. A
driver reserves addresses, creates pages, and maps pages to addresses; a pool has the pages that no row uses, for the
next one: creating them takes longer than mapping them.

Shapes: B batch, G KV heads, C tokens that there are addresses for, D head size.
"""

from __future__ import annotations

import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cache
from queue import SimpleQueue
from threading import Thread
from typing import Any

import torch

from sparsekv.plans.errors import SparseKVError, install_command
from sparsekv.runtime.stores.pinned import OUTSIDE_CAPTURES


class PageError(SparseKVError):
    """A call of the driver's virtual memory failed; what it had done was taken back."""


class Pages:
    __slots__ = ("handle", "nbytes", "users")

    def __init__(self, handle: Any, nbytes: int) -> None:
        self.handle = handle
        self.nbytes = nbytes
        self.users = 1  # places where it is mapped


class CudaPages:
    """Virtual memory of one device. Sizes and addresses are multiples of the granularity: bytes of a page. A failed
    call raises PageError or torch.OutOfMemoryError, with its name."""

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
        error, *results = getattr(self._cu, name)(*args)
        if error == self._cu.CUresult.CUDA_SUCCESS:
            return results[0] if results else None
        failure = f"{name} failed: {error.name}"
        if error == self._cu.CUresult.CUDA_ERROR_OUT_OF_MEMORY and name == "cuMemCreate":
            raise torch.OutOfMemoryError(f"{failure}, for {args[0]:,} bytes of keys and values")
        raise PageError(f"expected the CUDA driver to map memory for keys and values, found that {failure}")

    def reserve(self, nbytes: int) -> int:
        """The address of so many bytes without memory."""
        return int(self._call("cuMemAddressReserve", nbytes, 0, 0, 0))

    def free(self, address: int, nbytes: int) -> None:
        """Gives addresses back, where nothing is mapped."""
        self._call("cuMemAddressFree", address, nbytes)

    def create(self, nbytes: int) -> Any:
        """A handle of memory without an address."""
        return int(self._call("cuMemCreate", nbytes, self._prop, 0))

    def release(self, handle: Any) -> None:
        """Frees memory that is mapped nowhere."""
        self._call("cuMemRelease", handle)

    def map(self, address: int, nbytes: int, handle: Any) -> None:
        self._call("cuMemMap", address, nbytes, 0, handle, 0)

    def allow(self, address: int, nbytes: int) -> None:
        """Makes memory that was mapped since readable and writable."""
        self._call("cuMemSetAccess", address, nbytes, [self._access], 1)

    def unmap(self, address: int, nbytes: int) -> None:
        """Takes away what one `map` has put there."""
        self._call("cuMemUnmap", address, nbytes)

    def settle(self) -> None:
        """Waits until nothing on the device reads or writes what is about to be unmapped."""
        torch.cuda.synchronize(self.device)

    def relieve(self) -> None:
        """Gives memory back that nobody uses, for `create` to be tried again."""
        torch.cuda.empty_cache()

    def available(self) -> int:
        """Bytes that `create`, and everything else, could have."""
        unused = torch.cuda.memory_reserved(self.device) - torch.cuda.memory_allocated(self.device)
        return torch.cuda.mem_get_info(self.device)[0] + unused

    def enter(self) -> None:
        """Called once by every other thread before it calls anything else."""
        self._call("cuCtxSetCurrent", self._context)

    def tensor(
        self, address: int, size: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype, owner: object
    ) -> torch.Tensor:
        """A tensor there, which keeps its owner alive. The first page is mapped."""
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
    error, is_supported = driver.cuDeviceGetAttribute(supported, index_of(device))
    if error != driver.CUresult.CUDA_SUCCESS or not is_supported:
        return "the device does not support it"
    return ""


def index_of(device: torch.device) -> int:
    return torch.cuda.current_device() if device.index is None else device.index


AHEAD = 64  # tokens before the end of its pages at which a row gets more
LARGE = 16  # pages of a larger allocation, of which a prompt takes as many as fit
_PATIENCE = 2e-5  # seconds


class PageWarning(UserWarning):
    """Memory of a cache could not be freed; it is tried again."""


class Ahead:
    """A thread of one device that maps pages ahead of need; whoever waits for pages goes first."""

    def __init__(self, pool: PagePool) -> None:
        self._pool = pool
        self._waiting: SimpleQueue[Callable[[], object]] = SimpleQueue()
        self._thread: Thread | None = None

    def run(self, method: Callable[[], object]) -> None:
        """Calls a method of an object, unless that is gone by then. What fails is tried again by whoever needs it."""
        if self._thread is None:
            self._thread = Thread(target=self._work, name="sparsekv-pages", daemon=True)
            self._thread.start()
        self._waiting.put(weakref.WeakMethod(method))

    def _work(self) -> None:
        self._pool.driver.enter()
        while True:
            method: Any = self._waiting.get()()
            while self._pool.waiting:
                time.sleep(_PATIENCE)
            if method is not None:
                with suppress(SparseKVError, RuntimeError):  # also torch's, which empties no cache beside a capture
                    method()
            del method  # keeps no store alive


class PagePool:
    """Pages of a device that no row uses, kept for the next one. Mapping and unmapping are outside captures of CUDA
    graphs, of any thread: unmapping waits for the device."""

    def __init__(self, driver: CudaPages) -> None:
        self.driver = driver
        self.bytes = 0  # of free pages
        self.used = 0  # bytes of pages that are mapped
        self._free: dict[int, list[Pages]] = {}
        self.ahead = Ahead(self)
        self.waiting = 0  # who cannot go on without pages
        self._closings: deque[Callable[[], None]] = deque()

    def take(self, nbytes: int) -> list[Pages]:
        """At least so many bytes, in few allocations; one user has them. None where that is no number above 0. The last
        page is a small one: a row that becomes a copy of another has its own in place of it. Raises as CudaPages, and
        has taken nothing then."""
        page = self.driver.granularity
        count = max(0, -(-nbytes // page))
        taken: list[Pages] = []
        try:
            large = max(0, count - 1) // LARGE
            for size in (LARGE,) * large + (1,) * (count - large * LARGE):
                taken.append(self._take(size * page))
        except BaseException:
            self.give(taken)
            raise
        return taken

    def _take(self, nbytes: int) -> Pages:
        free = self._free.get(nbytes)
        if free:
            pages = free.pop()
            self.bytes -= nbytes
            pages.users = 1
        else:
            pages = Pages(self._create(nbytes), nbytes)
        self.used += nbytes
        return pages

    def _create(self, nbytes: int) -> Any:
        try:
            return self.driver.create(nbytes)
        except torch.OutOfMemoryError:
            self.trim()
            self.driver.relieve()
            return self.driver.create(nbytes)

    def give(self, given: Iterable[Pages]) -> None:
        """One user less of each; without any, they wait for the next one."""
        for pages in given:
            pages.users -= 1
            if not pages.users:
                self.used -= pages.nbytes
                self.bytes += pages.nbytes
                self._free.setdefault(pages.nbytes, []).append(pages)

    def make_way(self, missing: int, working: Callable[[], int]) -> None:
        """Before a prompt that takes `missing` bytes of pages and `working` others: free pages that it does not need go
        back to the driver where these would not fit beside them."""
        if self.bytes > missing and self.driver.available() < working():
            self.trim(missing)

    def trim(self, keep: int = 0) -> bool:
        """Gives free pages back to the driver, all but so many bytes; whether there were any. Also inside a capture."""
        OUTSIDE_CAPTURES.enter(waits=False)
        try:
            before = self.bytes
            for free in list(self._free.values()):  # what garbage collection closes meanwhile may add another size
                while free and self.bytes > keep:
                    pages = free.pop()
                    self.bytes -= pages.nbytes
                    self.driver.release(pages.handle)
            return self.bytes < before
        finally:
            OUTSIDE_CAPTURES.leave()

    @contextmanager
    def first(self) -> Iterator[None]:
        """Outside captures, and before the thread that maps ahead of need. What nobody uses any more is closed."""
        self.waiting += 1
        try:
            OUTSIDE_CAPTURES.enter()
        finally:  # else the thread would wait forever for someone whom Ctrl-C has ended here
            self.waiting -= 1
        try:
            self._close_all()
            yield
        finally:
            OUTSIDE_CAPTURES.leave()

    def close_later(self, closing: Callable[[], None]) -> None:
        """Closes a range that nobody uses any more: now, unless a graph is captured or another thread is at work.
        `closing` goes on where it stopped when it is called again."""
        self._closings.append(closing)
        OUTSIDE_CAPTURES.run(self._close_all)

    def _close_all(self) -> None:
        """Closes what it can; the rest is tried again with the next one."""
        failed: list[Callable[[], None]] = []
        try:
            while self._closings:
                failed.append(self._closings.popleft())
                try:
                    failed[-1]()
                except (PageError, RuntimeError) as error:  # torch's, where somebody else captures a graph
                    warnings.warn(f"memory that no cache uses is not free yet: {error}", PageWarning, stacklevel=2)
                else:
                    failed.pop()
        finally:
            self._closings += failed


def pool_of(device: torch.device) -> PagePool | None:
    """The one pool of a device; None where there is no virtual memory."""
    return None if why_not(device) else _pool_of(index_of(device))


def page_bytes(device: torch.device) -> int:
    """Returns the bytes of a page of a device; 0 where there is no virtual memory."""
    pool = pool_of(device)
    return 0 if pool is None else pool.driver.granularity


@cache
def _pool_of(index: int) -> PagePool:
    return PagePool(CudaPages(torch.device("cuda", index)))
