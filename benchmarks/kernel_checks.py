"""What `check_kernels.py` checks: every attention and index kernel of this machine against its oracle.

The problems and the oracle are those of the tests (tests/support).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import attention_cases
import decode_cases
import device_index
import index_cases
import torch
from attention_cases import Case, Problem
from decode_cases import DecodeCase
from flash_timing import flash, flash_obstacle
from kernel_timing import SMALL_TILE, TILE

from sparsekv.kernels.backends import prefill_attention
from sparsekv.kernels.prefill.columns import add_columns
from sparsekv.kernels.prefill.dense import dense_attention
from sparsekv.kernels.tiles import AttentionOutput, Chunk
from sparsekv.plans.patterns import Adaptive, BlockSparse, Dense, TileShape, VerticalSlash, fraction, tokens

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


# --- what is checked ------------------------------------------------------------------------------------------------

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
    found, expected = (device_index.index_by(builder, layer) for builder in ("triton", "torch"))
    name = f"{tile.query} x {tile.key} tiles{', window' if window else ''} (float16)"
    return Check("triton index", name, 0.0, 0.0, tuple(device_index.differences(found, expected)))


def _check(kernel: str, case: Case | DecodeCase, found: attention_cases.Comparison) -> Check:
    return Check(kernel, f"{case.name} ({str(case.dtype)[6:]})", found.error, found.lse_error, found.faults)
