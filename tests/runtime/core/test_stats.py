"""Counts of a run, as people read them."""

from sparsekv.runtime.core.stats import Meter, RunStats


def test_statistics_show_the_shares_that_follow_from_their_counts():
    meter = Meter()
    assert repr(meter.read()) == "RunStats()"
    meter.add_dense_prefill(3)
    meter.add_decode(1, 8)
    shown = repr(meter.read(kv_bytes_device=64))
    assert "kv_bytes_device=64" in shown
    assert "prefill_density=1" in shown
    assert "decode_share=0.125" in shown
    assert "acceptance" not in shown
    assert repr(RunStats(0, 0, 0, 0, 0, 0, host_tokens_chosen=8, host_tokens_fetched=2)).endswith("miss_share=0.25)")
