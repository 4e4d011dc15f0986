"""Virtual memory of the host in place of a GPU's: what is not mapped cannot be read, and one page can be in two places.

Pages are pieces of memory files. A limit stands for the size of a device's memory, and calls can be made to fail.
"""

import ctypes
import mmap
import os
from contextlib import suppress
from dataclasses import dataclass, field

import torch

from sparsekv.runtime.stores.page_pool import PagePool
from sparsekv.runtime.stores.pages import PageError

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.mmap.restype = ctypes.c_void_p
_LIBC.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *(ctypes.c_int,) * 3, ctypes.c_size_t]
_LIBC.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
_LIBC.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_FIXED, _NO_RESERVE, _NONE, _FAILED = 0x10, 0x4000, 0, ctypes.c_void_p(-1).value
CPU = torch.device("cpu")
_HIDDEN = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _NO_RESERVE


@dataclass
class HostPages:
    """A driver of pages of host memory that counts what is out."""

    granularity: int = 4096
    limit: int = 1 << 30  # bytes that can be created
    device: torch.device = CPU
    created: dict[int, int] = field(default_factory=dict)  # bytes by handle
    reserved: dict[int, int] = field(default_factory=dict)  # bytes by address
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)  # bytes and handle by address
    calls: dict[str, int] = field(default_factory=dict)
    fail: str = ""  # the call that fails next
    fail_after: int = 0  # calls of it that still succeed

    def _called(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if name == self.fail:
            if not self.fail_after:
                self.fail = ""
                raise PageError(f"{name} failed")
            self.fail_after -= 1

    def reserve(self, nbytes: int) -> int:
        self._called("reserve")
        address = _LIBC.mmap(None, nbytes, _NONE, _HIDDEN, -1, 0)
        if address == _FAILED:
            raise PageError(f"reserve failed: {os.strerror(ctypes.get_errno())}")
        self.reserved[address] = nbytes
        return address

    def free(self, address: int, nbytes: int) -> None:
        assert self.reserved.pop(address) == nbytes
        assert not any(address <= at < address + nbytes for at in self.mapped)
        assert _LIBC.munmap(address, nbytes) == 0

    def create(self, nbytes: int) -> int:
        self.calls["create"] = self.calls.get("create", 0) + 1
        if sum(self.created.values()) + nbytes > self.limit:
            raise torch.OutOfMemoryError("create failed: out of memory")
        handle = os.memfd_create("page")
        os.ftruncate(handle, nbytes)
        self.created[handle] = nbytes
        return handle

    def release(self, handle: int) -> None:
        assert handle not in {other for _, other in self.mapped.values()}
        del self.created[handle]
        os.close(handle)

    def map(self, address: int, nbytes: int, handle: int) -> None:
        self._called("map")
        assert self.created[handle] == nbytes
        assert any(at <= address and address + nbytes <= at + size for at, size in self.reserved.items())
        assert not any(at < address + nbytes and address < at + size for at, (size, _) in self.mapped.items())
        assert _LIBC.mmap(address, nbytes, _NONE, mmap.MAP_SHARED | _FIXED, handle, 0) == address
        self.mapped[address] = nbytes, handle

    def allow(self, address: int, nbytes: int) -> None:
        self._called("allow")
        assert _LIBC.mprotect(address, nbytes, mmap.PROT_READ | mmap.PROT_WRITE) == 0

    def unmap(self, address: int, nbytes: int) -> None:
        size, _ = self.mapped.pop(address)
        assert size == nbytes
        assert _LIBC.mmap(address, nbytes, _NONE, _HIDDEN | _FIXED, -1, 0) == address

    def settle(self) -> None:
        self.calls["settle"] = self.calls.get("settle", 0) + 1

    def relieve(self) -> None: ...

    def enter(self) -> None: ...

    def available(self) -> int:
        return self.limit - sum(self.created.values())

    def tensor(self, address, size, stride, dtype, owner):
        assert address in self.mapped, "nobody can tell where this memory is"
        array = (ctypes.c_char * self.reserved_from(address)).from_address(address)
        array.owner = owner
        return torch.frombuffer(array, dtype=dtype).as_strided(size, stride)

    def reserved_from(self, address: int) -> int:
        return next(at + size - address for at, size in self.reserved.items() if at <= address < at + size)


class AtOnce:
    """Maps pages ahead of need without a thread."""

    def run(self, method):
        with suppress(PageError, torch.OutOfMemoryError):
            method()


def host_pool(at_once: bool = True, **given) -> PagePool:
    """A pool of host pages."""
    pool = PagePool(HostPages(**given))
    if at_once:
        pool.ahead = AtOnce()
    return pool
