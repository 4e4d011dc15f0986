"""Minutes and memory of planning a model of a known shape with random weights, by stage.

    python -m sparsekv.bench.planning llama3-8b --lengths 32k --out plan.yaml [--layers 8] [--no-verify]

The planner's own defaults, on the first device. Random weights attend diffusely, so nothing here says what sparsity
keeps: it is about time and memory alone, and no gate is held. The plan's speed is then `sparsekv bench prefill MODEL
--random-weights --plan plan.yaml`, and `bench decode`.
"""

from __future__ import annotations

import argparse
import json
import resource
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from sparsekv.bench.harness import parse_lengths
from sparsekv.bench.random_model import random_model
from sparsekv.planner.job import job_of
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.progress import BarProgress, StageStep
from sparsekv.plans.files import write_plan
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.model_config import device_name, dtype_name, torch_device

_ANSWER = 64  # tokens that fit behind the longest prompt


class Timed(BarProgress):
    """Bars, and the seconds of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[StageStep]:
        plain, started = name.partition(" (")[0], time.monotonic()
        try:
            with super().stage(name, total) as step:
                yield step
        finally:
            self.seconds[plain] = round(self.seconds.get(plain, 0.0) + time.monotonic() - started, 1)


def main(argv: list[str] | None = None) -> int:
    """Plans, writes the plan, and prints a JSON object."""
    args = _arguments(argv)
    device = torch_device(args.device)
    subject = random_model(
        args.model,
        device=device,
        dtype=torch.bfloat16 if device.type == "cuda" else torch.float32,
        longest=max(args.lengths) + _ANSWER,
        layers=args.layers,
    )
    loaded = LoadedModel(subject.model, load_model("tiny-retriever", device="cpu").tokenizer, subject.info)
    options = PlanOptions(
        lengths=tuple(sorted(args.lengths)),
        calibration_samples=args.samples,
        verify="none" if args.no_verify else "small",  # random weights answer nothing: dense runs alone
        backend=args.backend,
    )
    job, stages = job_of(loaded, options), Timed()
    started = time.monotonic()
    result = compile_plan(job, progress=stages)
    seconds = time.monotonic() - started
    write_plan(result.plan, args.out)
    others = seconds - sum(stages.seconds.values())
    found: dict[str, Any] = {
        "model": args.model,
        "layers": loaded.info.layers,
        "lengths": list(options.lengths),
        "dtype": dtype_name(subject.model.dtype),
        "device": device_name(device),
        "minutes": round(seconds / 60, 2),
        "stage_seconds": stages.seconds | {"others": round(others, 1)},
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 2) if device.type == "cuda" else None,
        "peak_host_gib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20, 2),
        "status": result.plan.status,
        "predicted_density": result.prefill_density,
        "predicted_speedup": result.predicted_speedup,
    }
    print(json.dumps(found, indent=1, default=str))
    return 0


def _arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="whose shape")
    parser.add_argument("--out", type=Path, required=True, help="the plan")
    parser.add_argument("--lengths", type=parse_lengths, default=parse_lengths("32k"))
    parser.add_argument("--layers", type=int, help="only so many: time and memory grow with them")
    parser.add_argument("--samples", type=int, help="calibration prompts a length")
    parser.add_argument("--no-verify", action="store_true")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--backend", default="auto")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
