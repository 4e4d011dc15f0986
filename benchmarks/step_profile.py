"""What a captured decode step spends its time on, kernel by kernel, with layers in host memory and without.

`python benchmarks/step_profile.py llama3-8b-262k --length 128k`, on a GPU: random weights, filter layers and budget as
in `sparsekv bench decode`, choices swapped for lists with a stated share of new tokens.
"""

from __future__ import annotations

import argparse
from collections import defaultdict

import torch
from torch.profiler import ProfilerActivity, profile

from sparsekv.planner.bench.decode_bench import DecodeBench, greedy
from sparsekv.planner.bench.offload_bench import OffloadRuns
from sparsekv.planner.bench.random_model import HandDecode, random_model
from sparsekv.planner.bench.timing import once
from sparsekv.plans.patterns import tokens
from sparsekv.plans.types import parse_length

REPLAYS = 20


def told(replay: object, device: torch.device, title: str, most: int) -> None:
    """Prints microseconds of each kernel in one replay, the most expensive first."""
    assert callable(replay)
    print(f"{title}: {once(replay, device) * 1e3:.0f} us a step")
    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        for _ in range(REPLAYS):
            replay()
        torch.cuda.synchronize()
    times: dict[str, list[float]] = defaultdict(list)
    for event in seen.events():
        times[event.name].append(event.device_time)
    for name, taken in sorted(times.items(), key=lambda item: -sum(item[1]))[:most]:
        print(
            f"{sum(taken) / REPLAYS:>9.1f} us {len(taken) / REPLAYS:>6.1f} x {max(taken):>7.1f} us at most  {name:.90}"
        )


def main() -> None:
    """Profiles the step on the device, and with all layers of segments in host memory."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--length", default="128k")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--miss-rate", type=float, default=0.1)
    parser.add_argument("--kernels", type=int, default=16, help="lines to print")
    options = parser.parse_args()
    device, length = torch.device("cuda"), parse_length(options.length)
    subject = random_model(options.model, device=device, dtype=torch.bfloat16, longest=length)
    plans, _ = HandDecode(tokens(2048), (2, 8, 18), offload=True).plans(subject.info, length)
    runs = OffloadRuns(subject, plans, DecodeBench((length,), new_tokens=8), options.miss_rate)
    for mode in ("never", "always"):
        with runs.applied(mode, plans["last"], length) as handle, greedy(subject.model):
            cache = runs.filled(handle, length, options.batch)
            runs.token_ms(cache, options.batch)
            if handle.steps is None or handle.steps.latest is None:
                raise SystemExit("the step is not captured")
            told(handle.steps.latest.run, device, f"--offload {mode}", options.kernels)


if __name__ == "__main__":
    main()
