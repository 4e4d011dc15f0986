"""Runs the tasks of the reference model through vLLM's engine: dense and by a plan, prompts cut and whole, in turn and
at once, with and without prefixes in the cache.

    python benchmarks/vllm_tasks.py --plan plan.yaml [--length 4k] [--samples 20] [--chunk 1k]

In the environment of `make test-vllm`. Each row is one way of serving: the share of right answers of every task, and
the realised density of prefill.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
from collections.abc import Iterator, Sequence
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")

from vllm import LLM, SamplingParams

from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Sample, Split, make_samples, matches, prepare
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.types import parse_lengths
from sparsekv.runtime.vllm.counters import reset_stats, serving_stats

Samples = dict[str, list[Sample]]
Ids = Any  # int32 of numpy


def main() -> None:
    """Prints a row for every way of serving."""
    args = _arguments()
    dense = _engine(args, args.length, {"dense": True})
    kit = prepare(dense.get_tokenizer(), Split.EVALUATION)
    samples = {
        name: list(make_samples(TASKS[name], kit, args.length, args.seed, args.samples)) for name in RETRIEVAL_TASKS
    }
    _row("dense, whole, at once", dense, samples, None)
    del dense
    gc.collect()
    whole = _engine(args, args.length, {"plan": args.plan})
    _row("plan, whole, in turn", whole, samples, 1)
    del whole
    gc.collect()
    cut = _engine(args, args.chunk, {"plan": args.plan})
    _row("plan, cut, in turn", cut, samples, 1)
    _row("plan, cut, at once", cut, samples, None)
    _row("plan, cut, at once, prefixes cached", cut, samples, None, prefixes=True)


def _engine(args: argparse.Namespace, budget: int, settings: dict[str, Any]) -> LLM:
    return LLM(
        resolve_model("tiny-retriever").path_or_id,
        dtype="float32",
        enforce_eager=True,
        max_model_len=args.length + 64,
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        additional_config={"sparsekv": settings},
    )


def _row(name: str, llm: LLM, samples: Samples, at_once: int | None, prefixes: bool = False) -> None:
    if name.startswith("plan"):
        reset_stats(llm)
    right = {task: _right(llm, given, at_once, prefixes) / len(given) for task, given in samples.items()}
    density = serving_stats(llm).prefill_density if name.startswith("plan") else 1.0
    mean = sum(right.values()) / len(right)
    print(json.dumps({"served": name, "density": round(density or 0.0, 4), "mean": round(mean, 4)} | right), flush=True)


def _right(llm: LLM, samples: Sequence[Sample], at_once: int | None, prefixes: bool) -> int:
    """How many answers are right."""
    llm.reset_prefix_cache()
    if prefixes:  # of a length of its own for each prompt
        _generate(
            llm, [list(one.prompt_ids)[: 300 + 997 * n % len(one.prompt_ids)] for n, one in enumerate(samples)], 1
        )
    parts = _parts(samples, at_once or len(samples))
    answers = [text for part in parts for text in _generate(llm, [one.prompt_ids for one in part], 24)]
    return sum(matches(answer, one.answer) for answer, one in zip(answers, samples, strict=True))


def _parts(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    return (samples[first : first + size] for first in range(0, len(samples), size))


def _generate(llm: LLM, prompts: Sequence[Ids], new: int) -> list[str]:
    asked = [{"prompt_token_ids": [int(token) for token in prompt]} for prompt in prompts]
    outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=new), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plan", required=True, help="a plan of tiny-retriever")
    parser.add_argument("--length", type=_length, default="4k", help="of the prompts")
    parser.add_argument("--chunk", type=_length, default="1k", help="tokens of a step where prompts are cut")
    parser.add_argument("--samples", type=int, default=20, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


def _length(text: str) -> int:
    return parse_lengths(text)[0]


if __name__ == "__main__":
    main()
