"""One prefill of one prompt, timed from the tokens to the last logits, in each way that it can be run.

Caches are made before the clock starts: page-locking host memory is not counted.

Shapes: S tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from sparsekv.planner.bench.dense_peers import FLASH_ATTN, flash_attn_4
from sparsekv.planner.bench.timing import wait_for
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.cache import SparseLayer
from sparsekv.runtime.hf.capture import AttentionCall, capture_attention
from sparsekv.runtime.hf.describe import decoder_of
from sparsekv.runtime.hf.generate import piece_sizes

MakeCache = Callable[[int], Cache]
Told = tuple[RunStats | None, str | None, str]  # see Run
Way = Callable[[], AbstractContextManager[tuple[MakeCache, Callable[[], Told]]]]


@dataclass(frozen=True, slots=True)
class Run:
    """One prefill."""

    milliseconds: float
    peak: int | None  # most bytes of device memory, weights included; None on a CPU
    stats: RunStats | None  # where a plan was applied
    backend: str | None = None  # that computed prefill in the end, where a plan was applied: one that fails is replaced
    builder_failed: str = ""  # why torch built the indices in place of Triton


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs share."""

    model: PreTrainedModel
    plan: Plan
    backend: str
    kv_host_layers: int | None
    chunk: int | None  # most tokens given to the model at once; None is all

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return self.model.device

    def sparse(self) -> Way:
        """By the plan."""
        return lambda: _applied(self, True)

    def dense(self) -> dict[str, Way]:
        """Every way to run dense: the unmodified model, this runtime, and the model with flash-attn-4 in its place."""
        model = self.model
        ways: dict[str, Way] = {
            "transformers, SDPA": lambda: _unmodified(model),
            "sparsekv dense": lambda: _applied(self, False),  # by the backend's own dense kernel
        }
        if self.device.type == "cuda":  # whatever the backend is: where it is installed, it counts
            ways[f"transformers, {FLASH_ATTN}"] = lambda: _captured(model, _by_flash_attn)
        return ways


def run_prefill(setting: Setting, way: Way, ids_1S: torch.Tensor, layers: int | None = None) -> Run:
    """Prefills once.

    Args:
        layers: only the first of the model's; None for all.

    Raises:
        Whatever the model raises: out of memory, a kernel that does not run here.
    """
    device, length = setting.device, ids_1S.shape[1]
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
    with torch.no_grad(), way() as (new_cache, told), _first_layers(setting.model, layers):
        # Room for layers that do not run may be more than there is.
        cache: Any = new_cache(length if layers is None else 1)
        for layer in cache.layers[: layers or 0]:
            if isinstance(layer, SparseLayer):
                layer.reserve(length)
        wait_for(device)
        start = time.perf_counter()
        at = 0
        for size in [length] if setting.chunk is None else piece_sizes(length, setting.chunk):
            setting.model(ids_1S[:, at : at + size], past_key_values=cache, use_cache=True, logits_to_keep=1)
            at += size
        wait_for(device)
        elapsed = (time.perf_counter() - start) * 1e3
        peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
        return Run(elapsed, peak, *told())


@contextmanager
def _first_layers(model: PreTrainedModel, count: int | None) -> Iterator[None]:
    """The model without its layers from `count` on, for what one layer costs."""
    if count is None:
        yield
        return
    decoder: Any = decoder_of(model)
    whole = decoder.layers
    decoder.layers = whole[:count]
    try:
        yield
    finally:
        decoder.layers = whole


def layer_flops(model: PreTrainedModel, tokens: int) -> float:
    """Operations of the matrix products of the decoder layers, attention aside."""
    decoder: Any = decoder_of(model)
    weights: Iterator[torch.Tensor] = decoder.layers.parameters()
    return 2.0 * tokens * sum(weight.numel() for weight in weights if weight.dim() == 2)


@contextmanager
def _unmodified(model: PreTrainedModel) -> Iterator[tuple[MakeCache, Callable[[], Told]]]:
    yield lambda length: DynamicCache(config=model.config), lambda: (None, None, "")


@contextmanager
def _applied(setting: Setting, sparse: bool) -> Iterator[tuple[MakeCache, Callable[[], Told]]]:
    handle: Handle = apply(
        setting.model,
        setting.plan,
        prefill=sparse,
        backend=setting.backend,
        allow_mismatch=True,  # asked before anything was timed
        kv_host_layers=setting.kv_host_layers,
    )
    with handle:
        yield handle.new_cache, lambda: (handle.stats(), handle.backend.name, handle.builder_failed)


@contextmanager
def _captured(
    model: PreTrainedModel, observer: Callable[[AttentionCall], torch.Tensor | None]
) -> Iterator[tuple[MakeCache, Callable[[], Told]]]:
    with capture_attention(model, observer):
        yield lambda length: DynamicCache(config=model.config), lambda: (None, None, "")


def _by_flash_attn(call: AttentionCall) -> torch.Tensor | None:
    """Layers with a window of their own are left to torch."""
    if call.window is not None:
        return None
    return flash_attn_4(call.q_BHSD, *(x[:, :, : call.chunk.longest] for x in (call.k_BGKD, call.v_BGKD)))
