"""The one harness: calls timed in turn, the row of a case, and the table of rows.

On a GPU a sample is the median of `triton.testing.do_bench`, which clears the cache between runs, or of one run where a
run is long; on a CPU it is one run. Samples are taken in rounds, every other round backwards, so that what disturbs
the machine meets all calls alike; the result is the median over the rounds.
"""

from __future__ import annotations

import statistics
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, TypeVar

import torch

from sparsekv import __version__
from sparsekv.plans.errors import SparseKVError
from sparsekv.plans.types import columns, format_bytes, format_length, parse_length

Call = Callable[[], object]
Found = TypeVar("Found")

RANKED_FROM = 256 << 10  # tokens of a prompt that is so long that ways to run it are compared on a part
PARTS = 4
_LONG_MS = 100.0  # runs longer than this need no repetition to be timed, and no cleared cache
_SAMPLE_MS = 200  # that a sample of short runs takes
_MEMORY_WORDS = ("out of memory", "can't allocate memory", "not enough memory")


def parse_lengths(text: str) -> tuple[int, ...]:
    """Lengths separated by commas, ascending, each once."""
    return tuple(sorted({parse_length(part) for part in text.split(",")}))


def checkout_commit() -> str:
    """The commit of this checkout; empty where the program is installed, or git is not."""
    file = Path(__file__).resolve()
    for command in (("ls-files", "--error-unmatch", file.name), ("rev-parse", "--short=8", "HEAD")):
        try:
            done = subprocess.run(["git", *command], cwd=file.parent, capture_output=True, text=True, check=False)
        except OSError:
            return ""
        if done.returncode:
            return ""
    return done.stdout.strip()


def program() -> str:
    """This program and the day, for what is measured."""
    version = " ".join(filter(None, (f"sparsekv {__version__}", checkout_commit())))
    return f"{version}, {datetime.now(UTC):%Y-%m-%d}"


# --- timing -----------------------------------------------------------------------------------------------------------


def measure(calls: Mapping[str, Call], device: torch.device, rounds: int) -> dict[str, float]:
    """Milliseconds of each call, medians over `rounds`. Each runs once before: compilation is not counted."""
    for call in calls.values():
        call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for number in range(rounds):
        for name in in_turn(calls, number):
            samples[name].append(once(calls[name], device))
    return {name: statistics.median(taken) for name, taken in samples.items()}


def in_turn(names: Iterable[str], number: int) -> list[str]:
    """The order of a round: every other one is backwards."""
    return list(names)[:: -1 if number % 2 else 1]


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
    graph: torch.cuda.CUDAGraph | None = None

    def replay() -> None:
        nonlocal graph
        with torch.cuda.device(device):
            graph = graph or _captured(call)
            graph.replay()

    return replay if device.type == "cuda" else call


def _captured(call: Call) -> torch.cuda.CUDAGraph:
    stream, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        call()  # what is compiled and allocated once
    torch.cuda.current_stream().wait_stream(stream)
    with torch.cuda.graph(graph, stream=stream):
        call()
    return graph


def wait_for(device: torch.device) -> None:
    """Until everything asked of the device is done."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def free_memory(device: torch.device) -> None:
    """Gives back what the allocator holds on to, so that the next case meets the whole device."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


# --- ways to run that may fail ----------------------------------------------------------------------------------------


def is_out_of_memory(error: BaseException) -> bool:
    """Returns whether an exception means that memory ran out, on whatever device."""
    text = str(error).lower()
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or any(word in text for word in _MEMORY_WORDS)


def in_short(error: BaseException) -> str:
    """An exception in a line, for a note."""
    if is_out_of_memory(error):
        return "out of memory"
    first = (str(error).strip().splitlines() or [""])[0]
    return f"{first:.160}" if isinstance(error, SparseKVError) else f"{type(error).__name__}: {first:.160}"


def try_each(names: Iterable[str], run: Callable[[str], Found]) -> tuple[dict[str, Found], dict[str, str]]:
    """Returns what each gives, and why the others do not run."""
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
    """Runs the way that took least on a part of a very long prompt, or the next where it does not run on the whole.

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
    """The other repeats, appended to the first runs.

    What fails ends the repeats, as the others would no longer be timed in turn with it; returns what there is to say.
    """
    for number in range(1, repeats):
        for name in in_turn(turns, number):
            try:
                turns[name].append(run(name))
            except Exception as error:
                return f"repeat {number + 1} failed, and the ones before it are shown: {in_short(error)}"
    return ""


# --- rows and tables --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class DensePeers:
    """The ways to run dense that were tried at one length: milliseconds of each that ran, why the others did not."""

    length: int
    timed_ms: Mapping[str, float]
    refused: Mapping[str, str] = field(default_factory=dict)

    @property
    def fastest(self) -> str | None:
        """The peer that every ratio is against; None where none ran."""
        return min(self.timed_ms, key=lambda name: self.timed_ms[name]) if self.timed_ms else None

    @property
    def least_ms(self) -> float | None:
        return min(self.timed_ms.values(), default=None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Holds what a bench found of a case. A number that could not be measured is None; `note` says why.

    Attributes:
        name: of the model, or of what was timed of it.
        dense_ms: the fastest way to run dense, timed in turn with the sparse one.
        density: what is computed or read, over what dense would, as realised.
        own: what this bench alone has to say, by its key in JSON.
    """

    name: str
    length: int
    device: str
    dtype: str
    backend: str = ""
    dense_ms: float | None = None
    sparse_ms: float | None = None
    density: float | None = None
    tflops: float | None = None
    peers: DensePeers | None = None
    own: Mapping[str, Any] = field(default_factory=dict)
    note: str = ""

    @property
    def speedup(self) -> float | None:
        """Returns how many times faster than the fastest way to run dense."""
        return self.dense_ms / self.sparse_ms if self.dense_ms is not None and self.sparse_ms else None

    def plus(self, *notes: str, **found: Any) -> Row:
        """The row with more notes and numbers: its fields, or else what is the bench's own."""
        fields = {name: value for name, value in found.items() if name in self.__dataclass_fields__}
        own = {name: value for name, value in found.items() if name not in fields}
        return replace(self, **fields, own={**self.own, **own}, note="; ".join(filter(None, (self.note, *notes))))

    def data(self) -> dict[str, Any]:
        """As JSON data; the first nine keys are relied on."""
        relied_on = ("name", "length", "dense_ms", "sparse_ms", "speedup", "density", "tflops", "backend", "device")
        peers = self.peers or DensePeers(self.length, {})
        return {name: getattr(self, name) for name in (*relied_on, "dtype")} | {
            **self.own,
            "note": self.note,
            "dense_kernel": peers.fastest,
            "dense_peers_ms": dict(peers.timed_ms),
            "dense_refused": dict(peers.refused),
        }


Show = Callable[[Any], str]
Columns = Mapping[str, tuple[str, Show]]
"""By title: the key of a row's data, and how it is written. Words are aligned to the left, numbers to the right."""


def number(form: str, per: float = 1.0) -> Show:
    """A number in this format and unit, `-` where there is none."""
    return lambda value: "-" if value is None else format(value if per == 1 else value / per, form)


def bytes_in_short(count: int | None) -> str:
    return "-" if count is None else format_bytes(count)


def table(rows: Sequence[Row], shown: Columns) -> str:
    """A line a row under the titles."""
    found = [row.data() for row in rows]
    cells = [[title, *(show(row.get(key)) for row in found)] for title, (key, show) in shown.items()]
    numbers = [at for at, (_, show) in enumerate(shown.values()) if show is not str]
    return columns(list(zip(*cells, strict=True)), right=numbers)


def report(rows: Sequence[Row], title: str, shown: Columns) -> str:
    """For people: the ways to run dense once a case (ratios are against the first), the table, and the notes."""
    notes = dict.fromkeys(f"{row.backend or row.name}: {row.note}" for row in rows if row.note)
    return "\n".join([title, *dict.fromkeys(_dense_lines(rows)), "", table(rows, shown), *notes])


def case_of(row: Row) -> str:
    """Returns what its ways to run dense were timed on."""
    length = format_length(row.length)
    return f"{length}, batch {row.own['batch']}, {row.name}" if "batch" in row.own else length


def _dense_lines(rows: Sequence[Row]) -> Iterable[str]:
    for row in rows:
        if row.peers is not None:
            timed = sorted(row.peers.timed_ms.items(), key=lambda item: item[1])
            yield f"dense at {case_of(row)}: {', '.join(f'{name} {ms:.3f} ms' for name, ms in timed) or 'none ran'}"
            yield from (f"  not {name}: {why}" for name, why in row.peers.refused.items())
