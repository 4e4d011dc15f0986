"""Timing calls against one another in one process, and the dense kernels that every ratio is against.

On a GPU a sample is the median of `triton.testing.do_bench`, which clears the cache between runs, or of one run where a
run is long; on a CPU it is one run. Samples are taken in rounds, every other round backwards, so that what disturbs
the machine meets all calls alike; the result is the median over the rounds. Of very long prompts, where dense takes
minutes, dense kernels are compared on a part, and the fastest alone runs on all.

Shapes: B batch (1), H query heads, G KV heads, S tokens, D head size.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from importlib import import_module
from typing import Any, TypeVar

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.prefill.flash.call import ignore_argument_warnings
from sparsekv.kernels.tiles import Chunk
from sparsekv.plans.types import format_length

Call = Callable[[], object]

_LONG_MS = 100.0  # runs longer than this need no repetition to be timed, and no cleared cache
_SAMPLE_MS = 200  # that a sample of short runs takes
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


def measure(calls: Mapping[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of each call, medians over `rounds`. Each runs once before: compilation is not counted.

    Raises:
        Whatever a call raises.
    """
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in list(calls)[:: -1 if number % 2 else 1]:
            samples[name].append(once(calls[name], device))
    return {name: statistics.median(taken) for name, taken in samples.items()}


def once(call: Call, device: torch.device) -> float:
    """Milliseconds of one sample; the call has run before."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return (time.perf_counter() - start) * 1e3
    with torch.cuda.device(device):
        milliseconds = _event_ms(call)
        if milliseconds > _LONG_MS:
            return milliseconds
        import triton

        return float(triton.testing.do_bench(call, warmup=_SAMPLE_MS // 8, rep=_SAMPLE_MS, return_mode="median"))


def _event_ms(call: Call) -> float:
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    start.record()
    call()
    stop.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(stop))


def replayed(call: Call, device: torch.device) -> Call:
    """On a CUDA GPU the call as a graph, captured when it is first called; elsewhere the call itself.

    The call gives all its work to the current stream, and asks the device for nothing.
    """
    return _Replayed(call, device) if device.type == "cuda" else call


class _Replayed:
    def __init__(self, call: Call, device: torch.device) -> None:
        self._call = call
        self._device = device
        self._graph: torch.cuda.CUDAGraph | None = None

    def __call__(self) -> None:
        with torch.cuda.device(self._device):
            self._graph = self._graph or self._captured()
            self._graph.replay()

    def _captured(self) -> torch.cuda.CUDAGraph:
        stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self._call()  # what is compiled and allocated once
        torch.cuda.current_stream().wait_stream(stream)
        with torch.cuda.graph(graph, stream=stream):
            self._call()
        return graph


def wait_for(device: torch.device) -> None:
    """Until everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception means that memory ran out, on whatever device."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in text for word in _MEMORY_WORDS)


def in_short(error: BaseException) -> str:
    """An exception in a line, for a note."""
    if is_out_of_memory(error):
        return "out of memory"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{type(error).__name__}: {first:.160}"


def free_memory(device: torch.device) -> None:
    """Gives back what the allocator holds on to, so that the next case meets the whole device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


Found = TypeVar("Found")

RANKED_FROM = 256 << 10  # tokens of a prompt that is so long that ways to run it are compared on a part
PARTS = 4


def try_each(names: Iterable[str], run: Callable[[str], Found]) -> tuple[dict[str, Found], dict[str, str]]:
    """What each gives, and why the others do not run."""
    found: dict[str, Found] = {}
    refused: dict[str, str] = {}
    for name in names:
        try:
            found[name] = run(name)
        except Exception as error:  # each library has its own
            refused[name] = in_short(error)
    return found, refused


def fastest_that_runs(
    part_ms: Mapping[str, float], length: int, run: Callable[[str], Found]
) -> tuple[dict[str, Found], dict[str, str]]:
    """Runs the way that took least on the part, or the next where it does not run on the whole.

    Args:
        part_ms: milliseconds of every way that ran on the part.
        run: one way on the whole; raises what its library raises.

    Returns:
        What the one that ran gave, by its name, if any did; and why each of the others is not there.
    """
    refused: dict[str, str] = {}
    for name in (order := sorted(part_ms, key=lambda name: part_ms[name])):
        found, failed = try_each([name], run)
        refused |= failed
        if found:
            behind = f"times the time of {order[0]} at {length // PARTS} tokens"
            left = order[order.index(name) + 1 :]
            return found, refused | {other: f"{part_ms[other] / part_ms[order[0]]:.2f} {behind}" for other in left}
    return {}, refused


def repeat_in_turn(turns: Mapping[str, list[Found]], run: Callable[[str], Found], repeats: int) -> str:
    """The other repeats, appended to the first runs, every other round backwards.

    What fails ends the repeats, as the others would no longer be timed in turn with it; returns what there is to say.
    """
    for number in range(1, repeats):
        for name in list(turns)[:: -1 if number % 2 else 1]:
            try:
                turns[name].append(run(name))
            except Exception as error:
                return f"repeat {number + 1} failed, and the ones before it are shown: {in_short(error)}"
    return ""


FLASH_ATTN = "flash-attn-4"
TORCH_KERNELS = {
    "torch flash": SDPBackend.FLASH_ATTENTION,
    "torch cuDNN": SDPBackend.CUDNN_ATTENTION,
    "torch efficient": SDPBackend.EFFICIENT_ATTENTION,
}
# What torch warns of at every kernel that it does not take; that it was refused stands in the row.
_WHY_NOT = r"(?s).*Triggered internally at .*sdp_utils"
# A peer this much slower than the fastest in one run cannot turn out to be the fastest.
_OUT_OF_REACH = 1.5


@dataclass(frozen=True, slots=True)
class DensePeers:
    """The dense kernels tried at one length: milliseconds of each that ran, and why the others did not."""

    length: int
    timed_ms: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str | None:
        """The peer that every ratio is against; None where none ran."""
        return min(self.timed_ms, key=lambda name: self.timed_ms[name]) if self.timed_ms else None


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRow:
    """What every bench says of a case. A number that could not be measured is None; `note` says why.

    Attributes:
        dense_ms: the fastest way to run dense, timed in turn with the sparse one.
        density: computed tiles over causal tiles, as realised.
    """

    name: str
    length: int
    backend: str
    device: str
    dtype: str
    dense_ms: float | None = None
    sparse_ms: float | None = None
    density: float | None = None
    tflops: float | None = None
    dense_peers: DensePeers | None = None
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """How many times faster than the fastest way to run dense."""
        return self.dense_ms / self.sparse_ms if self.dense_ms is not None and self.sparse_ms else None

    @property
    def dense_case(self) -> str:
        """What the dense peers were timed on."""
        return format_length(self.length)

    def with_keys(self, *own: str) -> dict[str, Any]:
        """As JSON data, with these attributes of a bench's own; the first nine keys are relied on."""
        relied_on = ("name", "length", "dense_ms", "sparse_ms", "speedup", "density", "tflops", "backend", "device")
        peers = self.dense_peers or DensePeers(self.length, {})
        return {name: getattr(self, name) for name in (*relied_on, "dtype", *own, "note")} | {
            "dense_kernel": peers.fastest,
            "dense_peers_ms": dict(peers.timed_ms),
            "dense_refused": dict(peers.refused),
        }


def dense_calls(q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor) -> dict[str, Call]:
    """Causal attention of a whole prompt by every dense kernel that there may be for these tensors.

    On a CPU, where torch's kernel does not know grouped heads, K and V may be repeated beforehand, which is then not
    counted: what is compared with sparse is the kernel alone.
    """
    if q_BHSD.is_cuda:
        calls: dict[str, Call] = {
            name: partial(torch_kernel, kernel, q_BHSD, k_BGSD, v_BGSD) for name, kernel in TORCH_KERNELS.items()
        }
        return calls | {FLASH_ATTN: partial(flash_attn_4, q_BHSD, k_BGSD, v_BGSD)}
    chunk, scale = Chunk.uniform(q_BHSD.shape[0], 0, q_BHSD.shape[2]), q_BHSD.shape[-1] ** -0.5
    group = q_BHSD.shape[1] // k_BGSD.shape[1]
    k_BHSD, v_BHSD = (x_BGSD.repeat_interleave(group, 1) for x_BGSD in (k_BGSD, v_BGSD))
    return {
        "torch SDPA": lambda: dense_attention(q_BHSD, k_BGSD, v_BGSD, chunk, scale=scale),
        "torch SDPA, K and V repeated beforehand": lambda: scaled_dot_product_attention(
            q_BHSD, k_BHSD, v_BHSD, is_causal=True
        ),
    }


def time_dense(
    q_BHSD: torch.Tensor,
    k_BGSD: torch.Tensor,
    v_BGSD: torch.Tensor,
    rounds: int,
    *,
    ranked_from: int = RANKED_FROM,
    kernels: Callable[..., Mapping[str, Call]] = dense_calls,
) -> DensePeers:
    """Milliseconds of every dense kernel that runs on these tensors; of a very long prompt, of the fastest alone."""
    length, device = q_BHSD.shape[2], q_BHSD.device
    calls = kernels(q_BHSD, k_BGSD, v_BGSD)
    if length < ranked_from:
        return time_calls(calls, length, device, rounds)
    part = length // PARTS
    on_part = time_calls(kernels(*(x[:, :, :part] for x in (q_BHSD, k_BGSD, v_BGSD))), part, device, 1)
    found, refused = fastest_that_runs(
        on_part.timed_ms, length, lambda name: measure({name: calls[name]}, device, rounds)[name]
    )
    return DensePeers(length, found, dict(on_part.refused) | refused)


def time_calls(calls: Mapping[str, Call], length: int, device: torch.device, rounds: int) -> DensePeers:
    """Tries every call once, and times those again, in turn, that may be the fastest."""

    def first(name: str) -> float:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message=_WHY_NOT, category=UserWarning)
            calls[name]()
        return once(calls[name], device)

    first_ms, refused = try_each(calls, first)
    near = {name for name, ms in first_ms.items() if ms <= _OUT_OF_REACH * min(first_ms.values())}
    if rounds > 1 and len(near) > 1:
        first_ms |= measure({name: calls[name] for name in near}, device, rounds)
    return DensePeers(length, first_ms, refused)


def dense_flops(heads: int, head_dim: int, length: int) -> float:
    """Operations of causal attention: two products of the lower half of the matrix."""
    return 4.0 * heads * head_dim * length * (length + 1) / 2


def flash_attn_4(q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, **options: Any) -> torch.Tensor:
    """flash-attn-4's dense causal kernel; queries are the last of the keys. [B, H, S, D].

    Args:
        options: others of its own.

    Raises:
        ImportError: it is not installed.
    """
    attend: Callable[..., object] = import_module("flash_attn.cute").flash_attn_func
    ignore_argument_warnings()
    found = attend(*(x.transpose(1, 2) for x in (q_BHSD, k_BGSD, v_BGSD)), causal=True, **options)
    out_BSHD = found[0] if isinstance(found, tuple) else found
    assert isinstance(out_BSHD, torch.Tensor)
    return out_BSHD.transpose(1, 2)


def torch_kernel(
    kernel: SDPBackend, q_BHSD: torch.Tensor, k_BGSD: torch.Tensor, v_BGSD: torch.Tensor, *, causal: bool = True
) -> torch.Tensor:
    """One kernel of torch's SDPA, [B, H, S, D]. Raises RuntimeError where it does not take the tensors."""
    grouped = q_BHSD.shape[1] != k_BGSD.shape[1]
    with sdpa_kernel(kernel):
        try:
            return scaled_dot_product_attention(q_BHSD, k_BGSD, v_BGSD, is_causal=causal, enable_gqa=grouped)
        except RuntimeError as error:
            if "No available kernel" in str(error):
                raise RuntimeError("torch has no such kernel for these tensors") from error
            raise
