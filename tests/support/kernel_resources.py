"""Registers, spills and shared memory of every Triton kernel, compiled for GPUs that this machine need not have.

    python tests/support/kernel_resources.py                          # every generation in the table below
    python tests/support/kernel_resources.py --capability 80 --kernel prefill --json

Kernels are launched as the backends launch them, on tensors in main memory, up to the point where a GPU would be
needed: what is compiled is what would run, specialisations and block sizes included. Exit status 1 when a kernel needs
more shared memory than the GPU has. Spilled bytes are read from the machine code (its stack).
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from sparsekv.kernels import observed_triton, pages, row_damage
from sparsekv.kernels.decode import place, radix
from sparsekv.kernels.decode import triton as decode_triton
from sparsekv.kernels.decode.selection import Scoring, Selection
from sparsekv.kernels.decode.slots import SlotTable
from sparsekv.kernels.index.build import build_index, empty_index
from sparsekv.kernels.index.layout import FamilyHeads, IndexCall
from sparsekv.kernels.index.triton import block_sparse, sizes, vertical_slash
from sparsekv.kernels.keys import COLUMNS, PLAIN, KeyView, Requests, full_view
from sparsekv.kernels.prefill import columns as column_pass
from sparsekv.kernels.prefill import triton as triton_prefill
from sparsekv.kernels.tiles import Chunk, PrefillCall, TileIndex
from sparsekv.kernels.triton_support import QuickKernel
from sparsekv.plans.patterns import BlockSparse, Pattern, TileShape, VerticalSlash, tokens

# Shared memory that one program may have, in bytes (CUDA programming guide, technical specifications).
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
MULTIPROCESSORS = 132
TILE, SMALL_TILE = TileShape(query=128, key=128), TileShape(query=64, key=64)
LENGTH = 600
_LARGE = ((256, torch.bfloat16), (512, torch.bfloat16))
Cases = Iterator[tuple[str, Callable[[], object]]]


@dataclass(frozen=True)
class Built:
    """One compiled kernel."""

    capability: int
    kernel: str
    case: str
    registers: int
    spilled_bytes: int
    shared_bytes: int
    warps: int


@contextmanager
def compiling_for(capability: int) -> Iterator[list[tuple[str, Any]]]:
    """Inside, kernels are compiled for that GPU and not launched; yields (name, compiled kernel) as they come."""
    built: list[tuple[str, Any]] = []
    launching = JITFunction.run

    def compile_only(self: Any, *args: Any, grid: Any, warmup: bool, **options: Any) -> object:
        compiled = launching(self, *args, grid=grid, warmup=True, **options)
        built.append((self.__name__, compiled))
        return compiled

    rows, found = triton_prefill.launch_table(capability // 10), sizes.table_of(capability // 10)
    driver.set_active(_Target(capability))
    with (
        mock.patch.object(decode_triton, "_multiprocessors", return_value=MULTIPROCESSORS),
        mock.patch.object(decode_triton, "overlaps_launches", return_value=capability >= 90),
        mock.patch.object(radix, "overlaps_launches", return_value=capability >= 90),
        mock.patch.object(place, "overlaps_launches", return_value=capability >= 90),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(QuickKernel, "__getitem__", lambda self, grid: self.kernel[grid]),
        mock.patch.object(triton_prefill, "_rows_of", return_value=rows),
        mock.patch.object(vertical_slash, "sizes_for", return_value=found),
        mock.patch.object(block_sparse, "sizes_for", return_value=found),
    ):
        yield built


@dataclass(frozen=True)
class _Target:
    """As much of a Triton driver as compiling needs."""

    capability: int

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", self.capability, 32)

    def get_current_device(self) -> int:
        return self.capability  # compiled kernels are kept by device

    def get_current_stream(self, device: int) -> int:
        return 0


def _tensors(dim: int, *heads: int) -> Any:
    return [torch.zeros(1, count, LENGTH, dim, dtype=torch.bfloat16) for count in heads]


def _index(columns: bool, tile: TileShape) -> TileIndex:
    """Returns an index of four heads, the half of all tiles, with single columns or without."""
    draws = torch.Generator().manual_seed(0)
    q_BHSD, k_BGSD = (torch.randn(1, heads, LENGTH, 64, generator=draws) for heads in (4, 2))
    lines = VerticalSlash(vertical=tokens(100), slash=tokens(50), max_tiles=tokens(300))
    pattern = lines if columns else BlockSparse(keep=tokens(300))
    return build_index((pattern,) * 4, q_BHSD, k_BGSD, Chunk((0,), (LENGTH,)), tile, scale=0.1, builder="torch")


def prefill_cases() -> Cases:
    """Every variant of sparse prefill that users meet."""
    for dim, columns, window, tile in (
        (64, True, None, TILE), (128, False, None, TILE), (128, True, None, TILE), (128, True, 200, TILE),
        (128, True, None, SMALL_TILE), (256, True, None, TILE), (512, True, None, TILE),
    ):  # fmt: skip
        (q, k, v), index, chunk = _tensors(dim, 4, 2, 2), _index(columns, tile), Chunk((0,), (LENGTH,))
        call = partial(triton_prefill.prefill, PrefillCall(q, k, v, chunk, 0.1, window), index)
        extras = f"{', columns' if columns else ''}{', window' if window else ''}"
        yield f"head size {dim}, {tile.query} tiles{extras}", _unchecked(call)


def column_cases() -> Cases:
    """The pass that adds single columns behind the flash backend."""
    for dim in (64, 128, 256):
        q, k, v = _tensors(dim, 4, 2, 2)
        found, chunk = (torch.zeros_like(q), torch.zeros(q.shape[:3])), Chunk((0,), (LENGTH,))
        index = _index(True, TILE)
        yield (
            f"head size {dim}",
            partial(column_pass.add_columns, *found, PrefillCall(q, k, v, chunk, 0.1), index),
        )


def _unchecked(call: Callable[[], object]) -> Callable[[], object]:
    """The call without the check that tensors are on a GPU."""

    def called() -> object:
        with mock.patch.object(triton_prefill, "check_tensors"):
            return call()

    return called


def decode_cases() -> Cases:
    """Decode over all tokens or chosen ones, scores, the choice, and the newest token's place."""
    for dim in (64, 128, 256, 512):
        q, k, v = (torch.zeros(1, heads, n, dim, dtype=torch.bfloat16) for heads, n in ((8, 1), (2, 600), (2, 600)))
        chosen = torch.arange(4, 504, 2, dtype=torch.int32)[None, None]
        page = torch.zeros(10, 2, 16, dim, dtype=torch.bfloat16)
        table = torch.zeros((1, 10), dtype=torch.int32)
        pages = KeyView(page, page, torch.tensor([100], dtype=torch.int32), table)
        keys = full_view(k, v)
        selection = Selection(chosen, torch.full_like(keys.lengths_B, 250), 4, 16)
        shape = k[:, :, :1].expand(-1, -1, 600, -1)
        elsewhere = KeyView(shape, shape, keys.lengths_B, None, torch.zeros(COLUMNS, dtype=torch.int64))
        scoring = Scoring(torch.zeros_like(keys.lengths_B), 600, 1)
        for name, view, chosen_tokens, scores in (
            ("selected", keys, selection, None), ("dense", keys, None, None), ("pages", pages, None, None),
            ("dense, scores", keys, None, scoring), ("selected, found by address", elsewhere, selection, None),
            ("scores, found by address", elsewhere, None, scoring),
        ):  # fmt: skip
            out = torch.zeros_like(q) if view is pages else None  # as vLLM gives one
            call = partial(decode_triton.decode, q, view, chosen_tokens, scale=0.1, scoring=scores, out=out)
            yield f"head size {dim}, {name}", call
        q4, first_X = q.expand(4, -1, -1, -1), torch.tensor([0, 4], dtype=torch.int32)
        lengths_B, owners_B = pages.lengths_B.expand(4), torch.zeros(4, dtype=torch.int64)
        shared = replace(pages, lengths_B=lengths_B, requests=Requests(owners_B, first_X, 4))
        scores = replace(scoring, starts_B=lengths_B)
        call = partial(decode_triton.decode, q4, shared, None, scale=0.1, scoring=scores, out=torch.zeros_like(q4))
        yield f"head size {dim}, pages, scores, four rows a request", call
        yield f"head size {dim}, append", partial(place.append_newest, elsewhere, q[:, :2], q[:, :2])

    lengths_B = torch.tensor([600], dtype=torch.int32)

    def choose() -> object:
        scores_gT = torch.zeros(1, 600)
        counts_B = torch.full_like(lengths_B, 100)
        return radix.choose(
            scores_gT, lengths_B * 0, lengths_B, counts_B, capacity=131_072, most=100, sink=4, recent=16
        )

    def rows() -> object:
        bounds_N, most_SN, edges_S = torch.zeros(2).int(), torch.zeros(3, 3).long(), torch.zeros(3).int()
        return radix.budgets(lengths_B, bounds_N, most_SN, most_SN.double(), edges_S, edges_S.long())

    yield "choose", choose
    yield "budgets", rows
    for lists in (1, 8):
        yield f"fetch, {lists} lists", partial(_fetch, lists)


def _fetch(lists: int) -> None:
    """A choice of 2,048 tokens placed in a hot set of 4,096, and one layer's rows of what it misses."""
    table = SlotTable(1, lists, 3904, 8192, torch.device("cpu"))
    chosen_BgN = torch.zeros((1, lists, 2048), dtype=torch.int32)
    ones_B, counts_3 = torch.ones(1, dtype=torch.int32), torch.zeros(3, dtype=torch.int64)
    placed = place.PlacedStep.empty(table, 2048 + 4 + 128, 128)
    place.place_step(table, Selection(chosen_BgN, ones_B, 4, 128), ones_B, 192, placed, counts_3, 9)
    where_X = torch.zeros(COLUMNS, dtype=torch.int64)
    sizes = {"kv_heads": 8, "token_bytes": 256, "slots": 3904, "ring": 192, "recent": 128}
    place.gather_missed(where_X, placed, ones_B, **sizes)


def index_cases() -> Cases:
    """Building the index of vertical-slash heads."""
    for dim, last_q, window, tile in (
        (64, 64, None, TILE), (128, 64, 200, SMALL_TILE), (128, 64, None, TILE), (128, 256, None, TILE),
    ):  # fmt: skip
        pattern = VerticalSlash(vertical=tokens(100), slash=tokens(50), last_q=last_q, max_tiles=tokens(500))
        build = partial(_build, vertical_slash, pattern, dim, tile, window)
        yield f"head size {dim}, last_q {last_q}, {tile.query} tiles{', window' if window else ''}", build


def block_cases() -> Cases:
    """Building the index of block-sparse heads."""
    for dim, window, tile in ((64, None, TILE), (128, None, TILE), (128, 200, SMALL_TILE)):
        build = partial(_build, block_sparse, BlockSparse(keep=tokens(300)), dim, tile, window)
        yield f"head size {dim}, {tile.query} tiles{', window' if window else ''}", build


def _build(builder: Any, pattern: Pattern, dim: int, tile: TileShape, window: int | None) -> object:
    q, k = _tensors(dim, 8, 2)
    call = IndexCall.of(q, k, Chunk((0,), (LENGTH,)), tile, 0.1, window)
    prepared = builder.prepare(FamilyHeads.of((pattern,) * 8, range(8)), call)
    return prepared.fill(empty_index([prepared.widths], call.layout, ()))


def damage_cases() -> Cases:
    """Returns what candidates are scored with in profiling."""
    for dim, dtype in ((40, torch.bfloat16), (128, torch.bfloat16), (128, torch.float32), *_LARGE):
        out, gradient = torch.zeros(1, 8, 600, dim, dtype=dtype), torch.zeros(1, 8, 600, dim)
        call = partial(row_damage.head_damage, out, out, gradient, gradient[..., 0], gradient[:, :1, :, 0])
        yield f"head size {dim}, {str(dtype).removeprefix('torch.')}", call


def observed_cases() -> Cases:
    """Returns what a smaller cache is chosen by, and the move of what is kept."""
    for dim, dtype in ((64, torch.bfloat16), (128, torch.bfloat16), (128, torch.float32), *_LARGE):
        q, k = (torch.zeros(1, heads, LENGTH, dim, dtype=dtype) for heads in (8, 2))
        name = f"head size {dim}, {str(dtype).removeprefix('torch.')}"
        yield name, partial(observed_triton.attention_sums, q, k, 0.1, PLAIN)
        page, rows_1R = torch.zeros(40, 2, 16, dim, dtype=dtype), torch.arange(100)[None]
        table_P = torch.arange(40, dtype=torch.int32)
        yield f"{name}, move", partial(pages.move_rows, (k[0], k[0]), rows_1R, (page, page), table_P, 8)
    yield "neighbours", partial(observed_triton.near_sums, torch.zeros(1, 2, LENGTH), 1.0, 2, together=True)


CASES = {
    "index": index_cases,
    "blocks": block_cases,
    "prefill": prefill_cases,
    "columns": column_cases,
    "decode": decode_cases,
    "damage": damage_cases,
    "observed": observed_cases,
}


def build(capability: int, kernels: list[str]) -> Iterator[Built]:
    """Compiles these kernels for one GPU."""
    for kernel in kernels:
        for case, call in CASES[kernel]():
            with compiling_for(capability) as built:
                call()
            for name, compiled in built:
                registers, stack = resources(compiled.asm["cubin"])
                meta = compiled.metadata
                yield Built(capability, name, case, registers, stack, meta.shared, meta.num_warps)


def resources(machine_code: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(machine_code)
        file.flush()
        command = [triton.knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    numbers = dict(re.findall(r"(REG|STACK):(\d+)", told))
    return int(numbers["REG"]), int(numbers["STACK"])


def main() -> int:
    """Prints a line a kernel."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--capability", type=int, nargs="+", choices=sorted(SHARED), default=sorted(SHARED))
    parser.add_argument("--kernel", nargs="+", choices=sorted(CASES), default=sorted(CASES))
    parser.add_argument("--json", action="store_true")
    asked = parser.parse_args()
    found = []
    for capability in asked.capability:
        for built in build(capability, asked.kernel):
            found.append(built)
            if not asked.json:
                print(*(f"{name} {value}," for name, value in asdict(built).items()))
    if asked.json:
        print(json.dumps([asdict(built) for built in found], indent=1))
    return int(any(built.shared_bytes > SHARED[built.capability] for built in found))


if __name__ == "__main__":
    sys.exit(main())
