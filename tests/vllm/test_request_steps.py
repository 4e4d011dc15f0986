"""Both model runners of vLLM tell of the requests of each step, and replay no graph where a prompt has a single row."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from plans_samples import model_info
from tiny_plans import segment

from sparsekv.plans.phases import DecodeBucket, DecodePlan
from sparsekv.runtime.core.pays import ALWAYS
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.paged.metrics import Counters
from sparsekv.runtime.paged.step_rows import DecodeHost
from sparsekv.runtime.vllm import cache_internals
from sparsekv.runtime.vllm.attention_backend import SparseBuilder
from sparsekv.runtime.vllm.evicted_blocks import Requests


def output(rows: dict[str, int], **prompts: int) -> Any:
    new = [
        SimpleNamespace(req_id=name, prompt_token_ids=[1] * tokens, prompt_embeds=None, num_computed_tokens=0)
        for name, tokens in prompts.items()
    ]
    return SimpleNamespace(
        num_scheduled_tokens=rows, scheduled_new_reqs=new, finished_req_ids=set(),
        scheduled_cached_reqs=SimpleNamespace(resumed_req_ids=set()),
    )  # fmt: skip


class Runner:
    """Has the names that are used of either."""

    def __init__(self, config: Any, is_v2: bool) -> None:
        self.vllm_config, self._is_v2 = config, is_v2
        self.cudagraph_manager = SimpleNamespace(_graphs_captured=True)
        self.cudagraph_dispatcher = SimpleNamespace(keys_initialized=True)
        self.input_batch = SimpleNamespace(req_ids=[])

    def prepare_attn(self, input_batch: Any) -> str:
        return "tables"

    def execute_model(self, scheduler_output: Any, *, requests: Requests) -> tuple[Any, bool]:
        rows = sorted(scheduler_output.num_scheduled_tokens, reverse=True)
        self.input_batch = SimpleNamespace(req_ids=rows)
        if self._is_v2:
            assert self.prepare_attn(SimpleNamespace(req_ids=rows)) == "tables"
        graphs = (self.cudagraph_manager._graphs_captured, self.cudagraph_dispatcher.keys_initialized)
        return requests.rows, all(graphs)


@pytest.mark.parametrize("is_v2", [False, True], ids=["first", "second"])
def test_steps_are_told_of_and_those_with_a_single_row_of_a_prompt_are_launched(
    monkeypatch: pytest.MonkeyPatch, is_v2: bool
) -> None:
    requests, config = Requests(), SimpleNamespace(use_v2_model_runner=is_v2)
    module = "vllm.v1.worker.gpu.model_runner" if is_v2 else "vllm.v1.worker.gpu_model_runner"
    own = type("OwnRunner", (Runner,), {name: getattr(Runner, name) for name in ("execute_model", "prepare_attn")})
    monkeypatch.setattr(f"{module}.GPUModelRunner", own)
    for _ in range(2):  # two engines in one process
        cache_internals.follow_steps(config, lambda found: requests if found is config else None)
    runner = own(config, is_v2)
    assert runner.execute_model(output({"a": 3, "b": 4}, a=4, b=4), requests=requests) == ([("b", 4), ("a", 4)], True)
    assert runner.execute_model(output({"a": 1, "b": 1}), requests=requests) == ([("b", 4), ("a", 4)], False)
    assert runner.execute_model(output({"a": 1, "b": 1}), requests=requests) == ([("b", 4), ("a", 4)], True)
    assert requests.rows == []
    other = own(SimpleNamespace(use_v2_model_runner=is_v2), is_v2)
    assert other.execute_model(output({"c": 1}, c=1), requests=requests) == ([], True)


def test_a_request_beside_a_drafter_chooses_where_one_of_its_rows_does() -> None:
    """Its newest token, and those that are verified, lie on both sides of a bucket's end."""
    buckets = (
        DecodeBucket(up_to=90, dense=True),
        DecodeBucket(up_to=200, segments=(segment(0, (1,), 40),)),
        DecodeBucket(up_to=None, dense=True),
    )
    program = Program.of(None, DecodePlan(lengths=buckets), model_info(layers=2, heads=4, kv_heads=2))
    decode = DecodeHost(program, "cpu", 2, 320, torch.device("cpu"), queries=4)
    host = SimpleNamespace(pays=ALWAYS, queries=4, counters=Counters(), dense_graphs=True, holds_dense=True)
    builder: Any = SimpleNamespace(_graph_rows=8, _counts=True)
    chose = []
    for lengths in ([202, 90], [203, 90], [204, 90], [204, 91]):  # of the last row of each: four, and one
        common = SimpleNamespace(
            query_start_loc=torch.tensor([0, 4, 5], dtype=torch.int32), block_table_tensor=torch.ones(2, 20).int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
        )  # fmt: skip
        rows = SparseBuilder._decode(builder, host, decode, common, ([0, 4, 5], lengths, [False, False]), 2)
        chose.append((rows is not None, not host.decodes_dense))
    assert chose == [(True, True), (True, True), (False, False), (True, True)]
    assert host.counters.read().decode_sparse == 2 + 1 + 0 + 1
