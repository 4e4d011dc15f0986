"""Registers, spills and shared memory of every Triton kernel, compiled for GPUs that this machine need not have.

    python benchmarks/kernel_resources.py                          # every generation in the table below
    python benchmarks/kernel_resources.py --capability 80 --kernel prefill --json

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
from pathlib import Path
from unittest import mock

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))

import attention_cases
from attention_cases import Case

from sparsekv.kernels import row_damage
from sparsekv.kernels.decode import append, gather, place, radix, step_counts
from sparsekv.kernels.decode import triton as decode_triton
from sparsekv.kernels.decode.selection import Scoring, Selection
from sparsekv.kernels.decode.slots import SlotTable
from sparsekv.kernels.index.build import empty_index
from sparsekv.kernels.index.layout import HeadGroup, IndexCall
from sparsekv.kernels.index.triton import block_sparse, sizes, vertical_slash
from sparsekv.kernels.keys import COLUMNS, KeyView, full_view
from sparsekv.kernels.prefill import triton as triton_prefill
from sparsekv.kernels.tiles import AttentionOutput, Chunk
from sparsekv.plans.patterns import BlockSparse, TileShape, VerticalSlash, tokens

# Shared memory that one program may have, in bytes (CUDA programming guide, technical specifications).
SHARED = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}
REGISTERS = 65_536  # of a multiprocessor, on all of them
MULTIPROCESSORS = 132
TILE, SMALL_TILE = TileShape(query=128, key=128), TileShape(query=64, key=64)


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

    @property
    def programs(self) -> int:
        """How many fit on a multiprocessor at once, by registers and shared memory."""
        by_registers = REGISTERS // (self.registers * 32 * self.warps)
        return min(by_registers, SHARED[self.capability] // max(1, self.shared_bytes))


@contextmanager
def compiling_for(capability: int) -> Iterator[list[tuple[str, object]]]:
    """Inside, kernels are compiled for that GPU and not launched; yields (name, compiled kernel) as they come."""
    built: list[tuple[str, object]] = []
    launching = JITFunction.run

    def compile_only(self, *args, grid, warmup, **options):  # type: ignore[no-untyped-def]
        compiled = launching(self, *args, grid=grid, warmup=True, **options)
        built.append((self.__name__, compiled))
        return compiled

    def rows_of(device: torch.device) -> object:
        return triton_prefill.table_of(capability // 10)

    def sizes_for(device: torch.device) -> sizes.Sizes:
        return sizes.table_of(capability // 10)

    driver.set_active(_Target(capability))
    with (
        mock.patch.object(decode_triton, "_multiprocessors", return_value=MULTIPROCESSORS),
        mock.patch.object(decode_triton, "overlaps_launches", return_value=capability >= 90),
        mock.patch.object(radix, "overlaps_launches", return_value=capability >= 90),
        mock.patch.object(append, "overlaps_launches", return_value=capability >= 90),
        mock.patch.object(JITFunction, "run", compile_only),
        mock.patch.object(triton_prefill, "_rows_of", rows_of),
        mock.patch.object(vertical_slash, "sizes_for", sizes_for),
        mock.patch.object(block_sparse, "sizes_for", sizes_for),
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


def prefill_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Every variant of sparse prefill that users meet."""
    for dim, columns, window, tile in (
        (64, 100, None, TILE), (128, 0, None, TILE), (128, 100, None, TILE), (128, 100, 200, TILE),
        (128, 100, None, SMALL_TILE), (256, 100, None, TILE),
    ):  # fmt: skip
        case = Case("", lengths=(600,), heads=4, tile=tile, dim=dim, dtype=torch.bfloat16, columns=columns)
        p = attention_cases.draw(replace(case, window=window), "cpu")

        def call(p: attention_cases.Problem = p) -> object:
            with mock.patch.object(triton_prefill, "check_tensors"):
                return triton_prefill.prefill(
                    p.q_BHSD, p.k_BGKD, p.v_BGKD, p.index, p.chunk, scale=p.scale, window=p.window
                )

        extras = f"{', columns' if columns else ''}{', window' if window else ''}"
        yield f"head size {dim}, {tile.query} tiles{extras}", call


def column_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """The pass that adds single columns behind the flash backend."""
    from sparsekv.kernels.prefill import columns

    for dim in (64, 128, 256):
        case = Case("", lengths=(600,), heads=4, tile=TILE, dim=dim, dtype=torch.bfloat16, columns=100)
        p = attention_cases.draw(case, "cpu")
        found = AttentionOutput(torch.zeros_like(p.q_BHSD), torch.zeros(p.q_BHSD.shape[:3]))

        def call(p: attention_cases.Problem = p, found: AttentionOutput = found) -> object:
            with mock.patch.object(columns, "check_tensors"):
                return columns.add_columns(
                    found, p.q_BHSD, p.k_BGKD, p.v_BGKD, p.index, p.chunk, scale=p.scale, window=p.window
                )

        yield f"head size {dim}", call


def decode_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Decode over all tokens or chosen ones, scores, the choice, and the newest token's place."""
    for dim in (64, 128, 256):
        q, k, v = (torch.zeros(1, heads, n, dim, dtype=torch.bfloat16) for heads, n in ((8, 1), (2, 600), (2, 600)))
        chosen = torch.arange(4, 504, 2, dtype=torch.int32)[None, None]
        page = torch.zeros(10, 2, 16, dim, dtype=torch.bfloat16)
        table = torch.zeros((1, 10), dtype=torch.int32)
        pages = KeyView(page, page, torch.tensor([100], dtype=torch.int32), table)
        keys = full_view(k, v)
        selection = Selection(chosen, torch.full_like(keys.lengths_B, 250), 4, 16)
        shape = k[:, :, :1].expand(-1, -1, 600, -1)
        elsewhere = KeyView(shape, shape, keys.lengths_B, None, torch.zeros(3, dtype=torch.int64))
        scoring = Scoring(torch.zeros_like(keys.lengths_B), 600, 1)
        for name, view, chosen_tokens, scores in (
            ("selected", keys, selection, None), ("dense", keys, None, None), ("pages", pages, None, None),
            ("dense, scores", keys, None, scoring), ("selected, found by address", elsewhere, selection, None),
            ("scores, found by address", elsewhere, None, scoring),
        ):  # fmt: skip

            def call(q=q, view=view, chosen=chosen_tokens, scores=scores) -> object:  # type: ignore[no-untyped-def]
                with mock.patch.object(decode_triton, "check_device"):
                    return decode_triton.decode(q, view, chosen, scale=0.1, scoring=scores)

            yield f"head size {dim}, {name}", call

        def write(q=q, elsewhere=elsewhere) -> object:  # type: ignore[no-untyped-def]
            return append.append_newest(elsewhere, q[:, :2], q[:, :2])

        yield f"head size {dim}, append", write

    lengths_B = torch.tensor([600], dtype=torch.int32)

    def choose() -> object:
        scores_gT = torch.zeros(1, 600)
        counts_B = torch.full_like(lengths_B, 100)
        return radix.choose(
            scores_gT, lengths_B * 0, lengths_B, counts_B, capacity=131_072, most=100, sink=4, recent=16
        )

    def rows() -> object:
        bounds_N, most_SN, edges_S = torch.zeros(2).int(), torch.zeros(3, 3).long(), torch.zeros(3).int()
        return step_counts.budgets(lengths_B, bounds_N, most_SN, most_SN.double(), edges_S, edges_S.long())

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
    gather.gather_missed(where_X, placed, ones_B, **sizes)


def index_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Building the index of vertical-slash heads."""
    for dim, last_q, window, tile in (
        (64, 64, None, TILE), (128, 64, 200, SMALL_TILE), (128, 64, None, TILE), (128, 256, None, TILE),
    ):  # fmt: skip
        pattern = VerticalSlash(vertical=tokens(100), slash=tokens(50), last_q=last_q, max_tiles=tokens(500))
        q, k = (torch.zeros(1, heads, 600, dim, dtype=torch.bfloat16) for heads in (8, 2))
        call = IndexCall.of(q, k, Chunk((0,), (600,)), tile, 0.1, window)
        group = HeadGroup.of((pattern,) * 8, range(8))

        def build(call: IndexCall = call, group: HeadGroup = group) -> object:
            prepared = vertical_slash.prepare(group, call)
            return prepared.fill(empty_index([prepared.widths], call.layout, ()))

        yield f"head size {dim}, last_q {last_q}, {tile.query} tiles{', window' if window else ''}", build


def block_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """Building the index of block-sparse heads."""
    for dim, window, tile in ((64, None, TILE), (128, None, TILE), (128, 200, SMALL_TILE)):
        q, k = (torch.zeros(1, heads, 600, dim, dtype=torch.bfloat16) for heads in (8, 2))
        call = IndexCall.of(q, k, Chunk((0,), (600,)), tile, 0.1, window)

        def build(call: IndexCall = call) -> object:
            prepared = block_sparse.prepare(HeadGroup.of((BlockSparse(keep=tokens(300)),) * 8, range(8)), call)
            return prepared.fill(empty_index([prepared.widths], call.layout, ()))

        yield f"head size {dim}, {tile.query} tiles{', window' if window else ''}", build


def damage_cases() -> Iterator[tuple[str, Callable[[], object]]]:
    """What candidates are scored with in profiling."""
    for dim, dtype in ((40, torch.bfloat16), (128, torch.bfloat16), (128, torch.float32), (256, torch.bfloat16)):
        out, gradient = torch.zeros(1, 8, 600, dim, dtype=dtype), torch.zeros(1, 8, 600, dim)

        def call(out: torch.Tensor = out, gradient: torch.Tensor = gradient) -> object:
            with mock.patch.object(row_damage, "check_device"):
                return row_damage.head_damage(out, out, gradient, gradient[..., 0], gradient[:, :1, :, 0])

        yield f"head size {dim}, {str(dtype).removeprefix('torch.')}", call


CASES = {
    "index": index_cases,
    "blocks": block_cases,
    "prefill": prefill_cases,
    "columns": column_cases,
    "decode": decode_cases,
    "damage": damage_cases,
}


def build(capability: int, kernels: list[str]) -> Iterator[Built]:
    """Compiles these kernels for one GPU."""
    for kernel in kernels:
        for case, call in CASES[kernel]():
            with compiling_for(capability) as built:
                call()
            for name, compiled in built:
                registers, stack = _resources(compiled.asm["cubin"])  # type: ignore[attr-defined]
                meta = compiled.metadata  # type: ignore[attr-defined]
                yield Built(capability, name, case, registers, stack, meta.shared, meta.num_warps)


def _resources(machine_code: bytes) -> tuple[int, int]:
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
    found = [built for capability in asked.capability for built in _told(build(capability, asked.kernel), asked.json)]
    if asked.json:
        print(json.dumps([asdict(built) | {"programs": built.programs} for built in found], indent=1))
    return int(any(built.shared_bytes > SHARED[built.capability] for built in found))


def _told(some: Iterator[Built], quiet: bool) -> Iterator[Built]:
    for built in some:
        if not quiet:
            print(
                f"sm_{built.capability:<4} {built.kernel:16} {built.case:44} {built.registers:4} registers "
                f"{built.spilled_bytes:5} spilled {built.shared_bytes:7} shared {built.programs:3} programs",
                flush=True,
            )
        yield built


if __name__ == "__main__":
    sys.exit(main())
