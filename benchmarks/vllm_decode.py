"""A token of vLLM's dense decode beside ours, dense and by a plan made by hand, in one process on one device.

    python benchmarks/vllm_decode.py [MODEL] [--lengths 8k,32k,128k] [--batch 1,4] [--budget 2048] [--filters 2,8,18]

In an environment with vLLM (README, "In vLLM"). Random weights of MODEL's shape in both. A token is (time of 65 tokens
less time of 1) / 64 through the public `generate` of each, the median of three; vLLM finds the prompt in its prefix
cache, so that neither time holds its prefill. Its engine runs in this process (VLLM_ENABLE_V1_MULTIPROCESSING=0), with
its own CUDA graphs on a GPU, and is shut down before ours begins, for memory.
"""

from __future__ import annotations

import argparse
import gc
import os
import statistics
import time
from collections.abc import Iterator, Sequence
from itertools import product
from typing import Any

os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")

import torch
from transformers import AutoModelForCausalLM

from sparsekv.bench.decode import OURS, DecodeBench, DecodeRuns
from sparsekv.bench.random_model import HandDecode, describe_named, random_model
from sparsekv.bench.serve import served_model
from sparsekv.plans.patterns import tokens
from sparsekv.plans.types import format_length, parse_lengths
from sparsekv.runtime.hf.public_shapes import config_of
from sparsekv.runtime.model_config import device_name, dtype_name

NEW_TOKENS = 64
REPEATS = 3
DTYPES = {"cuda": torch.bfloat16, "cpu": torch.float32}
_SPARE_BYTES = 8 << 30  # for what vLLM computes with: activations, CUDA graphs
Case = tuple[int, int]  # tokens and rows


def main() -> None:
    """A row for each length and batch."""
    args = _arguments()
    cases = [case for case in product(args.lengths, args.batch) if case[0] * case[1] <= args.most]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    theirs = dict(_by_vllm(args.model, cases, device))
    print("milliseconds a token\n")
    print("| tokens | batch | vLLM, dense | captured dense | by the plan | over vLLM |\n|---|---|---|---|---|---|")
    for case, ours in _by_us(args, cases, device):
        dense, sparse = ours
        ratio = f"{theirs[case] / sparse:.2f}x"
        times = " | ".join(f"{ms:.2f}" for ms in (theirs[case], dense, sparse))
        print(f"| {format_length(case[0])} | {case[1]} | {times} | {ratio} |", flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="llama3-8b-1m", help="whose shape")
    parser.add_argument("--lengths", type=parse_lengths, default=(8192, 32768, 131072))
    parser.add_argument("--batch", type=lambda text: tuple(map(int, text.split(","))), default=(1, 4))
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--filters", type=lambda text: tuple(map(int, text.split(","))), default=(2, 8, 18))
    parser.add_argument("--most", type=int, default=1 << 19, help="cases with more cached tokens are left out")
    return parser.parse_args()


def _by_vllm(name: str, cases: Sequence[Case], device: torch.device) -> Iterator[tuple[Case, float]]:
    import vllm

    print(f"vLLM {vllm.__version__}, torch {torch.__version__}, {device_name(device)}", flush=True)
    longest = max(length for length, _ in cases) + 2
    with served_model(name, True, longest) as model:
        memory = {"gpu_memory_utilization": _share_of_memory(name, cases)} if device.type == "cuda" else {}
        engine = vllm.LLM(
            model=model.folder, load_format="dummy", dtype=dtype_name(DTYPES[device.type]), skip_tokenizer_init=True,
            max_model_len=longest, max_num_batched_tokens=16_384, enable_prefix_caching=True, **memory,
        )  # fmt: skip
        for length, batch in cases:
            yield (length, batch), _token_ms(engine, model.vocabulary, length, batch)
        engine.llm_engine.engine_core.shutdown()
    del engine
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _share_of_memory(name: str, cases: Sequence[Case]) -> float:
    """What the engine needs of the device, and no more: should it keep its memory, ours has to fit beside it."""
    cached, (config, _) = max(length * batch for length, batch in cases), config_of(name)
    with torch.device("meta"):
        weights = 2 * sum(weight.numel() for weight in AutoModelForCausalLM.from_config(config).parameters())
    token = 2 * 2 * config.num_hidden_layers * config.num_key_value_heads * config.head_dim
    total = torch.cuda.get_device_properties(0).total_memory
    return min(0.92, (weights + cached * token * 1.05 + _SPARE_BYTES) / total)


def _token_ms(engine: Any, vocabulary: int, length: int, batch: int) -> float:
    from vllm import SamplingParams

    ids_BS = torch.randint(1, vocabulary, (batch, length - NEW_TOKENS - 1)).tolist()
    rows: list[Any] = [{"prompt_token_ids": ids_S} for ids_S in ids_BS]

    def seconds(count: int) -> float:
        asked = SamplingParams(max_tokens=count, ignore_eos=True, detokenize=False, temperature=0.0)
        start = time.perf_counter()
        engine.generate(rows, asked, use_tqdm=False)
        return time.perf_counter() - start

    seconds(1 + NEW_TOKENS)  # prefills, and fills the prefix cache
    seconds(1)
    return statistics.median((seconds(1 + NEW_TOKENS) - seconds(1)) / NEW_TOKENS for _ in range(REPEATS)) * 1e3


def _by_us(
    args: argparse.Namespace, cases: Sequence[Case], device: torch.device
) -> Iterator[tuple[Case, tuple[float, float]]]:
    longest = max(length for length, _ in cases)
    info = describe_named(args.model, True)
    info = info.model_copy(update={"context_length": max(longest, info.context_length)})
    plans, _ = HandDecode(tokens(args.budget), args.filters, ("last",), None).plans(info, longest)
    subject = random_model(args.model, device=device, dtype=DTYPES[device.type], longest=longest)
    runs = DecodeRuns(subject, plans, DecodeBench(tuple(args.lengths), args.batch, REPEATS))
    (by_plan,) = plans
    for length, batch in cases:
        each = [[runs.run(way, length, batch).milliseconds for way in (OURS, by_plan)] for _ in range(REPEATS)]
        dense, sparse = (statistics.median(times) for times in zip(*each, strict=True))
        yield (length, batch), (dense, sparse)


if __name__ == "__main__":
    main()
