"""Host memory for keys and values: page-locked where a GPU copies to it, in few blocks that are made once and reused.

Locking 100 GB takes a minute, and torch's own pinned allocator rounds every block up to a power of two, so blocks are
made here: exactly as large as asked for, in huge pages where the system has them, registered with CUDA, and given to
the next cache of the same engine when one is done with them.
"""

from __future__ import annotations

import mmap
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol

import torch

from sparsekv.plans.errors import UsageError

# Where copies to the host run: behind the compute on a CUDA device, at once elsewhere.
#
# A lane is a second queue of work. What is run on it sees everything issued before; whoever reads its results says so
# and is ordered after them. Nothing waits otherwise, so a layer's attention and MLP go on while its keys and values
# leave the device.

Ticket = Any
"""What `run` returns: stands for that work and all before it on the lane."""


class Lane(Protocol):
    """A queue of copies beside the compute."""

    def run(self, work: Callable[[], None], reads: Sequence[torch.Tensor]) -> Ticket:
        """Queues `work` behind all compute issued so far.

        Args:
            work: issues copies; may make temporaries, which live on the lane.
            reads: tensors it reads. Their memory is not given to others before it is done, whoever lets go of them;
                their contents must not be overwritten.
        """

    def order(self, ticket: Ticket) -> None:
        """Compute issued from here on comes after the work of `ticket`. The host does not wait."""

    def finish(self, ticket: Ticket) -> None:
        """Returns when the work of `ticket` is done, so that the host may look at its results."""

    def settle(self) -> None:
        """Returns when nothing is under way on the device, so that the host may write to what was read or written."""


class InlineLane:
    """No queue: work is done when `run` returns."""

    def run(self, work: Callable[[], None], reads: Sequence[torch.Tensor]) -> Ticket:
        """Does it."""
        work()

    def order(self, ticket: Ticket) -> None:
        """Nothing is left to wait for."""

    def finish(self, ticket: Ticket) -> None:
        """Nothing is left to wait for."""

    def settle(self) -> None:
        """Nothing is left to wait for."""


class StreamLane:
    """A CUDA stream of its own on one device. Copies of all layers share it and so follow one another."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # ahead of the compute: a short packing kernel would else wait until a long attention kernel runs dry
        self.stream = torch.cuda.Stream(device, priority=-1)

    def run(self, work: Callable[[], None], reads: Sequence[torch.Tensor]) -> Ticket:
        """Queues `work` behind the current stream."""
        self.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self.stream):
            work()
            for tensor in reads:
                tensor.record_stream(self.stream)  # freed memory is not given out again before the lane is past here
            done = torch.cuda.Event()
            done.record(self.stream)
        return done

    def order(self, ticket: Ticket) -> None:
        """The current stream waits, the host does not."""
        if ticket is not None:
            torch.cuda.current_stream(self._device).wait_event(ticket)

    def finish(self, ticket: Ticket) -> None:
        """The host waits."""
        if ticket is not None:
            ticket.synchronize()

    def settle(self) -> None:
        """The host waits for every stream."""
        torch.cuda.synchronize(self._device)


def lane_for(device: torch.device) -> Lane:
    """The lane that copies from `device` run on."""
    return StreamLane(device) if device.type == "cuda" else InlineLane()


_MAY_BE_LARGER = 1.25  # a free block serves for smaller ones down to this
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device of the process
_ASK_FROM = 1 << 30  # blocks from this size on are held against what the machine has left
_SPARE = 1 << 30  # of which this much is left alone


class Block:
    """Bytes in host memory."""

    def __init__(self, data: torch.Tensor, registered: bool = False) -> None:
        self.data = data  # uint8, one dimension
        self.registered = registered  # locked here, and unlocked when the block ceases to be

    def view(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """The first bytes as a contiguous tensor; it does not keep the block locked by itself."""
        count = dtype.itemsize * torch.Size(shape).numel()
        return self.data[:count].view(dtype).view(shape)


class HostMemory:
    """The blocks of one engine, and its lanes: one of each device.

    Reuse is safe while copies of the former owner are still queued, because the new owner's copies go behind them on
    the same lane.
    """

    def __init__(self) -> None:
        self._keeps = True
        self._free: dict[torch.device, list[Block]] = {}
        self._lanes: dict[torch.device, Lane] = {}

    def lane(self, device: torch.device) -> Lane:
        """The lane of copies from `device`."""
        if device not in self._lanes:
            self._lanes[device] = lane_for(device)
        return self._lanes[device]

    def take(self, nbytes: int, device: torch.device) -> Block:
        """A block of at least `nbytes` that `device` can copy to without waiting; its contents are anything.

        Free blocks that are too small go back to the system: stores that grow would leave a trail of them, several
        times what they hold. Larger ones stay for the next long prompt, unless the machine needs them now.

        Raises:
            UsageError: the machine has not so much memory left.
        """
        free = self._free.setdefault(device, [])
        fitting = [block for block in free if nbytes <= len(block.data) <= _MAY_BE_LARGER * nbytes]
        if fitting:
            block = min(fitting, key=lambda block: len(block.data))
            free.remove(block)
            return block
        free[:] = [block for block in free if len(block.data) > nbytes]
        if not has_room(nbytes, available_bytes()):
            self._free.clear()
        return _locked(nbytes, device) if device.type == "cuda" else Block(torch.empty(nbytes, dtype=torch.uint8))

    def give(self, block: Block, device: torch.device) -> None:
        """Takes a block back, for the next that asks."""
        if self._keeps:
            self._free.setdefault(device, []).append(block)

    def close(self) -> None:
        """Gives blocks that nobody uses back to the system, and from here on those that come back."""
        self._keeps = False
        self._free.clear()


def _locked(nbytes: int, device: torch.device) -> Block:
    check_room(nbytes, available_bytes())
    data = _pages(nbytes)
    cudart: Any = torch.cuda.cudart()
    with torch.cuda.device(device):
        failed = int(cudart.cudaHostRegister(data.data_ptr(), nbytes, _PORTABLE))
    if failed:  # some sandboxes only know memory that the driver itself allocates
        _forget_error(device)
        return Block(torch.empty(nbytes, dtype=torch.uint8, pin_memory=True))
    block = Block(data, registered=True)
    weakref.finalize(block, _unlock, data, device).atexit = False  # the end of the process unlocks everything
    return block


def _forget_error(device: torch.device) -> None:
    """CUDA keeps an error until somebody asks for it: the next launch would be blamed for it."""
    with suppress(RuntimeError):
        torch.zeros(1, device=device)


def _unlock(data: torch.Tensor, device: torch.device) -> None:
    torch.cuda.synchronize(device)  # no copy may still be on its way
    cudart: Any = torch.cuda.cudart()
    cudart.cudaHostUnregister(data.data_ptr())


def _pages(nbytes: int) -> torch.Tensor:
    """Fresh memory, already backed by pages: touching them from all cores is faster than locking them untouched."""
    pages = mmap.mmap(-1, max(nbytes, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        pages.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(pages, dtype=torch.uint8)[:nbytes].zero_()


def has_room(nbytes: int, available: int | None) -> bool:
    """Whether a block of this size leaves the machine some memory; small ones are not asked about."""
    return available is None or nbytes < _ASK_FROM or nbytes + _SPARE <= available


def check_room(nbytes: int, available: int | None) -> None:
    """Refuses a large block that would make the machine run out of memory.

    Raises:
        UsageError: it would.
    """
    if available is None or has_room(nbytes, available):
        return
    raise UsageError(
        f"expected {nbytes / 2**30:.1f} GiB more of host memory for keys and values (and 1 GiB to spare), "
        f"found {available / 2**30:.1f} GiB available; keep more layers on the device (--kv-host-layers, or a plan's "
        f"decode.offload), or use a shorter context"
    )


def available_bytes() -> int | None:
    """Memory that the machine and this process's control group have left; None where neither tells."""
    found = [left for left in (_of_machine(), _of_group()) if left is not None]
    return min(found, default=None)


def _of_machine() -> int | None:
    found = _fields("/proc/meminfo").get("MemAvailable:")
    return None if found is None else found * 1024


def _of_group() -> int | None:
    group = Path("/sys/fs/cgroup")
    try:
        limit, used = int((group / "memory.max").read_text()), int((group / "memory.current").read_text())
    except (OSError, ValueError):  # no control group, or no limit
        return None
    return limit - used + _fields(str(group / "memory.stat")).get("inactive_file", 0)


def _fields(path: str) -> dict[str, int]:
    """The first number of each line, by its first word."""
    try:
        lines = [line.split() for line in Path(path).read_text().splitlines()]
    except OSError:
        return {}
    return {words[0]: int(words[1]) for words in lines if len(words) > 1 and words[1].isdigit()}
