"""Checks every attention kernel on this machine against the float32 oracle, then times it beside the dense kernels.

    python benchmarks/check_kernels.py                  # on a GPU: correctness, then the timing tables
    python benchmarks/check_kernels.py --json out.json  # the same, and every number in a file
    python benchmarks/check_kernels.py --only goals     # one part
    compute-sanitizer python benchmarks/check_kernels.py --quick    # small shapes, every kernel variant once
    python benchmarks/check_kernels.py --device cpu --tiny          # tries this script itself, in the interpreter

Needs the installed package and this repository's tests/support (the problems and their oracle). Exit status 1 when a
kernel is wrong. What the times mean is said in kernel_goals.py.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests" / "support"))
if "cpu" in sys.argv or "--device=cpu" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports triton

import attention_cases
import decode_cases
import index_cases
import triton_index
from attention_cases import Case, Problem
from decode_cases import DecodeCase
from kernel_goals import SMALL_TILE, TILE, Layer, Line, flash, flash_obstacle, goals, print_lines, table

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.prefill.columns import add_columns
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.tiles import AttentionOutput, Chunk
from sparsekv.plans.patterns import Adaptive, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens

PARTS = ("checks", "tables", "goals")
HALF, BFLOAT = torch.float16, torch.bfloat16
TALL_TILE = TileShape(query=128, key=64)


@dataclass(frozen=True)
class Check:
    """One comparison with the oracle."""

    kernel: str
    case: str
    error: float
    lse_error: float
    faults: tuple[str, ...]


# Every variant that compiles to other code: tile, head size, columns, window, log-sum-exp, dense heads, dtype.
VARIANTS = [
    Case("128 tiles", lengths=(600,), heads=4, tile=TILE, dim=128, dtype=BFLOAT),
    Case("128 tiles, columns", lengths=(600,), heads=4, tile=TILE, dim=128, dtype=BFLOAT, columns=150),
    Case("64 tiles, columns", lengths=(400,), heads=4, tile=SMALL_TILE, dim=128, dtype=BFLOAT, columns=150),
    Case("128 tiles, size 64, columns", lengths=(600,), heads=4, tile=TILE, dtype=BFLOAT, columns=150),
    Case("64 tiles, size 64, fp16", lengths=(400,), dtype=HALF, columns=70),
    Case("window", lengths=(600,), tile=TILE, dim=128, dtype=BFLOAT, columns=100, window=200, share=0.8),
    Case("past, ragged, dense head", past=(77, 0), lengths=(600, 333), heads=4, tile=TILE, dim=128, dtype=BFLOAT,
         columns=100, dense_heads=(2,), spare_rows=5, spare_keys=40, token_major=True),
    Case("columns only", lengths=(600,), tile=TILE, dim=128, dtype=BFLOAT, columns=300, share=0.0),
    Case("size 96", lengths=(400,), tile=TILE, dim=96, dtype=BFLOAT, columns=100),
    Case("size 256", lengths=(400,), tile=TILE, dim=256, dtype=BFLOAT, columns=100),
    Case("128 x 64 tiles, columns", lengths=(600,), heads=4, tile=TALL_TILE, dim=128, dtype=BFLOAT, columns=150),
    Case("128 x 64 tiles, size 256", lengths=(600,), tile=TALL_TILE, dim=256, dtype=BFLOAT, columns=100, window=200),
    Case("dense heads within groups", lengths=(600,), heads=8, kv_heads=2, tile=TILE, dim=128, dtype=BFLOAT,
         dense_heads=(1, 2, 7), columns=100),
    Case("float32", lengths=(300,), tile=TILE, dtype=torch.float32, columns=50),
]  # fmt: skip
LARGE = [
    Case("32K", lengths=(32768,), heads=8, kv_heads=2, tile=TILE, dim=128, dtype=BFLOAT, share=0.1),
    Case("32K, columns, dense head", lengths=(32768,), heads=8, kv_heads=2, tile=TILE, dim=128, dtype=BFLOAT,
         share=0.05, columns=1000, dense_heads=(3,)),
    Case("40K, dense heads", lengths=(40960,), heads=8, kv_heads=2, tile=TILE, dim=128, dtype=BFLOAT, share=0.05,
         columns=300, dense_heads=(1, 4, 5, 6, 7)),
    Case("32K, 64 tiles, columns", lengths=(32768,), heads=8, kv_heads=2, dim=128, dtype=BFLOAT, share=0.05,
         columns=3000),
    Case("32K, size 64, window", lengths=(32768,), heads=4, kv_heads=2, tile=TILE, dtype=BFLOAT, share=0.3,
         columns=500, window=4096),
    Case("chunk of 8K at 90K", past=(90001,), lengths=(98193,), heads=8, kv_heads=2, tile=TILE, dim=128,
         dtype=BFLOAT, share=0.05, columns=1000),
    Case("ragged batch of 16K", past=(0, 5000, 3), lengths=(16000, 16384, 900), heads=8, kv_heads=2, tile=TILE,
         dim=128, dtype=HALF, share=0.1, columns=500, spare_keys=777, token_major=True),
]  # fmt: skip
TINY = [
    Case("columns", lengths=(150,), heads=4, tile=TILE, dim=128, columns=50),
    Case("past, ragged, dense head", past=(77, 0), lengths=(160, 90), tile=TILE, columns=30, dense_heads=(1,)),
]


def check_prefill(case: Case, device: str) -> list[Check]:
    """The sparse kernels on this problem, and the dense one on the same tensors; long prompts on a sample of rows."""
    problem = attention_cases.draw(case, device)
    rows = sampled_rows(problem)
    checks = [_check("triton prefill", case, attention_cases.compare(_triton(problem), problem, rows))]
    if flash_obstacle(device, case.dtype, case.dim, case.tile) is None:
        checks.append(_check("flash prefill", case, attention_cases.compare(_flash(problem), problem, rows)))
    dense = attention_cases.draw(replace(case, dense_heads=tuple(range(case.heads)), columns=0), device)
    output = dense_attention(
        dense.q_BHSD, dense.k_BGKD, dense.v_BGKD, dense.chunk, scale=dense.scale, window=dense.window
    )
    return [*checks, _check("torch dense", case, attention_cases.compare(output, dense, rows))]


def _triton(problem: Problem) -> AttentionOutput:
    tensors = (problem.q_BHSD, problem.k_BGKD, problem.v_BGKD, problem.index, problem.chunk)
    return prefill_attention(*tensors, scale=problem.scale, window=problem.window, want_lse=True, backend="triton")


def _flash(problem: Problem) -> AttentionOutput:
    tensors = (problem.q_BHSD, problem.k_BGKD, problem.v_BGKD, problem.index, problem.chunk)
    return flash(*tensors, scale=problem.scale, window=problem.window, want_lse=True)


def sampled_rows(problem: Problem, most: int = 64) -> torch.Tensor:
    """All rows of a short prompt; else the first and last, those around tile edges, and some at random."""
    rows = problem.q_BHSD.shape[2]
    if rows <= 1024:
        return problem.every_row
    edges = [0, 1, 63, 64, 127, 128, rows // 2, rows - 129, rows - 128, rows - 2, rows - 1]
    drawn = torch.randint(rows, (most - len(edges),), generator=torch.Generator().manual_seed(0)).tolist()
    return torch.tensor(sorted({*edges, *drawn}), device=problem.q_BHSD.device)


def check_decode(case: DecodeCase, device: str) -> Check:
    """The decode kernels on this problem."""
    problem = decode_cases.draw(case, device)
    found = decode_cases.attend(problem, "triton")
    return _check("triton decode", case, decode_cases.compare(found, problem))


def check_columns(case: Case, device: str) -> Check:
    """The pass that adds single columns to attention over the tiles, whatever computed that: here, Triton."""
    problem = attention_cases.draw(case, device)
    index = problem.index
    tiles = _triton(
        replace(
            problem, index=replace(index, columns_BHC=index.columns_BHC[..., :0], live_BHTN=index.live_BHTN[..., :0])
        )
    )
    tensors = (problem.q_BHSD, problem.k_BGKD, problem.v_BGKD, index, problem.chunk)
    add_columns(tiles, *tensors, scale=problem.scale, window=problem.window)
    return _check("triton columns", case, attention_cases.compare(tiles, problem, sampled_rows(problem)))


def check_index(tile: TileShape, window: int | None, device: str) -> Check:
    """Indices built by Triton: the same as torch's to the last number, on numbers that leave no tie open."""
    patterns = (
        VerticalSlash(vertical=tokens(20), slash=tokens(12), max_tiles=fraction(0.6)),
        VerticalSlash(vertical=tokens(45), slash=tokens(2), last_q=100, max_tiles=fraction(0.5)),
        VerticalSlash(vertical=tokens(30), slash=tokens(40), last_q=256, max_tiles=fraction(0.5)),
        BlockSparse(keep=fraction(0.4)),
        Adaptive(score="antidiagonal", mass=0.7, max_tiles=fraction(0.6)),
        Dense(),
    )
    layer = index_cases.make_layer(
        patterns, Chunk((192, 0), (900, 633)), tile, kv_heads=2, spare=60, seed=3, size=64, window=window, dtype=HALF
    ).to(device)
    found, expected = (triton_index.index_by(builder, layer) for builder in ("triton", "torch"))
    name = f"{tile.query} x {tile.key} tiles{', window' if window else ''} (float16)"
    return Check("triton index", name, 0.0, 0.0, tuple(triton_index.differences(found, expected)))


def _check(kernel: str, case: Case | DecodeCase, found: attention_cases.Comparison) -> Check:
    return Check(kernel, f"{case.name} ({str(case.dtype)[6:]})", found.error, found.lse_error, found.faults)


def every_check(options: argparse.Namespace, device: str) -> Iterator[Check]:
    """Every case that the options ask for."""
    for case in TINY if options.tiny else VARIANTS if options.quick else VARIANTS + LARGE:
        yield from check_prefill(case, device)
        # flash-attn-4, behind which that pass runs, takes halves; the interpreter takes anything.
        if case.columns and (options.tiny or case.dtype != torch.float32):
            yield check_columns(case, device)
    decode = decode_cases.CASES if options.tiny or options.quick else decode_cases.GPU_CASES
    for decode_case in decode[:2] if options.tiny else decode:
        yield check_decode(decode_case, device)
    for tile, window in ((TILE, None),) if options.tiny else ((TILE, None), (TILE, 200), (SMALL_TILE, None)):
        yield check_index(tile, window, device)


def every_table(options: argparse.Namespace, device: str) -> Iterator[tuple[str, list[Line]]]:
    """The timing tables that the options ask for."""
    if options.quick:
        return
    if options.tiny:
        layer = Layer(256, device, heads=2, kv_heads=1, dim=64, dtype=torch.float32)
        yield "prefill", table(layer, ((0.5, 8),))
        yield "goals", goals(layer, (1,), 8)
        return
    if "tables" in options.only:
        mixes = ((0.02, 0), (0.05, 0), (0.05, 1000), (0.05, 3000), (0.1, 0), (0.2, 0), (0.4, 0))
        for tokens_ in (8192, 32768, 131072):
            yield f"prefill, {tokens_} tokens, 32/8 heads, size 128", table(Layer(tokens_, device), mixes)
        small = Layer(32768, device, heads=4, kv_heads=2, dim=64)
        yield "prefill, 4/2 heads, size 64", table(small, ((0.1, 0), (0.1, 500), (0.3, 0)))
    if "goals" in options.only:
        for tokens_ in (32768, 131072):
            yield f"goals, {tokens_} tokens", goals(Layer(tokens_, device))


def main() -> int:
    """Checks, then times."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="small shapes, every kernel variant once, no timing")
    parser.add_argument("--tiny", action="store_true", help="next to nothing: tries this script")
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="some parts only")
    parser.add_argument("--json", type=Path, help="write every number to this file")
    options = parser.parse_args()
    device = options.device
    if device == "cpu" and not options.tiny:
        parser.error("the interpreter is far too slow for this: add --tiny")
    at = torch.cuda.get_device_name() if device != "cpu" else "interpreter"
    print(f"{at}, torch {torch.__version__}, Python {platform.python_version()}")
    checks = []
    print(f"\n{'kernel':16} {'case':42} {'error':>9} {'lse':>9}")
    for check in every_check(options, device) if "checks" in options.only else ():
        checks.append(check)
        verdict = "ok" if not check.faults else "WRONG: " + "; ".join(check.faults)
        print(f"{check.kernel:16} {check.case:42} {check.error:9.1e} {check.lse_error:9.1e}  {verdict}", flush=True)
    tables = {}
    for title, lines in every_table(options, device):
        print_lines(title, lines)
        tables[title] = [asdict(line) | {"verdict": line.verdict} for line in lines]
    wrong = [check for check in checks if check.faults]
    print(f"\n{len(checks) - len(wrong)} of {len(checks)} checks right")
    if options.json:
        record = {"device": at, "torch": torch.__version__, "checks": [*map(asdict, checks)], "tables": tables}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
