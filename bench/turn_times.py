"""Where the time of a turn goes: the client, the scheduler, launches and kernels, dense and by a plan.

    python -m sparsekv.bench.turn_times [--model llama3-8b] [--past 100k] [--rows 512,2k,8k] [--density 0.12]
        [--plan FILE] [--repeats 5] [--step 8k] [--kernels 12] [--tokenizer tiny-retriever] [--json]

In an environment with vLLM. Weights are random, of the model's shape; the plan is made by hand. Each engine caches a
past, and is then given prompts of that past and new rows, answered by one token, with the engine in this process. Times
on the host are medians over the repeats, without a profiler:

    turn       from the prompt to its token
    client     tokens checked, hashed page by page, queued (`add_request`)
    schedule   pages found and allocated (`Scheduler.schedule`)
    launch     the model's step prepared and launched (`execute_model`)
    wait       until the device has ended, with sampling
    update     the scheduler's books, and the answer made
    tokeniser  of a text of as many tokens as the prompt, which `vllm serve` tokenises at each turn; not in `turn`

Times on the device are of one further turn, by torch.profiler (kernels alone): `span` from the first kernel to the end
of the last, `busy` with one running, `idle` the rest, which launches or the host cost; then kernels by kind.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from sparsekv.bench.hand_plans import dense_up_to, dummy_plan
from sparsekv.bench.harness import parse_lengths
from sparsekv.bench.serve import (
    DENSE,
    SPARSE,
    Load,
    ServeBench,
    ServedModel,
    served_engine,
    served_model,
)
from sparsekv.bench.vllm_engines import greedy
from sparsekv.plans.files import load_plan
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import columns, parse_length
from sparsekv.runtime.settings import preset_vllm

ON_GPU = torch.cuda.is_available()
HOST = ("client", "schedule", "launch", "wait", "update")
KINDS = {  # of kernels, by the first expression that is in their names
    "attention": r"flash|fmha|attn|(^|_)prefill_kernel|(^|_)decode_kernel|_attend",
    "products": r"gemm|nvjet|cutlass|cublas|matmul|s16816",
    "index": r"(budgets|columns|computed|count|crossings|diagonals|digit|join|lines|lists?|merge|near|stats|place|pool|"
    r"products|scores?|select|sums)_kernel|sort|topk|radix|scan",
    "copies": r"(gather|copy|append|pack|move)_kernel|memcpy|memset|reshape_and_cache|index_select|cat_",
}


@dataclass(frozen=True, slots=True)
class TurnParts:
    """Milliseconds of a turn behind a cached past.

    Attributes:
        turn: from the prompt to its token.
        host: by part (`HOST`).
        span, busy: of the device, from its first kernel to its last, and with a kernel running.
        kinds: of kernels, and `names` of the longest.
        launches: kernels and copies.
    """

    way: str
    rows: int
    turn: float
    host: Mapping[str, float]
    span: float
    busy: float
    kinds: Mapping[str, float]
    names: Mapping[str, float]
    launches: int

    @property
    def idle(self) -> float:
        return self.span - self.busy


@dataclass(frozen=True, slots=True)
class _Case:
    model: ServedModel
    plan: Plan
    past: int
    rows: tuple[int, ...]
    repeats: int
    bench: ServeBench


# --- one engine -------------------------------------------------------------------------------------------------------


def _parts_of(llm: Any, way: str, case: _Case) -> list[TurnParts]:
    source = random.Random(0)

    def tokens(count: int) -> list[int]:
        return [source.randrange(1, case.model.vocabulary) for _ in range(count)]

    past = tokens(case.past)
    _turn(llm, past)
    return [measure_turn(way, llm, rows, lambda: past + tokens(rows), case.repeats) for rows in case.rows]  # noqa: B023


def _turn(llm: Any, prompt: list[int]) -> float:
    """Seconds to the one token of an answer."""
    engine, start = llm.llm_engine, time.perf_counter()
    engine.add_request("turn", {"prompt_token_ids": prompt}, greedy(1))
    while engine.has_unfinished_requests():
        engine.step()
    return time.perf_counter() - start


def measure_turn(way: str, llm: Any, rows: int, prompt: Callable[[], list[int]], repeats: int) -> TurnParts:
    """The parts of a turn of an engine that has cached all but the last `rows` of each prompt."""
    for _ in range(2):
        _turn(llm, prompt())
    turns, parts = [], []
    for _ in range(repeats):
        with _timed(llm) as seconds:
            turns.append(_turn(llm, prompt()))
        parts.append(dict(seconds))
    host = {name: 1e3 * statistics.median(each.get(name, 0.0) for each in parts) for name in HOST}
    _profiled(llm, prompt())  # the profiler starts with its first kernels
    return TurnParts(way, rows, 1e3 * statistics.median(turns), host, **_profiled(llm, prompt()))


@contextmanager
def _timed(llm: Any) -> Iterator[dict[str, float]]:
    """Counts seconds of the engine's parts, by shadowing methods of its objects."""
    engine, seconds = llm.llm_engine, defaultdict[str, float](float)
    core = engine.engine_core.engine_core
    shadowed = [
        (engine, "add_request", "client"),
        (engine, "step", "step"),
        (core.scheduler, "schedule", "schedule"),
        (core.scheduler, "update_from_output", "update"),
        (core.model_executor, "execute_model", "launch"),
    ]
    for holder, name, part in shadowed:
        setattr(holder, name, _counting(getattr(holder, name), seconds, part))
    try:
        yield seconds
    finally:
        for holder, name, _ in shadowed:
            delattr(holder, name)
        seconds["wait"] = seconds["step"] - sum(seconds[part] for part in ("schedule", "update", "launch"))


def _counting(method: Callable[..., Any], seconds: dict[str, float], part: str) -> Callable[..., Any]:
    def counted(*args: Any, **kwargs: Any) -> Any:
        start = time.perf_counter()
        try:
            return method(*args, **kwargs)
        finally:
            seconds[part] += time.perf_counter() - start

    return counted


def _profiled(llm: Any, prompt: list[int]) -> dict[str, Any]:
    """The device's part of a turn; on a CPU that of torch's operators."""
    with profile(activities=[ProfilerActivity.CUDA if ON_GPU else ProfilerActivity.CPU]) as profiled:
        _turn(llm, prompt)
        if ON_GPU:
            torch.cuda.synchronize()
    device = "CUDA" if ON_GPU else "CPU"
    events = [one for one in profiled.events() if one.device_type.name == device and not one.is_user_annotation]
    names, kinds = Counter[str](), Counter[str](dict.fromkeys((*KINDS, "rest"), 0.0))
    for event in events:
        milliseconds = event.time_range.elapsed_us() / 1e3
        names[event.name] += milliseconds
        kinds[kind_of(event.name)] += milliseconds
    span, busy = span_and_busy([(event.time_range.start, event.time_range.end) for event in events])
    return {"span": span / 1e3, "busy": busy / 1e3, "kinds": kinds, "names": names, "launches": len(events)}


def kind_of(kernel: str) -> str:
    """The kind of a kernel by its name."""
    return next((kind for kind, names in KINDS.items() if re.search(names, kernel, re.IGNORECASE)), "rest")


def span_and_busy(intervals: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """From the first start to the last end of intervals, and the length of their union."""
    busy, end = 0.0, float("-inf")
    for start, stop in sorted(intervals):
        busy += max(0.0, stop - max(start, end))
        end = max(end, stop)
    return (end - min(intervals)[0], busy) if intervals else (0.0, 0.0)


# --- the table --------------------------------------------------------------------------------------------------------


def _table(parts: Sequence[TurnParts], tokenising: Mapping[int, float]) -> str:
    titles = ["rows", "", "turn", *HOST, "tokeniser", "span", "busy", "idle", *KINDS, "rest", "launches"]
    lines = [
        [
            str(one.rows),
            one.way,
            *(f"{value:.1f}" for value in (one.turn, *one.host.values(), tokenising[one.rows])),
            *(f"{value:.1f}" for value in (one.span, one.busy, one.idle, *one.kinds.values())),
            str(one.launches),
        ]
        for one in parts
    ]
    return columns([titles, *lines], right=[0, *range(2, len(titles))])


def _kernels(one: TurnParts, most: int) -> str:
    longest = Counter(one.names).most_common(most)
    return "\n".join([f"{one.way}, {one.rows} rows:", *(f"  {ms:8.2f} ms  {name:.100}" for name, ms in longest)])


def _tokenising_ms(name: str, tokens: int, repeats: int) -> float:
    """Milliseconds of a tokeniser for a text of as many tokens."""
    from transformers import AutoTokenizer

    from sparsekv.plans.aliases import resolve_model

    tokenizer, source = AutoTokenizer.from_pretrained(resolve_model(name).path_or_id), random.Random(0)
    ids = [source.randrange(len(tokenizer)) for _ in range(tokens)]
    text = tokenizer.decode(ids, skip_special_tokens=True)
    taken = []
    for _ in range(repeats):
        start = time.perf_counter()
        count = len(tokenizer(text)["input_ids"])
        taken.append((time.perf_counter() - start) * tokens / max(1, count))
    return 1e3 * statistics.median(taken)


def main() -> None:
    """Prints the table of both engines, and their longest kernels."""
    args = _arguments()
    preset_vllm()
    longest = args.past + max(args.rows) + 1
    device, dtype = (torch.device("cuda"), torch.bfloat16) if ON_GPU else (torch.device("cpu"), torch.float32)
    bench = ServeBench((Load(longest, 0),), device, dtype, 1, args.step, alone=True, prefix_caching=True)
    with served_model(args.model, args.random, longest) as model:
        plan = load_plan(args.plan) if args.plan else _hand_plan(model, longest, args.density)
        case = _Case(model, plan, args.past, args.rows, args.repeats, bench)
        each = []
        for way in (DENSE, SPARSE):
            with served_engine(way, model, plan, bench) as engine:
                each.append(engine(_parts_of, way, case))
    parts = [one for both in zip(*each, strict=True) for one in both]
    tokenising = {rows: _tokenising_ms(args.tokenizer, args.past + rows, args.repeats) for rows in args.rows}
    if args.json:
        print(json.dumps([_data(one) | {"tokeniser": tokenising[one.rows]} for one in parts]))
        return
    print(f"{args.model}, behind {args.past} tokens, milliseconds; tokeniser of {args.tokenizer}")
    print(_table(parts, tokenising))
    for one in parts if args.kernels else []:
        print(_kernels(one, args.kernels))


def _data(one: TurnParts) -> dict[str, Any]:
    times = {name: getattr(one, name) for name in ("way", "rows", "turn", "span", "busy", "idle", "launches")}
    return times | {"host": dict(one.host), "kinds": dict(one.kinds), "names": dict(one.names)}


def _hand_plan(model: ServedModel, longest: int, density: float) -> Plan:
    # Of the family that plans emit: others are in no graph.
    plan, _ = dummy_plan(model.info, [longest], [density], TileShape(), ("vertical_slash",))
    return dense_up_to(plan, min(8192, longest // 4))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help="alias, hub id or folder")
    parser.add_argument("--loaded", dest="random", action="store_false", help="its weights, not random ones")
    parser.add_argument("--past", type=parse_length, default="100k", help="tokens that are cached")
    parser.add_argument("--rows", type=parse_lengths, default="512,2k,8k", help="new tokens of a turn")
    parser.add_argument("--density", type=float, default=0.12, help="of the plan made by hand")
    parser.add_argument("--plan", type=Path, help="another plan")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--step", type=parse_length, default="8k", help="tokens that the engine computes in a step")
    parser.add_argument("--kernels", type=int, default=12, help="how many kernels of each turn are named")
    parser.add_argument("--tokenizer", default="tiny-retriever", help="alias, hub id or folder")
    parser.add_argument("--json", action="store_true")
    return parser.parse_args()


if __name__ == "__main__":
    main()
