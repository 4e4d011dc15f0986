"""Answers that a model generates by itself, dense and under a plan whose decode reads a small share of the context.

    python benchmarks/eval_generated.py --plan plan.yaml [--lengths 16k,32k] [--samples 100] [--budget 0.05] [--hot 4k]

Each answer is generated greedily, token by token, so that a wrong token is built upon; exact match, in percent. The
plan's filter layers and segments are used at every length with the stated budget, with its prefill phase and without.
With --hot, decode also runs with the sparse layers in host memory and so many of their tokens on the device: the tokens
it generates are compared with those of `decode`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import torch

from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Kit, Sample, Split, make_samples, matches, prepare
from sparsekv.plans.errors import UsageError
from sparsekv.plans.files import load_plan
from sparsekv.plans.patterns import tokens
from sparsekv.plans.phases import DecodeBucket, DecodeBudget, DecodePlan, Offload
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length, parse_length, parse_lengths
from sparsekv.runtime.core.stats import RunStats
from sparsekv.runtime.hf.apply import Handle, apply
from sparsekv.runtime.hf.load import LoadedModel, load_model

_SPARE = 8  # tokens generated beyond the longest answer: what follows a number must not be a digit


@dataclass(frozen=True, slots=True)
class Answers:
    """What one mode answered to the samples of a task and length."""

    right: int
    samples: int
    generated: tuple[tuple[int, ...], ...]  # tokens of each
    stats: RunStats | None

    @property
    def percent(self) -> float:
        """Exact matches."""
        return 100 * self.right / self.samples


def main() -> None:
    """Prints a row for each length, mode and task."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, required=True, help="of the model, with a decode phase")
    parser.add_argument("--model", default="tiny-retriever")
    parser.add_argument("--lengths", type=parse_lengths, default=(16384, 32768))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--budget", type=float, default=0.05, help="share of the context that is chosen")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hot", type=parse_length, help="tokens on the device of each layer in host memory")
    parser.add_argument("--device", default="auto")
    args = parser.parse_args()
    loaded = load_model(args.model, device=args.device)
    plan = with_budget(load_plan(args.plan), args.budget)
    kit = prepare(loaded.tokenizer, Split.EVALUATION)
    modes: dict[str, Callable[[], Any]] = {
        "dense": nullcontext,
        "decode": lambda: apply(loaded.model, plan, prefill=False),
    }
    if plan.prefill is not None:
        modes["prefill and decode"] = lambda: apply(loaded.model, plan)
    if args.hot is not None:
        hosted = offloaded(plan, args.hot)
        modes["decode in host memory"] = lambda: apply(loaded.model, hosted, prefill=False, offload="always")
    print(f"| mode | length | decode share | {' | '.join(RETRIEVAL_TASKS)} |\n|{'---|' * (3 + len(RETRIEVAL_TASKS))}")
    for length in args.lengths:
        samples = {name: list(make_samples(TASKS[name], kit, length, 0, args.samples)) for name in RETRIEVAL_TASKS}
        tokens_of: dict[str, list[tuple[int, ...]]] = {}
        for mode, running in modes.items():
            with running() as handle:
                found = [answers(loaded, handle, kit, samples[name], args.batch) for name in RETRIEVAL_TASKS]
            stats = found[-1].stats
            cells = " | ".join(f"{one.percent:.1f}" for one in found)
            told = "1" if stats is None else f"{stats.decode_share:.3f}"
            print(f"| {mode} | {format_length(length)} | {told} | {cells} |", flush=True)
            tokens_of[mode] = [generated for one in found for generated in one.generated]
            if stats is not None and stats.miss_share is not None:
                pairs = list(zip(tokens_of["decode"], tokens_of[mode], strict=True))
                same = sum(one == other for one, other in pairs)
                print(f"{same} of {len(pairs)} answers are, token for token, those on the device; "
                      f"{100 * stats.miss_share:.1f}% of chosen tokens fetched")  # fmt: skip


def with_budget(plan: Plan, share: float) -> Plan:
    """The plan with its segments at every length, at this budget.

    Raises:
        UsageError: it has none.
    """
    sparse = [bucket for bucket in plan.decode.lengths if bucket.segments] if plan.decode else []
    if not sparse:
        raise UsageError("expected a plan with a decode phase, found none; compile one with --decode-budget")
    budget = DecodeBudget(fraction=share, at_most=1 << 20)
    segments = tuple(segment.model_copy(update={"budget": budget}) for segment in sparse[-1].segments)
    decode = DecodePlan(lengths=(DecodeBucket(up_to=None, segments=segments),))
    return plan.model_copy(update={"decode": decode})


def offloaded(plan: Plan, hot: int) -> Plan:
    """The plan with all layers that only read chosen tokens in host memory."""
    assert plan.decode is not None
    segments = plan.decode.lengths[-1].segments
    layers = tuple(layer for segment in segments for layer in segment.layers if layer != segment.filter)
    offload = Offload(layers=layers, hot=tokens(hot))
    return plan.model_copy(update={"decode": plan.decode.model_copy(update={"offload": offload})})


def answers(loaded: LoadedModel, handle: Handle | None, kit: Kit, samples: list[Sample], batch: int) -> Answers:
    """Generates and matches; prompts of a task and length are equally long."""
    right, generated, model = 0, [], loaded.model
    for rows in batched(samples, batch):
        ids_BS = torch.stack([torch.from_numpy(sample.prompt_ids).long() for sample in rows]).to(model.device)
        most = max(len(sample.answer_ids) for sample in rows) + _SPARE
        generate: Any = model.generate
        with torch.no_grad():
            out_BS = generate(
                ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=most, do_sample=False,
                pad_token_id=0, prefill_chunk_size=None,
            )  # fmt: skip
        for sample, new_S in zip(rows, out_BS[:, ids_BS.shape[1] :], strict=True):
            generated.append(tuple(new_S.tolist()))
            right += matches(str(loaded.tokenizer.decode(new_S, skip_special_tokens=True)), sample.answer)
    return Answers(right, len(samples), tuple(generated), handle.stats() if handle else None)


def batched(samples: list[Sample], size: int) -> Iterator[list[Sample]]:
    """In order, `size` at a time."""
    left = iter(samples)
    while rows := list(islice(left, size)):
        yield rows


if __name__ == "__main__":
    main()
