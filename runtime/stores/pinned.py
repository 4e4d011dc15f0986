"""Pinned host memory for keys and values, in few blocks that are made once and reused, and the streams that fill it.

Pinning 100 GB takes a minute, and torch's own pinned allocator rounds every block up to a power of two, so blocks are
made here: exactly as large as asked for, in huge pages where the system has them, registered with CUDA, and given to
the next cache of the same engine when one is done with them.

Copies to the host run on a stream of their own behind the compute, so that a layer's attention and MLP go on while its
keys and values leave the device. On a CPU they run at once.
"""

from __future__ import annotations

import gc
import mmap
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from threading import Condition, RLock, get_ident
from typing import Any

import torch

from sparsekv.plans.errors import UsageError

CopyDone = Any
"""The result of `run`: stands for its work and all before it on the stream."""


class CopyStream:
    """Copies on a CPU, which run at once."""

    def run(self, work: Callable[[], None], reads: Sequence[torch.Tensor]) -> CopyDone:
        """Queues `work`, which issues copies, behind all compute issued so far; its temporaries belong to the stream.
        The memory of tensors that it reads is not reused before it is done; their contents must not be overwritten."""
        work()

    def order(self, done: CopyDone) -> None:
        """Compute issued from here on comes after the work of `done`. The host does not wait."""

    def finish(self, done: CopyDone) -> None:
        """Returns when the work of `done` is done, so that the host may look at its results."""

    def settle(self) -> None:
        """Returns when nothing is under way on the device, so that the host may write to what was read or written."""


class CudaStream(CopyStream):
    """A CUDA stream of its own on one device. Copies of all layers share it and so follow one another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # ahead of the compute: a short packing kernel would else wait until a long attention kernel runs dry
        self.stream = torch.cuda.Stream(device, priority=-1)

    def run(self, work: Callable[[], None], reads: Sequence[torch.Tensor]) -> CopyDone:
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            work()
            for tensor in reads:
                tensor.record_stream(self.stream)  # freed memory is not reused before the stream is past here
            done = torch.cuda.Event()
            done.record(self.stream)
        return done

    def order(self, done: CopyDone) -> None:
        if done is not None:
            torch.cuda.current_stream(self._device).wait_event(done)

    def finish(self, done: CopyDone) -> None:
        if done is not None:
            done.synchronize()

    def settle(self) -> None:
        with OUTSIDE_CAPTURES.none_under_way():
            torch.cuda.synchronize(self._device)


def stream_for(device: torch.device) -> CopyStream:
    return CudaStream(device) if device.type == "cuda" else CopyStream()


class OutsideCaptures:
    """Work that ends the capture of a CUDA graph, in whichever thread that is: waiting for the device, and destroying a
    graph. Whoever has some waits until no capture is under way; what may come at any time, as garbage collections do,
    is put off."""

    def __init__(self) -> None:
        self._lock = RLock()  # a collection may come to the thread that holds it
        self._ended = Condition(self._lock)
        self._turn = RLock()
        self._thread: int | None = None  # that captures
        self._captures = 0
        self._collects = False  # whether Python collects garbage by itself outside captures
        self._waiting: deque[Callable[[], object]] = deque()

    def run(self, work: Callable[[], object]) -> None:
        """Runs it now, or once no capture is under way and no other thread is at such work. Waits for nobody."""
        self._waiting.append(work)
        self._run_waiting()

    @contextmanager
    def none_under_way(self) -> Iterator[None]:
        """Waits until no capture is under way; inside it, none begins, and no other thread is at such work."""
        self.enter()
        try:
            yield
        finally:
            self.leave()

    def enter(self, waits: bool = True) -> None:
        """As `none_under_way` begins. Without waiting for captures, none begins or ends until `leave`. Raises
        RuntimeError where a thread would wait for its own capture."""
        self._lock.acquire()
        try:
            while self._captures and waits:
                if self._thread == get_ident():
                    raise RuntimeError("expected no wait for the device inside a capture, found one in its own thread")
                self._ended.wait()
        except BaseException:
            self._lock.release()
            raise

    def leave(self) -> None:
        self._lock.release()
        self._run_waiting()

    @contextmanager
    def put_off(self) -> Iterator[None]:
        """Inside it, work of any thread is put off to its end, and Python collects no garbage by itself: there may be
        graphs of others in it, and torch 2.11 fails a capture in whose thread it destroys one. Waits for the capture of
        another thread: torch begins one by waiting for the device, and what finds out waits before is a setting of the
        process."""
        with self._turn:
            with self._lock:  # waits for work that has begun
                if not self._captures:
                    self._collects = gc.isenabled()
                    gc.disable()
                self._captures += 1
                self._thread = get_ident()
            try:
                yield
            finally:
                with self._lock:
                    self._captures -= 1
                    if self._collects and not self._captures:
                        gc.enable()
                    self._ended.notify_all()
                self._run_waiting()

    def _run_waiting(self) -> None:
        # whoever has the lock meanwhile looks again once it has not
        while self._waiting and self._lock.acquire(blocking=False):
            try:
                if self._captures or (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
                    return
                while self._waiting:
                    self._waiting.popleft()()
            finally:
                self._lock.release()


OUTSIDE_CAPTURES = OutsideCaptures()  # one for all engines and threads: a capture is ended by the work of any of them


_MAY_BE_LARGER = 1.25  # a free block serves for smaller ones down to this
_PORTABLE, _MAPPED = 1, 2  # cudaHostRegister: pinned for every device of the process, readable by kernels
_ASK_FROM = 1 << 30  # blocks from this size on are compared with what the machine has left
SPARE = 1 << 30  # of which this much is left alone
_STEP = 1 << 30  # of a block, between which progress is told and Ctrl-C ends it

OnBytes = Callable[[int], object]
"""Is told how many bytes more are had."""


class Block:
    def __init__(self, data: torch.Tensor, registered: bool = False) -> None:
        self.data = data  # uint8, one dimension
        self.registered = registered  # pinned here, and unpinned when the block ceases to be

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first bytes as a contiguous tensor; it does not keep the block pinned by itself."""
        count = dtype.itemsize * torch.Size(shape).numel()
        return self.data[:count].view(dtype).view(shape)


class HostMemory:
    """The blocks of one engine, and its copy streams: one a device. Reuse is safe while copies of the former owner are
    still queued, because the new owner's copies go behind them on the same stream."""

    def __init__(self) -> None:
        self._keeps = True
        self._on_bytes: OnBytes | None = None
        self._free: dict[torch.device, list[Block]] = {}
        self._streams: dict[torch.device, CopyStream] = {}

    def stream(self, device: torch.device) -> CopyStream:
        if device not in self._streams:
            self._streams[device] = stream_for(device)
        return self._streams[device]

    @property
    def free_bytes(self) -> int:
        return sum(len(block.data) for blocks in self._free.values() for block in blocks)

    @contextmanager
    def telling(self, on_bytes: OnBytes | None) -> Iterator[None]:
        """Tells of the bytes of every block that is taken inside, in steps; what it raises ends the taking."""
        self._on_bytes = on_bytes
        try:
            yield
        finally:
            self._on_bytes = None

    def take(self, nbytes: int, device: torch.device) -> Block:
        """A block of at least `nbytes` that `device` can copy to without waiting; its contents are anything. Free
        blocks that are too small go back to the system: stores that grow would leave a trail of them, several times
        their contents. Larger ones stay for the next long prompt, unless the machine needs them now."""
        free = self._free.setdefault(device, [])
        fitting = [block for block in free if nbytes <= len(block.data) <= _MAY_BE_LARGER * nbytes]
        if fitting:
            block = min(fitting, key=lambda block: len(block.data))
            free.remove(block)
            self._tell(nbytes)
            return block
        free[:] = [block for block in free if len(block.data) > nbytes]
        if not has_room(nbytes, available_bytes()):
            self._free.clear()
        if device.type == "cuda":
            return _pinned(nbytes, device, self._tell)
        self._tell(nbytes)
        return Block(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))

    def _tell(self, nbytes: int) -> None:
        if self._on_bytes is not None:
            self._on_bytes(nbytes)

    def give(self, block: Block, device: torch.device) -> None:
        if self._keeps:
            self._free.setdefault(device, []).append(block)

    def trim(self) -> None:
        """Gives blocks that nobody uses back to the system."""
        self._free.clear()

    def close(self) -> None:
        """Gives blocks that nobody uses back to the system, and from here on those that come back."""
        self._keeps = False
        self.trim()


def _pinned(nbytes: int, device: torch.device, on_bytes: OnBytes) -> Block:
    check_room(nbytes, available_bytes())
    data = _pages(nbytes, on_bytes)
    block = Block(data, registered=True)
    # before it is pinned: Ctrl-C may come right after
    unpin = weakref.finalize(block, OUTSIDE_CAPTURES.run, partial(_unpin, data, device))
    unpin.atexit = False  # the end of the process unpins everything
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        failed = int(cudart.cudaHostRegister(data.data_ptr(), nbytes, _PORTABLE | _MAPPED))
    if failed:  # some sandboxes only know memory that the driver itself allocates
        unpin.detach()
        _forget_error(device)
        return _pinned_by_torch(nbytes, device)
    return block


def _pinned_by_torch(nbytes: int, device: torch.device) -> Block:
    data = torch.empty(nbytes, dtype=torch.uint8, device="cpu", pin_memory=True)
    block = Block(data)
    # torch does not see kernels that write by address, and would hand the memory out again while they do
    settle = weakref.finalize(block, OUTSIDE_CAPTURES.run, partial(_settle, data, device))
    settle.atexit = False
    return block


def _settle(data: torch.Tensor, device: torch.device) -> None:
    """Waits for the device. `data` is an argument so that whoever calls this later keeps it alive until then."""
    with suppress(RuntimeError):  # a device that an error has made unusable runs no kernels
        torch.cuda.synchronize(device)


def _forget_error(device: torch.device) -> None:
    """CUDA keeps an error until somebody asks for it: the next launch would be blamed for it."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unpin(data: torch.Tensor, device: torch.device) -> None:
    _settle(data, device)  # no copy may still be on its way
    cudart: Any = torch.cuda.cudart()
    if int(cudart.cudaHostUnregister(data.data_ptr())):  # it was not pinned yet
        _forget_error(device)


def _pages(nbytes: int, on_bytes: OnBytes = lambda nbytes: None) -> torch.Tensor:
    """Fresh memory, already backed by pages: touching them from all cores is faster than pinning them untouched."""
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    data = torch.frombuffer(pages, dtype=torch.uint8)[:nbytes]
    for piece in data.split(_STEP):
        piece.zero_()
        on_bytes(len(piece))
    return data


def has_room(nbytes: int, available: int | None) -> bool:
    """Returns whether a block of this size leaves the machine some memory; small ones are not asked about."""
    return available is None or nbytes < _ASK_FROM or nbytes + SPARE <= available


def spare_beside(nbytes: int) -> int:
    return SPARE if nbytes >= _ASK_FROM else 0


def check_room(nbytes: int, available: int | None) -> None:
    if available is None or has_room(nbytes, available):
        return
    raise UsageError(
        f"expected {nbytes / 2**30:.1f} GiB more of host memory for keys and values (and 1 GiB to spare), "
        f"found {available / 2**30:.1f} GiB available; keep more layers on the device (--offload), "
        f"or use a shorter context"
    )


def available_bytes(root: Path = Path("/")) -> int | None:
    """Memory that the machine and this process's control groups have left; None where nobody tells."""
    kilobytes = _fields(root / "proc/meminfo").get("MemAvailable:")
    of_machine = None if kilobytes is None else kilobytes * 1024
    return min((left for left in (of_machine, _of_group(root)) if left is not None), default=None)


# Limit, use, and what of that the kernel gives up by itself: of control groups of version 2 and 1.
_UNIFIED = ("memory.max", "memory.current", "inactive_file")
_LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def _of_group(root: Path) -> int | None:
    """The least that the process's own group and those around it have left; None where none has a limit."""
    known: list[int] = []
    for line in _lines(root / "proc/self/cgroup"):
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        group_path = top / path.strip("/")  # which a container may see as the top
        groups = [group for group in (group_path, *group_path.parents) if group.is_relative_to(top)]
        left = (_left_in(group, *(_LEGACY if controllers else _UNIFIED)) for group in groups)
        known += (count for count in left if count is not None)
    return min(known, default=None)


def _left_in(group: Path, limit: str, used: str, reclaimable: str) -> int | None:
    try:
        left = int((group / limit).read_text()) - int((group / used).read_text())
    except (OSError, ValueError):  # no such group, or no limit
        return None
    return left + _fields(group / "memory.stat").get(reclaimable, 0)


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except OSError:
        return []


def _fields(path: Path) -> dict[str, int]:
    """The first number of each line, by its first word."""
    lines = [line.split() for line in _lines(path)]
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
