"""Launches are timed in turn, each behind a write that leaves nothing of the one before in the device's L2."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch

from sparsekv.runtime.core import timed_layers

L2 = 50 << 20


@pytest.fixture
def log(monkeypatch):
    """Names of what the device of this file was given, in order."""
    names = []

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            names.append("event")

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return 1e-3 * {"dense": 7, "sparse": 3}[names[-2]]

    def empty(count, dtype, device):
        return SimpleNamespace(zero_=lambda: names.append(count * dtype.itemsize))

    cuda = SimpleNamespace(
        Event=Event, _sleep=lambda cycles: names.append("wait"),
        get_device_properties=lambda device: SimpleNamespace(L2_cache_size=L2),
    )  # fmt: skip
    monkeypatch.setattr(timed_layers, "torch", SimpleNamespace(cuda=cuda, empty=empty, uint8=torch.uint8))
    return names


def test_the_l2_is_overwritten_before_each_timed_launch_and_launches_alternate(log):
    launches = [lambda name=name: log.append(name) for name in ("dense", "sparse")]
    assert timed_layers._in_turn(launches, 4, "cuda", 20.0) == pytest.approx([7.0, 3.0])
    assert log[:2] == ["dense", "sparse"]  # compiled
    timed = [log[first : first + 5] for first in range(2, len(log), 5)]
    assert [run[3] for run in timed] == ["dense", "sparse"] * 4
    for wait, written, start, _, end in timed:
        assert (wait, start, end) == ("wait", "event", "event")
        assert written > L2


def test_a_captured_layer_is_timed_without_the_start_of_its_graph(monkeypatch):
    taken = {"dense": 17.0, "sparse": 9.5, "noise": 5.0, "small": 6.0}
    captured = []

    class Graph:
        def replay(self):
            return self.has

        def reset(self):
            captured.remove(self)

    class Capture(nullcontext):
        def __exit__(self, *_):
            self.enter_result.has = names[-1]
            captured.append(self.enter_result)

    def in_turn(launches, *_):
        return [taken[launch()] for launch in launches]

    names = []
    cuda = SimpleNamespace(
        synchronize=lambda _: None, CUDAGraph=Graph, graph=lambda one, **_: Capture(one), device=nullcontext
    )
    small = SimpleNamespace(zero_=lambda: names.append("small"))
    monkeypatch.setattr(timed_layers, "torch", SimpleNamespace(cuda=cuda, zeros=lambda *_, **__: small))
    monkeypatch.setattr(timed_layers, "_in_turn", in_turn)
    launches = [lambda name=name: names.append(name) for name in ("dense", "sparse", "noise")]
    assert timed_layers.replayed_us(launches, "cuda") == [11.0, 3.5, 1.0]
    assert not captured
