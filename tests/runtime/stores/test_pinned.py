"""Pinned memory: what there is of it, had in steps, and free again whatever ends them."""

import gc
from contextlib import nullcontext

import pytest
import torch

from sparsekv.runtime.stores import pinned
from sparsekv.runtime.stores.pinned import HostMemory, available_bytes

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
    """Locks memory; what happens while it does so may be anything."""

    def __init__(self, happens=lambda: None):
        self.locked, self.happens = set(), happens

    def cudaHostRegister(self, pointer, nbytes, flags):
        self.locked.add(pointer)
        self.happens()
        return 0

    def cudaHostUnregister(self, pointer):
        self.locked.remove(pointer)
        return 0


@pytest.fixture
def cuda(monkeypatch):
    def with_runtime(cudart):
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(torch.cuda, "device", lambda device: nullcontext())
        monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
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
