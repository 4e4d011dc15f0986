"""Pinned memory: what there is of it, had in steps, and free again whatever ends them."""

import gc
import weakref
from contextlib import nullcontext
from threading import Event, Thread

import pytest
import torch

from sparsekv.runtime.stores import pinned
from sparsekv.runtime.stores.pinned import OUTSIDE_CAPTURES, HostMemory, available_bytes

CUDA, MIB = torch.device("cuda", 0), 1 << 20


def system(root, files):
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return available_bytes(root)


MACHINE = {"proc/meminfo": "MemTotal:  9000 kB\nMemAvailable:  5000 kB\n"}
STAT = "file 9\ninactive_file 100\ntotal_inactive_file 200\n"


def group(folder, limit, used, names=("memory.max", "memory.current")):
    return {
        f"{folder}/{name}": f"{text}\n" for name, text in zip((*names, "memory.stat"), (limit, used, STAT), strict=True)
    }


LEGACY = ("memory.limit_in_bytes", "memory.usage_in_bytes")


@pytest.mark.parametrize(
    ("files", "left"),
    [
        ({}, None),
        (MACHINE, 5000 * 1024),
        (MACHINE | {"proc/self/cgroup": "0::/\n"} | group("sys/fs/cgroup", 9000, 2000), 7100),
        (MACHINE | {"proc/self/cgroup": "0::/\n"} | group("sys/fs/cgroup", "max", 2000), 5000 * 1024),
        ({"proc/self/cgroup": "0::/a/b\n"} | group("sys/fs/cgroup/a", 9000, 8900), 200),
        ({"proc/self/cgroup": "0::/a/b\n"} | group("sys/fs/cgroup/a", 9000, 9100), 0),
        (
            {"proc/self/cgroup": "0::/a/b\n"} | group("sys/fs/cgroup/a", 9000, 10) | group("sys/fs/cgroup/a/b", 800, 0),
            900,
        ),
        ({"proc/self/cgroup": "5:cpu,memory:/a\n4:pids:/c\n"} | group("sys/fs/cgroup/memory/a", 500, 50, LEGACY), 650),
        ({"proc/self/cgroup": "4:memory:/unseen\n"} | group("sys/fs/cgroup/memory", 500, 50, LEGACY), 650),
        (MACHINE | {"proc/self/cgroup": "4:pids:/a\n"} | group("sys/fs/cgroup", 10, 0), 5000 * 1024),
    ],
)
def test_what_is_left_is_the_least_that_machine_and_groups_leave(tmp_path, files, left):
    assert system(tmp_path, files) == left


class Cudart:
    """Locks memory, and notes how often the device is waited for; what happens while it does so may be anything."""

    def __init__(self, happens=lambda: None, failure=0):
        self.locked, self.happens, self.failure, self.waits = set(), happens, failure, 0

    def cudaHostRegister(self, pointer, nbytes, flags):
        if not self.failure:
            self.locked.add(pointer)
        self.happens()
        return self.failure

    def cudaHostUnregister(self, pointer):
        self.locked.remove(pointer)
        return 0

    def wait(self, device):
        self.waits += 1


@pytest.fixture
def cuda(monkeypatch):
    def with_runtime(cudart):
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", cudart.wait)
        monkeypatch.setattr(pinned, "_STEP", MIB)
        return cudart

    return with_runtime


def press():
    raise KeyboardInterrupt


def test_a_large_block_is_had_in_steps(cuda):
    cudart, told, memory = cuda(Cudart()), [], HostMemory()
    with memory.telling(told.append):
        block = memory.take(2 * MIB + 5, CUDA)
    assert told == [MIB, MIB, 5]
    memory.give(block, CUDA)
    with memory.telling(told.append):
        assert memory.take(2 * MIB, CUDA) is block  # at once, as it is there
    assert told[3:] == [2 * MIB]
    memory.take(MIB, CUDA)
    assert len(told) == 4
    assert len(cudart.locked) == 1


@pytest.mark.parametrize("step", [1, 3])
def test_ctrl_c_between_steps_leaves_nothing_locked(cuda, step):
    cudart, told, memory = cuda(Cudart()), [], HostMemory()

    def tell(nbytes):
        told.append(nbytes)
        if len(told) == step:
            press()

    with pytest.raises(KeyboardInterrupt), memory.telling(tell):
        memory.take(3 * MIB, CUDA)
    assert len(told) == step
    assert not cudart.locked
    assert memory.free_bytes == 0


def test_ctrl_c_while_memory_is_locked_unlocks_it(cuda):
    cudart = cuda(Cudart(press))
    with pytest.raises(KeyboardInterrupt):
        HostMemory().take(MIB, CUDA)
    gc.collect()
    assert not cudart.locked


def test_a_locked_block_is_unlocked_when_nobody_has_it_and_nothing_is_under_way(cuda, monkeypatch):
    cudart, shared, order = cuda(Cudart()), HostMemory(), []
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: order.append(len(cudart.locked)))
    block = shared.take(5 * MIB, CUDA)
    assert cudart.locked == {block.data.data_ptr()}
    shared.give(block, CUDA)
    assert shared.take(5 * MIB, CUDA) is block
    shared.close()
    shared.give(block, CUDA)
    assert cudart.locked
    del block
    gc.collect()
    assert (cudart.locked, order) == (set(), [1])  # waited for while it was locked still


def test_where_memory_cannot_be_locked_the_drivers_own_serves(cuda, monkeypatch):
    cudart, made, forgotten, empty = cuda(Cudart(failure=801)), [], [], torch.empty

    def new(*args, pin_memory=False, **options):
        made.append(pin_memory)
        return empty(*args, **options)

    monkeypatch.setattr(pinned, "_forget_error", forgotten.append)
    monkeypatch.setattr(torch, "empty", new)
    block = HostMemory().take(MIB, CUDA)
    assert (len(block.data), made, len(forgotten), cudart.waits) == (MIB, [True], 1, 0)
    del block
    gc.collect()
    assert cudart.waits == 1  # before the allocator hands the memory out again


def test_a_block_that_is_collected_during_a_capture_is_unlocked_behind_it(cuda):
    """In whichever thread."""
    cudart, block = cuda(Cudart()), HostMemory().take(MIB, CUDA)
    with OUTSIDE_CAPTURES.put_off():
        with OUTSIDE_CAPTURES.put_off():
            done, cycle, thread = weakref.finalize(block, lambda: None), [block], Thread(target=gc.collect)
            cycle.append(cycle)
            del block, cycle
            thread.start()
            thread.join()
            assert not done.alive
        assert (len(cudart.locked), cudart.waits) == (1, 0)
    assert (len(cudart.locked), cudart.waits) == (0, 1)


@pytest.mark.parametrize("collects", [True, False])
def test_python_collects_garbage_by_itself_again_behind_the_last_capture(collects):
    """If it did before."""
    if not collects:
        gc.disable()
    try:
        with OUTSIDE_CAPTURES.put_off():
            with OUTSIDE_CAPTURES.put_off():
                assert not gc.isenabled()
            assert not gc.isenabled()
        assert gc.isenabled() == collects
    finally:
        gc.enable()


def test_two_threads_capture_one_after_the_other():
    begun, ended = Event(), []

    def capture():
        begun.set()
        with OUTSIDE_CAPTURES.put_off():
            ended.append("second")

    with OUTSIDE_CAPTURES.put_off():
        thread = Thread(target=capture)
        thread.start()
        assert begun.wait(30)
        thread.join(0.2)
        ended.append("first")
    thread.join(30)
    assert ended == ["first", "second"]


def test_what_is_collected_during_a_capture_of_somebody_else_is_unlocked_with_what_comes_later(cuda, monkeypatch):
    cudart = cuda(Cudart())
    blocks = [HostMemory().take(MIB, CUDA) for _ in range(2)]
    with monkeypatch.context() as capture:
        for asked in ("is_available", "is_current_stream_capturing"):
            capture.setattr(torch.cuda, asked, lambda: True)
        blocks.pop()
        assert (len(cudart.locked), cudart.waits) == (2, 0)
    blocks.pop()
    assert not cudart.locked


def test_memory_of_a_device_that_no_longer_works_is_unlocked_without_an_error(cuda, monkeypatch):
    cudart = cuda(Cudart())
    block = HostMemory().take(MIB, CUDA)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: torch.empty(-1))
    with OUTSIDE_CAPTURES.put_off():
        del block
    assert not cudart.locked


def test_a_thread_does_not_wait_for_its_own_capture():
    with OUTSIDE_CAPTURES.put_off(), pytest.raises(RuntimeError, match="in its own thread"):
        OUTSIDE_CAPTURES.enter()
    with OUTSIDE_CAPTURES.none_under_way():
        pass
