"""Calls are timed in turn, what does not run is named and not dropped, and rows keep the keys that scripts rely on."""

import time
import warnings
from functools import partial

import pytest
import torch

from sparsekv.bench import dense_kernels
from sparsekv.bench.dense_kernels import dense_calls, dense_flops, time_calls, time_dense
from sparsekv.bench.harness import DensePeers, measure

CPU = torch.device("cpu")


def test_every_call_runs_in_every_round_and_every_other_round_is_backwards():
    ran: list[str] = []
    calls = {name: partial(ran.append, name) for name in ("dense", "index", "whole")}
    found = measure(calls, CPU, rounds=3)
    assert found.keys() == calls.keys()
    assert ran[:3] == ["dense", "index", "whole"]  # before the clock
    assert ran[3:] == ["dense", "index", "whole", "whole", "index", "dense", "dense", "index", "whole"]


def test_a_dense_kernel_that_does_not_run_is_refused_with_its_reason_and_other_warnings_are_passed_on():
    def broken():
        warnings.warn("not used because:\n(Triggered internally at /a/sdp_utils.cpp:9.)", stacklevel=1)
        raise RuntimeError("no such kernel\nand more")

    with warnings.catch_warnings(record=True) as told:
        good = partial(warnings.warn, "odd", stacklevel=1)
        peers = time_calls({"good": good, "broken": broken}, 128, CPU, rounds=2)
    assert (peers.fastest, peers.refused) == ("good", {"broken": "RuntimeError: no such kernel"})
    assert {str(warning.message) for warning in told} == {"odd"}
    assert DensePeers(128, {}, peers.refused).fastest is None


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
def test_dense_kernels_agree_with_one_another(kv_heads):
    random = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, heads, 130, 32, generator=random) for heads in (4, kv_heads, kv_heads))
    calls = dense_calls(q, k, v)
    outputs = [getattr(call(), "out_BHSD", None) if name == "torch SDPA" else call() for name, call in calls.items()]
    assert len(outputs) == 2
    torch.testing.assert_close(outputs[0], outputs[1], atol=1e-5, rtol=1e-5)
    assert dense_flops(1, 1, 3) == 4 * 6


@pytest.mark.parametrize(("fits", "timed"), [(True, "fast"), (False, "slow")])
def test_of_a_very_long_prompt_only_the_fastest_on_a_part_that_runs_on_all_of_it_is_timed(monkeypatch, fits, timed):
    lengths = []

    def calls(q_BHSD, *_):
        def run(name, seconds):
            lengths.append((name, q_BHSD.shape[2]))
            if name == "fast" and q_BHSD.shape[2] == 256 and not fits:
                raise torch.OutOfMemoryError("CUDA out of memory")
            time.sleep(seconds)

        return {"slow": partial(run, "slow", 0.02), "fast": partial(run, "fast", 0.001)}

    monkeypatch.setattr(dense_kernels, "dense_calls", calls)
    peers = time_dense(*(torch.randn(1, heads, 256, 16) for heads in (4, 2, 2)), rounds=1, ranked_from=256)
    assert (peers.length, list(peers.timed_ms), len(peers.refused)) == (256, [timed], 1)
    assert (("slow", 256) in lengths) == (not fits)
    assert ("slow", 64) in lengths
