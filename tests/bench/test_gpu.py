"""The bench on a CUDA GPU; run with `pytest -m gpu`."""

from dataclasses import replace

import pytest
import torch

from sparsekv.bench.decode import bench_decode, check_decode
from sparsekv.bench.hand_plans import decode_by_hand
from sparsekv.bench.harness import try_each
from sparsekv.bench.kernels import KernelBench, bench_kernels
from sparsekv.bench.random_model import random_model
from sparsekv.bench.step_attention import StepAttention
from sparsekv.bench.token_runs import DecodeBench
from sparsekv.plans.patterns import TileShape, tokens
from sparsekv.runtime.hf.placement import layouts_of

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("tile", [64, 128])
def test_every_backend_that_can_run_computes_what_its_index_stands_for(tile):
    bench = KernelBench(
        lengths=(4096,),
        densities=(0.3,),
        patterns=("mixed", "vertical_slash"),
        heads=8,
        kv_heads=2,
        tile=TileShape(query=tile, key=tile),
        device=torch.device("cuda"),
        dtype=torch.bfloat16,
        rounds=1,
    )
    rows = [row for row in bench_kernels(bench) if row.sparse_ms is not None]
    assert {row.backend for row in rows} >= {"triton"}
    for row in rows:
        assert row.own["error"] < 0.05, row
        assert row.own["mass"] > 0.9, row
        assert row.peers.fastest


def test_every_dense_kernel_of_a_decode_step_that_runs_computes_the_same():
    subject = random_model("tiny-retriever", device=torch.device("cuda"), dtype=torch.bfloat16, longest=8192, layers=2)
    layouts = tuple(replace(layout, batch=2) for layout in layouts_of(subject.model))
    calls = StepAttention(subject.info, layouts, 8000, "triton", 1).dense()
    found, refused = try_each(calls, lambda name: torch.stack(calls[name]()).float())
    assert {"sparsekv dense", "torch flash", "torch math, heads of a group as rows"} <= found.keys(), refused
    for name, out in found.items():
        torch.testing.assert_close(out, found["sparsekv dense"], atol=2e-3, rtol=2e-2, msg=name)


def test_decode_steps_are_captured_unless_the_selector_looks_back():
    bench = DecodeBench(lengths=(8192,), batches=(2,), repeats=1)
    subject = random_model("tiny-retriever", device=torch.device("cuda"), dtype=torch.bfloat16, longest=8192)
    plan, words = decode_by_hand(subject.info, 8192, tokens(256))
    (bucket,) = plan.decode.lengths
    segments = tuple(one.model_copy(update={"selector": "exponential", "window": 8}) for one in bucket.segments)
    looking = plan.decode.model_copy(update={"lengths": (bucket.model_copy(update={"segments": segments}),)})
    plans = {"last": plan, "exponential": plan.model_copy(update={"decode": looking})}
    check_decode(subject.info, plans, bench)
    last, _, captured, launched = bench_decode(subject, plans, words, bench)
    for row in (last, captured, launched):
        assert row.sparse_ms, row.note
        assert row.dense_ms, row.peers
    assert {"sparsekv dense", "torch flash", "torch math, heads of a group as rows"} <= last.peers.timed_ms.keys()
    assert 0 < captured.own["replay_ms"] < captured.sparse_ms
    assert "captured" not in captured.note
    assert launched.own["replay_ms"] is None
    assert "looks at older queries" in launched.note
