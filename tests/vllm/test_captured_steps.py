"""The steps that vLLM captures: of the sizes that exact output asks for; a second time, without our kernels."""

from types import SimpleNamespace
from typing import Any

import pytest
from captured_steps import captured
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

from sparsekv.runtime.core.pays import Pays, Thresholds
from sparsekv.runtime.vllm import internals
from sparsekv.runtime.vllm.exact_engine import capture_sizes


def manager(sizes: list[int], rows: int, drafted: int, decode_query_len: int) -> Any:
    """vLLM's own, of an engine that exact output has configured."""
    speculative = SimpleNamespace(
        uses_dynamic_speculative_decoding=lambda: True,
        num_speculative_tokens_per_batch_size=[[1, 1, 0], [2, 2, drafted]],
    )
    config: Any = SimpleNamespace(
        scheduler_config=SimpleNamespace(max_num_seqs=rows),
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=sizes, max_cudagraph_capture_size=max(sizes)),
        parallel_config=SimpleNamespace(tensor_parallel_size=1),
        cache_config=SimpleNamespace(use_kda_recoverssm=False),
        speculative_config=speculative,
        num_speculative_tokens=drafted,
    )
    full = CUDAGraphMode.FULL_DECODE_ONLY
    return cudagraph_utils.CudaGraphManager(config, "cpu", full, decode_query_len)


@pytest.mark.parametrize("drafted", [1, 4, 7])
@pytest.mark.parametrize("rows", [2, 9, 41, 256, 450, 1024])
def test_vllm_captures_the_steps_that_are_expected(monkeypatch: pytest.MonkeyPatch, drafted: int, rows: int) -> None:
    group = SimpleNamespace(is_first_rank=True, is_last_rank=True)
    monkeypatch.setattr(cudagraph_utils, "get_pp_group", lambda: group)
    monkeypatch.setattr(cudagraph_utils.current_platform, "get_global_graph_pool", lambda: None, raising=False)
    sizes = capture_sizes(drafted, (rows,))
    for most, lengths in ((drafted + 1, (1, drafted + 1)), (1, (1,))):
        made = manager(sizes, rows, drafted, most)._capture_descs[CUDAGraphMode.FULL]
        assert {(one.num_tokens, one.uniform_token_count) for one in made} == captured(sizes, rows, lengths)


class Manager:
    """Of captured steps, each of which is what its layers decode by."""

    def __init__(self, host: Any, steps: list[Any], samples: list[int] | None = None) -> None:
        self.vllm_config, self.graphs, self._capture_mem_samples = host, {}, samples
        self._capture_descs = {CUDAGraphMode.FULL: steps, CUDAGraphMode.PIECEWISE: [object()]}

    def capture(self) -> None:
        for step in self._capture_descs[CUDAGraphMode.FULL]:
            assert step not in self.graphs
            self.graphs[step] = self.vllm_config.decode

    def run_fullgraph(self, step: Any) -> Any:
        return self.graphs[step]


def managed(monkeypatch: pytest.MonkeyPatch) -> type[Manager]:
    class Ours(Manager):
        pass

    monkeypatch.setattr(cudagraph_utils, "ModelCudaGraphManager", Ours)
    monkeypatch.setattr(internals, "graph_rows", lambda config: 8)
    assert internals.hold_dense_graphs(config_of(), lambda host: host)
    return Ours


def test_steps_in_which_nothing_chooses_are_replayed_without_our_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    steps = [step(num_reqs=rows) for rows in (1, 4, 8)]
    host = engine(holds_dense=True, pays=Pays(decode=Thresholds((4,), (4096,))))
    manager = managed(monkeypatch)(host, steps)
    for _ in range(2):  # an engine that grows captures anew
        manager.graphs.clear()
        manager.capture()
        replayed = {}
        for host.decodes_dense in (True, False):
            replayed[host.decodes_dense] = [manager.run_fullgraph(step) for step in steps]
        assert replayed == {True: ["plan", None, None], False: ["plan"] * 3}  # one row never pays: it has none of ours
        assert host.decode == "plan"
        assert len(manager._capture_descs) == 2


def test_few_steps_are_captured_once_to_measure_memory_which_all_take_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    host = engine(holds_dense=True)
    manager = managed(monkeypatch)(host, [step(num_reqs=1)], samples=[100, 10])
    manager.capture()
    assert manager._capture_mem_samples == [100, 20]
    host.decodes_dense = True
    assert manager.run_fullgraph(step(num_reqs=1)) == "plan"


def test_engines_that_cannot_hold_two_sets_have_one(monkeypatch: pytest.MonkeyPatch) -> None:
    host = engine(holds_dense=False, decodes_dense=True)
    manager = managed(monkeypatch)(host, [step(num_reqs=1)])
    manager.capture()
    assert manager.run_fullgraph(step(num_reqs=1)) == "plan"
    assert not internals.hold_dense_graphs(config_of(use_v2_model_runner=False), lambda host: host)
    assert not internals.hold_dense_graphs(config_of(data_parallel_size=2), lambda host: host)


def config_of(use_v2_model_runner: bool = True, data_parallel_size: int = 1) -> Any:
    parallel = SimpleNamespace(data_parallel_size=data_parallel_size)
    return SimpleNamespace(use_v2_model_runner=use_v2_model_runner, parallel_config=parallel)


def engine(**given: Any) -> Any:
    """As `EngineHost` has them."""
    return SimpleNamespace(**{"decode": "plan", "dense_graphs": False, "decodes_dense": False, "pays": Pays(), **given})


def step(num_reqs: int) -> Any:
    return cudagraph_utils.BatchExecutionDescriptor(CUDAGraphMode.FULL, num_reqs, num_reqs)
