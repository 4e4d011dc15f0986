"""What is let go of while a decode step is captured does not end the capture. Without a GPU the graphs are emulated, as
is a device that fails a capture in which another graph is destroyed; with one they are real."""

import gc
import weakref
from contextlib import contextmanager
from threading import Thread

import pytest
import torch
from emulated_graphs import emulate
from tiny_models import random_tokens, steps, tiny_model
from tiny_plans import decode_plan, plan_for, segment

from sparsekv.runtime.hf import graphs
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.graph_fetches import StepFetches

CUDA = torch.cuda.is_available()
DEVICE = torch.device("cuda" if CUDA else "cpu")
pytestmark = [pytest.mark.gpu] if CUDA else []
DTYPE, SIZE = (torch.bfloat16, 64) if CUDA else (torch.float32, 16)
RUNS = 3 if CUDA else 2  # of a step that is captured, the last one in the capture
SPARSE = decode_plan(segment(0, (1,), 12, sink=4, recent=10))


@pytest.fixture(autouse=True)
def captured(monkeypatch):
    """Steps are captured."""
    if not CUDA:
        emulate(monkeypatch)


@contextmanager
def no_collection():
    """Garbage is collected where it is asked for alone."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def a_model(layers=1):
    return tiny_model(layers=layers, head_dim=SIZE, heads=2, kv_heads=1, dtype=DTYPE).to(DEVICE)


def one_step(model):
    """A prompt and a decode step, whose cache is let go of."""
    steps(model, random_tokens(1, 40).to(DEVICE), random_tokens(1, 1, 1).to(DEVICE))


def step_during_whose_capture(happens):
    """A captured step of a new model; its handle."""
    model, runs, fetch = a_model(2), [], StepFetches.fetch

    def fetching(self, segment, selection):
        runs.append(None)
        if len(runs) == RUNS:
            assert not CUDA or torch.cuda.is_current_stream_capturing()
            happens()
        fetch(self, segment, selection)

    with apply(model, plan_for(model, None, SPARSE), backend="triton") as handle, pytest.MonkeyPatch.context() as patch:
        patch.setattr(StepFetches, "fetch", fetching)
        one_step(model)
    return handle.steps


def applied():
    model = a_model()
    handle = apply(model, plan_for(model), backend="triton")
    one_step(model)
    return handle


def closed(handles):
    handles.pop().close()


def collected_by_another_thread(handles):
    handles.clear()
    thread = Thread(target=gc.collect)
    thread.start()
    thread.join()


@pytest.mark.parametrize("dropped", [closed, collected_by_another_thread])
def test_captured_steps_of_another_handle_are_destroyed_behind_the_capture(dropped):
    handles = [applied()]
    graph = weakref.ref(handles[0].steps.latest._graph)
    with no_collection():
        found = step_during_whose_capture(lambda: dropped(handles))
        assert (found.replayed, found.why_not) == (1, "")
        assert graph() is None


def test_no_graph_of_somebody_else_is_collected_in_the_capture():
    theirs = [graphs.torch.cuda.CUDAGraph()]
    if CUDA:
        with torch.cuda.graph(theirs[0]):
            torch.zeros(1, device=DEVICE)
    else:
        theirs[0].run = list

    def litter():
        cycle = [theirs.pop()]
        cycle.append(cycle)
        del cycle
        [[] for _ in range(100_000)]  # enough for a collection

    found = step_during_whose_capture(litter)
    assert not theirs
    assert (found.replayed, found.why_not) == (1, "")
    assert gc.isenabled()


def test_graphs_are_gone_as_soon_as_their_handle_is_closed():
    """Not only when garbage is collected: their memory is for the next handle."""
    with no_collection():
        handle = applied()
        graph = weakref.ref(handle.steps.latest._graph)
        handle.close()
        assert graph() is None
