"""Runs the tasks of the reference model through vLLM's engine: dense and by a plan, prompts cut and whole, in turn and
at once, with and without prefixes in the cache.

    python benchmarks/vllm_tasks.py [--plan plan.yaml] [--length 4k] [--samples 20] [--chunk 1k] [--transformers]

In an environment with vLLM (README, "In vLLM"). Each row is one way of serving: the share of right answers of every
task, and the realised density of prefill. Without a plan, one is made by hand that is sparse from 512 tokens on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")

import torch
from vllm import SamplingParams

from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Sample, Split, make_samples, matches, prepare
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import parse_lengths
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import load_config, load_model
from sparsekv.runtime.model_config import describe_config
from sparsekv.runtime.vllm.counters import reset_stats, serving_stats
from sparsekv.runtime.vllm.internals import asking_for_ours, make_engine

Samples = dict[str, list[Sample]]
Ids = Any  # int32 of numpy
MODEL = "tiny-retriever"
NEW = 24  # tokens of an answer
ON_GPU = torch.cuda.is_available()


def main() -> None:
    """Prints a row for every way of serving."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        if args.plan is None:
            args.plan = str(Path(folder) / "sparsekv.yaml")
            write_plan(_hand_plan(describe_config(load_config(MODEL), MODEL)), Path(args.plan))
        _rows(args)


def _rows(args: argparse.Namespace) -> None:
    dense = _engine(args, args.length, None)
    kit = prepare(dense.get_tokenizer(), Split.EVALUATION)
    samples = {
        name: list(make_samples(TASKS[name], kit, args.length, args.seed, args.samples)) for name in RETRIEVAL_TASKS
    }
    _row("dense, whole, at once", dense, samples, None)
    del dense
    gc.collect()
    whole = _engine(args, args.length, args.plan)
    _row("plan, whole, in turn", whole, samples, 1)
    del whole
    gc.collect()
    if args.transformers:
        _transformers_row("plan, whole, by transformers", args, samples)
    cut = _engine(args, args.chunk, args.plan, eager=not ON_GPU)
    _row("plan, cut, in turn", cut, samples, 1)
    _row("plan, cut, at once", cut, samples, None)
    _row("plan, cut, at once, prefixes cached", cut, samples, None, prefixes=True)


def _engine(args: argparse.Namespace, budget: int, plan: str | None, eager: bool = True) -> Any:
    ours = {} if plan is None else asking_for_ours()
    return make_engine(
        resolve_model(MODEL).path_or_id,
        dtype=args.dtype,
        enforce_eager=eager,
        max_model_len=args.length + 64,
        max_num_batched_tokens=budget,
        max_num_seqs=16,
        additional_config={"sparsekv": {"dense": True} if plan is None else {"plan": plan}},
        **ours,
        **({"gpu_memory_utilization": 0.1} if ON_GPU else {}),
    )


def _hand_plan(info: ModelInfo) -> Plan:
    pattern = VerticalSlash(vertical=tokens(256), slash=tokens(1024), last_q=64, max_tiles=fraction(0.25))
    heads = tuple(
        HeadGroup(layer=layer, heads=tuple(range(group.heads)), pattern=pattern)
        for group in info.attention
        for layer in group.layers
    )
    lengths = (PrefillBucket(up_to=512, dense=True), PrefillBucket(up_to=None, heads=heads))
    return Plan(status="unverified", model=info, prefill=PrefillPlan(tile=TileShape(query=64, key=64), lengths=lengths))


def _row(name: str, llm: Any, samples: Samples, at_once: int | None, prefixes: bool = False) -> None:
    sparse = name.startswith("plan")
    if sparse:
        reset_stats(llm)
    right = {task: _right(llm, given, at_once, prefixes) / len(given) for task, given in samples.items()}
    stats = serving_stats(llm) if sparse else None
    _print(name, right, stats.prefill_density if stats else 1.0, stats.failures if stats else 0)


def _print(name: str, right: dict[str, float], density: float | None, failures: int) -> None:
    mean = sum(right.values()) / len(right)
    told = {"served": name, "density": round(density or 0.0, 4), "failures": failures, "mean": round(mean, 4)}
    print(json.dumps(told | right), flush=True)


def _transformers_row(name: str, args: argparse.Namespace, samples: Samples) -> None:
    loaded = load_model(MODEL, device="cuda" if ON_GPU else "cpu", dtype=args.dtype)
    with apply(loaded.model, load_plan(Path(args.plan)), decode=False) as handle:
        right = {
            task: sum(matches(_decoded(loaded, one.prompt_ids), one.answer) for one in given) / len(given)
            for task, given in samples.items()
        }
        _print(name, right, handle.stats().prefill_density, 0)


@torch.no_grad()
def _decoded(loaded: Any, prompt: Ids) -> str:
    ids = torch.tensor([[int(token) for token in prompt]], device=loaded.model.device)
    out = loaded.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=NEW, do_sample=False)
    return str(loaded.tokenizer.decode(out[0, ids.shape[1] :], skip_special_tokens=True))


def _right(llm: Any, samples: Sequence[Sample], at_once: int | None, prefixes: bool) -> int:
    """How many answers are right."""
    llm.reset_prefix_cache()
    if prefixes:  # of a length of its own for each prompt
        _generate(
            llm, [list(one.prompt_ids)[: 300 + 997 * n % len(one.prompt_ids)] for n, one in enumerate(samples)], 1
        )
    parts = _parts(samples, at_once or len(samples))
    answers = [text for part in parts for text in _generate(llm, [one.prompt_ids for one in part], NEW)]
    return sum(matches(answer, one.answer) for answer, one in zip(answers, samples, strict=True))


def _parts(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    return (samples[first : first + size] for first in range(0, len(samples), size))


def _generate(llm: Any, prompts: Sequence[Ids], new: int) -> list[str]:
    asked = [{"prompt_token_ids": [int(token) for token in prompt]} for prompt in prompts]
    outputs = llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=new), use_tqdm=False)
    return [output.outputs[0].text for output in outputs]


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plan", help="a plan of tiny-retriever; one made by hand without it")
    parser.add_argument("--length", type=_length, default="4k", help="of the prompts")
    parser.add_argument("--chunk", type=_length, default="1k", help="tokens of a step where prompts are cut")
    parser.add_argument("--samples", type=int, default=20, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16" if ON_GPU else "float32")
    parser.add_argument("--transformers", action="store_true", help="also by the transformers host, for comparison")
    return parser.parse_args()


def _length(text: str) -> int:
    return parse_lengths(text)[0]


if __name__ == "__main__":
    main()
