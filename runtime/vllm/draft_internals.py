"""Holds what is taken from inside vLLM for exact output (docs/exact.md), but for the speculator and the scheduler: as
`internals.py`, and checked by contract.py like it."""

from __future__ import annotations

from functools import wraps
from typing import Any

from vllm.config import VllmConfig
from vllm.engine.arg_utils import EngineArgs
from vllm.platforms import current_platform

from sparsekv.runtime.vllm.exact_engine import ask_for_drafts

_REPLACED = "sparsekv_given"  # what a method that was replaced by ours was, on ours


def draft_where_asked() -> None:
    """Has configurations of engines be made with what exact output takes, where their arguments ask for it: nothing of
    vLLM lets a plugin choose a drafter."""
    given = EngineArgs.create_engine_config
    if hasattr(given, _REPLACED):  # once in a process
        return

    @wraps(given)
    def create_engine_config(self: EngineArgs, *args: Any, **kwargs: Any) -> VllmConfig:
        ask_for_drafts(self)
        return given(self, *args, **kwargs)

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
