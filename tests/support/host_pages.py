"""Virtual memory of the host in place of a GPU's: unmapped memory cannot be read, and a page can be in two places."""

import ctypes
import mmap
import os
from contextlib import suppress

import pytest
import torch

from sparsekv.plans.errors import SparseKVError
from sparsekv.runtime.stores.page_pool import PageError, PagePool

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_size_t]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED, _NO_RESERVE, _NONE, _FAILED = 0x10, 0x4000, 0, ctypes.c_void_p(-1).value
_HIDDEN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


class HostPages:
    """A driver whose pages are memory files."""

    def __init__(self, granularity: int = 4096) -> None:
        self.device, self.granularity = torch.device("cpu"), granularity
        self._reserved: dict[int, int] = {}

    def reserve(self, nbytes):
        address = _LIBC.mmap(None, nbytes, _NONE, _HIDDEN, -1, 0)
        if address == _FAILED:
            raise PageError(f"reserve failed: {os.strerror(ctypes.get_errno())}")
        self._reserved[address] = nbytes
        return address

    def free(self, address, nbytes):
        assert self._reserved.pop(address) == nbytes
        assert _LIBC.munmap(address, nbytes) == 0

    def create(self, nbytes):
        handle = os.memfd_create("page")
        os.write(handle, b"\xff" * nbytes)  # NaN: what is read by mistake shows
        return handle

    def release(self, handle):
        os.close(handle)

    def map(self, address, nbytes, handle):
        assert _LIBC.mmap(address, nbytes, _NONE, mmap.MAP_SHARED | _FIXED, handle, 0) == address

    def allow(self, address, nbytes):
        assert _LIBC.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def unmap(self, address, nbytes):
        assert _LIBC.mmap(address, nbytes, _NONE, _HIDDEN | _FIXED, -1, 0) == address

    def settle(self): ...

    def relieve(self): ...

    def enter(self): ...

    def available(self):
        return 1 << 40

    def tensor(self, address, size, stride, dtype, owner):
        end = next(at + nbytes for at, nbytes in self._reserved.items() if at <= address < at + nbytes)
        array = (ctypes.c_char * (end - address)).from_address(address)
        array.owner = owner
        return torch.frombuffer(array, dtype=dtype).as_strided(size, stride)


class Watched:
    """A driver that knows what is out, and whose calls can be made to fail.

    Attributes:
        limit: bytes that can be created.
        addresses: bytes that can be reserved at once.
        fail: the call that fails next, once `fail_after` of it have succeeded.
    """

    def __init__(self, driver, limit: int = 1 << 40) -> None:
        self.driver, self.device, self.granularity = driver, driver.device, driver.granularity
        self.addresses = 1 << 50
        self.limit, self.fail, self.fail_after = limit, "", 0
        self.created, self.reserved, self.mapped, self.calls = {}, {}, {}, {}

    def _called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name == self.fail:
            if not self.fail_after:
                self.fail = ""
                raise PageError(f"{name} failed")
            self.fail_after -= 1

    def reserve(self, nbytes):
        self._called("reserve")
        if nbytes > self.addresses:
            raise PageError("reserve failed")
        address = self.driver.reserve(nbytes)
        self.reserved[address] = nbytes
        return address

    def free(self, address, nbytes):
        self._called("free")
        assert self.reserved.pop(address) == nbytes
        assert not any(address <= at < address + nbytes for at in self.mapped)
        self.driver.free(address, nbytes)

    def create(self, nbytes):
        self._called("create")
        if sum(self.created.values()) + nbytes > self.limit:
            raise torch.OutOfMemoryError("create failed: out of memory")
        handle = self.driver.create(nbytes)
        self.created[handle] = nbytes
        return handle

    def release(self, handle):
        assert handle not in {other for _, other in self.mapped.values()}
        del self.created[handle]
        self.driver.release(handle)

    def map(self, address, nbytes, handle):
        self._called("map")
        assert self.created[handle] == nbytes
        assert any(at <= address and address + nbytes <= at + size for at, size in self.reserved.items())
        assert not any(at < address + nbytes and address < at + size for at, (size, _) in self.mapped.items())
        self.driver.map(address, nbytes, handle)
        self.mapped[address] = nbytes, handle

    def allow(self, address, nbytes):
        self._called("allow")
        self.driver.allow(address, nbytes)

    def unmap(self, address, nbytes):
        self._called("unmap")
        size, _ = self.mapped.pop(address)
        assert size == nbytes
        self.driver.unmap(address, nbytes)

    def settle(self):
        self._called("settle")
        self.driver.settle()

    def relieve(self):
        self.driver.relieve()

    def enter(self):
        self.driver.enter()

    def available(self):
        return min(self.driver.available(), self.limit - sum(self.created.values()))

    def tensor(self, address, size, stride, dtype, owner):
        assert address in self.mapped, "nobody can tell where this memory is"
        return self.driver.tensor(address, size, stride, dtype, owner)


class AtOnce:
    """Maps pages ahead of need without a thread."""

    def run(self, method):
        with suppress(SparseKVError, torch.OutOfMemoryError):
            method()


def host_pool(granularity: int = 4096, limit: int = 1 << 40, at_once: bool = True) -> PagePool:
    """A pool of host pages whose driver is watched."""
    return watched_pool(HostPages(granularity), limit, at_once)


def watched_pool(driver, limit: int = 1 << 40, at_once: bool = True) -> PagePool:
    """A pool of a driver that is watched."""
    pool = PagePool(Watched(driver, limit))
    if at_once:
        pool.ahead = AtOnce()
    return pool


def page_on_the_host(patch: pytest.MonkeyPatch) -> PagePool:
    """Gives models on the CPU virtual memory, as those on CUDA have it; returns where pages come from."""
    pool = host_pool()
    for user in ("plan_engine", "memory"):
        patch.setattr(f"sparsekv.runtime.hf.{user}.pool_of", lambda device: pool)
    patch.setattr("sparsekv.runtime.hf.apply.page_bytes", lambda device: pool.driver.granularity)
    return pool
