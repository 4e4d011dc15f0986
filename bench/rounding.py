"""What rounding alone does to a model: dense in bfloat16 against dense in float32, by the measures of the gates.

    python -m sparsekv.bench.rounding MODEL [MODEL ...] --lengths 4k [--samples 8] [--tasks NAMES]

A plan is measured against dense in the same dtype, so that none of this is in its numbers. It is the scale that the
defaults of the gates can be held against: a deployment that moves from float32 to bfloat16 accepts so much.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from transformers import PreTrainedModel

from sparsekv.planner.compare import compare, dense_reference
from sparsekv.planner.eval_results import Spent, agreement_of
from sparsekv.planner.profile.calibration import held_out
from sparsekv.planner.tasks import QUOTE_TASKS, Split, prepare
from sparsekv.plans.types import format_length, parse_lengths
from sparsekv.runtime.hf.load import load_model


class Rounded:
    """Dense in bfloat16, as a mode of `compare`."""

    stepwise = True
    dense_prefill = False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """Weights that are stored in bfloat16 come back as they were."""
        weights: Any = model
        weights.to(torch.bfloat16)
        try:
            yield lambda: Spent(0.0, 0.0, 0.0, 0.0)
        finally:
            weights.to(torch.float32)


def main() -> None:
    """A line for each model and length."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("models", nargs="+", help="whose weights are stored in bfloat16")
    parser.add_argument("--lengths", type=parse_lengths, default=(4096,))
    parser.add_argument("--samples", type=int, default=8, help="of each task and length")
    parser.add_argument("--tasks", default=",".join((*QUOTE_TASKS, "perplexity")))
    args = parser.parse_args()
    for name in args.models:
        loaded = load_model(name, dtype="float32")
        kit = prepare(loaded.tokenizer, Split.EVALUATION)
        for length in args.lengths:
            samples = [one for task in args.tasks.split(",") for one in held_out(kit, task, length, args.samples, 0)]
            outcomes = compare(loaded, {"": Rounded()}, dense_reference(loaded, samples))[""].outcomes
            found, worst = agreement_of(outcomes), max(one.kl for one in outcomes)
            low, high = found.kl_interval or (found.kl, found.kl)
            print(
                f"{name} {format_length(length)}, {len(samples)} prompts: divergence {found.kl:.2e} [{low:.1e}, "
                f"{high:.1e}] nats, worst prompt {worst:.2e}; top-1 agreement {found.top1 or 0.0:.3f}, exact agreement "
                f"{found.exact or 0.0:.3f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
