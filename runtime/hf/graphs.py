"""Decode steps as CUDA graphs: one launch in place of several hundred.

A graph is captured for a batch size and a capacity, and serves every cache of that size: the addresses of keys and
values stand in a small tensor that is written when another cache comes, or one has grown (runtime/hf/captured.py);
lengths, choices and budgets are read on the device as well. It covers the decoder; what follows (the head, sampling)
runs as always, on a copy of the hidden state.

Shapes: B batch, E hidden size.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from itertools import chain, repeat
from operator import contains, is_
from typing import Any, NamedTuple, cast

import torch
from torch import nn
from torch.nn.modules import module as torch_modules
from transformers import Cache, DynamicCache
from transformers.modeling_outputs import BaseModelOutputWithPast

from sparsekv.kernels.decode.selection import Selection
from sparsekv.plans.errors import SparseKVError
from sparsekv.runtime.core.program import Program, SegmentProgram
from sparsekv.runtime.core.state import DecodeState
from sparsekv.runtime.hf.attention import CONTEXT, Context, Engine, Phase
from sparsekv.runtime.hf.cache import Progress, SparseLayer
from sparsekv.runtime.hf.captured import FetchError, HotRows, StepStores, kinds_of, obstacle
from sparsekv.runtime.hf.long_inputs import asks_for_more, is_touched
from sparsekv.runtime.stores.pinned import OUTSIDE_CAPTURES
from sparsekv.runtime.stores.store import Bytes, HostReads, KVStore

MOST_ROWS = 64
_LEAST_CAPACITY = 4096
_MOST_GRAPHS = 16  # of all batch sizes and capacities; the one that was not used for longest makes room


Revise = Callable[[SegmentProgram, Selection], Selection]
"""Another choice in place of what a filter layer chose for its segment."""


class _Key(NamedTuple):
    """What a step is captured for: a batch size, a capacity, and the rows on the device of layers in host memory."""

    rows: int
    capacity: int
    kinds: tuple[HotRows | None, ...]


class GraphWarning(UserWarning):
    """Decode steps are not captured: they run one launch at a time, which is slower."""


class StepGraph:
    """One captured step of one batch size, one capacity, and one kind of stores.

    Args:
        stores: of a cache of this kind, one a layer.
        capacity: tokens that a row may have: what grids and scratch are made for.
        program: what the layers compute.
        reads: where to count what layers in host memory read.
        revise: what to put in place of the choices of filter layers.
    """

    def __init__(
        self, stores: Sequence[Any], capacity: int, program: Program, reads: HostReads, revise: Revise | None = None
    ) -> None:
        batch, device = stores[0].keys.shape[0], stores[0].keys.device
        self.open = True  # as the owner of its cache
        self.bytes: list[Bytes] = []
        self.capacity = capacity
        self.ids_B1 = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.positions_B1 = torch.zeros((batch, 1), dtype=torch.int64, device=device)
        self.lengths_B = torch.ones(batch, dtype=torch.int32, device=device)
        self.stores = StepStores(stores, capacity, program, self.lengths_B, reads)
        # no method of this object: in a reference cycle, a graph would outlive its handle until garbage is collected
        self._state = DecodeState(program, on_choice=partial(_chosen, self.stores, revise))
        self._graph = torch.cuda.CUDAGraph()
        # who lets go of the last reference may be in the midst of another capture, and torch would destroy it there
        weakref.finalize(self, OUTSIDE_CAPTURES.run, self._graph.reset).atexit = False
        self._out_B1E: torch.Tensor | None = None

    def new_store(self, layer: int) -> KVStore:
        """Of the cache that the step is captured with."""
        return self.stores.new_store(layer)

    def new_state(self) -> DecodeState:
        """The one state of the graph."""
        return self._state

    def serves(self, ids_B1: torch.Tensor, stores: Sequence[Any], length: int) -> bool:
        """Whether the next step is of the very stores that it is bound to, and these have room for it."""
        return ids_B1.shape == self.ids_B1.shape and self.stores.serves(stores, length)

    def load(self, ids_B1: torch.Tensor, positions: torch.Tensor | None, past: int) -> None:
        """What the next step is of."""
        self.ids_B1.copy_(ids_B1)
        self.lengths_B.fill_(past + 1)
        if positions is None:
            self.positions_B1.fill_(past)
        else:
            self.positions_B1.copy_(positions)

    def step_of(self, forward: Callable[..., Any], engine: Engine) -> Callable[[], torch.Tensor]:
        """The step as a function of what `bind` and `load` have written."""
        cache = DynamicCache()
        progress = Progress(self._state)
        cache.layers = [SparseLayer(self, layer, progress) for layer in range(len(self.stores.kinds))]

        def step() -> torch.Tensor:
            self._state.begin(self.lengths_B, self.lengths_B.device)
            found = forward(
                input_ids=self.ids_B1,
                position_ids=self.positions_B1,
                past_key_values=cache,
                use_cache=True,
                **{CONTEXT: Context(engine, cache, Phase.DECODE)},
            )
            self.stores.join()
            hidden_B1E: torch.Tensor = found.last_hidden_state
            return hidden_B1E

        return step

    def capture(self, forward: Callable[..., Any], engine: Engine, pool: Any, stream: torch.cuda.Stream) -> None:
        """Runs the step once, for what is compiled and allocated on first use, and captures it. The token that it
        writes is written again by the replay.

        A capture that fails leaves the allocator waiting for its end: a step that waits for the device is found out
        before.
        """
        step, current = self.step_of(forward, engine), torch.cuda.current_stream(self.ids_B1.device)
        stream.wait_stream(current)
        with torch.cuda.stream(stream):  # around the capture as well, which does not restore it when it fails
            step()
            with _refusing_waits():
                step()
            with torch.cuda.graph(self._graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                self._out_B1E = step()
        current.wait_stream(stream)

    def run(self) -> torch.Tensor:
        """[B, 1, E]: a copy, on the current stream."""
        assert self._out_B1E is not None, "capture comes first"
        self._graph.replay()
        return self._out_B1E.clone()


def _chosen(stores: StepStores, revise: Revise | None, segment: SegmentProgram, selection: Selection) -> Selection:
    """Raises FetchError: else attention would be blamed, and begin the layer again over a half-placed choice."""
    expected = "replaced by the `revise` of the steps"
    try:
        if revise is not None:
            selection = revise(segment, selection)
        expected = "fetched from host memory by a kernel"
        stores.fetch(segment, selection)
    except (torch.OutOfMemoryError, SparseKVError):
        raise
    except Exception as error:
        raise FetchError(
            f"expected the choice of filter layer {segment.filter} to be {expected}, found {_summary(error)}"
        ) from error
    return selection


@contextmanager
def _refusing_waits() -> Iterator[None]:
    """Inside it, what waits for the device raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


class StepGraphs:
    """The decode steps of one attached decoder, which only captured steps keep alive: `release` lets go of it.

    Args:
        model_type: the model's.
        engine: attends.
        program: what the layers compute.
        reads: where to count what layers in host memory read.
    """

    def __init__(self, model_type: str, engine: Engine, program: Program, reads: HostReads) -> None:
        self._model_type = model_type
        self._engine = engine
        self._program = program
        self._reads = reads
        self.revise: Revise | None = None  # for measurements: what to put in place of choices in steps to be captured
        self._graphs: dict[_Key, StepGraph] = {}  # the one used last at the end
        self._next: StepGraph | None = None
        self._pool: Any = None
        self._stream: torch.cuda.Stream | None = None
        self._capturing: torch.cuda.Stream | None = None
        self._parts: _Parts | None = None
        self._refused: dict[_Key, str] = {}  # what memory did not suffice for, or cannot be fetched
        self.replayed = 0  # steps so far
        self.why_not = ""  # why the last decode step was not replayed
        self._never = ""  # why no step is captured any more
        self._told = False

    @property
    def latest(self) -> StepGraph | None:
        """The captured step that ran last."""
        return self._next

    def takes(self, decoder: nn.Module, inputs: dict[str, Any]) -> bool:
        """Whether this forward pass is a decode step that can be replayed; captures it where none was before."""
        context: Context = inputs[CONTEXT]
        if context.phase is not Phase.DECODE:
            if self._parts is not None and self._parts.changed():
                self.release()  # old weights are not kept alive beside a prompt
            return False
        self.why_not = self._never or self._obstacle(decoder, inputs) or self._ready(decoder, inputs)
        if self.why_not and not self._told:
            self._told = True
            warnings.warn(f"decode steps run one launch at a time, not captured: {self.why_not}", GraphWarning, 2)
        return not self.why_not

    def run(self, decoder: Any, inputs: dict[str, Any]) -> Any:
        """What the decoder's own forward returns. `takes` has made the step ready.

        Whether the model still is what was captured is looked at while the device works: asking first would take as
        long as a layer. The captured tensors are kept alive, so that a replay in vain reads nothing but old weights.
        """
        assert self._next is not None, "takes() comes first"
        cache: Cache = inputs[CONTEXT].cache
        hidden_B1E = self._next.run()
        assert self._parts is not None
        if self._parts.changed():
            self.release()  # captured anew, where it can be
            return type(decoder).forward(decoder, **inputs)
        for store in _stores(cache):
            store.advance()
        self.replayed += 1
        return BaseModelOutputWithPast(last_hidden_state=hidden_B1E, past_key_values=cache)

    def release(self) -> None:
        """Frees the graphs and their memory."""
        self._graphs.clear()
        self._next = self._pool = self._parts = None

    def _obstacle(self, decoder: nn.Module, inputs: dict[str, Any]) -> str:
        """Why the step has to run as the model's own forward; empty where it does not."""
        ids = inputs.get("input_ids")
        if ids is None or inputs.get("inputs_embeds") is not None or asks_for_more(decoder, inputs):
            return "more is asked of the model than the next token of token ids"
        if self._program.remembers:
            return f"the selector of filter layer {self._program.remembers[0]} looks at older queries"
        if ids.shape[0] > MOST_ROWS:
            return f"expected at most {MOST_ROWS} rows, found {ids.shape[0]}"
        if cast(Any, decoder).config.num_hidden_layers != len(inputs[CONTEXT].cache.layers):
            return "only some layers of the model run"
        if torch.is_grad_enabled() or torch.is_autocast_enabled("cuda") or torch.compiler.is_compiling():
            return "it runs under autograd, autocast or torch.compile"
        return ""

    def _ready(self, decoder: nn.Module, inputs: dict[str, Any]) -> str:
        """Prepares the replay; why that failed."""
        ids_B1, stores = inputs["input_ids"], _stores(inputs[CONTEXT].cache)
        past, positions = stores[0].length, inputs.get("position_ids")
        stream = torch.cuda.current_stream(ids_B1.device)
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)  # the last step used the same memory
        self._stream = stream
        if self._next is not None and self._next.serves(ids_B1, stores, past + 1):
            self._next.load(ids_B1, positions, past)
            return ""
        if found := obstacle(self._program, stores, past + 1, ids_B1):
            return found
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.device(ids_B1.device):
            for store in stores:
                store.prepare(past + 1)
            if self._parts is not None and self._parts.numbers_changed():
                self.release()
            rows, needed, kinds = ids_B1.shape[0], max(store.capacity for store in stores), kinds_of(stores)
            least = bucketed_capacity(needed)
            fitting = [
                key.capacity
                for key in self._graphs
                if (key.rows, key.kinds) == (rows, kinds) and needed <= key.capacity <= 4 * least
            ]
            key = _Key(rows, min(fitting, default=least), kinds)
            known = self._graphs.pop(key, None)
            if known is None and (found := self._refused.get(key) or self._parts_captured(decoder)):
                return found
            try:
                graph = known or StepGraph(stores, key.capacity, self._program, self._reads, self.revise)
                graph.stores.bind(stores)
                graph.load(ids_B1, positions, past)
                if known is None:
                    self._capture(graph, decoder)
            except Exception as error:  # memory, or what a model does cannot be captured: it runs all the same
                self._abandon(ids_B1.device)
                return self._not_captured(key, error)
            except BaseException:
                self._abandon(ids_B1.device)
                raise
            self._graphs[key] = self._next = graph
            if len(self._graphs) > _MOST_GRAPHS:
                del self._graphs[next(iter(self._graphs))]
        return ""

    def _capture(self, graph: StepGraph, decoder: Any) -> None:
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        self._capturing = self._capturing or torch.cuda.Stream(graph.ids_B1.device)  # cuBLAS keeps memory for each one
        with self._reads.uncounted(), OUTSIDE_CAPTURES.put_off():
            graph.capture(partial(type(decoder).forward, decoder), self._engine, self._pool, self._capturing)

    def _abandon(self, device: torch.device) -> None:
        """Frees everything, once the kernels are done that a failed capture has queued on its streams: they read and
        write its tables and the caches."""
        with suppress(RuntimeError):  # a device that an error has made unusable runs no kernels; that error is told
            torch.cuda.synchronize(device)
        self.release()

    def _not_captured(self, key: _Key, error: Exception) -> str:
        """Notes not to try again: this size where memory ran out or layers in host memory are at fault, else any."""
        found = f"capturing failed ({_summary(error)})"
        if isinstance(error, (torch.OutOfMemoryError, FetchError)):
            self._refused[key] = found
        else:
            self._never = found
        return found

    def _parts_captured(self, decoder: nn.Module) -> str:
        """Notes what is about to be captured, once for all graphs; why it cannot be."""
        if self._parts is not None:
            return ""
        parts = _Parts(decoder, self._model_type)
        found = parts.obstacle()
        self._parts = None if found else parts
        return found


def _summary(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"


def _stores(cache: Cache) -> list[Any]:
    return [layer.store for layer in cache.layers if isinstance(layer, SparseLayer)]


def can_capture(device: torch.device, backend: str) -> bool:
    """Whether steps on this device can be captured: Triton's kernels ask the host for nothing."""
    return device.type == "cuda" and torch.version.hip is None and backend in ("flash", "triton")


def bucketed_capacity(tokens: int) -> int:
    """Capacities are powers of two: few graphs serve all contexts."""
    return max(_LEAST_CAPACITY, 1 << (tokens - 1).bit_length())


class _Parts:
    """The modules, tensors and numbers that graphs have captured, to notice when others take their place.

    Only modules of torch and of transformers are captured: what others read cannot be known. Types, class forwards,
    modules, tensors and hooks are compared at every step, numbers that modules hold when a cache is new or has grown.
    """

    def __init__(self, decoder: Any, model_type: str) -> None:
        self._modules = list(decoder.modules())
        self._inner = self._modules[1:]
        self._homes = (f"transformers.models.{model_type}.", "transformers.activations", "torch.nn.modules.")
        self._hooks = [hooks for module in self._inner for hooks in (module._forward_hooks, module._forward_pre_hooks)]
        self._attributes = [vars(module) for module in self._inner]
        self._types = list(map(type, self._modules))
        self._kinds: list[Any] = list(set(self._types))
        self._forwards = [kind.forward for kind in self._kinds]
        self._seen = self._flat()
        self._tensors = [member for member in self._seen if isinstance(member, torch.Tensor)]
        self._numbers = self._read_numbers()
        self._storages: list[torch.UntypedStorage] = []
        self._addresses: list[int] = []
        self._plain = {type(tensor) for tensor in self._tensors} <= {torch.Tensor, nn.Parameter}
        if self._plain:
            self._storages = [tensor.untyped_storage() for tensor in self._tensors]  # kept: a replay may come too late
            self._addresses = list(map(torch.Tensor.data_ptr, self._tensors))

    def obstacle(self) -> str:
        """Why these modules cannot be captured; empty where they can."""
        for module in self._inner:
            kind = type(module)
            if not f"{kind.__module__}.".startswith(self._homes):
                return f"the decoder has a module of {kind.__module__}.{kind.__name__}, which may change unseen"
        if not self._plain:
            return "the decoder has tensors of a class of their own"
        return "a module of the decoder has a hook, or a forward of its own" if self._touched() else ""

    def changed(self) -> bool:
        """Whether the model would compute something else than what was captured."""
        now = self._flat()
        same = len(now) == len(self._seen) and all(map(is_, now, self._seen))
        same = same and list(map(torch.Tensor.data_ptr, self._tensors)) == self._addresses
        same = same and list(map(type, self._modules)) == self._types
        same = same and all(map(is_, [kind.forward for kind in self._kinds], self._forwards))
        return not same or self._touched()

    def numbers_changed(self) -> bool:
        """Whether a module holds another number, text or flag."""
        return self._read_numbers() != self._numbers

    def _touched(self) -> bool:
        """Whether modules have hooks, or forwards of their own."""
        if torch_modules._global_forward_hooks or torch_modules._global_forward_pre_hooks:
            return True
        if any(self._hooks) or any(map(contains, self._attributes, repeat("forward"))):
            return any(map(is_touched, self._inner))
        return False

    def _read_numbers(self) -> list[Any]:
        kinds = (int, float, str, bool, type(None))
        return [
            [(name, value) for name, value in vars(module).items() if type(value) in kinds] for module in self._modules
        ]

    def _flat(self) -> list[Any]:
        kinds = ("_modules", "_parameters", "_buffers")
        return list(chain.from_iterable(vars(module)[kind].values() for module in self._modules for kind in kinds))
