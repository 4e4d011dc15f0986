"""Plans a model of an 8B's shape with random weights, then times what the plan does beside dense: what a user gets.

    python benchmarks/plan_8b_shape.py --out DIR [--lengths 4k,8k,32k] [--at 1k,2k,4k,8k,32k] [--tile 128]

The planner's own defaults, with the seconds of each stage on standard error; verification only with --verify. The
crossover is on, so that short prompts are to come out dense and no slower. Prefill is timed as `sparsekv bench prefill`
does, decode by generating. Random weights attend diffusely, so nothing here says what sparsity keeps: it is about time
and memory alone.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from sparsekv.kernels.backends import choose_backend
from sparsekv.planner.bench.prefill_bench import PrefillBench, bench_prefill
from sparsekv.planner.bench.random_model import BenchModel, random_model
from sparsekv.planner.bench.step_attention import StepAttention
from sparsekv.planner.bench.timing import measure, replayed
from sparsekv.planner.options import Gate, PlanOptions
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.progress import BarProgress
from sparsekv.planner.tasks import TASKS, Split, make_sample, prepare
from sparsekv.plans.files import write_plan
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import parse_lengths
from sparsekv.runtime.hf.apply import apply
from sparsekv.runtime.hf.generate import Generation, generate_stream
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.hf.placement import layouts_of

_NEW_TOKENS = 32


def main() -> None:
    """Plans, runs dense and sparse, prints what came of it."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    longest = max(*args.lengths, *args.at) + _NEW_TOKENS
    subject = random_model(
        args.model,
        device=torch.device(args.device),
        dtype=torch.bfloat16 if args.device == "cuda" else torch.float32,
        longest=longest,
        layers=args.layers,
    )
    loaded = LoadedModel(subject.model, load_model("tiny-retriever", device="cpu").tokenizer, subject.info)
    plan, found = _plan(loaded, args)
    found["prefill"] = _prefill(subject, plan, args)
    found["predicted"] = list(_predicted(subject, plan, found["prefill"], args.repeats))
    found["decode"] = _decode(loaded, plan, args.backend, max(args.lengths))
    (args.out / "plan_8b_shape.json").write_text(json.dumps(found, indent=1) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", default="llama3-8b", help="whose shape")
    parser.add_argument("--lengths", type=parse_lengths, default=(4096, 8192, 32768), help="that are planned")
    parser.add_argument("--at", type=parse_lengths, default=(1024, 2048, 4096, 8192, 32768), help="that are timed")
    parser.add_argument("--tile", type=int, choices=(64, 128), help="the planner's own choice if not given")
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--layers", type=int)
    parser.add_argument(
        "--samples", type=int, help="calibration prompts a length; the planner's own choice if not given"
    )
    parser.add_argument(
        "--verify", action="store_true", help="run the verification too: its gates fail, its time counts"
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def _plan(loaded: LoadedModel, args: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    options = PlanOptions(
        lengths=tuple(sorted(args.lengths)),
        samples=args.samples,
        verify_samples=None if args.verify else 0,
        gate=Gate(max_kl=1e3, min_agreement=0.0, min_exact=0.0),  # of random weights nothing is kept
        tile=TileShape(query=args.tile, key=args.tile) if args.tile else None,
        backend=args.backend,
    )
    result = compile_plan(loaded, options, progress=BarProgress())
    write_plan(result.plan, args.out / "plan_8b_shape.yaml")
    row = {
        "model": args.model,
        "layers": loaded.info.layers,
        "plan_minutes": round(result.seconds / 60, 2),
        "plan_peak_gib": _peak_gib(loaded),
        "predicted_density": result.prefill_density,
        "predicted_speedup": result.predicted_speedup,
        "remarks": list(result.remarks),
    }
    print(json.dumps(row, indent=1, default=str), flush=True)
    return result.plan, row


def _prefill(subject: BenchModel, plan: Plan, args: argparse.Namespace) -> list[dict[str, Any]]:
    bench = PrefillBench(tuple(sorted(args.at)), args.repeats, backend=args.backend)
    rows = []
    for row in bench_prefill(subject, plan, "planned", bench):
        rows.append(row.as_data())
        sparse, dense, density = row.sparse_ms or 0.0, row.dense_ms or 0.0, row.density or 1.0
        print(f"{row.length:7} {row.backend:7} dense {dense:9.1f} ms, planned {sparse:9.1f} ms, density {density:.3f}")
    return rows


def _predicted(
    subject: BenchModel, plan: Plan, prefill: list[dict[str, Any]], repeats: int
) -> Iterator[dict[str, Any]]:
    """Predicted beside measured milliseconds at each planned length: what sparse prefill saves of a whole prompt, as
    attention alone is all that differs, and attention of one decode step, dense and by the plan."""
    saved = {row["length"]: row["dense_ms"] - row["sparse_ms"] for row in prefill if row["sparse_ms"]}
    for entry in plan.cost.lengths if plan.cost else ():
        row: dict[str, Any] = {"length": entry.length}
        if entry.prefill and entry.length in saved:
            row["prefill_saves"] = (entry.prefill.dense_us - entry.prefill.sparse_us) / 1e3, saved[entry.length]
        if entry.decode:
            measured = _step_ms(subject, plan, entry.length, repeats)
            row["step_dense"] = entry.decode.dense_us / 1e3, measured["dense"]
            row["step_planned"] = entry.decode.sparse_us / 1e3, measured["planned"]
        print("predicted, measured ms:", row, flush=True)
        yield row


def _step_ms(subject: BenchModel, plan: Plan, length: int, repeats: int) -> dict[str, float]:
    device, group = subject.model.device, subject.info.attention[0]
    backend = choose_backend(device, subject.model.dtype, group.head_dim, "auto").name
    attention = StepAttention(subject.info, tuple(layouts_of(subject.model)), length, backend, 0)
    steps = {"dense": attention.by_plan(None), "planned": attention.by_plan(plan.decode)}
    return measure({name: replayed(step, device) for name, step in steps.items()}, device, repeats)


def _decode(loaded: LoadedModel, plan: Plan, backend: str, length: int) -> dict[str, Any]:
    kit = prepare(loaded.tokenizer, Split.EVALUATION)
    prompt = make_sample(TASKS["kv_retrieval"], kit, length, 0, 0).prompt_ids.tolist()
    _generate(loaded, prompt)  # warms up
    dense = _generate(loaded, prompt)
    with apply(loaded.model, plan, backend=backend) as handle:
        _generate(loaded, prompt)
        handle.reset_stats()
        sparse = _generate(loaded, prompt)
        share = handle.stats().decode_share
    row = {
        "length": length,
        "dense_ms": round(1e3 * dense.decode_seconds / (_NEW_TOKENS - 1), 2),
        "planned_ms": round(1e3 * sparse.decode_seconds / (_NEW_TOKENS - 1), 2),
        "decode_share": share,
    }
    print(row, flush=True)
    return row


def _generate(loaded: LoadedModel, prompt: list[int]) -> Generation:
    return generate_stream(loaded, prompt, max_new_tokens=_NEW_TOKENS)


def _peak_gib(loaded: LoadedModel) -> float | None:
    if loaded.model.device.type != "cuda":
        return None
    return round(torch.cuda.max_memory_allocated() / 2**30, 2)


if __name__ == "__main__":
    main()
