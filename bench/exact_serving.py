"""Exact output inside vLLM (docs/exact.md), each term of it timed in one engine: a dense token, a step of a draft, the
pass that verifies, and the cycle of both.

    python -m sparsekv.bench.exact_serving llama3-8b --random-weights --length 128k --at-once 1 [--draft 4]
        [--budget 2048] [--acceptance 0.975] [--steps 48] [--dense] [--eager] [--tensor-parallel N]

One process is one engine and one load; it prints a line of JSON, and its progress on standard error. `--acceptance`
has this share of drafts count, each if those before it do (vLLM's synthetic rejection sampler), as those of random
weights mean nothing; 0 verifies them. `--dense` times vLLM alone, without a drafter, in the same words. Requests are
prefilled once; then steps without drafts, with them, and with a verification of what nothing has drafted take turns.

`dense_ms`, `cycle_ms` and `check_ms` are medians between outputs of steps, `draft_ms` between events on the device.
`speedup` is tokens a second by cycles over those of dense steps; `reached` is its share of dense_ms x tokens a cycle /
(draft x draft_ms + check_ms), what the terms alone would give.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from sparsekv.bench.hand_plans import HandDecode
from sparsekv.bench.serve import ServedModel, served_model
from sparsekv.bench.vllm_engines import asking_for_ours, greedy, make_engine
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import tokens
from sparsekv.plans.types import parse_length
from sparsekv.runtime.settings import preset_vllm

_SETTLING = 4  # steps after a change: those that were scheduled before it
_TURNS = 3
DENSE, CYCLE, CHECK = "dense", "cycle", "check"


@dataclass
class Timed:
    """Holds what steps of one kind took.

    Attributes:
        seconds: between outputs.
        tokens: of all requests, that each output has.
        draft_ms: of one step of a draft, on the device.
    """

    seconds: list[float] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    draft_ms: list[float] = field(default_factory=list)

    @property
    def milliseconds(self) -> float:
        """Returns the median."""
        return statistics.median(self.seconds) * 1e3


def main() -> None:
    """Times one load, and prints what it took."""
    args = _arguments()
    preset_vllm()
    with served_model(args.model, args.random_weights, args.length + _room(args)) as model, _engine(model, args) as llm:
        _say(f"engine is up: {_device_memory()}")
        found = _run(llm, model, args)
    print(json.dumps(_row(found, args) | {"model": model.name}), flush=True)


def _room(args: argparse.Namespace) -> int:
    return int((args.steps + 2 * _SETTLING) * _TURNS * 3 * (args.draft + 1))


@contextmanager
def _engine(model: ServedModel, args: argparse.Namespace) -> Iterator[Any]:
    settings: dict[str, Any] = {
        "dtype": "bfloat16" if torch.cuda.is_available() else "float32",
        "max_model_len": args.length + _room(args),
        "max_num_batched_tokens": args.step,
        "max_num_seqs": max(2, args.at_once),
        "enable_prefix_caching": False,
        "skip_tokenizer_init": True,
        "enforce_eager": args.eager,
        "tensor_parallel_size": args.tensor_parallel,
        "gpu_memory_utilization": args.memory,
        "kernel_config": {"enable_jit_warmup": False},  # of samplers, which takes minutes
    } | ({"load_format": "dummy"} if model.random else {})
    own: dict[str, Any] = {"dense": True}
    with tempfile.TemporaryDirectory() as folder:
        if not args.dense:
            plans, words = HandDecode(tokens(args.budget)).plans(model.info, args.length)
            write_plan(plans["last"], path := Path(folder) / "sparsekv.yaml")
            _say(words)
            own = {"plan": str(path), "exact": True, "draft": args.draft, "allow_untested": True}
            settings |= asking_for_ours() | drafting(model.folder, own, args.acceptance, max(2, args.at_once))
        yield make_engine(model.folder, additional_config={"sparsekv": own}, **settings)


def drafting(model: str, own: dict[str, Any], acceptance: float, rows: int) -> dict[str, Any]:
    """Returns what `exact` writes into an engine's arguments, with a rejection sampler that takes drafts at random."""
    from sparsekv.runtime.vllm.exact_engine import ask_for_drafts

    args = SimpleNamespace(
        additional_config={"sparsekv": own}, model=model, revision=None, speculative_config=None, worker_cls="auto",
        scheduler_cls=None, max_num_seqs=rows, cudagraph_capture_sizes=[],
        compilation_config=SimpleNamespace(cudagraph_capture_sizes=None, max_cudagraph_capture_size=None),
    )  # fmt: skip
    ask_for_drafts(args)
    speculative: dict[str, Any] = dict(args.speculative_config)
    if acceptance:
        rates = [acceptance ** (number + 1) for number in range(own["draft"])]
        speculative |= {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": rates}
    names = ("worker_cls", "scheduler_cls", "cudagraph_capture_sizes")
    return {"speculative_config": speculative, **{name: getattr(args, name) for name in names}}


def _run(llm: Any, model: ServedModel, args: argparse.Namespace) -> dict[str, Timed]:
    source, engine = random.Random(0), llm.llm_engine
    params, ids = greedy(_room(args)), []
    for number in range(args.at_once):
        prompt = [source.randrange(1, model.vocabulary) for _ in range(args.length)]
        ids.append(engine.add_request(f"exact-{number}", {"prompt_token_ids": prompt}, params))
    counts: dict[str, int] = {}
    began = time.perf_counter()
    while len(counts) < args.at_once:  # until every request has a token
        _step(engine, counts)
    _say(f"prefilled in {time.perf_counter() - began:.1f} s: {_device_memory()}")
    kinds = (DENSE,) if args.dense else (DENSE, CYCLE, CHECK)
    found = {kind: Timed() for kind in kinds}
    size = [0]
    if not args.dense:
        engine.engine_core.engine_core.scheduler.drafting.next = lambda lengths: size[0]
    for _ in range(_TURNS):
        for kind in kinds:
            size[0] = 0 if kind == DENSE else args.draft
            if not args.dense:
                llm.collective_rpc(_watch, args=(kind == CHECK,))
            for _ in range(_SETTLING):
                _step(engine, counts)
            _time(engine, counts, args.steps, found[kind])
            if not args.dense:
                found[kind].draft_ms += llm.collective_rpc(_watched)[0]
            _say(f"{kind}: {found[kind].milliseconds:.3f} ms, {statistics.mean(found[kind].tokens):.2f} tokens a step")
    engine.abort_request(ids, internal=True)
    while engine.has_unfinished_requests():
        engine.step()
    return found


def _time(engine: Any, counts: dict[str, int], steps: int, into: Timed) -> None:
    last = time.perf_counter()
    for _ in range(steps):
        new = _step(engine, counts)
        now = time.perf_counter()
        into.seconds.append(now - last)
        into.tokens.append(new)
        last = now


def _step(engine: Any, counts: dict[str, int]) -> int:
    """Runs the engine until it has an output; the new tokens of all requests."""
    while not (outputs := engine.step()):
        pass
    before = sum(counts.values())
    counts |= {one.request_id: len(one.outputs[0].token_ids) for one in outputs}
    return sum(counts.values()) - before


# --- in the worker ----------------------------------------------------------------------------------------------------


def _watch(worker: Any, only_check: bool) -> None:
    """Has the speculator's drafts be timed, or be none though they are asked for."""
    speculator = worker.model_runner.speculator
    propose: Callable[..., Any] = type(speculator).propose
    events: list[tuple[Any, Any, int]] = []

    def proposing(input_batch: Any, *args: Any, num_speculative_tokens: int | None = None, **given: Any) -> Any:
        if only_check:
            drafts = speculator.draft_tokens[: input_batch.num_reqs]
            return drafts.fill_(1)
        if not torch.cuda.is_available():
            return propose(speculator, input_batch, *args, num_speculative_tokens=num_speculative_tokens, **given)
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        first.record()
        found = propose(speculator, input_batch, *args, num_speculative_tokens=num_speculative_tokens, **given)
        last.record()
        events.append((first, last, num_speculative_tokens or 0))
        return found

    speculator.propose, speculator.sparsekv_events = proposing, events


def _watched(worker: Any) -> list[float]:
    """Milliseconds of a step of each draft since; drafts are made as ever."""
    speculator = worker.model_runner.speculator
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    del speculator.propose
    return [first.elapsed_time(last) / drafted for first, last, drafted in speculator.sparsekv_events if drafted]


# --- what is told -----------------------------------------------------------------------------------------------------


def _row(found: dict[str, Timed], args: argparse.Namespace) -> dict[str, Any]:
    from sparsekv.runtime.vllm import internals as vllm

    dense_ms = found[DENSE].milliseconds
    row: dict[str, Any] = {
        "vllm": vllm.release, "length": args.length, "at_once": args.at_once, "dense_ms": round(dense_ms, 3),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu", "drafter": not args.dense,
    }  # fmt: skip
    if args.dense:
        return row
    cycle, check_ms = found[CYCLE], found[CHECK].milliseconds
    each = statistics.mean(cycle.tokens) / args.at_once
    # Of many requests the mean over time is what counts: outputs come at the pace of the slowest.
    cycle_ms = statistics.mean(cycle.seconds) * 1e3 if args.acceptance == 0 else cycle.milliseconds
    draft_ms = statistics.median(cycle.draft_ms) if cycle.draft_ms else max(0.0, cycle_ms - check_ms) / args.draft
    speedup = each * dense_ms / cycle_ms
    terms = each * dense_ms / (args.draft * draft_ms + check_ms)
    return row | {
        "draft": args.draft, "acceptance": args.acceptance or "measured", "tokens_a_cycle": round(each, 3),
        "cycle_ms": round(cycle_ms, 3), "check_ms": round(check_ms, 3), "draft_ms": round(draft_ms, 3),
        "speedup": round(speedup, 3), "by_its_terms": round(terms, 3), "reached": round(speedup / terms, 3),
    }  # fmt: skip


def _device_memory() -> str:
    if not torch.cuda.is_available():
        return "no device"
    free, total = torch.cuda.mem_get_info()
    return f"{free / 2**30:.1f} of {total / 2**30:.1f} GiB free"


def _say(line: str) -> None:
    print(f"exact_serving: {line}", file=sys.stderr, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("model")
    parser.add_argument("--random-weights", action="store_true")
    parser.add_argument("--length", type=parse_length, default=32768)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--draft", type=int, default=4)
    parser.add_argument("--budget", type=int, default=2048)
    parser.add_argument("--acceptance", type=float, default=0.975)
    parser.add_argument("--steps", type=int, default=48)
    parser.add_argument("--step", type=parse_length, default=8192)
    parser.add_argument("--memory", type=float, default=0.9)
    parser.add_argument("--tensor-parallel", type=int, default=1)
    parser.add_argument("--dense", action="store_true")
    parser.add_argument("--eager", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
