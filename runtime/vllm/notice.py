"""The entry point `vllm.stat_logger_plugins`, of which an API server makes one with its engine's configuration: it
announces a plan that nothing executes, as another backend was asked for, or is preferred on that GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from sparsekv.plans.errors import SparseKVError, UsageError
from sparsekv.runtime.vllm import internals as vllm
from sparsekv.runtime.vllm.settings import plan_path, read_options

_StatLogger: Any = vllm.stat_logger_base()


class PlanNotice(_StatLogger):
    """Logs no statistics: one line when a server starts that has a plan and does not run it, or its end where the plan
    is required."""

    def __init__(self, vllm_config: Any, engine_index: int = 0) -> None:
        line = unused_plan(vllm_config)
        if line is None or engine_index > 0:
            return
        options = read_options(vllm_config.additional_config)
        if options.requires(by_name=options.plan is not None):
            raise UsageError(line)
        vllm.logger.warning("sparsekv: %s", line)

    def record(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def log_engine_initialized(self) -> None:
        """Nothing."""


def unused_plan(config: Any) -> str | None:
    """Returns what to say about the plan of an engine whose backend does not execute it; None where there is nothing to
    say."""
    if vllm.runs_ours(config):
        return None
    options, model = read_options(config.additional_config), config.model_config
    try:
        path: Path | None = plan_path(options, model.model, model.revision)
    except SparseKVError as error:
        return str(error)
    if path is None:
        return None
    return (
        f"found a plan at {path}, which is not executed: attention runs by {vllm.backend_name(config)}; add "
        '--attention-backend FLASH_ATTN to run it, or --additional-config \'{"sparsekv": {"dense": true}}\' to leave it'
    )
