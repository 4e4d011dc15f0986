"""Evicting layers, in transformers: a plan with them beside the same plan without, on one prompt.

    python -m sparsekv.bench.dropping --length 128k --retain 0.25

Prompts run sparse by hand-made patterns; `kept` evicts tokens of all layers but the first three, all alike, until
`--retain` of the bytes are left. Steps behind the prompt are dense over what a layer has; `chosen` are those of a
decode plan made by hand. Weights are random, of the model's shape. Prints a JSON object; times are medians in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from sparsekv.bench.growth import stores_of
from sparsekv.bench.hand_plans import HandDecode, hand_plan
from sparsekv.bench.harness import free_memory, wait_for
from sparsekv.bench.random_model import BenchModel, random_model
from sparsekv.bench.step_attention import kv_bytes
from sparsekv.bench.token_runs import greedy
from sparsekv.planner.retain_search import by_hand, rules_of
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import parse_lengths
from sparsekv.runtime.hf import apply as host
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.cache import CACHE_NAME
from sparsekv.runtime.hf.placement import layouts_of
from sparsekv.runtime.model_config import device_name

STEPS, WARM_UP = 64, 4
LAYOUT = "behind whole first layers"


def main() -> None:
    """Runs every plan in turn."""
    args = _arguments()
    device = torch.device("cuda", torch.cuda.current_device())
    subject = random_model(
        args.model, device=device, dtype=torch.bfloat16, longest=args.length + STEPS + 2 * WARM_UP, layers=args.layers
    )
    plans = plans_of(subject, args)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in plans}
    with torch.no_grad():
        for _ in range(args.repeats + 1):  # the first one compiles
            for name, plan in plans.items():
                runs[name].append(run(subject, plan, args.length))
    found: dict[str, Any] = {
        name: {key: statistics.median(one[key] for one in own[1:]) for key in own[0]} for name, own in runs.items()
    }
    print(json.dumps({"model": subject.name, "device": device_name(device), "length": args.length} | found, indent=1))


def plans_of(subject: BenchModel, args: argparse.Namespace) -> dict[str, Plan]:
    """By name; all with the same prefill."""
    plan, _ = hand_plan(subject.info, (args.length,), (args.density,), TileShape(query=128, key=128))
    layout = by_hand(subject.info.full_layers, args.retain, args.length)[LAYOUT]
    chosen = HandDecode().plans(subject.info, args.length)[0]["last"].decode
    return {
        "all": plan,
        "chosen": plan.model_copy(update={"decode": chosen}),
        "kept": plan.model_copy(update={"kv_cache": rules_of(subject.info, layout)}),
    }


@contextmanager
def dropping() -> Iterator[list[float]]:
    """Seconds inside that scores, choices and compaction take, a layer each."""
    spent: list[float] = []
    name = "end_prompt"
    end_prompt = getattr(host, name)

    def timed(layer: Any, entry: Any, attempt: Any) -> None:
        wait_for(entry.store.tensors[0].device)
        began = time.perf_counter()
        end_prompt(layer, entry, attempt)
        wait_for(entry.store.tensors[0].device)
        spent.append(time.perf_counter() - began)

    setattr(host, name, timed)
    try:
        yield spent
    finally:
        setattr(host, name, end_prompt)


def run(subject: BenchModel, plan: Plan, length: int) -> dict[str, float]:
    """A prompt with one new token, then steps: seconds, milliseconds a token, bytes over those of all tokens."""
    model: Any = subject.model
    ids_1S = torch.randint(1, 1000, (1, length), generator=torch.Generator().manual_seed(0)).to(model.device)
    free_memory(model.device)
    torch.cuda.reset_peak_memory_stats()
    with apply(model, plan, info=subject.info) as handle, greedy(model):
        with dropping() as spent:
            seconds, out = _timed(
                lambda: model.generate(
                    ids_1S, attention_mask=torch.ones_like(ids_1S), max_new_tokens=1, return_dict_in_generate=True
                ),
                model.device,
            )
        cache, peak = out[CACHE_NAME], torch.cuda.max_memory_allocated()
        stored = sum(store.bytes.device for store in stores_of(cache))
        ids_11 = out.sequences[:, -1:]

        def steps(count: int) -> None:
            for _ in range(count):
                model(ids_11, logits_to_keep=1, **{CACHE_NAME: cache})

        steps(WARM_UP)
        token, _ = _timed(lambda: steps(STEPS), model.device)
        assert handle.steps is not None
        assert not handle.steps.why_not, handle.steps.why_not
    return {
        "prompt_seconds": round(seconds, 4),
        "dropping_share": round(sum(spent) / seconds, 5),
        "bytes_over_all": round(stored / (length * kv_bytes(layouts_of(model))), 4),
        "peak_gib": round(peak / 2**30, 2),
        "token_ms": round(token / STEPS * 1e3, 3),
    }


def _timed(call: Any, device: torch.device) -> tuple[float, Any]:
    wait_for(device)
    began = time.perf_counter()
    found = call()
    wait_for(device)
    return time.perf_counter() - began, found


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="llama3-8b", help="whose shape")
    parser.add_argument("--layers", type=int, help="only so many")
    parser.add_argument("--length", type=lambda text: parse_lengths(text)[0], default=131_072)
    parser.add_argument("--retain", type=float, default=0.25, help="of the bytes")
    parser.add_argument("--density", type=float, default=0.08, help="of the prompt")
    parser.add_argument("--repeats", type=int, default=3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
