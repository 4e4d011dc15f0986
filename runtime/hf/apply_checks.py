"""Checks what `apply` and its handle are given, once, before anything runs."""

from __future__ import annotations

from types import UnionType
from typing import get_args

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.backends import float8_obstacle
from sparsekv.plans.errors import BackendError, UsageError
from sparsekv.plans.types import KVDtype
from sparsekv.runtime.hf.describe import config_of
from sparsekv.runtime.hf.placement import OffloadMode
from sparsekv.runtime.model_config import rope_switch
from sparsekv.runtime.plan_checks import Host


def check_sizes(answer: object, *, tokens: int, **sizes: object) -> None:
    """Raises UsageError where an answer or a size of `Handle.new_cache` is none."""
    for name, count in {"tokens": tokens, **sizes}.items():
        if type(count) is not int or count < 1:
            raise UsageError(f"expected {name} of 1 or more, found {count!r:.40}")
    if type(answer) is not int or not 0 <= answer < tokens:
        raise UsageError(f"expected answer to be 0 to {tokens - 1} of the {tokens} tokens, found {answer!r:.40}")


def check_offload(mode: object, host_layers: object) -> None:
    """Raises UsageError where `offload` is no mode, or stands beside `kv_host_layers`."""
    if mode is None:
        return
    if mode not in get_args(OffloadMode):
        raise UsageError(f"expected offload to be {', '.join(get_args(OffloadMode))}, found {mode!r:.40}")
    if host_layers is not None:
        raise UsageError(f"expected offload or kv_host_layers, found both: {mode} and {host_layers!r:.40}")


def check_kv_dtype(kv_dtype: object, backend: str, device: torch.device) -> bool:
    """Returns whether keys and values are in 8 bits.

    Raises:
        UsageError: `kv_dtype` is none.
        BackendError: the backend does not read it there.
    """
    if kv_dtype not in get_args(KVDtype):
        raise UsageError(f"expected kv_dtype to be {' or '.join(get_args(KVDtype))}, found {kv_dtype!r:.40}")
    if kv_dtype == "fp8" and (obstacle := float8_obstacle(backend, device)):
        raise BackendError(f"expected a device for keys and values in fp8, found {device}: {obstacle}; leave it out")
    return kv_dtype == "fp8"


def host_of(model: PreTrainedModel, exact: bool) -> Host:
    """Drafts would leave older queries behind, and cannot be taken back where rotary angles change."""
    switch = rope_switch(config_of(model)) if exact else 0
    changes = f"exact output where rotary angles are others from {switch + 1} tokens on: leave exact out"
    return Host(older_queries=not exact, drafts=exact, obstacles=(changes,) if switch else ())


def check_type(kind: type | UnionType, expected: str, **arguments: object) -> None:
    """Raises UsageError where an argument is of another type."""
    for name, value in arguments.items():
        if not isinstance(value, kind):
            raise UsageError(f"expected {name} to be {expected}, found {value!r:.80}")
