"""Measures what keys and values in fp8 add to a plan's divergence from dense, beside what they add to dense itself.

    python -m sparsekv.bench.float8_quality MODEL --plan plan.yaml --lengths 8k,32k [--samples 10]

All ways run the same held-out samples: dense in fp8, the plan as the model stores keys and values, and the plan in
fp8. A line of JSON for each length: the divergence of each in nats a token, right answers, and what fp8 adds, with 95%
intervals over samples (paired, where it is a difference).
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from sparsekv.planner.evaluation import EvalSamples, PlanMode, evaluate
from sparsekv.planner.evaluation.results import EvalResult, bootstrap_interval
from sparsekv.planner.progress import BarProgress
from sparsekv.plans.files import load_plan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length, parse_lengths
from sparsekv.runtime.hf.load import load_model

TASKS = ("quote_text", "quote_code", "niah_multikey", "kv_retrieval", "perplexity")
DENSE8, PLAN, PLAN8 = "dense in fp8", "plan", "plan in fp8"


def main() -> None:
    """Prints a line for each length."""
    args = _arguments()
    loaded, plan = load_model(args.model, device=args.device, dtype=args.dtype), load_plan(args.plan)
    modes = {
        DENSE8: PlanMode(Plan(status="unverified", model=plan.model), kv_dtype="fp8"),
        PLAN: PlanMode(plan, kv_dtype="auto"),
        PLAN8: PlanMode(plan, kv_dtype="fp8"),
    }
    for length in args.lengths:
        asked = EvalSamples(TASKS, (length,), args.samples, args.batch, args.seed)
        found = evaluate(loaded, modes, asked, progress=BarProgress())
        print(json.dumps(row(length, {name: found[name][0] for name in modes})), flush=True)


def row(length: int, found: dict[str, EvalResult]) -> dict[str, Any]:
    """Returns what is told of one length."""
    nats = {name: [one.kl for task in result.tasks.values() for one in task.sparse] for name, result in found.items()}
    added = [own - plain for own, plain in zip(nats[PLAN8], nats[PLAN], strict=True)]
    right = {
        name: [one.correct for task in result.tasks.values() for one in task.sparse if one.correct is not None]
        for name, result in found.items()
    }
    told: dict[str, Any] = {"length": format_length(length), "samples": len(added)}
    for name in found:
        told[name] = {**_mean(nats[name]), "right": sum(right[name]), "of": len(right[name])}
    over = [own - dense for own, dense in zip(added, nats[DENSE8], strict=True)]
    return told | {"added to the plan": _mean(added), "added to the plan beyond what is added to dense": _mean(over)}


def _mean(values: list[float]) -> dict[str, Any]:
    interval = bootstrap_interval(values)
    rounded = None if interval is None else [round(bound, 6) for bound in interval]
    return {"nats": round(sum(values) / len(values), 6), "interval": rounded}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--plan", type=Path, required=True)
    parser.add_argument("--lengths", type=parse_lengths, default="8k")
    parser.add_argument("--samples", type=int, default=10, help="of each task")
    parser.add_argument("--batch", type=int, default=None)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    return parser.parse_args()


if __name__ == "__main__":
    main()
