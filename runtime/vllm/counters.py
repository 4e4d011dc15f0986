"""Counts what an engine computed by a plan: counters, and when an engine reports them."""

from __future__ import annotations

import math
from dataclasses import astuple, dataclass
from typing import Any

from sparsekv.plans.errors import UsageError
from sparsekv.runtime.core.stats import Meter, RunStats

REPORT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class ServingStats:
    """Counts since the engine started or the last reset."""

    tiles_computed: float  # of prefill, over all heads and layers
    tiles_causal: int  # what dense prefill would have computed
    sparse_tokens: int  # of chunks that the plan computes sparse; again after a preemption counts again
    dense_tokens: int  # of chunks that it leaves dense
    failures: int  # chunks of a layer that were to be sparse, and that vLLM's own kernel computed after an error
    decode_sparse: int = 0  # decoded tokens that attended to a choice in all layers of segments
    decode_dense: int = 0  # that attended to everything in some
    decode_left: int = 0  # of these, those that the score scratch had no room for

    @property
    def prefill_density(self) -> float | None:
        """Computed tiles over those of dense attention in the same layers; None before the first prompt."""
        return self.tiles_computed / self.tiles_causal if self.tiles_causal else None

    def since(self, before: ServingStats) -> ServingStats:
        """The counts that came after `before`."""
        return ServingStats(*(new - old for new, old in zip(astuple(self), astuple(before), strict=True)))

    def __str__(self) -> str:
        density = "none" if self.prefill_density is None else f"{self.prefill_density:.3f}"
        failed = f", {self.failures:,} chunks of a layer dense after an error" if self.failures else ""
        return (
            f"prefill density {density}, {self.sparse_tokens:,} prompt tokens sparse, "
            f"{self.dense_tokens:,} dense{failed}{self._decoded}"
        )

    @property
    def _decoded(self) -> str:
        left = f" ({self.decode_left:,} for want of scratch)" if self.decode_left else ""
        some = self.decode_sparse or self.decode_dense
        return f"; {self.decode_sparse:,} decoded tokens sparse, {self.decode_dense:,} dense{left}" if some else ""

    @property
    def tokens(self) -> int:
        """All that were counted."""
        return self.sparse_tokens + self.dense_tokens + self.decode_sparse + self.decode_dense


_NONE = ServingStats(0.0, 0, 0, 0, 0)


class Counters:
    """The running counts of one engine."""

    def __init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Starts counting anew."""
        self.meter = Meter()
        self.sparse_tokens = self.dense_tokens = self.failures = 0
        self.decode_sparse = self.decode_dense = self.decode_left = 0
        self._reported = _NONE
        self._reported_at = -math.inf
        self._waiting_since: float | None = None

    def read(self) -> ServingStats:
        """The counts so far; waits for the device."""
        run: RunStats = self.meter.read()
        return ServingStats(
            run.prefill_tiles_computed, run.prefill_tiles_causal, self.sparse_tokens, self.dense_tokens, self.failures,
            self.decode_sparse, self.decode_dense, self.decode_left,
        )  # fmt: skip

    def report(self, now: float, prefilling: bool) -> ServingStats | None:
        """The counts since the last report, where it is time for one: at most once in REPORT_SECONDS, after prompts
        and among decoded tokens, and while prompts go on without end in between. It waits for the device.

        Args:
            now: seconds of a clock that never goes back.
            prefilling: whether the step that begins prefills as well.
        """
        decoded = self.decode_sparse + self.decode_dense
        if self.sparse_tokens + self.dense_tokens + decoded == self._reported.tokens:
            return None
        self._waiting_since = now if self._waiting_since is None else self._waiting_since
        if now - (self._waiting_since if prefilling else self._reported_at) < REPORT_SECONDS:
            return None
        stats = self.read()
        new = stats.since(self._reported)
        self._reported, self._reported_at, self._waiting_since = stats, now, None
        return new


def serving_stats(llm: Any) -> ServingStats:
    """The counts of a `vllm.LLM`'s engine that runs a plan.

    With the engine in another process (the default of vLLM), set VLLM_ALLOW_INSECURE_SERIALIZATION=1: vLLM sends the
    function that reads them there.

    Raises:
        UsageError: the engine runs no plan.
    """
    found: list[ServingStats | None] = llm.apply_model(_read)
    if found[0] is None:
        raise UsageError(
            "expected an engine that runs a plan, found one without; give it a plan, or a model with one, and on a GPU "
            'attention_config={"backend": "FLASH_ATTN"} where vLLM chose another'
        )
    return found[0]


def reset_stats(llm: Any) -> None:
    """Starts counting anew in a `vllm.LLM`'s engine. See `serving_stats`."""
    llm.apply_model(_reset)


def serving_backend(llm: Any) -> str | None:
    """The kernels that prefill in a `vllm.LLM`'s engine; None where it runs no plan. See `serving_stats`."""
    found: list[str | None] = llm.apply_model(_backend)
    return found[0]


def plan_host(model: Any) -> Any:
    """The plan that the attention layers of a model share."""
    hosts = (getattr(getattr(module, "impl", None), "plan_host", None) for module in model.modules())
    return next((host for host in hosts if host is not None), None)


def _counters(model: Any) -> Counters | None:
    host = plan_host(model)
    return None if host is None else host.counters


def _backend(model: Any) -> str | None:
    host = plan_host(model)
    return None if host is None else host.backend


def _read(model: Any) -> ServingStats | None:
    counters = _counters(model)
    return None if counters is None else counters.read()


def _reset(model: Any) -> None:
    counters = _counters(model)
    if counters is not None:
        counters.reset()
