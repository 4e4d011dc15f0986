"""A plan in an attention backend of SGLang: prompts chunk by chunk where the plan is sparse at their length, rows that
choose together; all other rows of a step go to SGLang's own methods, of the class that stands behind ours.

SGLang keeps keys and values as [slots, heads, head size], and finds the slots of a request by a table: pages of one
token, or of as many as it was asked for.

Shapes: T tokens of a step, B requests, H query heads, G KV heads, N pages, S tokens of a page, P pages of a request,
D head size.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, takewhile
from typing import Any, ClassVar

import numpy as np
import torch
from numpy.typing import NDArray
from sglang.srt.mem_cache.layout.paged_view import paged_kv_view
from sglang.srt.mem_cache.memory_pool import KVWriteLoc

from sparsekv.kernels.keys import FLOAT8, PLAIN, Scales, Softmax
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.paged.plan_host import LayerStep, PlanHost
from sparsekv.runtime.paged.step_rows import DecodeRows, StepRows, prefill_rows

logger = logging.getLogger("sglang.sparsekv")

Pages = tuple[torch.Tensor, torch.Tensor]


class OnCpu:
    """SGLang's backend on CPUs, which finds slots by requests and keeps nothing for a step."""

    zero_lengths = False  # whether rows of length 0 may be given

    @staticmethod
    def table(backend: Any, forward_batch: Any, longest: int) -> torch.Tensor:
        """int32 [B, P]: the pages of each request."""
        slots_BP = backend.req_to_token_pool.req_to_token[forward_batch.req_pool_indices, : longest : backend.plan_page]
        return (slots_BP // backend.plan_page).int()

    @staticmethod
    def part(metadata: Any, requests: slice, rows: slice) -> Any:
        """The metadata of some requests, whose rows follow one another."""
        return metadata


class OnCuda:
    """FlashAttention 3. Where pools move, its page table has the places that kernels read, and no other has."""

    zero_lengths = True

    @staticmethod
    def table(backend: Any, forward_batch: Any, longest: int) -> torch.Tensor:
        table_BP: torch.Tensor = backend.forward_metadata.page_table
        return table_BP

    @staticmethod
    def part(metadata: Any, requests: slice, rows: slice) -> Any:
        bounds = slice(requests.start, requests.stop + 1)
        swa, q_X, k_X = metadata.swa_page_table, metadata.cu_seqlens_q[bounds], metadata.cu_seqlens_k[bounds]
        return replace(
            metadata,
            cache_seqlens_int32=metadata.cache_seqlens_int32[requests],
            cu_seqlens_q=q_X - rows.start,
            cu_seqlens_k=k_X - k_X[:1],
            max_seq_len_q=min(metadata.max_seq_len_q, rows.stop - rows.start),
            page_table=metadata.page_table[requests],
            swa_page_table=None if swa is None else swa[requests],
            scheduler_metadata=None,
        )

    @staticmethod
    def of_lengths(metadata: Any, lengths_B: torch.Tensor) -> Any:
        """The metadata with other lengths; rows of length 0 read nothing and their output is 0. The schedule of a step,
        made for the true lengths, remains: it says into how many parts a row is split at most."""
        return replace(metadata, cache_seqlens_int32=lengths_B)

    @staticmethod
    def attention(
        backend: Any, q_THD: torch.Tensor, cache: torch.Tensor, table_BP: torch.Tensor, lengths: Sequence[int],
        scale: float, out_THD: torch.Tensor, scales: Scales | None = None, softmax: Softmax = PLAIN,
        left_B: torch.Tensor | None = None,
    ) -> Callable[[], Any]:  # fmt: skip
        """A launch of SGLang's kernel, causal, of the last rows of requests, over a layer's keys and values in pages,
        [2, N, S, G, D]; into memory of its own. Decode has its schedule, which SGLang makes once a step: of all
        `lengths`, as in `of_lengths`, where it attends to `left_B` alone."""
        like: Any = {"dtype": torch.int32, "device": q_THD.device}
        rows, by = len(q_THD) // len(lengths), dict[str, torch.Tensor | None]()
        if scales is not None:
            cache, each = cache.view(FLOAT8), (scales.k_G, scales.v_G)
            by.update(zip(("k_descale", "v_descale"), (x_G.expand(len(lengths), -1) for x_G in each), strict=True))
        lengths_B, starts = torch.tensor(lengths, **like), torch.arange(0, len(q_THD) + 1, rows, **like)
        if rows == 1:
            schedule = backend._compute_scheduler_metadata
            by["scheduler_metadata"] = schedule(len(lengths), backend.max_context_len, lengths_B, starts)
        return partial(
            backend.flash_attn_with_kvcache, q=q_THD, k_cache=cache[0], v_cache=cache[1], page_table=table_BP,
            cache_seqlens=lengths_B if left_B is None else left_B, cu_seqlens_q=starts, max_seqlen_q=rows,
            softmax_scale=scale, causal=True, softcap=softmax.cap, sinks=softmax.sinks_H,
            num_splits=backend.num_splits, ver=backend.fa_impl_ver, **by,
        )  # fmt: skip


@dataclass(slots=True)
class PlannedLayer:
    program: LayerProgram
    scale: float
    softmax: Softmax
    scales: Scales | None = None  # of a cache in 8 bits


class Planned:
    """Methods of a backend with a plan, before those of its own class."""

    plan_host: PlanHost
    plan_layers: Mapping[int, PlannedLayer]
    plan_dense: Sequence[LayerProgram]  # as `merged` has them
    plan_page: int
    plan_mixes: bool  # whether steps have prompts and rows that decode
    plan_device: ClassVar[Any]
    forward_metadata: Any  # of SGLang's class, as the pool
    token_to_kv_pool: Any
    plan_step: StepRows | None = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)  # type: ignore[misc]
        self.plan_step = self._begin(forward_batch, captured=False)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        """Before a step that is captured or replayed: what its graph reads of ours is put where it was captured."""
        super().init_forward_metadata_out_graph(forward_batch, in_capture)  # type: ignore[misc]
        self.plan_step = self._begin(forward_batch, captured=True)

    def init_forward_metadata_in_graph(self, forward_batch: Any) -> None:
        """Before each run of a step that is captured, of which SGLang makes others first."""
        super().init_forward_metadata_in_graph(forward_batch)  # type: ignore[misc]
        if self.plan_step is not None and self.plan_step.decode is not None:
            self.plan_step = replace(self.plan_step, decode=self.plan_step.decode.again())

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> torch.Tensor:
        dense, step = super().forward_extend, self.plan_step  # type: ignore[misc]
        planned = None if step is None else self._planned(layer, others)
        if planned is None or step is None:  # nothing more, in any layer of a step that is dense
            return dense(q, k, v, layer, forward_batch, save_kv_cache, **others)
        decode = step.decode if planned.program.role.is_sparse else None
        if decode is None and not any(planned.program.patterns_at(rows.chunk.longest) for rows in step.prefill):
            for rows in step.prefill:
                self.plan_host.count_dense((planned.program,), rows.chunk)
            return dense(q, k, v, layer, forward_batch, save_kv_cache, **others)
        if save_kv_cache and k is not None:
            self._store(layer, forward_batch, k, v)
        q_THD = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        out_THD = torch.empty_like(q_THD)
        new = (k, v) if save_kv_cache else (None, None)  # the model has stored them, and maybe turned them there alone
        by = planned.scale, planned.softmax, planned.scales
        given = LayerStep(q_THD.__getitem__, new, self.pages(layer), step.table, *by)
        done = self.plan_host.attend_chunks(planned.program, given, step.prefill, out_THD)
        if decode is not None:
            first = len(step.starts) - 1 - len(decode.requests)
            own = slice(step.starts[first], None)
            decode.attend(planned.program, q_THD[own], given.pages, out_THD[own], *by)
            done |= set(range(first, len(step.starts) - 1))
        for rest in step.rest(done):
            batch, metadata = rest.metadata
            k_TGD, v_TGD = (None if x is None else x[rest.tokens] for x in (k, v))
            with self._given(metadata):
                attended = dense(q[rest.tokens], k_TGD, v_TGD, layer, batch, False, **others)
            out_THD[rest.tokens] = attended.view(-1, *out_THD.shape[1:])
        return out_THD.flatten(1)

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True, **others: Any
    ) -> torch.Tensor:
        dense, step = super().forward_decode, self.plan_step  # type: ignore[misc]
        decode = None if step is None else step.decode
        planned = None if decode is None else self._planned(layer, others)
        if planned is None or decode is None or not planned.program.role.is_sparse:
            return dense(q, k, v, layer, forward_batch, save_kv_cache, **others)
        q_BHD = q.reshape(-1, layer.tp_q_head_num, layer.head_dim)
        if decode.whole:
            if save_kv_cache and k is not None:
                self._store(layer, forward_batch, k, v)
            out_BHD = torch.empty_like(q_BHD)
        else:
            rest = decode.rest(planned.program, self.forward_metadata, self.plan_device.of_lengths)
            with self._given(rest):
                attended = dense(q, k, v, layer, forward_batch, save_kv_cache, **others)
            out_BHD = attended.view(q_BHD.shape)
        by = planned.scale, planned.softmax, planned.scales
        decode.attend(planned.program, q_BHD, self.pages(layer), out_BHD, *by)
        return out_BHD.flatten(1)

    # --- what a step is ---

    def _begin(self, forward_batch: Any, captured: bool) -> StepRows | None:
        """The rows of a step that the layers compute; None where all of it is SGLang's: rows that verify a draft,
        prompts that it makes up to warm up or to capture, and steps without any."""
        mode, host = forward_batch.forward_mode, self.plan_host
        if mode.is_decode():
            host.report(False)
            known = forward_batch.seq_lens_cpu  # None where SGLang makes up a step
            lengths_B = (forward_batch.seq_lens.cpu() if known is None else known).numpy()
            chosen = self._chosen(forward_batch, lengths_B, 0, captured)
            return None if chosen is None else StepRows((0,), (), chosen.table_BP, lambda first, end: None, chosen)
        if captured or forward_batch.rids is None or not (mode.is_mixed() or mode.name == "EXTEND"):
            return None
        rows, pasts = forward_batch.extend_seq_lens_cpu, forward_batch.extend_prefix_lens_cpu
        starts = tuple(accumulate(rows, initial=0))
        lengths = [past + count for past, count in zip(pasts, rows, strict=True)]
        prefill = prefill_rows(starts, lengths, [False] * len(rows))
        host.report(bool(prefill))  # of the steps before: the layers of this one have not run yet
        paying = host.paying(prefill)
        for chunk in [chunk for chunk in prefill if chunk not in paying]:
            host.count_dense(self.plan_dense, chunk.chunk)
        # A mixed step has the requests that decode behind its prompts. SGLang's runner calls it a step of prompts by
        # now, and nothing tells the single row of the last prompt from theirs.
        decoding = sum(1 for _ in takewhile(lambda count: count == 1, reversed(rows))) if self.plan_mixes else 0
        chosen = self._chosen(forward_batch, np.array(lengths), len(rows) - decoding, captured) if decoding else None
        if not paying and chosen is None:
            return None
        table_BP = self.plan_device.table(self, forward_batch, max(lengths))
        return StepRows(starts, paying, table_BP, partial(self._part, forward_batch, starts), chosen)

    def _chosen(self, forward_batch: Any, lengths_B: NDArray[Any], first: int, captured: bool) -> DecodeRows | None:
        """The requests of a step that decode, from the `first` on, where some may choose or a graph reads which do. To
        look at each request would be a part of a small model's step, for which the device waits."""
        host, own_B, least = self.plan_host, lengths_B[first:], None
        rule = host.pays.of_decode(captured)
        at = None if host.decode is None else rule.at(len(own_B))
        if host.decode is not None and host.decode.chooses(own_B, at):
            own: list[int] = own_B.tolist()
            least = rule.least(own)
            host.decode.count([range(length, length + 1) for length in own], host.counters, least)
        else:
            host.counters.decode_dense += int((own_B > 1).sum())  # the others are of steps that SGLang makes up
        # A graph of so many rows, where no length pays, holds SGLang's kernel alone.
        if host.decode is None or at is None or not (captured or host.decode.chooses(own_B, least)):
            return None
        table_BP = self.plan_device.table(self, forward_batch, int(lengths_B.max()))[first:]
        # A graph reads the lengths where it was captured.
        read_B = self.forward_metadata.cache_seqlens_int32 if captured else forward_batch.seq_lens[first:].int()
        whole = bool(first) or not self.plan_device.zero_lengths
        return host.decode.begin(read_B, (), table_BP, None, least, None, len(own_B), whole)

    def _part(self, forward_batch: Any, starts: Sequence[int], first: int, end: int) -> tuple[Any, Any]:
        """A step of the requests from the `first` to before the `end` alone, as far as attention reads it, and its
        metadata."""
        part, requests, rows = copy(forward_batch), slice(first, end), slice(starts[first], starts[end])
        part.batch_size = end - first
        for name in ("req_pool_indices", "seq_lens", "extend_seq_lens", "extend_prefix_lens", "seq_lens_cpu"):
            whole = getattr(forward_batch, name)
            setattr(part, name, None if whole is None else whole[requests])
        for name in ("extend_seq_lens_cpu", "extend_prefix_lens_cpu"):
            setattr(part, name, list(getattr(forward_batch, name))[requests])
        part.extend_num_tokens = rows.stop - rows.start
        part.out_cache_loc, part.positions = forward_batch.out_cache_loc[rows], forward_batch.positions[rows]
        part._attn_output = None  # memory for the rows of the whole step
        return part, self.plan_device.part(self.forward_metadata, requests, rows)

    # --- what a layer computes ---

    def _planned(self, layer: Any, others: Mapping[str, Any]) -> PlannedLayer | None:
        """The layer, where it runs by the plan; not where its model hands over more than we know."""
        planned = self.plan_layers.get(layer.layer_id)
        if planned is None or any(value is not None for name, value in others.items() if name != "sinks"):
            return None
        sinks_H = others.get("sinks")  # the same object in each step
        if sinks_H is not None and planned.softmax.sinks_H is not sinks_H:
            planned.softmax = replace(planned.softmax, sinks_H=sinks_H)
        return planned

    @contextmanager
    def _given(self, metadata: Any) -> Iterator[None]:
        whole, self.forward_metadata = self.forward_metadata, metadata
        try:
            yield
        finally:
            self.forward_metadata = whole

    def _store(self, layer: Any, forward_batch: Any, k: torch.Tensor, v: torch.Tensor) -> None:
        scales = (layer.k_scale, layer.v_scale) if self.plan_device is OnCuda else ()
        self.token_to_kv_pool.set_kv_buffer(layer, KVWriteLoc.for_layer(forward_batch, layer), k, v, *scales)

    def pages(self, layer: Any) -> Pages:
        """Keys and values in pages, [N, G, S, D] each: views. The getters wait for a layer that is being loaded."""
        pool, size = self.token_to_kv_pool, (layer.tp_k_head_num, layer.head_dim)
        k_NGSD, v_NGSD = (
            paged_kv_view(x, self.plan_page, *size).transpose(1, 2)
            for x in (pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id))
        )
        return k_NGSD, v_NGSD


def with_methods(backend: Any, device: Any) -> Any:
    """A backend that SGLang has just made, with the methods of a plan before those of its own class."""
    own = type(backend)
    kind: Any = type(f"Planned{own.__name__}", (Planned, own), {"plan_device": device})
    planned = object.__new__(kind)
    vars(planned).update(vars(backend))
    return planned
