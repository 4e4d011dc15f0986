"""Measures in an engine of vLLM where its plan is faster than vLLM's own attention, once a place; see
`runtime/paged/pays_here.py`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from sparsekv.kernels.keys import FLOAT8, PLAIN, Scales, Softmax
from sparsekv.runtime.core.pays import Pays, parse
from sparsekv.runtime.core.timed_layers import Timers
from sparsekv.runtime.core.timing import Launch
from sparsekv.runtime.paged.pays_here import EngineLayers, Pages
from sparsekv.runtime.pays_cache import RuleFile, place_of
from sparsekv.runtime.settings import cache_folder
from sparsekv.runtime.vllm import internals as vllm
from sparsekv.runtime.vllm.engine_host import EngineHost

_SECONDS = 5.0
_MOST_TEXT = 1024  # bytes of a rule
_FINITE = 0x7F  # bytes below it are numbers in e4m3


@dataclass(frozen=True, slots=True)
class VllmKernels:
    """See `EngineKernels`. vLLM's kernel takes queries in e4m3 beside a cache in 8 bits.

    Attributes:
        size: of a head.
        dtype: of the model.
        scales: of a cache in 8 bits; queries have none.
        softmax: of the layers.
    """

    device: torch.device
    size: int
    dtype: torch.dtype
    ranks: int
    scales: Scales | None = None
    softmax: Softmax = PLAIN

    def queries(self, rows: int, heads: int) -> torch.Tensor:
        return torch.randn(rows, heads, self.size, dtype=self.dtype, device=self.device)

    def pages(self, rows: int, tokens: int, kv_heads: int, most_bytes: int) -> Pages:
        page, dtype = vllm.platform.page, self.dtype if self.scales is None else torch.uint8
        each = -(-tokens // page)
        count = max(each, min(rows * each, most_bytes // (2 * page * kv_heads * self.size * dtype.itemsize)))
        cache = vllm.empty_cache(count, kv_heads, self.size, dtype, self.device)
        cache.normal_() if self.scales is None else cache.random_(0, _FINITE)
        order_P = torch.randperm(count, dtype=torch.int32, device=self.device)
        table_BP = order_P.repeat(-(-rows * each // count))[: rows * each].view(rows, each)
        return Pages(cache, vllm.platform.pages_of(cache), table_BP)

    def dense(self, q_THD: torch.Tensor, pages: Pages, lengths: Sequence[int], out_THD: torch.Tensor) -> Launch:
        scales = self.scales
        if scales is not None and q_THD.is_cuda:
            scales = replace(scales, q_G=torch.ones_like(scales.k_G))
            q_THD = q_THD.to(FLOAT8)
        scale, table_BP = self.size**-0.5, pages.table_BP
        return vllm.engine_dense_attention(q_THD, pages.cache, table_BP, lengths, scale, out_THD, scales, self.softmax)

    def agreed(self, gain: float) -> float:
        if self.ranks == 1:
            return gain
        return float(vllm.gather(torch.tensor([gain], dtype=torch.float32, device=self.device))[0, 0])


def measured_rule(host: EngineHost, kernels: VllmKernels) -> Pays:
    """The rule of this engine, from disk where it was measured before. Where memory is short the plan is sparse
    wherever it may be."""
    started, place = time.monotonic(), host.place
    key = place_of(
        kernels.device, kernels.dtype, host.backend, kernels.scales is not None,
        page=vllm.platform.page, ranks=kernels.ranks, vllm=vllm.release, **place.key,
    )  # fmt: skip
    file = RuleFile(key, cache_folder())
    try:
        measure = partial(EngineLayers(host.program, place, Timers(), host, kernels).rule, _SECONDS)
        rule, is_new = file.read_or(measure) if kernels.ranks == 1 else _on_ranks(file, measure)
    except torch.OutOfMemoryError:
        vllm.logger.warning("sparsekv: no memory to measure where the plan is faster; it is sparse wherever it may be")
        return host.pays
    finally:
        torch.cuda.empty_cache()
    how = f"measured in {time.monotonic() - started:.1f} s" if is_new else "as measured before"
    vllm.logger.info("sparsekv: %s (%s)", rule.told, how)
    return rule


def _on_ranks(file: RuleFile, measure: Callable[[], Pays]) -> tuple[Pays, bool]:
    """The first rank's file decides. All ranks measure together: a lock would keep them from each other."""
    known = file.read()
    text = vllm.gather_bytes(("" if known is None else str(known)).encode().ljust(_MOST_TEXT))[0].decode().strip()
    if text:
        return parse(text), False
    rule = measure()
    file.write(rule)
    return rule, True
