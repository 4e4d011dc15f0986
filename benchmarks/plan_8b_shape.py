"""Plans a model of an 8B's shape with random weights, then times what the plan does beside dense: what a user gets.

    python benchmarks/plan_8b_shape.py --out DIR [--lengths 4k,8k,32k] [--at 1k,2k,4k,8k,32k] [--tile 128]
    python benchmarks/plan_8b_shape.py --out DIR --lengths 32k --trace [STAGES]

The planner's own defaults, with the seconds of each stage; verification only with --verify. With --trace no more than
planning runs, on few layers and prompts, under torch.profiler: what took the time of each of these stages, and of each
prompt of the profile. The crossover is on, so that short prompts are to come out dense and no slower. Prefill is timed
as `sparsekv bench prefill` does, decode by generating. Random weights attend diffusely, so nothing here says what
sparsity keeps: it is about time and memory alone.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity
from torch.profiler import profile as torch_profile

from sparsekv.bench.harness import measure, replayed
from sparsekv.bench.prefill import PrefillBench, bench_prefill
from sparsekv.bench.random_model import BenchModel, random_model
from sparsekv.bench.step_attention import StepAttention
from sparsekv.kernels.backends import choose_backend
from sparsekv.planner.data_files import read_measured
from sparsekv.planner.options import Gate, PlanOptions
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.progress import BarProgress, Step
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
# Reading a trace takes torch.profiler twenty times as long as the stage itself.
_TRACED_LAYERS, _TRACED_SAMPLES, _TRACED_HELD_OUT = 2, 2, 1
_TRACED_STAGES = ("profile", "refine")
_LONGEST = 25  # entries of a table


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
        layers=args.layers or (_TRACED_LAYERS if args.trace else None),
    )
    loaded = LoadedModel(subject.model, load_model("tiny-retriever", device="cpu").tokenizer, subject.info)
    if args.trace:
        _trace(loaded, args)
        return
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
    parser.add_argument(
        "--trace",
        type=lambda text: tuple(text.split(",")),
        nargs="?",
        const=_TRACED_STAGES,
        help=f"trace these stages of planning instead ({','.join(_TRACED_STAGES)}), each prompt of the profile alone",
    )
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--device", default="cuda")
    return parser.parse_args()


def _options(args: argparse.Namespace) -> PlanOptions:
    return PlanOptions(
        lengths=tuple(sorted(args.lengths)),
        samples=args.samples,
        verify_samples=None if args.verify else 0,
        gate=Gate(max_kl=1e3, min_agreement=0.0, min_exact=0.0),  # of random weights nothing is kept
        tile=TileShape(query=args.tile, key=args.tile) if args.tile else None,
        backend=args.backend,
    )


def _plan(loaded: LoadedModel, args: argparse.Namespace) -> tuple[Plan, dict[str, Any]]:
    stages = _Timed()
    result = compile_plan(loaded, _options(args), progress=stages, profile_out=args.out / "plan_8b_shape.profile")
    write_plan(result.plan, args.out / "plan_8b_shape.yaml")
    row = {
        "model": args.model,
        "layers": loaded.info.layers,
        "plan_minutes": round(result.seconds / 60, 2),
        "stage_seconds": stages.seconds | {"others": round(result.seconds - sum(stages.seconds.values()), 1)},
        "calibration_prompts": read_measured(Profile, args.out / "plan_8b_shape.profile").samples,
        "verification_prompts": _held_out_prompts(result.plan),
        "plan_peak_gib": _peak_gib(loaded),
        "predicted_density": result.prefill_density,
        "predicted_speedup": result.predicted_speedup,
        "remarks": list(result.remarks),
    }
    print(json.dumps(row, indent=1, default=str), flush=True)
    return result.plan, row


def _held_out_prompts(plan: Plan) -> int:
    found = plan.quality and (plan.quality.prefill or plan.quality.decode)
    return sum(part.agreement.samples for part in found.by_length) if found else 0


class _Timed(BarProgress):
    """Bars, and the seconds of each stage."""

    def __init__(self) -> None:
        super().__init__()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Step]:
        started = time.monotonic()
        with super().stage(name, total) as step:
            yield step
        self.seconds[name] = round(self.seconds.get(name, 0.0) + time.monotonic() - started, 1)


def _trace(loaded: LoadedModel, args: argparse.Namespace) -> None:
    options = replace(
        _options(args), samples=args.samples or _TRACED_SAMPLES, verify_samples=_TRACED_HELD_OUT if args.verify else 0
    )
    compile_plan(loaded, options, progress=_Traced(args.trace, loaded.info.layers))


class _Traced(BarProgress):
    """Traces the stages of these names; the profile in pieces of as many steps as the model has layers: a prompt."""

    def __init__(self, names: Sequence[str], layers: int) -> None:
        super().__init__()
        self._names, self._layers = names, layers

    @contextmanager
    def stage(self, name: str, total: float | None = None) -> Iterator[Step]:
        with super().stage(name, total) as step:
            own = name.partition(" (")[0]
            if own not in self._names:
                yield step
                return
            piece = _TracedPieces(own, self._layers if own == "profile" else None, step)
            yield piece
            piece.finish()


class _TracedPieces(Step):
    """Traces a stage from start to finish, or piece by piece."""

    def __init__(self, name: str, steps: int | None, inner: Step) -> None:
        self._name, self._steps, self._inner = name, steps, inner
        self._done = 0
        self._begin()

    def advance(self, units: float = 1, note: str = "") -> None:
        self._inner.advance(units, note)
        self._done += 1
        if self._steps and self._done % self._steps == 0:
            self.finish()
            self._begin()

    def _begin(self) -> None:
        _wait()
        kinds = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
        self._profiler = torch_profile(activities=kinds)
        self._profiler.start()
        self._started, self._since = time.monotonic(), self._done

    def finish(self) -> None:
        """Prints what was traced since the last piece."""
        _wait()
        seconds = time.monotonic() - self._started
        self._profiler.stop()
        if self._done > self._since:
            print(f"\n== {self._name}, steps {self._since + 1} to {self._done}")
            _tell(self._profiler, seconds)


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _tell(profiler: torch_profile, seconds: float) -> None:
    entries = profiler.key_averages()
    kernels = [entry for entry in entries if entry.device_type.name != "CPU"]
    host = [entry for entry in entries if entry.device_type.name == "CPU"]
    busy = sum(entry.self_device_time_total for entry in kernels) / 1e6
    waits = sum(entry.count for entry in host if "Synchronize" in entry.key)
    items = sum(entry.count for entry in host if entry.key == "aten::_local_scalar_dense")
    launches = sum(entry.count for entry in kernels)
    print(f"wall {seconds:.2f} s, device busy {busy:.2f} s, {launches} launches and copies,", end=" ")
    print(f"{waits} waits of the host for the device, {items} numbers read by it")
    _table("device ms", kernels, lambda entry: entry.self_device_time_total)
    _table("host ms", host, lambda entry: entry.self_cpu_time_total)


def _table(title: str, entries: Sequence[Any], microseconds: Callable[[Any], float]) -> None:
    print(f"{title:>12} {'count':>8}  name")
    for entry in sorted(entries, key=microseconds, reverse=True)[:_LONGEST]:
        print(f"{microseconds(entry) / 1e3:12.1f} {entry.count:8}  {entry.key[:110]}", flush=True)


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
