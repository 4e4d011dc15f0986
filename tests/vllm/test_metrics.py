"""Counters for Prometheus, where the model runs and in the server's process."""

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from prometheus_client import REGISTRY
from vllm.v1.metrics.prometheus import get_prometheus_registry
from vllm_engine import CROSSOVER, generate

from sparsekv.runtime.vllm.engine_host import serving_stats

SAMPLES = {
    "sparse_tokens": ("sparsekv_prompt_tokens_total", {"plan": "sparse"}),
    "dense_tokens": ("sparsekv_prompt_tokens_total", {"plan": "dense"}),
    "tiles_computed": ("sparsekv_prefill_tiles_total", {"kind": "computed"}),
    "tiles_causal": ("sparsekv_prefill_tiles_total", {"kind": "causal"}),
    "failures": ("sparsekv_prefill_failures_total", {}),
}
DECODED = {kind: ("sparsekv_decode_tokens_total", {"plan": kind}) for kind in ("sparse", "dense", "no_scratch")}
RULE = {"rule": ("sparsekv_rule", {"prefill": "8kx512", "decode": "never"})}
PUBLISHES = """
from sparsekv.runtime.core.pays import parse
from sparsekv.runtime.paged.metrics import ServingStats, publish

prompts = {"tiles_computed": 25.5, "tiles_causal": 100, "sparse_tokens": 700, "dense_tokens": 30, "failures": 2}

for _ in range(2):
    new = ServingStats(**prompts, decode_sparse=9, decode_dense=5, decode_left=1)
    publish(new, parse("prefill=8kx512 decode=never"))
"""


def test_what_an_engine_prefilled_is_added_when_prompts_have_ended(engine: Any, prompts: dict[int, list[int]]) -> None:
    before = {name: REGISTRY.get_sample_value(*sample) for name, sample in SAMPLES.items()}
    generate(engine, [prompts[700][:CROSSOVER], prompts[2000]])
    stats = serving_stats(engine)
    for name, sample in SAMPLES.items():
        added = REGISTRY.get_sample_value(*sample) - (before[name] or 0.0)
        assert added == pytest.approx(getattr(stats, name)), name
    assert 0 < stats.tiles_computed < stats.tiles_causal


def test_a_server_in_another_process_shows_them_where_prometheus_collects_from_several(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("PROMETHEUS_MULTIPROC_DIR", str(tmp_path))
    subprocess.run([sys.executable, "-c", PUBLISHES], check=True)
    registry = get_prometheus_registry()
    shown = {name: registry.get_sample_value(*sample) for name, sample in (SAMPLES | DECODED | RULE).items()}
    assert shown == {
        "sparse_tokens": 1400, "dense_tokens": 60, "tiles_computed": 51, "tiles_causal": 200, "failures": 4,
        "sparse": 18, "dense": 10, "no_scratch": 2, "rule": 1,
    }  # fmt: skip
