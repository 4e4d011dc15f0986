"""Answers that a model generates by itself, dense and under a plan whose decode reads a small share of the context.

    python -m sparsekv.bench.generated --plan plan.yaml [--lengths 16k,32k] [--samples 100] [--budget 0.05] [--hot 4k]

Each answer is generated greedily, token by token, so that a wrong token is built upon; exact match, in percent. The
plan's filter layers and segments are used at every length with the stated budget, with its prefill phase and without.
With --hot, decode also runs with the sparse layers in host memory and so many of their tokens on the device: the tokens
it generates are compared with those of `decode`.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch

from sparsekv.bench.hand_plans import at_budget
from sparsekv.planner.tasks import RETRIEVAL_TASKS, TASKS, Sample, Split, make_samples, matches, prepare
from sparsekv.plans.files import load_plan
from sparsekv.plans.patterns import fraction, tokens
from sparsekv.plans.phases import Offload
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length, parse_length, parse_lengths
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.load import LoadedModel, load_model

_SPARE = 8  # tokens generated beyond the longest answer: what follows a number must not be a digit
Answers = list[tuple[int, ...]]  # tokens of each


def main() -> None:
    """Prints a row for each length and mode, with the share of right answers of every task."""
    args = _arguments()
    loaded = load_model(args.model, device=args.device)
    plan = at_budget(load_plan(args.plan), fraction(args.budget), 1 << 20)
    modes: dict[str, Callable[[], Any]] = {
        "dense": nullcontext,
        "decode": lambda: apply(loaded.model, plan, prefill=False),
        "prefill and decode": lambda: apply(loaded.model, plan),
    }
    if args.hot is not None:
        hosted = offloaded(plan, args.hot)
        modes["decode in host memory"] = lambda: apply(loaded.model, hosted, prefill=False, offload="always")
    if plan.prefill is None:
        del modes["prefill and decode"]
    kit = prepare(loaded.tokenizer, Split.EVALUATION)
    print(f"| mode | length | decode share | {' | '.join(RETRIEVAL_TASKS)} |\n|{'---|' * (3 + len(RETRIEVAL_TASKS))}")
    for length in args.lengths:
        samples = {name: list(make_samples(TASKS[name], kit, length, 0, args.samples)) for name in RETRIEVAL_TASKS}
        found: dict[str, dict[str, Answers]] = {}
        for mode, running in modes.items():
            with running() as handle:
                found[mode] = {name: generate(loaded, samples[name], args.batch) for name in RETRIEVAL_TASKS}
                stats = handle.stats() if handle else None
            cells = " | ".join(f"{percent(loaded, samples[name], found[mode][name]):.1f}" for name in RETRIEVAL_TASKS)
            share = stats.decode_share if stats else 1.0
            print(f"| {mode} | {format_length(length)} | {share:.3f} | {cells} |", flush=True)
            if stats is not None and stats.miss_share is not None:
                own, others = ([ids for some in found[one].values() for ids in some] for one in ("decode", mode))
                same = sum(map(tuple.__eq__, own, others))
                print(f"{same} of {len(own)} answers are, token for token, those on the device; "
                      f"{100 * stats.miss_share:.1f}% of chosen tokens fetched")  # fmt: skip


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", type=Path, required=True, help="of the model, with a decode phase")
    parser.add_argument("--model", default="tiny-retriever")
    parser.add_argument("--lengths", type=parse_lengths, default=(16384, 32768))
    parser.add_argument("--samples", type=int, default=100)
    parser.add_argument("--budget", type=float, default=0.05, help="share of the context that is chosen")
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--hot", type=parse_length, help="tokens on the device of each layer in host memory")
    parser.add_argument("--device", default="auto")
    return parser.parse_args()


def offloaded(plan: Plan, hot: int) -> Plan:
    """The plan with all layers that only read chosen tokens in host memory."""
    assert plan.decode is not None
    segments = plan.decode.lengths[-1].segments
    layers = tuple(layer for segment in segments for layer in segment.layers if layer != segment.filter)
    offload = Offload(layers=layers, hot=tokens(hot))
    return plan.model_copy(update={"decode": plan.decode.model_copy(update={"offload": offload})})


def generate(loaded: LoadedModel, samples: list[Sample], batch: int) -> Answers:
    """The tokens of each answer, greedily; prompts of a task and length are equally long."""
    answers: Answers = []
    model: Any = loaded.model
    for first in range(0, len(samples), batch):
        rows = samples[first : first + batch]
        ids_BS = torch.stack([torch.from_numpy(sample.prompt_ids).long() for sample in rows]).to(model.device)
        most = max(len(sample.answer_ids) for sample in rows) + _SPARE
        with torch.no_grad():
            out_BS = model.generate(
                ids_BS, attention_mask=torch.ones_like(ids_BS), max_new_tokens=most, do_sample=False, pad_token_id=0
            )
        answers += map(tuple, out_BS[:, ids_BS.shape[1] :].tolist())
    return answers


def percent(loaded: LoadedModel, samples: list[Sample], answers: Answers) -> float:
    """Exact matches."""
    texts = (str(loaded.tokenizer.decode(list(ids), skip_special_tokens=True)) for ids in answers)
    return 100 * sum(matches(text, one.answer) for text, one in zip(texts, samples, strict=True)) / len(samples)


if __name__ == "__main__":
    main()
