"""What `bench` prints for people."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from sparsekv.cli.output import columns, size
from sparsekv.plans.types import format_length

if TYPE_CHECKING:
    from sparsekv.planner.bench.kernel_bench import KernelRow
    from sparsekv.planner.bench.prefill_bench import PrefillRow
    from sparsekv.planner.bench.timing import DensePeers

_KERNEL_COLUMNS = (
    *("pattern", "length", "backend", "density", "dense ms", "index", "attention", "whole", "speedup", "TFLOP/s"),
    *("dense", "columns", "diagonals", "tiles", "mass", "error"),
)
_PREFILL_COLUMNS = (
    *("length", "backend", "density", "dense s", "sparse s", "speedup", "TFLOP/s", "dense peak", "sparse peak"),
    *("KV device", "KV host"),
)


def kernel_text(rows: Sequence[KernelRow]) -> str:
    """Dense kernels, a line a case, and notes."""
    return "\n".join([*_dense_lines(rows), "", _kernel_table(rows), *_notes(rows)])


def prefill_text(rows: Sequence[PrefillRow]) -> str:
    """Dense runs, a line a length, and notes."""
    return "\n".join([*_dense_lines(rows), "", _prefill_table(rows), *_notes(rows)])


def _kernel_table(rows: Sequence[KernelRow]) -> str:
    header = _KERNEL_COLUMNS
    lines = [
        (
            row.name,
            format_length(row.length),
            row.backend,
            _number(row.density, ".3f"),
            *(_number(ms, ".3f") for ms in (row.dense_ms, row.index_ms, row.attention_ms, row.sparse_ms)),
            _number(row.speedup, ".2f"),
            _number(row.tflops, ".3g"),
            _number(row.dense_tflops, ".3g"),
            *(_number(part, ".3f") for part in _recalls(row)),
            _number(row.mass, ".3f"),
            _number(row.error, ".1e"),
        )
        for row in rows
    ]
    return columns([header, *lines], right=range(3, len(header)))


def _recalls(row: KernelRow) -> tuple[float | None, float | None, float | None]:
    found = row.recall
    return (found.columns, found.diagonals, found.tiles) if found else (None, None, None)


def _prefill_table(rows: Sequence[PrefillRow]) -> str:
    header = _PREFILL_COLUMNS
    lines = [
        (
            format_length(row.length),
            row.backend,
            _number(row.density, ".3f"),
            *(_number(None if ms is None else ms / 1e3, ".3f") for ms in (row.dense_ms, row.sparse_ms)),
            _number(row.speedup, ".2f"),
            _number(row.tflops, ".3g"),
            *(
                "-" if count is None else size(count)
                for count in (row.dense_peak, row.sparse_peak, row.kv_device, row.kv_host)
            ),
        )
        for row in rows
    ]
    return columns([header, *lines], right=range(2, len(header)))


def _dense_lines(rows: Sequence[KernelRow | PrefillRow]) -> Iterator[str]:
    """Every dense kernel, once a length; ratios are against the first named."""
    seen: dict[int, DensePeers] = {row.length: row.dense_peers for row in rows if row.dense_peers}
    for length, peers in seen.items():
        timed = sorted(peers.timed_ms.items(), key=lambda item: item[1])
        named = [f"{name} {ms:.3f} ms" for name, ms in timed]
        yield f"dense at {format_length(length)}: {', '.join(named) or 'none ran'}"
        for name, why in peers.refused.items():
            yield f"  not {name}: {why}"


def _notes(rows: Sequence[KernelRow | PrefillRow]) -> Iterator[str]:
    yield from dict.fromkeys(f"{row.backend}: {row.note}" for row in rows if row.note)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
