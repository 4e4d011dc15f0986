"""Holds what is taken from inside vLLM for exact output (docs/exact.md), but for the speculator and the scheduler, and
where configurations of engines are made: as `internals.py`."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

_REPLACED = "sparsekv_given"  # what a method that was replaced by ours was, on ours


def follow_configs(before: Callable[[Any], None], after: Callable[[VllmConfig], None]) -> None:
    """Has arguments of engines be changed by one function, and the configuration that is made of them be seen by the
    other: nothing of vLLM lets a plugin choose a drafter."""
    given = EngineArgs.create_engine_config
    if hasattr(given, _REPLACED):  # once in a process
        return

    @wraps(given)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        before(self)
        config = given(self, *args, **kwargs)
        after(config)
        return config

    setattr(create_engine_config, _REPLACED, given)
    EngineArgs.create_engine_config = create_engine_config


def worker_class() -> Any:
    """Returns vLLM's own worker for this device."""
    if current_platform.is_cpu():
        from vllm.v1.worker.cpu_worker import CPUWorker

        return CPUWorker
    from vllm.v1.worker.gpu_worker import Worker

    return Worker


def beside_drafts(config: VllmConfig) -> tuple[str, ...]:
    """Returns the settings of an engine that exact output does not run with."""
    parallel, model = config.parallel_config, config.model_config
    there = {
        "--data-parallel-size": parallel.data_parallel_size > 1,
        "--enable-eplb": parallel.enable_eplb,
        "--enable-lora": config.lora_config is not None,
        "positions of several axes (M-RoPE)": model.uses_mrope,
        # Drafts begin with tokens, and a compiled model takes only one of the two.
        "prompts as embeddings": model.enable_prompt_embeds or model.supports_multimodal_inputs,
        # The target stands for its own draft model, whose configuration vLLM reads from its files alone.
        "--hf-overrides": isinstance(model.hf_overrides, dict) and bool(model.hf_overrides),
        "--max-model-len beyond what the model's files say": model.max_model_len < (model.original_max_model_len or 0),
    }
    return tuple(name for name, is_there in there.items() if is_there)
