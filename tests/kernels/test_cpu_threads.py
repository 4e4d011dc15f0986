"""Heads on threads of their own: the same results, the caller's modes, and torch's threads as they were."""

import signal
import threading
import time

import pytest
import torch
from torch_state import torch_threads

from sparsekv.kernels.cpu_threads import THREAD_ELEMENTS, for_each, spread

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def two_threads():
    with torch_threads(2):
        yield


def test_every_item_is_worked_on_once_by_one_thread_each():
    done, alone, names = [], [], set()

    def work(item: int) -> None:
        done.append(item)
        alone.append(torch.get_num_threads())
        names.add(threading.current_thread().name)

    for_each(work, range(9))
    assert sorted(done) == list(range(9))
    assert set(alone) == {1}
    assert threading.main_thread().name not in names


def test_few_items_get_all_threads():
    seen = []
    for_each(lambda item: seen.append((torch.get_num_threads(), threading.current_thread())), [0])
    assert seen == [(2, threading.main_thread())]


def test_the_number_of_threads_is_what_it_was_also_for_threads_to_come():
    def fail(item: int) -> None:
        raise ValueError(f"item {item}")

    for_each(lambda item: None, range(4))
    with pytest.raises(ValueError, match="item 0"):
        for_each(fail, range(4))
    assert torch.get_num_threads() == 2
    later = []
    thread = threading.Thread(target=lambda: later.append(torch.get_num_threads()))
    thread.start()
    thread.join()
    assert later == [2]


def test_threads_that_work_are_waited_for_at_exit_whatever_is_interrupted():
    """A thread that is not, but calls torch while the interpreter goes down, aborts the process."""
    main, working, go_on = threading.main_thread(), [], threading.Event()

    def work(item: int) -> None:
        working.append(threading.current_thread())
        for _ in range(2 if len(working) == 2 else 0):  # once while items are waited for, once while threads are
            signal.pthread_kill(main.ident, signal.SIGINT)
            time.sleep(0.05)
        go_on.wait(30)

    with pytest.raises(KeyboardInterrupt):
        for_each(work, range(4))
    alive = [thread.is_alive() for thread in working]
    go_on.set()
    assert alive == [True, True]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
def test_threads_write_to_what_the_caller_made_in_its_own_mode(mode):
    with mode():
        rows = torch.zeros(6, 3)

        def work(item: int) -> None:
            rows[item] = torch.ones(3, requires_grad=False) * item

        for_each(work, range(6))
    assert rows.sum(1).tolist() == [0, 3, 6, 9, 12, 15]


@pytest.mark.parametrize(("items", "elements"), [(4, 2 * THREAD_ELEMENTS - 1), (1, 100 * THREAD_ELEMENTS)])
def test_small_work_and_a_single_item_take_the_callers_thread_alone(items: int, elements: int):
    seen = []
    spread(
        lambda item: seen.append((torch.get_num_threads(), threading.current_thread())),
        range(items),
        elements=elements,
        device=CPU,
    )
    assert seen == [(1, threading.main_thread())] * items
    assert torch.get_num_threads() == 2


def test_large_work_takes_as_many_threads_as_pay():
    both = threading.Barrier(2)  # two items at once, else it breaks
    alone = []

    def work(item: int) -> None:
        both.wait(30)
        alone.append((torch.get_num_threads(), threading.current_thread() is threading.main_thread()))

    with torch_threads(4):
        spread(work, range(2), elements=100 * THREAD_ELEMENTS, device=CPU)
        assert torch.get_num_threads() == 4
    assert alone == [(1, False)] * 2


def test_small_work_that_fails_gives_the_threads_back():
    def fail(item: int) -> None:
        raise ValueError(f"item {item}")

    with pytest.raises(ValueError, match="item 0"):
        spread(fail, range(4), elements=0, device=CPU)
    assert torch.get_num_threads() == 2
