"""The decode kernels against memory speed and the fastest dense decode of torch, in one process on one GPU.

    python benchmarks/decode_goals.py [--json]

8B shape (32 query heads, 8 KV heads of 128, bfloat16), random keys. Each call is captured in a CUDA graph and replayed
(`triton.testing.do_bench_cudagraph`, medians). Keys and values of the long cases are several times the cache of the
GPU; those of 8K tokens, selected ones and scores lie in it. Budgets are those of a step with three filter layers.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench_cudagraph

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode.choose import choose
from sparsekv.kernels.decode.selection import Scoring, Selection
from sparsekv.kernels.keys import KeyView, full_view
from sparsekv.plans.phases import DecodeBudget, Segment
from sparsekv.runtime.core.budgets import Budgets
from sparsekv.runtime.core.program import SegmentProgram

DEVICE = "cuda"
HEADS, KV_HEADS, SIZE = 32, 8, 128
BUDGET, SINK, RECENT = 2048, 4, 128
CASES = ((1, 131_072), (4, 131_072), (8, 32_768), (1, 8192))


def us(call: Callable[[], object]) -> float:
    """Median microseconds of a replay."""
    call()
    return float(do_bench_cudagraph(call, rep=40, return_mode="median")) * 1e3


@dataclass(frozen=True)
class Inputs:
    """One batch of random queries, keys and values, and what its layers choose."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    keys: KeyView
    counts_B: torch.Tensor
    scoring: Scoring

    @classmethod
    def draw(cls, rows: int, length: int) -> Inputs:
        """Those of a batch of equal lengths."""
        source = torch.Generator(DEVICE).manual_seed(0)

        def tensor(heads: int, tokens: int) -> torch.Tensor:
            return torch.randn((rows, heads, tokens, SIZE), generator=source, device=DEVICE, dtype=torch.bfloat16)

        q, k, v = tensor(HEADS, 1), tensor(KV_HEADS, length), tensor(KV_HEADS, length)
        starts_B = torch.arange(rows, dtype=torch.int32, device=DEVICE) * length
        scoring = Scoring(starts_B, rows * length, 1)
        return cls(q, k, v, full_view(k, v), torch.full_like(starts_B, BUDGET), scoring)

    def choose(self, scores_gT: torch.Tensor) -> torch.Tensor:
        """The best of every row."""
        return choose(
            scores_gT, self.scoring, self.keys.lengths_B, self.counts_B, capacity=self.keys.capacity, most=BUDGET,
            sink=SINK, recent=RECENT, backend="triton",
        )  # fmt: skip


def measure(rows: int, length: int) -> dict[str, float]:
    """Microseconds of every call at one batch and length."""
    drawn = Inputs.draw(rows, length)
    q, k, v = drawn.q, drawn.k, drawn.v
    found = {}
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION):
        with sdpa_kernel(backend):
            found[f"SDPA {backend.name}"] = us(lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True))
    attend = partial(decode_attention, q, drawn.keys, scale=SIZE**-0.5, backend="triton")
    found["dense"] = us(attend)
    found["dense with scores"] = us(lambda: attend(scoring=drawn.scoring))
    scores_gT = attend(scoring=drawn.scoring).scores_gT
    assert scores_gT is not None
    found["choose"] = us(lambda: drawn.choose(scores_gT))
    selection = Selection(drawn.choose(scores_gT), drawn.counts_B, SINK, RECENT)
    found["sparse"] = us(lambda: attend(selection))
    found["TB/s of dense"] = 2 * k.numel() * k.element_size() / found["dense"] / 1e6
    return found


def measure_budgets(rows: int, length: int) -> dict[str, float]:
    """Microseconds of the budgets of a step, in operations of torch and in a kernel."""
    segment = Segment(filter=0, layers=(1,), budget=DecodeBudget(tokens=BUDGET), sink=SINK, recent=RECENT)
    lowered = SegmentProgram(0, SINK, RECENT, "last", 1, "max", False, (4096,), (None, segment))
    tables = Budgets([lowered] * 3, [HEADS] * 3, torch.device(DEVICE))
    lengths_B = torch.full((rows,), length, dtype=torch.int32, device=DEVICE)
    return {
        "budgets, torch": us(lambda: tables.by_torch(lengths_B)),
        "budgets, one launch": us(lambda: tables.by_kernel(lengths_B)),
    }


def main() -> None:
    """A row for each batch and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = {
        f"batch {batch}, {length} tokens": measure(batch, length) | measure_budgets(batch, length)
        for batch, length in CASES
    }
    if args.json:
        print(json.dumps(rows))
        return
    cases, names = list(rows), list(next(iter(rows.values())))
    print(f"{torch.cuda.get_device_name()}, microseconds\n| | {' | '.join(cases)} |\n|{'---|' * (1 + len(cases))}")
    for name in names:
        print(f"| {name} | " + " | ".join(f"{rows[case][name]:.1f}" for case in cases) + " |")


if __name__ == "__main__":
    main()
