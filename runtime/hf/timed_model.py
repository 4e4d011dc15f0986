"""Measures from how many tokens on a plan is faster than dense attention in transformers, once a plan and device.

Timed is one layer over random keys: what `core.prefill` computes of a chunk beside the fastest dense kernel, and
captured decode steps of each kind of layer beside a dense one.

Shapes: B rows, H query heads, G KV heads, T rows of a chunk, K tokens, D head size.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.backends import Fallback
from sparsekv.kernels.keys import FLOAT8, PLAIN, KeyView, Scales, Softmax, full_view
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import PlanWarning
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.schema import Plan
from sparsekv.runtime.core.pays import Pays
from sparsekv.runtime.core.prefill import DenseLayers, prefill
from sparsekv.runtime.core.program import LayerProgram, Program, decode
from sparsekv.runtime.core.roles import DENSE
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.core.timed_layers import Launch, Place, RuleFile, TimedLayers, Timers, rule_key
from sparsekv.runtime.hf.describe import config_of
from sparsekv.runtime.model_config import device_name, soft_cap
from sparsekv.runtime.settings import cache_folder
from sparsekv.runtime.stores.store import Resident

_SECONDS = 1.0  # for each planned length
_STEP = 16_384  # rows of the largest chunk; larger ones follow its threshold
_ROWS = 16  # of the largest decode step, likewise
_MOST_BYTES = 1 << 31  # of keys and values, many times a device's cache: more rows overlap


def measured_rule(
    plan: Plan, program: Program, info: ModelInfo, model: PreTrainedModel, backend: str, float8: bool
) -> Pays:
    """The rule of a plan on this device, from disk where it was measured before; the hint where memory is short."""
    place = Place.of(plan, max(plan.planned_lengths, default=info.context_length), _STEP, _ROWS)
    cap = soft_cap(config_of(model))
    softmax = Softmax(cap) if cap else PLAIN
    layers = ModelLayers(program, place, Timers(), info, model.device, model.dtype, backend, float8, softmax)
    name, of_host = device_name(model.device), {"host": "transformers"} | place.key
    key = rule_key(model.device, name, model.dtype, backend, float8, info.fingerprint.architecture, **of_host)
    seconds = _SECONDS * max(1, len(plan.planned_lengths))
    try:
        return RuleFile(key, cache_folder()).read_or(partial(layers.compiled_rule, seconds))[0]
    except torch.OutOfMemoryError:
        warnings.warn("no memory to measure where the plan is faster; it is sparse wherever it may be", PlanWarning, 3)
        return program.hint
    finally:
        torch.cuda.empty_cache()


@dataclass(frozen=True, slots=True)
class ModelLayers(TimedLayers):
    info: ModelInfo
    device: torch.device
    dtype: torch.dtype
    backend: str
    float8: bool
    softmax: Softmax = PLAIN

    @torch.no_grad()
    def compiled_rule(self, seconds: float) -> tuple[Pays, bool]:
        """See `rule`; kernels are compiled before the time runs."""
        with torch.cuda.device(self.device):
            replace(self, timers=Timers(_launched_once, _launched_once)).compile()
            return self.rule(seconds)

    def prefill_gain(self, layer: LayerProgram, rows: int, length: int) -> float:
        q_BHTD, k_BGKD, v_BGKD = self._tensors(layer, 1, rows, length)
        chunk, scale = Chunk.uniform(1, length - rows, length), q_BHTD.shape[3] ** -0.5
        keys = replace(full_view(k_BGKD, v_BGKD), softmax=self.softmax)
        given = {"q_BHSD": q_BHTD, "keys": keys, "chunk": chunk, "scale": scale}
        attend = partial(prefill, fallback=Fallback(self.backend), **given)
        alike = self.alike(layer, q_BHTD, k_BGKD, chunk, scale)
        if alike is None:
            return math.nan
        dense = partial(attend, plain := layer.without_patterns)
        if self.softmax is PLAIN and not self.float8:  # as `DenseLayers` run in a pass
            of_pass = DenseLayers({plain.layer: plain}, {plain.window: 0}, chunk, Fallback(self.backend), Meter())
            dense = partial(of_pass.attend, plain.layer, q_BHTD, k_BGKD, v_BGKD, scale)
        return self.layer_gain(dense, partial(attend, alike), q_BHTD[0].transpose(0, 1).flatten(1))

    def decode_gain(self, rows: int, length: int) -> float:
        """All layers of a step, of which one of each kind is timed, filter layers first."""
        state = DecodeState(self.program.segments, carried=self.program.carried)
        state.begin(torch.full((rows,), length, dtype=torch.int32, device=self.device), self.device)
        kinds = [layer for layer, _ in self.kinds]
        q_BHTD, *kv_BGKD = self._tensors(kinds[0], rows, 1, length)
        keys = replace(self._stored(full_view(*kv_BGKD)), softmax=self.softmax)

        def step(layer: LayerProgram) -> torch.Tensor:
            scale = q_BHTD.shape[3] ** -0.5
            return decode(layer, q_BHTD, Resident(keys), state, scale=scale, backend=self.backend)

        layers = [replace(kinds[0], role=DENSE), *kinds]
        timer = self.timers.launched if self.program.remembers else self.timers.replayed  # as they run
        dense, sparse = self.step_us(timer([partial(step, layer) for layer in layers], self.device))
        return dense / sparse

    def _tensors(
        self, layer: LayerProgram, batch: int, queries: int, length: int
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        size, kv_heads = self.info.group_of(layer.layer).head_dim, layer.kv_heads
        new = partial(torch.randn, dtype=self.dtype, device=self.device)
        most = _MOST_BYTES // (2 * kv_heads * size * self.dtype.itemsize)
        tokens = max(length, min(batch * length, most))
        apart = (tokens - length) // max(1, batch - 1)
        shape, strides = (batch, kv_heads, length, size), (apart * size, tokens * size, size, 1)
        k_BGKD, v_BGKD = (new(kv_heads, tokens, size).as_strided(shape, strides) for _ in range(2))
        return new(batch, layer.heads, queries, size), k_BGKD, v_BGKD

    def _stored(self, keys: KeyView) -> KeyView:
        if not self.float8:
            return keys
        ones_G = torch.ones(keys.kv_heads, device=self.device)
        k_BGKD, v_BGKD = (x.to(FLOAT8) for x in (keys.k, keys.v))
        return replace(keys, k=k_BGKD, v=v_BGKD, scales=Scales(ones_G, ones_G, self.dtype))


def _launched_once(launches: Sequence[Launch], device: torch.device) -> Sequence[float]:
    """Compiles kernels, as nothing is timed."""
    for launch in launches:
        launch()
    return [1.0] * len(launches)
