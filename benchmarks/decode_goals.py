"""The decode kernels against memory speed and the fastest dense decode of torch, in one process on one GPU.

    python benchmarks/decode_goals.py [--json] [--variants]

8B shape (32 query heads, 8 KV heads of 128, bfloat16), random keys. Each call is captured in a CUDA graph and replayed
(`triton.testing.do_bench_cudagraph`, medians). Keys and values of the long cases are several times the cache of the
GPU; those of 8K tokens, selected ones and scores lie in it. `--variants` times the kernels as they can be launched
instead: splits merged in a kernel of their own or by the program that ends last, a kernel launched while the one before
it ends (`overlap`) or after it. `chained` is a layer of 32 in one graph, as in a step.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal
from unittest.mock import patch

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention
from triton.testing import do_bench_cudagraph

from sparsekv.kernels.backends import decode_attention
from sparsekv.kernels.decode import radix
from sparsekv.kernels.decode.choose import choose
from sparsekv.kernels.decode.selection import Scoring, Selection
from sparsekv.kernels.decode.triton import Launch, decode, launch_for
from sparsekv.kernels.keys import KeyView, full_view
from sparsekv.plans.phases import DecodeBudget, Segment
from sparsekv.runtime.core.budgets import Budgets
from sparsekv.runtime.core.program import SegmentProgram

DEVICE = "cuda"
HEADS, KV_HEADS, SIZE = 32, 8, 128
BUDGET, SINK, RECENT = 2048, 4, 128
MERGES: tuple[Literal["kernel", "last"], ...] = ("kernel", "last")
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
    arrivals_X = torch.zeros(rows * KV_HEADS, dtype=torch.int32, device=DEVICE)
    attend = partial(decode_attention, q, drawn.keys, scale=SIZE**-0.5, arrivals_X=arrivals_X, backend="triton")
    found["dense"] = us(attend)
    found["dense with scores"] = us(lambda: attend(scoring=drawn.scoring))
    scores_gT = attend(scoring=drawn.scoring).scores_gT
    assert scores_gT is not None
    found["choose"] = us(lambda: drawn.choose(scores_gT))
    selection = Selection(drawn.choose(scores_gT), drawn.counts_B, SINK, RECENT)
    found["sparse"] = us(lambda: attend(selection))
    found["TB/s of dense"] = 2 * k.numel() * k.element_size() / found["dense"] / 1e6
    return found


def measure_variants(rows: int, length: int) -> dict[str, float]:
    """Microseconds of every way to launch the kernels."""
    drawn, found = Inputs.draw(rows, length), {}
    usual = launch_for(drawn.q.device, rows * KV_HEADS, drawn.q.dtype, SIZE)
    expected: list[torch.Tensor] = []
    for overlapped in (False, True):
        suffix = ", overlap" if overlapped else ""
        with patch.object(radix, "overlaps_launches", return_value=overlapped):
            for merge in MERGES:
                times, outputs = _time_launch(drawn, replace(usual, merge=merge, overlap=overlapped))
                found |= {f"{name}, merge: {merge}{suffix}": time for name, time in times.items()}
                expected = expected or outputs
                for one, other in zip(outputs, expected, strict=True):
                    torch.testing.assert_close(one, other, rtol=2e-2, atol=1e-3)
            found[f"choose{suffix}"] = us(partial(drawn.choose, outputs[-1]))
    return found


def _time_launch(drawn: Inputs, launch: Launch) -> tuple[dict[str, float], list[torch.Tensor]]:
    """Microseconds, and what was computed: dense and sparse attention, scores."""
    arrivals_X = torch.zeros(len(drawn.counts_B) * KV_HEADS, dtype=torch.int32, device=DEVICE)
    attend = partial(decode, drawn.q, drawn.keys, scale=SIZE**-0.5, arrivals_X=arrivals_X, launch=launch)
    scores_gT = attend(None, scoring=drawn.scoring).scores_gT
    assert scores_gT is not None
    selection = Selection(drawn.choose(scores_gT), drawn.counts_B, SINK, RECENT)
    times = {
        "dense": us(lambda: attend(None)),
        "dense with scores": us(lambda: attend(None, scoring=drawn.scoring)),
        "sparse": us(lambda: attend(selection)),
        "sparse, chained": us(lambda: [attend(selection) for _ in range(32)]) / 32,
    }
    outputs = [attend(None).out_BHSD, attend(selection).out_BHSD, scores_gT]
    assert not arrivals_X.any()
    return times, outputs


def measure_budgets(rows: int, length: int) -> dict[str, float]:
    """Microseconds of the budgets of a step with three filter layers."""
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
    parser.add_argument("--variants", action="store_true")
    args = parser.parse_args()
    of_case = _variants if args.variants else measure
    rows = {f"batch {batch}, {length} tokens": of_case(batch, length) for batch, length in CASES}
    if args.json:
        print(json.dumps(rows))
        return
    cases, names = list(rows), list(next(iter(rows.values())))
    print(f"{torch.cuda.get_device_name()}, microseconds\n| | {' | '.join(cases)} |\n|{'---|' * (1 + len(cases))}")
    for name in names:
        print(f"| {name} | " + " | ".join(f"{rows[case][name]:.1f}" for case in cases) + " |")


def _variants(rows: int, length: int) -> dict[str, float]:
    return measure_variants(rows, length) | measure_budgets(rows, length)


if __name__ == "__main__":
    main()
