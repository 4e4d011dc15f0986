"""vLLM's own attention backend with a plan; without one all rows go to vLLM's own kernel.

Prefill rows go request by request through the core where the plan is sparse at their length, decode rows that choose
together; all other rows of a step go to vLLM's kernel. vLLM imports this file when it makes the first attention layer.

Shapes: T tokens of the step, H query heads, G KV heads, N pages, S tokens of a page, D head size.
"""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from sparsekv.kernels.keys import FLOAT8, PLAIN, Scales, Softmax
from sparsekv.plans.errors import SparseKVError, UnsupportedError
from sparsekv.runtime.core.program import LayerProgram
from sparsekv.runtime.core.state import Observed
from sparsekv.runtime.engine_plan import agreed_plan
from sparsekv.runtime.paged.plan_host import LayerStep, merged
from sparsekv.runtime.paged.step_rows import (
    DecodeHost,
    DecodeRows,
    Rest,
    StepRows,
    behind_decode,
    decode_rows,
    prefill_rows,
)
from sparsekv.runtime.paged.timed_kernels import measured_rule
from sparsekv.runtime.vllm import internals as vllm
from sparsekv.runtime.vllm.devices import check_pages, scales_of
from sparsekv.runtime.vllm.engine_host import (
    EngineHost,
    decoded_dense,
    is_plain,
    part_of,
    requests_of,
    start_host,
    with_tables,
)
from sparsekv.runtime.vllm.evicted_blocks import EvictedBlocks, EvictedLengths, EvictedTable, Requests, move
from sparsekv.runtime.vllm.settings import check_engine_layer, plan_path, read_options

_STEP = "sparsekv"  # what vLLM's metadata of a step carries of ours
_Backend: Any
_Impl: Any
_Builder: Any
_Backend, _Impl, _Builder = vllm.platform.classes()


class SparseBackend(_Backend):
    @staticmethod
    def get_name() -> str:
        return vllm.platform.backend.name

    @staticmethod
    def get_impl_cls() -> type[SparseImpl]:
        return SparseImpl

    @staticmethod
    def get_builder_cls() -> type[SparseBuilder]:
        return SparseBuilder


class PlannedBackend(_Backend):
    """vLLM's backend by the name that vLLM chooses it by: ours in engines with a plan, and in all others itself. vLLM
    registers the name's class before it knows a configuration, and keeps the class for all engines of a process: so it
    is asked anew for each layer."""

    @staticmethod
    def get_name() -> str:
        return vllm.platform.planned.name

    @staticmethod
    def get_impl_cls() -> type[Any]:
        return SparseImpl if _has_plan() else _Backend.get_impl_cls()

    @staticmethod
    def get_builder_cls() -> type[Any]:
        return SparseBuilder if _has_plan() else _Backend.get_builder_cls()


class SparseImpl(_Impl):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = vllm.get_current_vllm_config()
        self._config = weakref.ref(config)  # which holds all layers
        self.plan_host = _host_of(config)
        if self.plan_host is not None and not self.plan_host.takes_layer():
            self.plan_host = None
        self.program: LayerProgram | None = None  # known once vLLM names its layers
        self.scales: Scales | None = None  # of a cache in 8 bits, known once weights are loaded
        plain = not self.logits_soft_cap and self.sinks is None
        self.softmax = PLAIN if plain else Softmax(self.logits_soft_cap or 0.0, self.sinks)
        decodes = self.attn_type == vllm.AttentionType.DECODER and self.alibi_slopes is None
        if self.plan_host is not None and not decodes:
            text = "expected a decoder's attention without ALiBi in every layer, found another; run without a plan"
            _leave_dense(config, UnsupportedError(text))
            self.plan_host = None

    def program_of(self, host: EngineHost, layer: Any) -> LayerProgram:
        """The program of this layer, checked against the layer that vLLM made."""
        if self.program is None:
            program = host.program.layers[vllm.layer_number(layer.layer_name)]
            owner = self.kv_sharing_target_layer_name
            keys_of = None if owner is None else vllm.layer_number(owner)
            check_engine_layer(program, layer.num_heads, layer.num_kv_heads, layer.sliding_window, keys_of)
            self.program = program
        return self.program

    def forward(
        self,
        layer: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor,
        attn_metadata: Any,
        output: torch.Tensor,
        output_scale: torch.Tensor | None = None,
        output_block_scale: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attention of a step's rows, [T, H, D], into `output`; the cache has their keys and values already."""
        host, step = self.plan_host, getattr(attn_metadata, _STEP, None)
        scales = {"output_scale": output_scale, "output_block_scale": output_block_scale}
        if host is not None and attn_metadata is None and vllm.platform.profiles:
            began = time.monotonic()
            self._warm_up(host, layer, query)
            if host.measures:
                host.passed.append((began, time.monotonic()))
        if host is None or self.program is None or step is None:  # nothing more, in any layer of a step that is dense
            return super().forward(layer, query, key, value, kv_cache, attn_metadata, output, **scales)
        dense = partial(super().forward, **scales)
        self._attend(host, self.program, step, dense, (layer, query, key, value, kv_cache, attn_metadata, output))
        if host.evicting is not None and self.program.role.evicts is not None:
            pages = vllm.platform.pages_of(kv_cache)
            for rows in step.prompts:
                new = Observed(self._read(query[rows.tokens]).transpose(0, 1)[None], self.scale, self.softmax)
                host.evicting.observe(self.program, rows, new, pages, step.table[rows.request], self.scales)
        return output

    def _read(self, query: torch.Tensor) -> torch.Tensor:
        """Queries as they attend, which vLLM may have rounded to 8 bits."""
        if query.dtype != FLOAT8:
            return query
        assert self.scales is not None
        assert self.scales.q_G is not None
        q_H = self.scales.q_G.repeat_interleave(self.num_heads // self.num_kv_heads)
        return query.to(self.scales.dtype).mul_(q_H[:, None])

    def _warm_up(self, host: EngineHost, layer: Any, query: torch.Tensor) -> None:
        """Runs in the step by which vLLM measures memory, which on a GPU is the first that sees a layer whole."""
        try:
            host.warm_up(self.program_of(host, layer), query.to(host.scratch.kind[0]), self.softmax, self.scale)
        except SparseKVError as error:
            if host.evicting is not None:  # whose caches are made for it
                raise
            _leave_dense(self._config(), error)

    def _attend(
        self, host: EngineHost, program: LayerProgram, step: StepRows, dense: Callable[..., torch.Tensor],
        given: tuple[Any, ...],
    ) -> None:  # fmt: skip
        layer, query, key, value, kv_cache, attn_metadata, output = given
        decode = step.decode if program.role.is_sparse else None
        pages = vllm.platform.pages_of(kv_cache)
        rows = LayerStep(
            lambda rows: self._read(query[rows]), (key, value), pages, step.table, self.scale, self.softmax, self.scales
        )
        done = host.attend_chunks(program, rows, step.prefill, output)
        if not done and decode is None:
            dense(*given)
            return
        parts = step.rest(done if decode is None else done.union(decode.requests))
        if decode is not None and not decode.whole:  # whose rows are the first of the step
            others = decode.rest(program, attn_metadata, vllm.platform.of_lengths)
            parts = (Rest(decode.rows, others), *parts)
        for rest in parts:
            q_THD, k_TGD, v_TGD, out_THD = (_rows_of(x, rest.tokens) for x in (query, key, value, output))
            dense(layer, q_THD, k_TGD, v_TGD, kv_cache, rest.metadata, out_THD)
        if decode is not None:
            out_RHD = output[decode.rows]
            decode.attend(program, query[decode.rows], pages, out_RHD, self.scale, self.softmax, self.scales)


class SparseBuilder(_Builder):
    reorder_batch_threshold = 1  # rows that decode follow one another
    supports_update_block_table = False  # what it would update is ours as well
    drafts = False  # of steps that draft what others verify

    def __init__(self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        ours = [layer for layer in _planned(vllm_config) if layer.layer_name in layer_names]
        self._first: SparseImpl | None = ours[0].impl if ours else None
        self._table: EvictedTable | None = None  # of evicting layers
        host = self._host
        if host is None:
            self._be_vllms()
            return
        self.reorder_batch_threshold = host.decoded
        try:
            self._prepare(host, ours, kv_cache_spec, vllm_config, device)
        except SparseKVError as error:
            if host.evicting is not None:  # whose caches are made for it
                raise
            _leave_dense(vllm_config, error)
            self._be_vllms()

    def _be_vllms(self) -> None:
        self.reorder_batch_threshold = _Builder.reorder_batch_threshold
        self.supports_update_block_table = _Builder.supports_update_block_table

    @property
    def _host(self) -> EngineHost | None:
        """The host of its layers; None where a later one left all of them dense."""
        return None if self._first is None else self._first.plan_host

    def _prepare(
        self, host: EngineHost, own: list[Any], kv_cache_spec: Any, vllm_config: Any, device: torch.device
    ) -> None:
        ours = _planned(vllm_config)
        ours.sort(key=lambda layer: layer.impl.program_of(host, layer).role.evicts is not None)
        self._counts = ours[0] in own  # of several kinds of cache, each of which has a builder, one counts the tokens
        for layer in own:
            layer.impl.scales = scales_of(vllm_config, layer.impl, layer)
        scales = own[0].impl.scales  # layers without any have another kind of cache
        pages = check_pages(vllm_config, own[0].impl, own[0], kv_cache_spec, device)
        table_P = torch.ones(1, dtype=torch.int32, device=device)
        host.scratch.copy(pages, table_P, 1, scales)  # compiles what copies
        planned = [layer for layer in own if layer.impl.program_of(host, layer) in host.program.prefilling]
        if host.captured is not None and planned:
            impl = planned[0].impl
            host.captured.warm_up(impl.program_of(host, planned[0]), pages, impl.scale, impl.softmax, scales)
        self._programs = tuple(layer.impl.program_of(host, layer) for layer in own)
        self._dense, self._graph_rows = merged(self._programs), vllm.graph_rows(vllm_config)
        blocks: EvictedBlocks | None = getattr(kv_cache_spec, "blocks", None)
        if host.evicting is not None and blocks is not None:
            self._table = EvictedTable(blocks, host.evicting.tables, kv_cache_spec.block_size)
            keys = host.scratch.copy(pages, table_P, 1)
            move((keys.k[0], keys.v[0]), table_P.long()[None] - 1, pages, table_P, 0)
        elif host.decode is not None:
            longest, softmax = vllm_config.model_config.max_model_len, own[0].impl.softmax
            host.decode.warm_up(self._programs, pages, longest, softmax, scales)
        if self._counts and host.measures and vllm.platform.captures:
            impl, host.kernel = own[0].impl, vllm.platform.kernel(vllm_config, ours, self._graph_rows)
            host.pays, host.measures = measured_rule(host, device, impl.head_size, scales, impl.softmax), False

    @classmethod
    def get_cudagraph_support(cls, vllm_config: Any, kv_cache_spec: Any) -> Any:
        """As vLLM's own, but without prefill."""
        return vllm.without_prefill(vllm_config, super().get_cudagraph_support(vllm_config, kv_cache_spec))

    def use_cascade_attention(self, *args: Any, **kwargs: Any) -> bool:
        """Never by a plan: its metadata are of a whole step."""
        given = getattr(super(), "use_cascade_attention", None)  # before 0.33
        return self._host is None and given is not None and bool(given(*args, **kwargs))

    def build(self, common_prefix_len: int, common_attn_metadata: Any, fast_build: bool = False) -> Any:
        common, evicted = common_attn_metadata, None
        if self._table is not None:
            rows = partial(requests_of, common)
            evicted, table_BP = self._table.step(rows, common.seq_lens, common.block_table_tensor)
            common = with_tables(common, evicted.lengths_B, evicted.cpu_lengths_B, table_BP)
        metadata = super().build(common_prefix_len, common, fast_build)
        only_decodes = evicted is not None and not evicted.prompts and common.max_query_len == 1
        if self._host is not None and is_plain(common) and (self._counts or not only_decodes):
            step = self._step(self._host, common, evicted)
            if step is not None:
                setattr(metadata, _STEP, step)
        return metadata

    def build_for_drafting(self, common_attn_metadata: Any, draft_index: int) -> Any:
        return super().build(0, common_attn_metadata, fast_build=True)

    def _step(self, host: EngineHost, common: Any, evicted: EvictedLengths | None) -> StepRows | None:
        """The rows of a step that the layers compute; None where all of it is vLLM's."""
        captures = vllm.platform.captures and evicted is None
        tokens = decoded_dense(host, common, self._graph_rows) if captures else None
        if tokens is not None and common.max_query_len <= 1:
            if self._counts:
                host.report(False)  # of the steps before: the layers of this one have not run yet
                host.count_decoded(tokens)
            return None
        starts, lengths, unfinished = requests_of(common)
        # Captured graphs do not tell a prompt's row from a decoded one or drafts: it goes with those, and is dense.
        decoded = 0 if host.decode is None else host.decoded
        alone = [False] * len(lengths) if vllm.platform.captures else behind_decode(starts, unfinished, decoded)
        prefill = prefill_rows(starts, lengths, alone, host.decoded)
        prompts = () if evicted is None else evicted.prompts
        decoding = decode_rows(starts, prefill)
        if self._counts:
            host.report(bool(prefill))  # as above
            if tokens is not None:
                host.count_decoded(tokens)
        paying = host.paying(prefill, self._counts)
        if evicted is not None:  # lines and tiles mean nothing over keys of which some were evicted
            prefill = tuple(rows for rows in prefill if not evicted.shortened[rows.request])
        decode = None
        if tokens is None and host.decode is not None and evicted is None and self.drafts == host.drafts:
            decode = self._decode(host, host.decode, common, (starts, lengths, unfinished), decoding)
        for rows in [rows for rows in prefill if rows not in paying]:
            host.count_dense(self._dense, rows.chunk)
        prefill = tuple(rows for rows in paying if rows in prefill)
        if not prefill and decode is None and not prompts:
            return None
        part_of = partial(self._part_of, common)
        return StepRows(tuple(starts), prefill, common.block_table_tensor, part_of, decode, prompts)

    def _decode(
        self, host: EngineHost, decode: DecodeHost, common: Any, step: tuple[list[int], list[int], list[bool]],
        requests: int,
    ) -> DecodeRows | None:  # fmt: skip
        """The decode rows of a step (`requests_of`): of its first requests. Tensors that graphs read are there whatever
        the lengths are."""
        starts, lengths, unfinished = step
        prompts = [request for request in range(requests) if unfinished[request]]
        seen = [
            range(length - (end - first) + 1, length + 1)
            for first, end, length, is_prompt in zip(starts, starts[1:], lengths[:requests], unfinished, strict=False)
            if not is_prompt
        ]
        alone, verifies = requests == len(lengths), host.queries > 1
        rows = starts[requests] if verifies else requests
        captured = alone and rows <= self._graph_rows
        rule, longest = host.pays.of_decode(captured), [of_rows.stop - 1 for of_rows in seen]
        least = rule.least(longest)
        chooses = decode.chooses([length for of_rows in seen for length in of_rows], least)
        if self._counts:
            decode.count(seen, host.counters, least)
            host.decodes_dense = not chooses
        idle = captured and bool(host.pays.decode.rows) and not host.dense_graphs
        if not rows or not (chooses or idle):
            return None
        part_of = None if alone else partial(self._part_of, common, 0, requests)
        starts_X = common.query_start_loc[: requests + 1] if verifies else None
        lengths_B, table_BP = common.seq_lens[:requests], common.block_table_tensor[:requests]
        whole = captured and host.holds_dense
        chosen = decode.begin(lengths_B, prompts, table_BP, part_of, least, starts_X, rows, whole)
        # A graph of so many rows, where no length pays, holds the engine's kernel alone; one of more rows reads zeros.
        return None if rule.at(requests) is None else chosen

    def _part_of(self, common: Any, first: int, end: int) -> Any:
        # A fast build leaves alone what the builder keeps for the whole step: a schedule that graphs read.
        return super().build(0, part_of(common, first, end), fast_build=True)


_hosts: dict[int, EngineHost | None] = {}  # of engines whose plan was looked for, by the identity of their key
# Of a release or a model that is unlike what was seen: the same on all ranks, as a device without memory is not.
_UNLIKE = (AssertionError, AttributeError, ImportError, LookupError, TypeError, ValueError)


def _has_plan() -> bool:
    config = vllm.current_config()
    return config is not None and _host_of(config) is not None


def _host_of(config: Any) -> EngineHost | None:
    key = vllm.engine_key(config)
    if id(key) not in _hosts:
        _hosts[id(key)] = _started(config)
        weakref.finalize(key, _hosts.pop, id(key)).atexit = False  # engines that end leave it
    return _hosts[id(key)]


def _started(config: Any) -> EngineHost | None:
    options, model = read_options(config.additional_config), config.model_config
    if model is None or options.dense:
        return None
    try:
        path = agreed_plan(partial(plan_path, options, model.model, model.revision), vllm.gather_bytes)
        if path is None:  # and nothing else of vLLM has been looked at
            return None
        facts = vllm.engine_facts(config, SparseImpl, SparseBuilder)
        host = start_host(path, options, facts, vllm.engine_model(config), vllm.gather)
        if host.evicting is not None:
            _evict_blocks(config)
        host.holds_dense = host.decode is not None and not host.drafts and vllm.hold_dense_graphs(config, _host_of)
    except (SparseKVError, *_UNLIKE) as error:
        vllm.say_dense(config, error)
        return None
    runner = 2 if config.use_v2_model_runner else 1
    vllm.logger.info("sparsekv: %s by %s, kernels: %s, model runner V%d", host.phases, path, host.backend, runner)
    return host


def _planned(config: Any) -> list[Any]:
    """Returns the layers so far that run by the plan: without a drafter's, which may share a cache with them."""
    impls = ((layer, getattr(layer, "impl", None)) for layer in vllm.layers_so_far(config).values())
    return [layer for layer, impl in impls if isinstance(impl, SparseImpl) and impl.plan_host is not None]


def _leave_dense(config: Any, error: SparseKVError) -> None:
    """The layers that were made already attend by vLLM's own code, and so do those to come."""
    vllm.say_dense(config, error)
    for layer in _planned(config):
        layer.impl.plan_host = layer.impl.program = None
    _hosts[id(vllm.engine_key(config))] = None


def _rows_of(x: Any, rows: slice) -> Any:
    """Rows of a step; None where a layer attends to keys and values of another one, and vLLM hands it none."""
    return None if x is None else x[rows]


def _evict_blocks(config: Any) -> None:
    """Has vLLM free what layers evict, and tell of which requests steps are."""
    from sparsekv.runtime.vllm import cache_internals as caches  # which an engine without eviction does not need

    caches.change_specs(_spec_of)
    caches.follow_steps(config, _requests_of)
    if caches.without_prefix_caching(config):
        vllm.logger.info("sparsekv: prefix caching is off: blocks of evicting layers cannot be shared")


def _spec_of(config: Any, layer: Any, spec: Any) -> Any:
    impl = getattr(layer, "impl", None)
    if not isinstance(impl, SparseImpl) or impl.plan_host is None:
        return spec
    host = impl.plan_host
    try:  # before any layer has a cache that is made for it
        for planned in _planned(config):
            planned.impl.program_of(host, planned)
    except SparseKVError as error:
        _leave_dense(config, error)
        return spec
    rule = impl.program_of(host, layer).role.evicts
    if rule is None:
        return spec
    from sparsekv.runtime.vllm.cache_internals import evicting_spec  # as above

    return evicting_spec(spec, EvictedBlocks.of(rule, spec.block_size))


def _requests_of(config: Any) -> Requests | None:
    host = _hosts.get(id(vllm.engine_key(config)))
    return None if host is None or host.evicting is None else host.evicting.requests
