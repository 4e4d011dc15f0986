"""Continuous batching of transformers (`generate_batch`, `transformers serve`) by a plan.

The scheduler, its pages, and the requests that it cuts, shares, forks, offloads or computes again stay transformers'.
A pass of its loop has the rows of all requests one after another. Chunks of prompts attend one by one, as in a batch of
one row; rows that decode attend together, from the pages: no key is read back, and nobody lists where keys are. Steps
of nothing but decode have the loop's block table, and are captured by it on a GPU. Layers with a sliding window have no
more than it in pages, and attend to all of that; models with such layers have no block table.

Shapes: T rows of a pass, R requests, B of them decode, H query heads, G KV heads, N pages in memory, S tokens of a
page, P pages of a request, K tokens of a request, D head size.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from itertools import accumulate, compress, pairwise
from threading import Lock
from typing import Any

import torch
import transformers
from transformers import PreTrainedModel

from sparsekv.kernels.backends import decode_attention, summary
from sparsekv.kernels.keys import KeyView, full_view
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.errors import PlanWarning, UnsupportedError
from sparsekv.plans.types import format_ids
from sparsekv.runtime.core.prefill import prefill
from sparsekv.runtime.core.program import LayerProgram, count_step
from sparsekv.runtime.core.stats import Meter
from sparsekv.runtime.hf.attention import PACKED, Attachment, Engine, LayerCall, Pass, Phase
from sparsekv.runtime.hf.describe import config_of, decoder_of
from sparsekv.runtime.hf.graphs import GraphWarning, can_capture
from sparsekv.runtime.hf.plan_engine import PlanEngine
from sparsekv.runtime.model_config import rope_switch
from sparsekv.runtime.paged.step_rows import DecodeHost, DecodeRows
from sparsekv.runtime.plan_checks import Host, refuse

_KEPT_MANAGER = "_cached_continuous_batching_manager"  # where transformers keeps one for the next call
_WINDOWED = "sliding_attention"
_WARM_UP = "__warmup_"  # names of requests that transformers makes up begin so
_HAS_PAGES = find_spec("transformers.generation.continuous_batching.cache_allocators") is not None


class Batches:
    """The managers of continuous batching that were made while an engine is attached."""

    def __init__(self, attached: Attachment, engine: Engine) -> None:
        self._attached, self._engine = attached, engine
        self._started: tuple[BatchEngine, ...] = ()  # replaced as a whole, as loops read it in threads of theirs
        self._lock = Lock()

    def start(self, init: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """The manager that `init_continuous_batching` makes, without passes that transformers compiles, nor the next
        one's preparation beside one under way: rows that prefill are known to the host alone."""
        engine = self._engine
        model: Any = self._attached.model
        if not isinstance(engine, PlanEngine):
            raise UnsupportedError("expected a plan for continuous batching, found a model that is observed")
        check_batching(engine, model)
        cached = vars(model).get(_KEPT_MANAGER)
        if cached is not None and all(batch.manager() is not cached for batch in self._started):
            model.destroy_cached_continuous_batching_manager()  # of another plan, or of none
            cached = None
        config_of(model)._attn_implementation = PACKED
        manager = init(*args, **kwargs)
        if manager is not cached:
            with self._lock:
                alive = [batch for batch in self._started if batch.manager() is not None]
                self._started = (*alive, BatchEngine(engine, manager))
        return manager

    def begin(self, inputs: dict[str, Any]) -> Pass | None:
        """The pass of a manager's loop; None for any other. Its inputs are changed so that the cache reads nothing back
        of layers whose pages are read here."""
        if (batch := self.of(inputs)) is None:
            return None
        batch.begin_pass(batch.requests, inputs)
        read = zip(batch.cache.cache_allocators, inputs["read_index"], strict=True)
        inputs["read_index"] = [index if kind == _WINDOWED else index[:0] for kind, index in read]
        return Pass(batch, Phase.PREFILL, None, self._attached.shapes)

    def of(self, inputs: Mapping[str, Any]) -> BatchEngine | None:
        """The engine of the loop with the cache of these inputs; None where they are of no manager's."""
        cache = inputs.get("cache")
        return next((batch for batch in self._started if cache is not None and batch.cache is cache), None)

    def close(self) -> None:
        """Ends the loops: without the plan they would attend by an implementation that knows nothing of theirs."""
        model: Any = self._attached.model
        for manager in filter(None, [batch.manager() for batch in self._started]):
            del manager._create_batch_processor
            if manager.is_running():
                manager.stop(hard_stop=True)
            manager.batch_processor, config = None, manager.continuous_batching_config
            config.use_cuda_graph, config.max_blocks_per_request = (False, False), 0  # for any attention
        if self._started:
            model.destroy_cached_continuous_batching_manager()
        self._started = ()


@dataclass(frozen=True, slots=True)
class Rows:
    """The rows of one request in a pass."""

    tokens: slice  # among those of the pass
    chunk: Chunk
    window: slice  # its keys in layers with a sliding window, among those of the pass
    table_P: torch.Tensor | None  # int32 on the device: its pages, where a layer has any without a window


@dataclass(frozen=True, slots=True)
class DecodeTokens:
    """The rows of a pass that decode, one a request."""

    row_B: torch.Tensor | slice  # their numbers in the pass, int64
    lengths_B: torch.Tensor  # int32, as all that follows
    table_BP: torch.Tensor | None
    chosen: DecodeRows | None  # where some may choose
    window_lengths_B: torch.Tensor | None = None
    window_BK: torch.Tensor | None = None  # keys in layers with a sliding window, as pages of one token


class BatchEngine(Engine):
    """Attention of one manager's passes by the plan of an engine."""

    def __init__(self, engine: PlanEngine, manager: Any) -> None:
        """Sets what a manager's configuration leaves to whoever runs its passes."""
        super().__init__()
        self.manager, config = weakref.ref(manager), manager.continuous_batching_config
        manager._create_batch_processor = self.processor
        self._engine, self._device, self._most = engine, engine.device, config.max_requests_per_batch
        info = engine.paging.sizes.size.info
        self._longest, by_table = info.context_length, all(group.kind != "sliding" for group in info.attention)
        self._captures = by_table and can_capture(self._device, engine.decode_backend) and config.cuda_graph_booleans[1]
        config.use_cuda_graph, config.use_async_batching = (False, self._captures), False
        config.varlen_compile_config = config.decode_compile_config = None
        config.max_blocks_per_request = by_table * -(-self._longest // config.page_size)
        self.cache: Any = None
        self._processor: weakref.ref[Any] | None = None  # whose cache it is
        self.requests: Sequence[Any] = ()  # (`FutureRequestState`) of the pass under way, in the order of their rows
        self._host: DecodeHost | None = None
        self._meter = engine.meter
        self._least: int | None = None
        self._graphs: dict[int | None, Any] = {}  # of steps, by the context from which rows choose in them
        self._slot_T: torch.Tensor | None = None  # int64: where the keys of a pass go, if nobody has put them there
        self._prompts: tuple[Rows, ...] = ()
        self._decode: DecodeTokens | None = None

    def _drop(self, _: Any = None) -> None:
        """Frees what a processor had: graphs read and write its cache and its inputs."""
        self._processor = self.cache = self._host = self._decode = None
        self._graphs.clear()

    def processor(self) -> Any:
        """The batch processor that the manager makes. Its loop calls a pass here; what is captured, it then replays."""
        manager: Any = self.manager()
        processor = type(manager)._create_batch_processor(manager)
        if self.cache is processor.cache:
            return processor
        self._processor, self.cache, self._graphs = weakref.ref(processor, self._drop), processor.cache, {}
        engine, processor.model_runner.pad_inputs = self._engine, self._captures
        engine.check_cut(self.cache.max_batch_tokens, self._longest)
        if engine.program.sparse:  # of requests as long as the cache, which may be longer than the model's context
            room = (self._most, self.cache.max_tokens_read, self._device)
            self._host = DecodeHost(engine.program, engine.decode_backend, *room)
        processor.model_runner.compute_batch = partial(self._compute, weakref.ref(processor))
        for kind, allocator in self.cache.cache_allocators.items():
            if kind != _WINDOWED:  # a list of every cached token takes the host longer than a step
                allocator.get_read_indices = lambda *request: ()
        return processor

    def _compute(self, of: weakref.ref[Any], model: Any, inputs: dict[str, Any]) -> None:
        """Runs a pass, or replays it: where all rows decode."""
        processor: Any = of()
        runner, io = processor.model_runner, processor.inputs_and_outputs
        self.requests = io.requests_in_batch
        warms_up = any(request.state.request_id.startswith(_WARM_UP) for request in self.requests)
        self._meter = Meter() if warms_up else self._engine.meter
        lengths = [request.state.position_offset for request in self.requests if _decodes(request)]
        self._least = self._engine.pays.decode.least(lengths)
        self._count(lengths)
        io.graphs = self._graphs.setdefault(self._least if self._chooses(lengths) else None, type(io.graphs)())
        runner.use_cuda_graph_decode = self._captures and len(lengths) == len(self.requests)
        run = partial(type(runner).compute_batch, runner, model, inputs)
        try:
            run()
        except Exception as error:
            if not runner.use_cuda_graph_decode or isinstance(error, torch.OutOfMemoryError):
                raise
            runner.use_cuda_graph_decode = False
            warnings.warn(f"decode steps are not captured: {summary(error)}", GraphWarning, 2)
            run()  # of padded rows, the last ones
            self._captures = runner.pad_inputs = False

    def _chooses(self, lengths: Sequence[int]) -> bool:
        return self._host is not None and self._host.chooses(lengths, self._least)

    def begin_pass(self, requests: Sequence[Any], inputs: Mapping[str, Any]) -> None:
        decodes, self._slot_T = list(map(_decodes, requests)), None
        chunks = list(map(_chunk_of, requests))
        if inputs.get("block_table") is not None:  # one row a request, and padding
            self._prompts, self._decode = (), self._of_table(inputs, [chunk.longest for chunk in chunks])
            if all(decodes):
                return
        starts = accumulate((request.query_length for request in requests), initial=0)
        tokens = [slice(first, end) for first, end in pairwise(starts)]
        tables = _tables_of(self.cache, [request.state.request_id for request in requests], self._device)
        rows = list(map(Rows, tokens, chunks, _windows_of(self.cache, chunks), tables))
        self._prompts = tuple(row for row, is_decode in zip(rows, decodes, strict=True) if not is_decode)
        decoding = [row for row, is_decode in zip(rows, decodes, strict=True) if is_decode]
        self._decode = self._decode_tokens(decoding) if decoding else None

    def _of_table(self, inputs: Mapping[str, Any], lengths: Sequence[int]) -> DecodeTokens:
        """The rows of a step, and the places of its keys, from tensors alone where it is captured."""
        (allocator,), chosen = self.cache.cache_allocators.values(), None
        lengths_B, page = inputs["cu_seq_lens_k"][allocator.layer_type].diff(), allocator.tokens_per_page
        table_BP, newest_B = inputs["block_table"][allocator.index], (lengths_B - 1).clamp_(min=0).long()
        slot_B = table_BP.gather(1, newest_B[:, None] // page)[:, 0] * page + newest_B % page
        self._slot_T = torch.where(lengths_B > 0, slot_B, allocator.write_trash_index)
        if self._host is not None and self._chooses(lengths):
            table_BP = table_BP if self._captures else table_BP[:, : -(-max(lengths) // page)]
            chosen = self._host.begin(lengths_B, (), table_BP, None, self._least)
        return DecodeTokens(slice(None), lengths_B, table_BP, chosen)

    def _decode_tokens(self, rows: Sequence[Rows]) -> DecodeTokens:
        lengths = [row.chunk.longest for row in rows]
        on_device = partial(torch.tensor, dtype=torch.int32, device=self._device)
        lengths_B, chosen = on_device(lengths), None
        tables = [row.table_P for row in rows if row.table_P is not None]
        table_BP = torch.stack(tables) if tables else None
        if self._host is not None and table_BP is not None and self._chooses(lengths):
            chosen = self._host.begin(lengths_B, (), table_BP, None, self._least)
        windows = [range(row.window.start, row.window.stop) for row in rows]
        widest = max(map(len, windows))
        window_BK = on_device([[*window, *[0] * (widest - len(window))] for window in windows])
        row_B = torch.tensor([row.tokens.start for row in rows], device=self._device)
        return DecodeTokens(row_B, lengths_B, table_BP, chosen, on_device(list(map(len, windows))), window_BK)

    def _count(self, lengths: Sequence[int]) -> None:
        program, least = self._engine.program, self._least
        long = [length for length in lengths if least is not None and length >= least]
        left = [False] * len(long) if self._host is None else self._host.without_room(long)
        dense = [length for length in lengths if least is None or length < least]
        chosen = [length for length, is_dense in zip(long, left, strict=True) if not is_dense]
        count_step(program, chosen, self._meter)
        count_step(program.dense_in_decode, [*dense, *compress(long, left)], self._meter)

    def attend(self, call: LayerCall) -> torch.Tensor:
        """[1, H, T, D]: attention of all rows of the pass. Keys and values of the call are those of its tokens, or all
        that a layer with a sliding window has for them."""
        layer, allocator = self._engine.program.layers[call.layer], self.cache.layer_to_allocator[call.layer]
        pages = None
        if allocator.layer_type != _WINDOWED:
            k_NSGD, v_NSGD = allocator.get_cache_for_block_table(call.layer)
            if self._slot_T is not None:
                for x_NSGD, new_BGTD in ((k_NSGD, call.k_BGSD), (v_NSGD, call.v_BGSD)):
                    x_NSGD.flatten(0, 1).index_copy_(0, self._slot_T, new_BGTD[0].transpose(0, 1))
            pages = k_NSGD.transpose(1, 2), v_NSGD.transpose(1, 2)
        out_BHTD = (torch.zeros_like if self._captures else torch.empty_like)(call.q_BHSD)  # with rows of padding
        for rows in self._prompts:
            out_BHTD[:, :, rows.tokens] = self._prefill(layer, call, rows, pages)
        if self._decode is not None:
            self._step(layer, call, self._decode, pages, out_BHTD[0].transpose(0, 1))
        return out_BHTD

    def _prefill(
        self, layer: LayerProgram, call: LayerCall, rows: Rows, pages: tuple[torch.Tensor, torch.Tensor] | None
    ) -> torch.Tensor:
        engine, chunk, keys = self._engine, rows.chunk, (call.k_BGSD, call.v_BGSD)
        if pages is None:
            k_BGKD, v_BGKD = (x_BGTD[:, :, rows.window] for x_BGTD in keys)
            chunk = Chunk.uniform(1, k_BGKD.shape[2] - chunk.rows[0], k_BGKD.shape[2])
        elif not any(chunk.past):
            k_BGKD, v_BGKD = (x_BGTD[:, :, rows.tokens] for x_BGTD in keys)
        else:
            k_BGKD, v_BGKD = (_copied(x_NGSD, rows.table_P, chunk.longest) for x_NGSD in pages)
        if not engine.pays.prefill.pays(chunk.rows[0], chunk.longest):
            layer = layer.without_patterns
        seen, q_BHTD = replace(full_view(k_BGKD, v_BGKD), softmax=call.softmax), call.q_BHSD[:, :, rows.tokens]
        return prefill(layer, q_BHTD, seen, chunk, scale=call.scale, fallback=engine.fallback, meter=self._meter)

    def _step(
        self, layer: LayerProgram, call: LayerCall, decode: DecodeTokens,
        pages: tuple[torch.Tensor, torch.Tensor] | None, out_THD: torch.Tensor,
    ) -> None:  # fmt: skip
        """Attention of the rows that decode, into those of the pass: of those that choose, then of the others."""
        q_BHD, is_all = call.q_BHSD[0].transpose(0, 1)[decode.row_B], isinstance(decode.row_B, slice)
        out_BHD = out_THD if is_all else torch.empty_like(q_BHD)
        lengths_B, table_BP = decode.lengths_B, decode.table_BP
        if pages is None:
            assert decode.window_lengths_B is not None, "a block table of layers with a window"
            lengths_B, table_BP = decode.window_lengths_B, decode.window_BK
            k_TGD, v_TGD = call.k_BGSD[0].transpose(0, 1), call.v_BGSD[0].transpose(0, 1)
            pages = k_TGD[:, :, None], v_TGD[:, :, None]
        elif decode.chosen is not None and layer.role.is_sparse:
            decode.chosen.attend(layer, q_BHD, pages, out_BHD, call.scale, call.softmax)
            lengths_B = decode.chosen.rest(layer, None, lambda _, rest_B: rest_B)
        keys, out_BHQD = KeyView(*pages, lengths_B, table_BP, softmax=call.softmax), out_BHD[:, :, None]
        attend = partial(decode_attention, q_BHD[:, :, None], keys, scale=call.scale, window=layer.window, out=out_BHQD)
        engine = self._engine
        engine.fallback.decode(lambda backend: attend(backend=backend), engine.decode_backend, self._device)
        if not is_all:
            out_THD[decode.row_B] = out_BHD


def _decodes(request: Any) -> bool:
    """True where a row of a request (`FutureRequestState`) decodes; the last piece of a prompt does not."""
    return bool(request.state.generated_tokens) or request.state.request_id.startswith(f"{_WARM_UP}DECODING")


def _chunk_of(request: Any) -> Chunk:
    """The rows of a request (`FutureRequestState`), whose position is at their end already."""
    length = request.state.position_offset
    return Chunk.uniform(1, length - request.query_length, length)


def _windows_of(cache: Any, chunks: Sequence[Chunk]) -> list[slice]:
    windowed = cache.cache_allocators.get(_WINDOWED)
    if windowed is None:
        return [slice(0, 0)] * len(chunks)
    keys = (windowed.get_seqlen_k(chunk.past[0], chunk.rows[0]) for chunk in chunks)
    return [slice(first, end) for first, end in pairwise(accumulate(keys, initial=0))]


def _tables_of(cache: Any, names: Sequence[str], device: torch.device) -> Sequence[torch.Tensor | None]:
    """int32 [P] for each request: its pages in layers without a window; None where there are no such layers."""
    full = next((allocator for kind, allocator in cache.cache_allocators.items() if kind != _WINDOWED), None)
    if full is None:
        return [None] * len(names)
    widest = max(len(full.block_table[name]) for name in names)
    table_RP = torch.zeros((len(names), widest), dtype=torch.int32, device="cpu")
    for name, row_P in zip(names, table_RP, strict=True):
        full.fill_block_table(name, 0, 0, row_P)
    return table_RP.to(device).unbind()


def _copied(x_NGSD: torch.Tensor, table_P: torch.Tensor | None, length: int) -> torch.Tensor:
    """[1, G, length, D]: the first tokens of a request, contiguous by token."""
    assert table_P is not None, "a layer without a window has pages of every request"
    used_P = table_P[: -(-length // x_NGSD.shape[2])].long()
    return x_NGSD.transpose(1, 2)[used_P].flatten(0, 1)[:length].transpose(0, 1)[None]


def check_batching(engine: PlanEngine, model: PreTrainedModel) -> None:
    """Refuses what passes of many requests cannot follow of a plan or its handle."""
    info = engine.paging.sizes.size.info
    sliding = {layer for group in info.attention if group.kind == "sliding" for layer in group.layers}
    in_segments = sorted(sliding & {layer.layer for layer in engine.program.sparse})
    sentences = {
        f"transformers {transformers.__version__}, whose pages are others: install 5.19 or newer": not _HAS_PAGES,
        "exact output: leave exact out": engine.loop is not None,
        "keys and values in fp8: leave kv_dtype out": engine.float8,
        "a multimodal model: load its decoder alone": decoder_of(model) is not model.base_model,
        "layers with a recurrent state, of which there are no pages": any(g.kind == "linear" for g in info.attention),
        "layers that attend to keys of others": any(group.keys_of is not None for group in info.attention),
        f"segments with layers that have a sliding window ({format_ids(in_segments)}): leave these dense": in_segments,
        "rotary angles that change with the length, where a pass has one set": rope_switch(config_of(model)),
    }
    obstacles = tuple(sentence for sentence, holds in sentences.items() if holds)
    way_out = "Call generate, or run many requests by this plan in vLLM (docs/vllm.md)."
    able = Host("continuous batching", older_queries=False, windows=False, evicts=False, obstacles=obstacles)
    refuse(engine.plan, info, replace(able, way_out=way_out))
    if engine.placement.layers:
        warnings.warn(
            f"layers {format_ids(sorted(engine.placement.layers))} may be in host memory by this plan, which "
            "continuous batching ignores: their pages stay on the device",
            PlanWarning, stacklevel=4,
        )  # fmt: skip
