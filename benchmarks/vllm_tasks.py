"""Runs the tasks of the reference model through vLLM's engine: dense and by a plan, prompts cut and whole, in turn and
at once, with and without prefixes in the cache.

    python benchmarks/vllm_tasks.py [--plan plan.yaml] [--length 4k] [--chunk 1k] [--samples 20] [--transformers]

In an environment with vLLM (README, "In vLLM"). Each row is one way of serving: the share of right answers of every
task, how many points the worst task lost to dense, the realised density of prefill and how much more that is than with
whole prompts. Several lengths and chunks, separated by commas, share engines. Without a plan, one is made by hand that
is sparse from 512 tokens on.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "4")
os.environ.setdefault("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("VLLM_LOGGING_STREAM", "ext://sys.stderr")
os.environ.setdefault("VLLM_USE_FLASHINFER_SAMPLER", "0")  # two minutes to compile, for answers that nobody samples

import torch
from vllm import SamplingParams

from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Sample, Split, make_samples, matches, prepare
from sparsekv.plans.aliases import resolve_model
from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.model import ModelInfo
from sparsekv.plans.patterns import TileShape, VerticalSlash, fraction, tokens
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length, parse_lengths
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


@dataclass
class Report:
    """Rows of one length, held against those of dense and of whole prompts, which come first."""

    length: int
    dense: dict[str, float] = field(default_factory=dict)
    whole: float = 0.0  # density

    def row(self, name: str, right: dict[str, float], density: float, failures: int = 0, cached: int = 0) -> None:
        """Prints a row.

        Args:
            cached: tokens of prompts that the engine found in its cache.
        """
        self.dense, self.whole = self.dense or right, self.whole or (density if density < 1 else 0.0)
        told = {
            "length": self.length,
            "served": name,
            "mean": round(sum(right.values()) / len(right), 4),
            "worst_points": round(100 * max(self.dense[task] - right[task] for task in right), 1),
            "density": round(density, 4),
            "over_whole": round(density / self.whole, 3) if self.whole else None,
            "cached_tokens": cached,
            "failures": failures,
        }
        print(json.dumps(told | right), flush=True)


def main() -> None:
    """Prints a row for every length and way of serving."""
    args = _arguments()
    with tempfile.TemporaryDirectory() as folder:
        _rows(args, prepared_plan(args.plan, Path(folder)))


def _rows(args: argparse.Namespace, plan: Path) -> None:
    longest, reports = max(args.length), {length: Report(length) for length in args.length}
    llm = start_engine(None, longest, longest, args.dtype)
    kit = prepare(llm.get_tokenizer(), Split.EVALUATION)
    samples = {
        length: {
            name: list(make_samples(TASKS[name], kit, length, args.seed, args.samples)) for name in RETRIEVAL_TASKS
        }
        for length in args.length
    }
    for length, report in reports.items():
        _row(report, "dense, whole, at once", llm, samples[length], None)
    _stop(llm)
    del llm
    llm = start_engine(plan, longest, longest, args.dtype)
    for length, report in reports.items():
        _row(report, "plan, whole, in turn", llm, samples[length], 1)
    for chunk in args.chunk:
        _stop(llm)
        del llm
        llm = start_engine(plan, longest, chunk, args.dtype)
        for length in (length for length in args.length if length > chunk):
            report, cut = reports[length], f"plan, chunks of {format_length(chunk)}"
            _row(report, f"{cut}, in turn", llm, samples[length], 1)
            _row(report, f"{cut}, at once", llm, samples[length], None)
            _row(report, f"{cut}, at once, prefixes cached", llm, samples[length], None, prefixes=True)
    if args.transformers:
        _transformers_rows(args, plan, reports, samples)


def _stop(llm: Any) -> None:
    """Ends an engine; the next one starts when nothing refers to it any more."""
    llm.llm_engine.engine_core.shutdown()


def start_engine(plan: Path | None, longest: int, step: int, dtype: str, eager: bool = True, **more: Any) -> Any:
    """An engine with the reference model.

    Args:
        plan: none is dense.
        longest: tokens of the longest prompt.
        step: tokens that it computes in a step at most.
        eager: without CUDA graphs, which take longer to capture than they save here.
        more: of vLLM's own settings.
    """
    gc.collect()
    settings = {"max_num_seqs": 16, "gpu_memory_utilization": 0.1} if ON_GPU else {"max_num_seqs": 16}
    return make_engine(
        resolve_model(MODEL).path_or_id,
        dtype=dtype,
        enforce_eager=eager,
        max_model_len=longest + 64,
        max_num_batched_tokens=step,
        additional_config={"sparsekv": {"dense": True} if plan is None else {"plan": str(plan)}},
        **({} if plan is None else asking_for_ours()),
        **settings | more,
    )


def prepared_plan(path: str | None, folder: Path) -> Path:
    """The plan that was asked for, or one made by hand in a folder."""
    if path is not None:
        return Path(path)
    write_plan(_hand_plan(describe_config(load_config(MODEL), MODEL)), folder / "sparsekv.yaml")
    return folder / "sparsekv.yaml"


def _hand_plan(info: ModelInfo) -> Plan:
    pattern = VerticalSlash(vertical=tokens(256), slash=tokens(1024), last_q=64, max_tiles=fraction(0.25))
    heads = tuple(
        HeadGroup(layer=layer, heads=tuple(range(group.heads)), pattern=pattern)
        for group in info.attention
        for layer in group.layers
    )
    lengths = (PrefillBucket(up_to=512, dense=True), PrefillBucket(up_to=None, heads=heads))
    return Plan(status="unverified", model=info, prefill=PrefillPlan(tile=TileShape(query=64, key=64), lengths=lengths))


def _row(report: Report, name: str, llm: Any, samples: Samples, at_once: int | None, prefixes: bool = False) -> None:
    sparse = name.startswith("plan")
    if sparse:
        reset_stats(llm)
    found = {task: _right(llm, given, at_once, prefixes) for task, given in samples.items()}
    right = {task: answers / len(samples[task]) for task, (answers, _) in found.items()}
    stats = serving_stats(llm) if sparse else None
    density, failures = (1.0, 0) if stats is None else (stats.prefill_density or 0.0, stats.failures)
    report.row(name, right, density, failures, sum(cached for _, cached in found.values()))


def _transformers_rows(
    args: argparse.Namespace, plan: Path, reports: dict[int, Report], samples: dict[int, Samples]
) -> None:
    loaded = load_model(MODEL, device="cuda" if ON_GPU else "cpu", dtype=args.dtype)
    with apply(loaded.model, load_plan(plan), decode=False) as handle:
        for length, report in reports.items():
            for chunk in (length, *(chunk for chunk in args.chunk if chunk < length)):
                handle.reset_stats()
                right = {
                    task: sum(matches(_decoded(loaded, one.prompt_ids, chunk), one.answer) for one in given)
                    / len(given)
                    for task, given in samples[length].items()
                }
                cut = "whole" if chunk == length else f"chunks of {format_length(chunk)}"
                report.row(f"plan, {cut}, by transformers", right, handle.stats().prefill_density or 0.0)


@torch.no_grad()
def _decoded(loaded: Any, prompt: Ids, chunk: int) -> str:
    ids = torch.tensor([[int(token) for token in prompt]], device=loaded.model.device)
    cache, last, new = None, int(ids.shape[1]), []
    ends = loaded.model.generation_config.eos_token_id
    for first in range(0, last, chunk):
        out = loaded.model(ids[:, first : first + chunk], past_key_values=cache, use_cache=True, logits_to_keep=1)
        cache = out.past_key_values
    while len(new) < NEW:
        new.append(int(out.logits[0, -1].argmax()))
        if new[-1] in (ends if isinstance(ends, list) else [ends]):
            break
        ids = torch.tensor([new[-1:]], device=ids.device)
        out = loaded.model(ids, past_key_values=cache, use_cache=True)
    return str(loaded.tokenizer.decode(new, skip_special_tokens=True))


def _right(llm: Any, samples: Sequence[Sample], at_once: int | None, prefixes: bool) -> tuple[int, int]:
    """How many answers are right, and how many tokens of prompts were cached."""
    llm.reset_prefix_cache()
    if prefixes:  # of a length of its own for each prompt
        _generate(
            llm, [list(one.prompt_ids)[: 300 + 997 * n % len(one.prompt_ids)] for n, one in enumerate(samples)], 1
        )
    parts = _parts(samples, at_once or len(samples))
    outputs = [output for part in parts for output in _generate(llm, [one.prompt_ids for one in part], NEW)]
    right = (matches(output.outputs[0].text, one.answer) for output, one in zip(outputs, samples, strict=True))
    return sum(right), sum(output.num_cached_tokens or 0 for output in outputs)


def _parts(samples: Sequence[Sample], size: int) -> Iterator[Sequence[Sample]]:
    return (samples[first : first + size] for first in range(0, len(samples), size))


def _generate(llm: Any, prompts: Sequence[Ids], new: int) -> list[Any]:
    asked = [{"prompt_token_ids": [int(token) for token in prompt]} for prompt in prompts]
    return list(llm.generate(asked, SamplingParams(temperature=0.0, max_tokens=new), use_tqdm=False))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--plan", help="a plan of tiny-retriever; one made by hand without it")
    parser.add_argument("--length", type=parse_lengths, default="4k", help="of the prompts")
    parser.add_argument("--chunk", type=parse_lengths, default="1k", help="tokens of a step where prompts are cut")
    parser.add_argument("--samples", type=int, default=20, help="of each task")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--dtype", default="bfloat16" if ON_GPU else "float32")
    parser.add_argument("--transformers", action="store_true", help="also by the transformers host, for comparison")
    return parser.parse_args()


if __name__ == "__main__":
    main()
