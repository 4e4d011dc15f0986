"""The scheduler of exact output in vLLM (docs/exact.md): vLLM's own, which asks for drafts where they pay."""

from __future__ import annotations

import time
from typing import Any

from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler

from sparsekv.plans.files import load_plan
from sparsekv.runtime.paged.metrics import publish_drafts
from sparsekv.runtime.vllm import internals as vllm
from sparsekv.runtime.vllm.exact_engine import Drafting, Step, dense_up_to
from sparsekv.runtime.vllm.settings import plan_path, read_options


class _Asking(Scheduler):
    """Asks for drafts behind each step, and sees which of them count."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.vllm_config
        path = plan_path(
            read_options(config.additional_config), config.model_config.model, config.model_config.revision
        )
        assert path is not None, "its configuration was made with a plan"
        self.drafting = Drafting(
            self.num_spec_tokens, dense_up_to(load_plan(path)), lambda line: vllm.logger.info("sparsekv: %s", line),
            publish_drafts,
        )  # fmt: skip
        self._accepted: dict[str, int] = {}

    def _update_after_schedule(self, scheduler_output: Any) -> None:
        rows = scheduler_output.num_scheduled_tokens
        lengths = {request: self.requests[request].num_computed_tokens + new for request, new in rows.items()}
        scheduler_output.num_spec_tokens_to_schedule = self.drafting.next(lengths)
        super()._update_after_schedule(scheduler_output)

    def update_from_output(self, scheduler_output: Any, model_runner_output: Any) -> Any:
        self._accepted.clear()
        rows = scheduler_output.num_scheduled_tokens
        known = {request: self.requests[request].num_computed_tokens for request in rows if request in self.requests}
        output = super().update_from_output(scheduler_output, model_runner_output)
        drafts = {request: len(drafts) for request, drafts in scheduler_output.scheduled_spec_decode_tokens.items()}
        if rows:
            lengths = {request: known.get(request, 0) for request in rows}
            self.drafting.ran(Step(rows, drafts, dict(self._accepted), lengths), time.monotonic())
        return output

    def make_spec_decoding_stats(
        self, spec_decoding_stats: Any, num_draft_tokens: int, num_accepted_tokens: int, num_invalid_spec_tokens: Any,
        request_id: str,
    ) -> Any:  # fmt: skip
        """vLLM's own, which it calls for each request that had drafts."""
        self._accepted[request_id] = num_accepted_tokens
        return super().make_spec_decoding_stats(
            spec_decoding_stats, num_draft_tokens, num_accepted_tokens, num_invalid_spec_tokens, request_id
        )


class _AskingAhead(_Asking, AsyncScheduler):
    """Schedules a step before the one before it is over."""


def exact_scheduler(vllm_config: Any, **given: Any) -> Any:
    kind = _AskingAhead if vllm_config.scheduler_config.async_scheduling else _Asking
    return kind(vllm_config=vllm_config, **given)
