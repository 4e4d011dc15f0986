"""What vLLM captures of the sizes that exact output asks for is what other tests take it to be."""

from types import SimpleNamespace
from typing import Any

import pytest
from captured_steps import captured
from vllm.config.compilation import CUDAGraphMode
from vllm.v1.worker.gpu import cudagraph_utils

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
