"""Index building by torch and by Triton, beside the sparse attention that it serves, in one process.

    python benchmarks/index_timing.py --lengths 32768,131072,524288      # on a GPU
    python benchmarks/index_timing.py --launches --last-q 64             # the time of every launch as well
    python benchmarks/index_timing.py --sweep                            # other block sizes than the table's
    python benchmarks/index_timing.py --family block_sparse              # the other family that Triton builds
    python benchmarks/index_timing.py --device cpu --tiny                # tries this script itself, in the interpreter

Vertical-slash heads on planted structure (sparsekv bench kernels plants the same) at about 5% of the tiles. One line a
builder: milliseconds of the index, of the attention over it, the share of the index in both, the realised density, the
recall of what was planted, and the share of row tiles and columns that are those of torch. Times are medians of calls
timed in turn (sparsekv.planner.bench.timing). Exit status 1 when the builders do not agree.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from unittest import mock

import torch

if "cpu" in sys.argv or "--device=cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

from sparsekv.kernels.backends import choose_backend, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.index.triton import vertical_slash
from sparsekv.kernels.index.triton.sizes import Pass, Sizes, sizes_for
from sparsekv.kernels.tiles import TileIndex, density
from sparsekv.planner.bench.planted import Planted, find_planted, plant
from sparsekv.planner.bench.timing import measure
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.types import parse_lengths

KERNELS = ("stats", "lines", "select", "crossings", "diagonals", "rows")
# Rounding decides between scores that are nearly equal, and one such choice can change every row of a head.
LEAST_AGREEMENT = 0.9


@dataclass(frozen=True)
class Found:
    """One builder at one length."""

    builder: str
    index_ms: float
    attention_ms: float
    density: float
    recall: float  # of what was planted
    same_rows: float
    same_columns: float

    @property
    def share(self) -> float:
        """Of the index in the whole."""
        return self.index_ms / (self.index_ms + self.attention_ms)


def planted_layer(options: argparse.Namespace, length: int) -> Planted:
    """The layer to build for, with `--last-q` in its patterns."""
    planted = plant(
        (options.family,) * options.heads,
        kv_heads=options.kv_heads,
        head_dim=options.head_dim,
        length=length,
        density=options.density,
        tile=TileShape(query=128, key=options.tile_key),
        device=torch.device(options.device),
        dtype=torch.float32 if options.device == "cpu" else torch.bfloat16,
    )
    if not options.last_q or options.family != "vertical_slash":
        return planted
    patterns = tuple(pattern.model_copy(update={"last_q": options.last_q}) for pattern in planted.patterns)
    return replace(planted, patterns=patterns)


def build(planted: Planted, builder: str) -> TileIndex:
    """The whole layer's index."""
    return build_index(
        planted.patterns, planted.q_BHSD, planted.k_BGSD, planted.chunk, planted.tile, scale=planted.scale,
        builder=builder,  # type: ignore[arg-type]
    )  # fmt: skip


def time_builders(options: argparse.Namespace, length: int) -> list[Found]:
    """Both builders and the attention, in turn."""
    planted = planted_layer(options, length)
    device = planted.q_BHSD.device
    backend = choose_backend(device, planted.q_BHSD.dtype, options.head_dim, options.backend, planted.tile).name
    indices = {builder: build(planted, builder) for builder in ("torch", "triton")}
    index = indices["triton"]
    calls: dict[str, Callable[[], object]] = {
        "torch": lambda: build(planted, "torch"),
        "triton": lambda: build(planted, "triton"),
        "attention": lambda: prefill_attention(
            planted.q_BHSD, planted.k_BGSD, planted.v_BGSD, index, planted.chunk, scale=planted.scale, backend=backend
        ),
    }
    times = measure(calls, device, options.rounds)
    found = [summary(planted, name, one, indices["torch"], times) for name, one in indices.items()]
    print_found(length, backend, found)
    if options.launches and options.family == "vertical_slash":
        print_launches(planted)
    if options.sweep and options.family == "vertical_slash":
        sweep(planted, options.rounds)
    return found


def summary(planted: Planted, name: str, index: TileIndex, torchs: TileIndex, times: dict[str, float]) -> Found:
    """What is printed of a builder."""
    recall = find_planted(planted, index)
    shares = [share for share in (recall.columns, recall.diagonals, recall.tiles) if share is not None]
    return Found(
        name,
        times[name],
        times["attention"],
        float(density(index, planted.chunk)),
        min(shares, default=1.0),
        same_share(index.tiles_BHTW, torchs.tiles_BHTW),
        same_share(index.columns_BHC[..., None], torchs.columns_BHC[..., None]),
    )


def same_share(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Share of entries of all but the last dimension that are the same."""
    if found.shape != expected.shape:
        return 0.0
    return float((found == expected).all(-1).float().mean()) if found.numel() else 1.0


def print_found(length: int, backend: str, found: list[Found]) -> None:
    """A line a builder."""
    for one in found:
        print(
            f"{length:8} {one.builder:7} index {one.index_ms:9.3f} ms, "
            f"attention ({backend}) {one.attention_ms:9.3f} ms, "
            f"index of both {one.share:6.1%}; density {one.density:.3f}, recall {one.recall:.3f}, "
            f"rows as torch {one.same_rows:.4f}, columns as torch {one.same_columns:.4f}",
            flush=True,
        )


def print_launches(planted: Planted) -> None:
    """Every launch of one build, after a first one that compiles."""
    build(planted, "triton")
    with timed_kernels(planted.q_BHSD.is_cuda) as marks:
        build(planted, "triton")
    if planted.q_BHSD.is_cuda:
        torch.cuda.synchronize()
    for name, start, stop in marks:
        spent = f"{start.elapsed_time(stop):9.3f} ms" if start is not None else "not timed on a CPU"
        print(f"{'':16} {name:10} {spent}")


@contextmanager
def timed_kernels(on_gpu: bool) -> Iterator[list[tuple[str, torch.cuda.Event | None, torch.cuda.Event | None]]]:
    """Marks before and behind every launch; what the host takes between two launches is not in them."""
    marks: list[tuple[str, torch.cuda.Event | None, torch.cuda.Event | None]] = []

    class Marked:
        def __init__(self, name: str) -> None:
            self.name, self.kernel = name, getattr(vertical_slash, f"{name}_kernel")

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            def launch(*arguments: object, **numbers: object) -> None:
                start, stop = (torch.cuda.Event(enable_timing=True) if on_gpu else None for _ in range(2))
                if start is not None:
                    start.record()
                self.kernel[grid](*arguments, **numbers)
                if stop is not None:
                    stop.record()
                marks.append((self.name, start, stop))

            return launch

    with mock.patch.multiple(vertical_slash, **{f"{name}_kernel": Marked(name) for name in KERNELS}):
        yield marks


def sweep(planted: Planted, rounds: int) -> None:
    """Other block sizes, one at a time; those that do not compile or fit say so."""
    device = planted.q_BHSD.device
    for name, sizes in other_sizes(sizes_for(device)):
        with mock.patch.object(vertical_slash, "sizes_for", lambda device, sizes=sizes: sizes):
            try:
                ms = measure({"index": lambda: build(planted, "triton")}, device, rounds)["index"]
            except Exception as error:
                print(f"{'':16} {name:44} does not run: {type(error).__name__}: {str(error).splitlines()[:1]}")
                continue
        print(f"{'':16} {name:44} {ms:9.3f} ms", flush=True)


def other_sizes(table: Sizes) -> Iterator[tuple[str, Sizes]]:
    """The table, and what may be better."""
    yield "the table", table
    for heads, keys, warps in ((1, 64, 4), (1, 128, 4), (2, 64, 4), (2, 128, 4), (2, 128, 8), (4, 64, 8), (4, 128, 8)):
        one = {strips: Pass(heads, keys, 1024, 3, warps) for strips in (1, 2, 4)}
        yield f"stats {heads} heads, {keys} keys, {warps} warps", replace(table, stats=one)
    for heads, stages, warps in product((1, 2), (2, 3), (4, 8)):
        one = {strips: Pass(heads, 64, 2048, stages, warps) for strips in (1, 2, 4)}
        yield f"lines {heads} heads, {stages} stages, {warps} warps", replace(table, lines=one)
    yield (
        "lines 1 heads, 2 stages, 16 warps",
        replace(table, lines={strips: Pass(1, 64, 2048, 2, 16) for strips in (1, 2, 4)}),
    )
    for least in (512, 1024, 2048, 4096):
        yield (
            f"runs of {least} keys at least",
            replace(
                table,
                stats={strips: replace(one, least_run=least) for strips, one in table.stats.items()},
                lines={strips: replace(one, least_run=least) for strips, one in table.lines.items()},
            ),
        )
    for block, warps in ((4096, 16), (8192, 16), (8192, 32), (16384, 32)):
        yield f"select {block} with {warps} warps", replace(table, select_block=block, select_warps=warps)
    for block in (4, 8, 16):
        yield f"rows {block}", replace(table, rows_block=block)


def main() -> int:
    """Times every length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lengths", default="32768,131072,524288")
    parser.add_argument("--family", choices=("vertical_slash", "block_sparse"), default="vertical_slash")
    parser.add_argument("--density", type=float, default=0.05)
    parser.add_argument("--last-q", type=int, help="sampled queries; the planner's own choice if not given")
    parser.add_argument("--heads", type=int, default=32)
    parser.add_argument("--kv-heads", type=int, default=8)
    parser.add_argument("--head-dim", type=int, default=128)
    parser.add_argument("--tile-key", type=int, choices=(64, 128), default=128)
    parser.add_argument("--backend", default="auto", help="of the attention")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--launches", action="store_true", help="also the time of every launch")
    parser.add_argument("--sweep", action="store_true", help="also other block sizes")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="next to nothing: tries this script")
    options = parser.parse_args()
    if options.device == "cpu" and not options.tiny:
        parser.error("the interpreter is far too slow for this: add --tiny")
    if options.tiny:
        options.lengths, options.heads, options.kv_heads, options.head_dim, options.rounds = "1024", 2, 1, 64, 1
        options.density, options.sweep = 0.4, False
    at = "interpreter" if options.device == "cpu" else torch.cuda.get_device_name()
    layer = f"{options.heads}/{options.kv_heads} heads of size {options.head_dim}"
    print(f"{at}, torch {torch.__version__}, Python {platform.python_version()}; {layer}")
    found = [one for length in parse_lengths(options.lengths) for one in time_builders(options, length)]
    return int(any(min(one.same_rows, one.same_columns) < LEAST_AGREEMENT for one in found))


if __name__ == "__main__":
    sys.exit(main())
