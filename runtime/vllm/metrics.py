"""Reports what an engine computed by a plan, for Prometheus.

These counts are made where the model runs, which is another process than the one that answers /metrics. A server shows
them where Prometheus collects from several processes: with several API servers, for which vLLM arranges that, and with
PROMETHEUS_MULTIPROC_DIR, which names an empty folder, in the environment of the server.
"""

from __future__ import annotations

from collections.abc import Mapping

from prometheus_client import Counter

from sparsekv.runtime.vllm.counters import ServingStats
from sparsekv.runtime.vllm.drafting import Drafted

# Of a process, whatever engines it has: that is how Prometheus counts, and a name can be registered once.
_TOKENS = Counter(
    "sparsekv_prompt_tokens", "Prompt tokens prefilled, by whether the plan is sparse at their length.", ["plan"]
)
_TILES = Counter(
    "sparsekv_prefill_tiles",
    "Attention tiles of prefill over all heads and layers: computed, and causal, which are all that dense computes.",
    ["kind"],
)
_FAILURES = Counter(
    "sparsekv_prefill_failures", "Chunks of a layer that were to be sparse and ran dense after an error."
)
_DECODED = Counter(
    "sparsekv_decode_tokens",
    "Decoded tokens: sparse in all layers of segments, dense in some, dense for want of score scratch (of the dense).",
    ["plan"],
)
_DRAFTS = Counter(
    "sparsekv_draft_tokens",
    "Tokens that the plan drafted, and those that counted, by context length.",
    ["kind", "length"],
)


def publish(new: ServingStats) -> None:
    """Adds the counts that came since the last report."""
    _TOKENS.labels("sparse").inc(new.sparse_tokens)
    _TOKENS.labels("dense").inc(new.dense_tokens)
    _TILES.labels("computed").inc(new.tiles_computed)
    _TILES.labels("causal").inc(new.tiles_causal)
    _FAILURES.inc(new.failures)
    _DECODED.labels("sparse").inc(new.decode_sparse)
    _DECODED.labels("dense").inc(new.decode_dense)
    _DECODED.labels("no_scratch").inc(new.decode_left)


def publish_drafts(new: Mapping[str, Drafted]) -> None:
    """Adds the drafts that came since the last report, by length."""
    for length, one in new.items():
        _DRAFTS.labels("drafted", length).inc(one.drafted)
        _DRAFTS.labels("accepted", length).inc(one.accepted)
