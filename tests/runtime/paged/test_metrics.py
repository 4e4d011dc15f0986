"""What an engine counts, and when it reports."""

import torch

from sparsekv.runtime.paged.metrics import REPORT_SECONDS, Counters


def counted(counters: Counters, tokens: int) -> None:
    counters.sparse_tokens += tokens
    counters.meter.add_sparse_prefill(torch.tensor([[25.0, 50.0]]), 300)


def test_a_report_comes_when_prompts_end_and_tells_what_came_since_the_last() -> None:
    counters = Counters()
    assert counters.report(1000.0, prefilling=False) is None
    counted(counters, 700)
    assert counters.report(1001.0, prefilling=True) is None
    assert str(counters.report(1002.0, prefilling=False)) == (
        "prefill density 0.250, 700 prompt tokens sparse, 0 dense"
    )
    assert counters.report(1002.0 + 2 * REPORT_SECONDS, prefilling=False) is None
    counted(counters, 1200)
    assert counters.report(1003.0 + 2 * REPORT_SECONDS, prefilling=False).sparse_tokens == 1200


def test_reports_keep_their_distance_and_come_in_the_midst_of_prompts_that_do_not_end() -> None:
    counters = Counters()
    counted(counters, 700)
    assert counters.report(1000.0, prefilling=False) is not None
    counted(counters, 700)
    assert counters.report(1000.0 + REPORT_SECONDS / 2, prefilling=False) is None
    assert counters.report(1000.0 + REPORT_SECONDS, prefilling=True) is None, "waiting for half an interval"
    assert counters.report(1000.0 + 2 * REPORT_SECONDS, prefilling=True) is not None


def test_failures_are_told_and_a_reset_forgets_everything() -> None:
    counters = Counters()
    counted(counters, 700)
    counters.failures, counters.decode_sparse, counters.decode_dense, counters.decode_left = 3, 70, 9, 2
    assert "3 chunks" in str(counters.read())
    assert "70 decoded tokens sparse, 9 dense (2 for" in str(counters.read())
    counters.reset()
    assert counters.read() == Counters().read()
