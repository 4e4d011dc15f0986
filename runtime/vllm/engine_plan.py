"""Finds the plan of an engine, on all of its ranks alike, and says why one is not run."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path
from typing import Any

from sparsekv.plans.errors import BackendError, SparseKVError, UnsupportedError, UsageError
from sparsekv.runtime.vllm import internals as vllm
from sparsekv.runtime.vllm.engine_options import EngineOptions, plan_path, read_options

_NO_PLAN = b"\0" * 32  # in place of a digest


def plan_of(config: Any, options: EngineOptions) -> Path | None:
    """Returns the plan file of an engine, the same one on all of its ranks: else they would wait for each other."""
    model, trouble, digest = config.model_config, None, _NO_PLAN
    path: Path | None = None
    try:
        path = plan_path(options, model.model, model.revision)
        digest = _NO_PLAN if path is None else sha256(path.read_bytes()).digest()
    except SparseKVError as error:
        trouble = error
    except OSError as error:
        trouble = UsageError(f"expected a plan to be read at {path}, found: {error}; correct its rights, or remove it")
    each = [digest] if config.parallel_config.tensor_parallel_size == 1 else vllm.gather_bytes(digest)
    if trouble is None and any(one != each[0] for one in each):
        having = ", ".join(f"{rank}: {'none' if one == _NO_PLAN else one.hex()[:8]}" for rank, one in enumerate(each))
        trouble = UnsupportedError(
            f"expected one plan on all tensor-parallel ranks, found files with these digests (by rank): {having}; copy "
            "the same sparsekv.yaml beside the model on every machine"
        )
    if trouble is not None:
        say_dense(config, trouble)
        return None
    return path


def say_dense(config: Any, error: SparseKVError) -> None:
    """Raises the error where the plan is required, and one of a rank's own device: the others would wait for it."""
    options = read_options(config.additional_config)
    if isinstance(error, BackendError) and config.parallel_config.tensor_parallel_size > 1:
        raise error
    if options.requires(options.plan is not None or vllm.asks_for_ours(config)):
        raise error
    vllm.logger.warning(
        "sparsekv: the plan beside the model is not run, all attention is dense: %s (to end such an engine instead: "
        '--additional-config \'{"sparsekv": {"require": true}}\')',
        error,
    )
