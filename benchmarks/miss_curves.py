"""How many of the tokens that filter layers choose were not in a hot set on the device: curves by policy and size.

    python benchmarks/miss_curves.py tiny-retriever --filters 2,6 [--lengths 16k] [--budgets 5%,512,2k] [--tokens 128]
    python benchmarks/miss_curves.py MODEL --plan plan.yaml

Prompts of several tasks are prefilled dense; answers are then generated token by token under the decode plan, drawn at
temperature 1 with a seed, since greedy answers of small models repeat themselves. Every filter layer's choice is
recorded at every step, and the record is replayed through each policy. A miss is a chosen token that is neither in the
hot set nor among the newest ones, which always stay on the device. The first step, which finds an empty hot set, is
left out. Printed are the share of chosen tokens that missed, over all steps and filter layers, and its 95th percentile
over steps.

Policies: `last step` has what the step before chose; `lru` replaces what was chosen longest ago; `clock` gives every
token one more round of the hand when it was chosen since the last; `lrfu` replaces what is worth least, as the slot map
does (kernels/decode/slots.py); `best` knows the future (Belady) and is the bound.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import DynamicCache

from sparsekv.bench.random_model import HandDecode
from sparsekv.kernels.decode.slots import AGEING, USE
from sparsekv.planner.tasks import TASKS, Split, make_sample, prepare
from sparsekv.plans.files import load_plan
from sparsekv.plans.patterns import Budget, fraction, tokens
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length, parse_length, parse_lengths
from sparsekv.runtime.core.program import Program
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import LoadedModel, load_model

Tokens = npt.NDArray[np.int64]
Trace = list[Tokens]  # what one filter layer chose at every step, without the newest tokens
_MARGIN = 64  # tokens beyond `recent` that stay on the device
_TASKS = ["quote_text", "niah_multikey", "kv_retrieval", "variable_tracking", "perplexity"]
_SIZES = (1, 2, 4)  # of the hot set, in budgets


def main() -> None:
    """Prints a row for each length, budget and task, and one over all tasks."""
    args = _arguments()
    loaded = load_model(args.model, device=args.device)
    policies = [("last step", 1), *((name, size) for size in _SIZES for name in ("lru", "clock", "lrfu", "best"))]
    heads = " | ".join(f"{name} {size}x" if name != "last step" else name for name, size in policies)
    print(f"| length | budget | task | never chosen before | {heads} |\n|{'---|' * (4 + len(policies))}", flush=True)
    for length in args.lengths:
        plans = [plan_of(args, loaded, budget, length) for budget in args.budgets]
        found: dict[Budget, list[Trace]] = {budget: [] for budget in args.budgets}
        for task in args.tasks:
            for index in range(args.samples):
                traces = recorded(loaded, plans, task, length, index, args.tokens)
                for budget, of_plan in zip(args.budgets, traces, strict=True):
                    found[budget] += of_plan
            for budget in args.budgets:
                own = found[budget][-args.samples * len(traces[0]) :]
                print(_row(length, budget, task, own, policies), flush=True)
        for budget in args.budgets:
            print(_row(length, budget, "all", found[budget], policies), flush=True)


def _arguments() -> argparse.Namespace:
    def numbers(text: str) -> tuple[int, ...]:
        return tuple(map(int, text.split(",")))

    def budgets(text: str) -> tuple[Budget, ...]:
        parts = text.split(",")
        return tuple(fraction(float(p[:-1]) / 100) if p.endswith("%") else tokens(parse_length(p)) for p in parts)

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--plan", type=Path, help="whose filter layers and segments to take")
    parser.add_argument("--filters", type=numbers, default=(), help="filter layers, in place of a plan's")
    parser.add_argument("--lengths", type=parse_lengths, default=(16384,))
    parser.add_argument("--budgets", type=budgets, default=(fraction(0.05), tokens(512), tokens(2048)))
    parser.add_argument("--tasks", type=lambda text: text.split(","), default=_TASKS)
    parser.add_argument("--samples", type=int, default=1, help="prompts a task")
    parser.add_argument("--tokens", type=int, default=128, help="generated a prompt")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def plan_of(args: argparse.Namespace, loaded: LoadedModel, budget: Budget, length: int) -> Plan:
    """The decode phase alone, at this budget and every length."""
    if args.plan is None:
        return HandDecode(budget, args.filters).plans(loaded.info, length)[0]["last"]
    plan = load_plan(args.plan)
    assert plan.decode is not None, "expected a plan with a decode phase"
    at_most = None if budget.fraction is None else budget.resolve(length)
    spend = DecodeBudget(tokens=budget.tokens, fraction=budget.fraction, at_most=at_most)
    last = next(bucket for bucket in reversed(plan.decode.lengths) if bucket.segments)
    segments = tuple(segment.model_copy(update={"budget": spend}) for segment in last.segments)
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=segments),))
    return plan.model_copy(update={"prefill": None, "decode": decode})


# --- recording --------------------------------------------------------------------------------------------------------


@torch.no_grad()
def recorded(
    loaded: LoadedModel, plans: Sequence[Plan], task: str, length: int, index: int, count: int
) -> list[list[Trace]]:
    """For each plan the traces of its filter layers, over an answer of `count` tokens to one prompt."""
    kit = prepare(loaded.tokenizer, Split.CALIBRATION)
    model: Any = loaded.model
    prompt = torch.from_numpy(make_sample(TASKS[task], kit, length, 0, index).prompt_ids).long()
    cache = DynamicCache()
    logits_V = model(prompt[None].to(model.device), past_key_values=cache, logits_to_keep=1).logits[0, -1]
    return [list(_answered(model, plan, cache, logits_V, count, index)) for plan in plans]


def _answered(
    model: Any, plan: Plan, prompt: DynamicCache, logits_V: torch.Tensor, count: int, seed: int
) -> Iterator[Trace]:
    segments = [layer.filters for layer in Program.of(None, plan.decode, plan.model).filters if layer.filters]
    traces: list[Trace] = [[] for _ in segments]
    draws = torch.Generator().manual_seed(seed)
    with apply(model, plan) as handle:
        cache = handle.new_cache(prompt.get_seq_length() + count, answer=count)
        for layer, (own, given) in enumerate(zip(cache.layers, prompt.layers, strict=True)):
            own.update(given.keys, given.values, layer)
        for _ in range(count):
            token = torch.multinomial(logits_V.float().softmax(-1).cpu(), 1, generator=draws)
            logits_V = model(token[None].to(model.device), past_key_values=cache).logits[0, -1]
            for segment, trace in zip(segments, traces, strict=True):
                chosen = cache.layers[0].state.chosen(segment)
                kept = chosen.chosen_BgN[0, 0, : int(chosen.counts_B[0])].cpu().numpy().astype(np.int64)
                newest = cache.get_seq_length() - segment.recent - _MARGIN
                trace.append(kept[(kept >= 0) & (kept < newest)])
    yield from traces


# --- replaying --------------------------------------------------------------------------------------------------------


def misses(trace: Trace, policy: str, slots: int) -> Tokens:
    """How many chosen tokens missed at every step but the first."""
    run = {"last step": _last_step, "lru": _lru, "clock": _clock, "lrfu": _lrfu, "best": _best}[policy]
    return np.array(list(run(trace, slots))[1:])


def _last_step(trace: Trace, slots: int) -> Iterator[int]:
    before: Tokens = np.zeros(0, np.int64)
    for chosen in trace:
        yield len(np.setdiff1d(chosen, before))
        before = chosen


def _replaced(trace: Trace, slots: int, worth: Callable[[int, Tokens], Tokens]) -> Iterator[int]:
    """Replaces the tokens that are worth least, by `worth(step, tokens)`; those of the step itself stay."""
    present: Tokens = np.zeros(0, np.int64)
    for step, chosen in enumerate(trace):
        yield len(np.setdiff1d(chosen, present))
        others = np.setdiff1d(present, chosen)
        room = max(slots - len(chosen), 0)
        others = others[np.argsort(-worth(step, others), kind="stable")[:room]]
        present = np.union1d(chosen, others)


def _lru(trace: Trace, slots: int) -> Iterator[int]:
    last = np.zeros(_longest(trace), np.int64)

    def worth(step: int, others: Tokens) -> Tokens:
        last[trace[step]] = step + 1
        return last[others]

    return _replaced(trace, slots, worth)


def _lrfu(trace: Trace, slots: int) -> Iterator[int]:
    held: Tokens = np.full(max(slots, max(map(len, trace))), -1)
    worth = np.zeros(len(held), np.int64)
    for chosen in trace:
        now = np.isin(held, chosen)
        worth -= worth >> AGEING
        worth[now] += USE
        new = np.setdiff1d(chosen, held)
        yield len(new)
        others = np.flatnonzero(~now)
        victims = np.sort(others[np.argsort(worth[others], kind="stable")[: len(new)]])
        held[victims], worth[victims] = new, USE


def _best(trace: Trace, slots: int) -> Iterator[int]:
    uses: list[list[int]] = [[] for _ in range(_longest(trace))]
    for step in range(len(trace) - 1, -1, -1):
        for token in trace[step]:
            uses[token].append(step)

    def worth(step: int, others: Tokens) -> Tokens:
        for token in trace[step]:
            uses[token].pop()
        return np.array([-uses[token][-1] if uses[token] else -len(trace) for token in others], np.int64)

    return _replaced(trace, slots, worth)


def _clock(trace: Trace, slots: int) -> Iterator[int]:
    held: Tokens = np.full(max(slots, max(map(len, trace))), -1)
    used = np.zeros(len(held), np.bool_)
    hand = 0
    for chosen in trace:
        now = np.isin(held, chosen)
        used |= now
        new = np.setdiff1d(chosen, held)
        yield len(new)
        order = (hand + np.arange(len(held))) % len(held)
        free, again = order[~used[order]], order[used[order] & ~now[order]]
        victims = np.concatenate((free, again))[: len(new)]
        if len(new) > len(free):
            used[~now] = False
        held[victims], used[victims] = new, True
        hand = int(victims[-1]) + 1 if len(victims) else hand


def _longest(trace: Trace) -> int:
    return 1 + max((int(chosen.max()) for chosen in trace if len(chosen)), default=0)


@dataclass(frozen=True, slots=True)
class _Shares:
    """Shares of chosen tokens, by step."""

    mean: float
    p95: float

    @classmethod
    def of(cls, traces: Sequence[Trace], policy: str, size: int, budget: int) -> _Shares:
        missed = np.concatenate([misses(trace, policy, size * budget) for trace in traces])
        chosen = np.array([max(len(step), 1) for trace in traces for step in trace[1:]])
        return cls(float(missed.sum() / chosen.sum()), float(np.quantile(missed / chosen, 0.95)))


def _row(length: int, budget: Budget, task: str, traces: Sequence[Trace], policies: Sequence[tuple[str, int]]) -> str:
    count = budget.resolve(length)
    shares = [_Shares.of(traces, name, size, count) for name, size in policies]
    never = np.mean([_never_seen(trace) for trace in traces])
    cells = " | ".join(f"{100 * share.mean:.1f} ({100 * share.p95:.0f})" for share in shares)
    return f"| {format_length(length)} | {budget} | {task} | {100 * never:.1f} | {cells} |"


def _never_seen(trace: Trace) -> float:
    """Share of chosen tokens that no step before has chosen: what any policy and size must miss."""
    seen, new = set(trace[0].tolist()), 0
    for chosen in trace[1:]:
        new += len(set(chosen.tolist()) - seen)
        seen.update(chosen.tolist())
    return new / max(sum(map(len, trace[1:])), 1)


if __name__ == "__main__":
    main()
