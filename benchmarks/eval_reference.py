"""Plans the reference model and measures what the plan keeps, beside plans that searched less.

    python benchmarks/eval_reference.py --out DIR [--lengths 4k,16k,32k] [--samples 200]

At each length: dense, the plan (prefill alone, decode alone, both), and at the same density one pattern family for all
heads, the minference preset, and indices frozen from one prompt. Every row is written to DIR/rows.jsonl as it comes;
profiles and device costs that lie in DIR are used again, so that several processes can share the work:

    python benchmarks/eval_reference.py --out DIR --measure nothing             # plans only
    python benchmarks/eval_reference.py --out DIR --measure phases --at 32k     # one part, at one planned length
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from sparsekv.kernels.backends import BACKENDS, choose_backend, prefill_attention
from sparsekv.kernels.index.build import build_index
from sparsekv.kernels.tiles import TileIndex, computed_tiles
from sparsekv.planner.cost.device_cost import DeviceCost
from sparsekv.planner.data_files import read_measured
from sparsekv.planner.eval_results import EvalResult, Spent
from sparsekv.planner.evaluation import EvalSamples, Mode, PhaseName, PlanMode, evaluate
from sparsekv.planner.options import PRESET_FAMILIES, TASKS, PlanOptions
from sparsekv.planner.plan import compile_plan
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.tasks import RETRIEVAL_TASKS, Kit, Split, make_sample, prepare
from sparsekv.planner.tasks import TASKS as GENERATORS
from sparsekv.plans.files import load_plan, write_plan
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length, parse_lengths
from sparsekv.runtime.hf.load import LoadedModel, load_model
from sparsekv.runtime.hf.observe import AttentionCall, capture_attention

_FULL: tuple[PhaseName, ...] = ("prefill", "decode", "both")


@dataclass(frozen=True, slots=True)
class Bench:
    """What every measurement needs."""

    loaded: LoadedModel
    kit: Kit
    samples: int
    out: Path
    deadline: float


def main() -> None:
    """Plans, measures, prints."""
    args = _arguments()
    args.out.mkdir(parents=True, exist_ok=True)
    loaded = load_model("tiny-retriever", device=args.device)
    kit = prepare(loaded.tokenizer, Split.EVALUATION)
    bench = Bench(loaded, kit, args.samples, args.out, time.monotonic() + args.time_limit)
    options = PlanOptions(
        lengths=args.lengths,
        crossover=False,
        verify_samples=0,
        seed=args.seed,
        tile=TileShape(query=args.tile, key=args.tile) if args.tile else None,
    )
    if args.plan:
        for length in args.at or args.lengths:
            _measure(bench, _modes(load_plan(args.plan), args.phases, args.backends), length)
        return
    plan = _planned(loaded, options, args.out, "plan")
    modes = _modes(plan, args.phases, args.backends)
    for length in args.at or args.lengths if args.measure in ("all", "phases") else ():
        _measure(bench, modes, length)
    if args.measure in ("all", "ablations"):
        _ablate(bench, _ablations(bench, options), plan, args.at or args.lengths)
    if args.measure == "nothing":
        _preset(bench, args.lengths)


def _modes(plan: Plan, phases: list[PhaseName], backends: list[str]) -> dict[str, Mode]:
    """Every phase through every backend, so that backends are compared on the very same prompts."""
    return {
        f"{phase}, {backend}" if len(backends) > 1 else phase: PlanMode(plan, phase, backend)
        for phase in phases
        for backend in backends
    }


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--lengths", type=lambda text: tuple(sorted(parse_lengths(text))), default=(4096, 16384, 32768))
    parser.add_argument("--plan", type=Path, help="measure the phases of this one, and plan nothing")
    parser.add_argument("--samples", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tile", type=int, choices=(64, 128), help="the planner's own choice if not given")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--phases", nargs="+", choices=_FULL, default=list(_FULL))
    parser.add_argument("--backends", nargs="+", choices=("auto", *BACKENDS), default=["auto"])
    parser.add_argument("--measure", choices=("all", "phases", "ablations", "nothing"), default="all")
    parser.add_argument("--at", type=lambda text: tuple(sorted(parse_lengths(text))), help="some of --lengths only")
    parser.add_argument("--time-limit", type=float, default=float("inf"), help="seconds after which nothing new begins")
    args = parser.parse_args()
    if args.at and not args.plan and set(args.at) - set(args.lengths):
        parser.error("--at takes lengths of --lengths: others are not planned")
    return args


def _planned(loaded: LoadedModel, options: PlanOptions, out: Path, name: str) -> Plan:
    profile_file, cost_file = out / f"{name}.profile.json", out / f"{name}.cost.json"
    known: dict[str, Any] = (
        {"profile_in": read_measured(Profile, profile_file)} if profile_file.exists() else {"profile_out": profile_file}
    )
    known |= {"cost_in": read_measured(DeviceCost, cost_file)} if cost_file.exists() else {"cost_out": cost_file}
    result = compile_plan(loaded, options, **known)
    write_plan(result.plan, out / f"{name}.yaml")
    print(f"{name}: planned in {result.seconds:.1f} s", flush=True)
    return result.plan


def _ablations(bench: Bench, options: PlanOptions) -> Iterator[tuple[str, Plan]]:
    for family in PRESET_FAMILIES:
        alone = replace(options, families=(family,), phases=("prefill",))
        yield f"only {family}", _planned(bench.loaded, alone, bench.out, f"only_{family}")
    yield "minference preset", _preset(bench, options.lengths)


def _preset(bench: Bench, lengths: tuple[int, ...]) -> Plan:
    preset = replace(
        PlanOptions(lengths=lengths, crossover=False, verify_samples=0, phases=("prefill",)), preset="minference"
    )
    return _planned(bench.loaded, preset, bench.out, "minference")


def _ablate(bench: Bench, plans: Iterator[tuple[str, Plan]], plan: Plan, lengths: tuple[int, ...]) -> None:
    modes: dict[str, Mode] = {name: PlanMode(other, "prefill") for name, other in plans}
    for length in lengths:
        _measure(bench, {**modes, "frozen indices": _frozen(bench, plan, length)}, length)


def _measure(bench: Bench, modes: Mapping[str, Mode], length: int) -> None:
    if time.monotonic() > bench.deadline:
        print(f"no time left for {', '.join(modes)} at {format_length(length)}", flush=True)
        return
    started = time.monotonic()
    results = evaluate(bench.loaded, modes, EvalSamples(TASKS, (length,), bench.samples), bench.kit)
    for name in modes:
        _write(bench, name, length, results[name][0], time.monotonic() - started)


def _frozen(bench: Bench, plan: Plan, length: int) -> FrozenIndices:
    """The plan's own patterns, with the indices of one calibration prompt for all."""
    assert plan.prefill is not None
    kit = prepare(bench.loaded.tokenizer, Split.CALIBRATION)
    sample = make_sample(GENERATORS["kv_retrieval"], kit, length, 0, 0)
    ids = [*sample.prompt_ids.tolist(), *sample.answer_ids.tolist()]
    ids += ids[-1:] * (length - len(ids))
    return FrozenIndices(bench.loaded, plan.prefill, torch.tensor([ids], device=bench.loaded.model.device))


def _write(bench: Bench, name: str, length: int, result: EvalResult, seconds: float) -> None:
    scores = {task: found.score.model_dump(mode="json") for task, found in result.tasks.items()}
    row = {
        "name": name,
        "length": length,
        "samples": bench.samples,
        "prefill_density": round(result.prefill_density, 4),
        "decode_share": round(result.decode_share, 4),
        "kl": result.kl,
        "tasks": scores,
        "seconds": round(seconds, 1),
    }
    with (bench.out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    cells = [f"{100 * scores[task]['dense']:.1f} {100 * scores[task]['sparse']:.1f}" for task in RETRIEVAL_TASKS]
    text = scores["perplexity"]
    print(
        f"| {name} | {format_length(length)} | {result.prefill_density:.3f} | {result.decode_share:.3f} | "
        + " | ".join(cells)
        + f" | {text['dense']:.3f} {text['sparse']:.3f} | {seconds:.0f} s |",
        flush=True,
    )


class FrozenIndices:
    """The tiles that a plan computes on one prompt, used for every other: MInference 1.0's static ablation (4.4)."""

    def __init__(self, loaded: LoadedModel, plan: PrefillPlan, prompt_ids: torch.Tensor) -> None:
        self._plan, self._indices = plan, dict[int, TileIndex]()
        model, info = loaded.model, loaded.info
        self._backend = choose_backend(model.device, model.dtype, info.attention[0].head_dim).name
        self._computed, self._causal = torch.zeros(()), 0.0
        with capture_attention(model, self._freeze), torch.no_grad():
            model(input_ids=prompt_ids, use_cache=False, logits_to_keep=1)

    @property
    def stepwise(self) -> bool:
        """See `planner.compare.Mode`: prefill alone."""
        return False

    @property
    def dense_prefill(self) -> bool:
        """See `planner.compare.Mode`."""
        return False

    @contextmanager
    def running(self, model: PreTrainedModel) -> Iterator[Callable[[], Spent]]:
        """See `planner.compare.Mode`: every prefill runs on the frozen indices."""
        self._computed, self._causal = torch.zeros((), device=model.device), 0.0
        with capture_attention(model, self._attend):
            yield lambda: Spent(float(self._computed), self._causal)

    def _freeze(self, call: AttentionCall) -> None:
        heads, tile = call.q_BHSD.shape[1], self._plan.tile
        patterns = self._plan.bucket(call.chunk.longest).patterns(call.layer, heads)
        self._indices[call.layer] = build_index(
            patterns, call.q_BHSD, call.k_BGKD, call.chunk, tile, scale=call.scale, window=call.window
        )

    def _attend(self, call: AttentionCall) -> torch.Tensor:
        batch, heads, queries, _ = call.q_BHSD.shape
        index = _spread(self._indices[call.layer], batch, call.chunk.query_tiles(self._plan.tile, queries))
        self._computed = self._computed + computed_tiles(index).sum()
        self._causal += heads * call.chunk.causal_tiles(self._plan.tile)
        return prefill_attention(
            call.q_BHSD, call.k_BGKD, call.v_BGKD, index, call.chunk, scale=call.scale, backend=self._backend
        ).out_BHSD


def _spread(index: TileIndex, batch: int, rows: int) -> TileIndex:
    """The first rows of an index of one prompt, for every row of a batch."""
    same: Callable[[torch.Tensor], torch.Tensor] = lambda part: part.expand(batch, *part.shape[1:])  # noqa: E731
    return TileIndex(
        tile=index.tile,
        tiles_BHTW=same(index.tiles_BHTW[:, :, :rows]),
        counts_BHT=same(index.counts_BHT[:, :, :rows]),
        columns_BHC=same(index.columns_BHC),
        live_BHTN=same(index.live_BHTN[:, :, :rows]),
        dense_H=index.dense_H,
    )


if __name__ == "__main__":
    main()
