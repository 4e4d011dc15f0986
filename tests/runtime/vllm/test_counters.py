"""What an engine counts, and when it logs."""

import torch

from sparsekv.runtime.vllm.counters import LOG_SECONDS, Counters


def counted(counters: Counters, tokens: int) -> None:
    counters.sparse_tokens += tokens
    counters.meter.add_sparse_prefill(torch.tensor([[25.0, 50.0]]), 300)


def test_a_line_comes_at_most_once_an_interval_only_after_prompts_and_tells_what_came_since_the_last() -> None:
    counters, start = Counters(), 1000.0
    assert counters.line(start) is None
    counted(counters, 700)
    assert counters.line(start) == (
        "prefill density 0.250, 700 prompt tokens sparse, 0 at lengths where the plan is dense"
    )
    counted(counters, 1200)
    assert counters.line(start + LOG_SECONDS / 2) is None
    assert "1,200 prompt tokens sparse" in counters.line(start + LOG_SECONDS)
    assert counters.line(start + 3 * LOG_SECONDS) is None


def test_failures_are_told_and_a_reset_forgets_everything() -> None:
    counters = Counters()
    counted(counters, 700)
    counters.failures = 3
    assert str(counters.read()).endswith("3 chunks of a layer dense after an error")
    counters.reset()
    assert (counters.read().prefill_density, counters.read().failures) == (None, 0)
