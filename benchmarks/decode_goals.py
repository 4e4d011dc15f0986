"""The decode kernels against memory speed and the fastest dense decode of torch, in one process on one GPU.

    python benchmarks/decode_goals.py [--json]

8B shape (32 query heads, 8 KV heads of 128, bfloat16), random keys. Each call is captured in a CUDA graph and replayed
(`triton.testing.do_bench_cudagraph`, medians). Keys and values of the long cases are several times the cache of the
GPU; those of 8K tokens, selected ones and scores lie in it.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench_cudagraph

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode.choose import choose
from sparsekv.kernels.decode.selection import Scoring, Selection
from sparsekv.kernels.keys import full_view

HEADS, KV_HEADS, SIZE = 32, 8, 128
BUDGET, SINK, RECENT = 2048, 4, 128
CASES = ((1, 131_072), (4, 131_072), (8, 32_768), (1, 8192))


def us(call: Callable[[], object]) -> float:
    """Median microseconds of a replay."""
    call()
    return float(do_bench_cudagraph(call, rep=40, return_mode="median")) * 1e3


def measure(rows: int, length: int) -> dict[str, float]:
    """Microseconds of every call at one batch and length."""
    source = torch.Generator("cuda").manual_seed(0)

    def draw(heads: int, tokens: int) -> torch.Tensor:
        return torch.randn((rows, heads, tokens, SIZE), generator=source, device="cuda", dtype=torch.bfloat16)

    q, k, v = draw(HEADS, 1), draw(KV_HEADS, length), draw(KV_HEADS, length)
    keys, scale = full_view(k, v), SIZE**-0.5
    starts_B = torch.arange(rows, dtype=torch.int32, device="cuda") * length
    counts_B = torch.full_like(starts_B, BUDGET)
    scoring = Scoring(starts_B, rows * length, 1)
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            found[f"SDPA {backend.name}"] = us(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))
    attend = lambda *args, **options: decode_attention(q, keys, *args, scale=scale, backend="triton", **options)  # noqa: E731
    found["dense"] = us(attend)
    found["dense with scores"] = us(lambda: attend(scoring=scoring))
    scores_gT = attend(scoring=scoring).scores_gT
    pick = lambda: choose(  # noqa: E731
        scores_gT, scoring, keys.lengths_B, counts_B, capacity=length, most=BUDGET, sink=SINK, recent=RECENT,
        backend="triton",
    )  # fmt: skip
    found["choose"] = us(pick)
    selection = Selection(pick(), counts_B, SINK, RECENT)
    found["sparse"] = us(lambda: attend(selection))
    found["TB/s of dense"] = 2 * k.numel() * k.element_size() / found["dense"] / 1e6
    return found


def main() -> None:
    """A row for each batch and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = {f"batch {batch}, {length} tokens": measure(batch, length) for batch, length in CASES}
    if args.json:
        print(json.dumps(rows))
        return
    names = list(next(iter(rows.values())))
    print(f"{torch.cuda.get_device_name()}, microseconds\n| case | {' | '.join(names)} |\n|{'---|' * (1 + len(names))}")
    for case, found in rows.items():
        print(f"| {case} | " + " | ".join(f"{found[name]:.1f}" for name in names) + " |")


if __name__ == "__main__":
    main()
