"""Seconds and memory of planning a model of a known shape with random weights, by stage.

    python -m sparsekv.bench.planning --out plan.yaml [--model llama3-8b] [--lengths 4k,8k,32k] [--verify]

The planner's own defaults. Random weights attend diffusely, so nothing here says what sparsity keeps: it is about time
and memory alone. What the plan does beside dense is then `sparsekv bench prefill MODEL --random-weights --plan
plan.yaml --allow-mismatch`, and `bench decode`.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sparsekv.bench.random_model import random_model
from sparsekv.planner.job import job_of
from sparsekv.planner.options import Gate, PlanOptions
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.progress import BarProgress, Step
from sparsekv.plans.files import write_plan
from sparsekv.plans.types import parse_lengths
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.model_config import device_name

_ANSWER = 64  # tokens that fit behind the longest prompt


class Timed(BarProgress):
    """Bars, and the seconds of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Step]:
        """See `Progress`."""
        started = time.monotonic()
        with super().stage(name, total) as step:
            yield step
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 1)


def main() -> None:
    """Plans, writes the plan, and prints a JSON object."""
    args = _arguments()
    device = torch.device(args.device)
    subject = random_model(
        args.model,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        longest=max(args.lengths) + _ANSWER,
    )
    loaded = LoadedModel(subject.model, load_model("tiny-retriever", device="cpu").tokenizer, subject.info)
    options = PlanOptions(
        lengths=tuple(sorted(args.lengths)),
        samples=args.samples,
        verify_samples=None if args.verify else 0,
        gate=Gate(max_kl=1e3, min_agreement=0.0, min_exact=0.0),  # of random weights nothing is kept
    )
    stages = Timed()
    result = compile_plan(job_of(loaded, options), progress=stages)
    write_plan(result.plan, args.out)
    others = result.seconds - sum(stages.seconds.values())
    found = {
        "model": args.model,
        "layers": loaded.info.layers,
        "device": device_name(device),
        "minutes": round(result.seconds / 60, 2),
        "stage_seconds": stages.seconds | {"others": round(others, 1)},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
        "predicted_density": result.prefill_density,
        "predicted_speedup": result.predicted_speedup,
    }
    print(json.dumps(found, indent=1, default=str))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="the plan")
    parser.add_argument("--model", default="llama3-8b", help="whose shape")
    parser.add_argument("--lengths", type=parse_lengths, default=(4096, 8192, 32768), help="that are planned")
    parser.add_argument("--samples", type=int, help="calibration prompts a length")
    parser.add_argument("--verify", action="store_true", help="run the verification too: its time counts")
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


if __name__ == "__main__":
    main()
