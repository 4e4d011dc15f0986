"""Calls are timed in turn, and what does not run is named, not dropped."""

import time
import warnings
from functools import partial

import pytest
import torch

from sparsekv.bench.harness import (
    DensePeers,
    dense_calls,
    dense_flops,
    in_short,
    is_out_of_memory,
    measure,
    time_calls,
    time_dense,
)

CPU = torch.device("cpu")


def test_every_call_runs_in_every_round_and_every_other_round_is_backwards():
    ran: list[str] = []
    calls = {name: lambda name=name: ran.append(name) for name in ("dense", "index", "whole")}
    found = measure(calls, CPU, rounds=3)
    assert found.keys() == calls.keys()
    assert ran[:3] == ["dense", "index", "whole"]  # before the clock
    assert ran[3:] == ["dense", "index", "whole", "whole", "index", "dense", "dense", "index", "whole"]


def test_a_dense_kernel_that_does_not_run_is_refused_with_its_reason():
    def broken():
        raise RuntimeError("no such kernel\nand more")

    peers = time_calls({"good": lambda: None, "broken": broken}, 128, CPU, rounds=2)
    assert peers.fastest == "good"
    assert peers.refused == {"broken": "RuntimeError: no such kernel"}


def test_why_torch_does_not_take_a_kernel_is_no_warning_and_others_are_passed_on():
    def refused():
        warnings.warn(
            "Flash attention kernel not used because:\n(Triggered internally at /a/sdp_utils.cpp:9.)", stacklevel=1
        )
        raise RuntimeError("no such kernel")

    with warnings.catch_warnings(record=True) as told:
        time_calls({"refused": refused, "odd": lambda: warnings.warn("odd", stacklevel=1)}, 128, CPU, rounds=1)
    assert {str(warning.message) for warning in told} == {"odd"}


def test_without_any_dense_kernel_there_is_no_fastest():
    assert DensePeers(128, {}, {"all": "reason"}).fastest is None


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_kernels_agree_with_one_another(kv_heads):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 130, 32, generator=random) for heads in (4, kv_heads, kv_heads))
    calls = dense_calls(q, k, v)
    outputs = [getattr(call(), "out_BHSD", None) if name == "torch SDPA" else call() for name, call in calls.items()]
    assert len(outputs) == 2
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)


def test_running_out_of_memory_is_told_from_other_failures():
    assert is_out_of_memory(torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"))
    assert is_out_of_memory(MemoryError())
    assert is_out_of_memory(RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried ..."))
    assert not is_out_of_memory(RuntimeError("shapes do not fit"))
    assert in_short(torch.OutOfMemoryError("long story")) == "out of memory"
    assert in_short(ValueError("")) == "ValueError: "


def test_rates_count_the_causal_half():
    assert dense_flops(1, 1, 3) == 4 * 6


def test_of_a_very_long_prompt_only_the_kernel_that_is_fastest_on_a_part_of_it_is_timed():
    q, k, v = (torch.randn(1, heads, 256, 16) for heads in (4, 2, 2))
    sleeps = {"slow": 0.02, "fast": 0.001}
    lengths = []

    def calls(q_BHSD, k_BGSD, v_BGSD):
        def sleep(name):
            lengths.append((name, q_BHSD.shape[2], k_BGSD.shape[2]))
            time.sleep(sleeps[name])

        return {name: partial(sleep, name) for name in sleeps}

    peers = time_dense(q, k, v, rounds=1, ranked_from=256, kernels=calls)
    assert (peers.length, list(peers.timed_ms)) == (256, ["fast"])
    assert "times the time of fast at 64 tokens" in peers.refused["slow"]
    assert {place for place in lengths if place[1] == 256} == {("fast", 256, 256)}
    assert ("slow", 64, 64) in lengths


def test_of_a_very_long_prompt_the_next_kernel_is_timed_where_the_fastest_does_not_run():
    q, k, v = (torch.randn(1, heads, 256, 16) for heads in (4, 2, 2))

    def calls(q_BHSD, k_BGSD, v_BGSD):
        def fast():
            if q_BHSD.shape[2] == 256:
                raise torch.OutOfMemoryError("CUDA out of memory")

        return {"fast": fast, "slow": lambda: time.sleep(0.01)}

    peers = time_dense(q, k, v, rounds=1, ranked_from=256, kernels=calls)
    assert list(peers.timed_ms) == ["slow"]
    assert peers.refused == {"fast": "out of memory"}
