"""Continuous batching of transformers, dense beside a plan: first tokens, and then a token, of requests of one length.

    python -m sparsekv.bench.continuous_batching llama3-8b --density 0.21
        [--length 32k] [--requests 8] [--answer 64] [--repeats 5] [--attention flash_attention_4]

Weights are random, the plan is made by hand, and answers mean nothing. Both ways run in one process and take turns,
after one that is not counted; dense is transformers as it comes, which captures its steps where it has flash attention.
"""

from __future__ import annotations

import argparse
import statistics
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig

from sparsekv.bench.hand_plans import dense_up_to, hand_plan
from sparsekv.bench.random_model import BenchModel, random_model
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import parse_length
from sparsekv.runtime.hf.apply import apply

_PAGE = 256


@dataclass(frozen=True, slots=True)
class Times:
    first: float  # seconds until the last request has its first token
    token: float  # seconds a token of all requests together from then on


def main() -> None:
    args = _arguments()
    device = torch.device(args.device)
    made = random_model(args.model, device=device, dtype=args.dtype, longest=args.length + args.answer)
    made.model.set_attn_implementation(args.attention)
    plan, words = hand_plan(made.info, [args.length], [args.density], TileShape(), ("vertical_slash",))
    plan = dense_up_to(plan, min(4096, args.length // 4))
    print(f"{made.name}, {made.note}; {words}")
    ways: dict[str, list[Times]] = {"dense": [], "plan": []}
    for repeat in range(args.repeats + 1):
        for way, times in ways.items():
            times.append(_timed(made, plan if way == "plan" else None, args))
            print(f"{repeat} {way}: {times[-1]}", flush=True)
    for way, times in ways.items():
        first, token = (statistics.median(getattr(one, name) for one in times[1:]) for name in ("first", "token"))
        load = f"{args.requests} x {args.length:,}"
        print(f"{way}: first tokens of {load} in {first:.2f} s, then {token * 1e3:.2f} ms a token")


def _timed(made: BenchModel, plan: Plan | None, args: argparse.Namespace) -> Times:
    model: Any = made.model
    source = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, model.config.vocab_size, (args.requests, args.length), generator=source).tolist()
    blocks = args.requests * (-(-(args.length + args.answer) // _PAGE) + 1)
    batching = ContinuousBatchingConfig(page_size=_PAGE, num_blocks=blocks, allow_block_sharing=False)
    generation = GenerationConfig(max_new_tokens=args.answer, do_sample=False, eos_token_id=[], pad_token_id=0)
    with nullcontext() if plan is None else apply(model, plan, info=made.info) as handle:
        outputs = model.generate_batch(prompts, generation, batching, record_timestamps=True).values()
        if handle is not None:
            print(f"plan: {handle.pays.told}; {handle.stats()}")
    begun, first = (min(output.created_time for output in outputs), max(output.timestamps[0] for output in outputs))
    last = max(output.timestamps[-1] for output in outputs)
    return Times(first - begun, (last - first) / (args.answer - 1))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="alias, hub id or folder, of which the shape is taken")
    parser.add_argument("--density", type=float, required=True)
    parser.add_argument("--length", type=parse_length, default=32768)
    parser.add_argument("--requests", type=int, default=8)
    parser.add_argument("--answer", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--attention", default="sdpa", help="of dense, as transformers calls it: flash_attention_4")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--dtype", type=lambda name: getattr(torch, name), default=torch.bfloat16)
    return parser.parse_args()


if __name__ == "__main__":
    main()
