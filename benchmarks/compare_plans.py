"""Plans beside ours at their own density, on tasks of formats that calibration never saw.

    python benchmarks/compare_plans.py MODEL PROFILE PLAN [PLAN ...] --lengths 4k,16k,32k [--samples 8] [--out FILE]
        [--families vertical_slash,vertical_slash_means] [--share 0.7]

Each PLAN is a prefill phase of any origin: of an earlier version, of one family, of a preset. It is taken for MODEL
whatever it says it was made for. It runs on held-out prompts of the shipped tasks and of those in
`tools/reference_model/formats.py`; then a plan is compiled from PROFILE (without a crossover) at the density that this
one realised on them, or a share of it, and runs on the same prompts. Printed is the ratio of the geometric means of
their divergences from dense, ours over theirs, with a 95% bootstrap interval over prompts, and the ratio of each task.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from scipy.stats import bootstrap

from sparsekv.planner.allocate import at_target
from sparsekv.planner.compare import DenseReference, PlanMode, compare, dense_reference
from sparsekv.planner.cost.predict import ScoreTables
from sparsekv.planner.data_files import read_measured
from sparsekv.planner.options import FAMILIES, Family
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.planner.tasks import Split, TaskError, make_samples, prepare
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan
from sparsekv.plans.schema import Plan
from sparsekv.plans.types import format_length, parse_lengths
from sparsekv.plans.yaml_io import read_tree
from sparsekv.runtime.hf.load import LoadedModel, load_model

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))

from reference_model.formats import TRAINED

_LEAST = 1e-7  # nats: below this, divergences are rounding
_CLOSE = 0.01  # of densities that count as equal
_ATTEMPTS = 3


def main() -> None:
    """Measures and prints."""
    args = _arguments()
    loaded, profile = load_model(args.model, device=args.device), read_measured(Profile, args.profile)
    for entry in profile.lengths:
        if entry.length in args.lengths:
            samples = _Samples.of(loaded, entry.length, args.samples, args.seed)
            for path in args.plans:
                row = {
                    "plan": path.stem,
                    "length": entry.length,
                    **_compared(loaded, profile, entry, samples, path, args.families, args.share),
                }
                _print(row)
                if args.out:
                    with args.out.open("a", encoding="utf-8") as file:
                        file.write(json.dumps(row) + "\n")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("profile", type=Path, help="of the model, from `sparsekv plan --profile-out`")
    parser.add_argument("plans", type=Path, nargs="+")
    parser.add_argument("--lengths", type=parse_lengths, default=(4096, 16384, 32768))
    parser.add_argument("--samples", type=int, default=8, help="of each task and length")
    parser.add_argument("--seed", type=int, default=4242)
    parser.add_argument("--families", type=lambda text: tuple(text.split(",")), default=FAMILIES, help="of ours")
    parser.add_argument("--share", type=float, default=1.0, help="of their density that ours has")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--out", type=Path, help="rows as JSON lines")
    return parser.parse_args()


@dataclass(frozen=True, slots=True, eq=False)
class _Samples:
    """Held-out prompts of one length, and what dense says to them."""

    reference: DenseReference
    tasks: tuple[str, ...]  # of each prompt

    @classmethod
    def of(cls, loaded: LoadedModel, length: int, count: int, seed: int) -> _Samples:
        kit, drawn = prepare(loaded.tokenizer, Split.EVALUATION), []
        for name, task in TRAINED.items():
            try:
                drawn += list(make_samples(task, kit, length, seed, count))
            except TaskError as error:
                print(f"without {name}: {error}", file=sys.stderr)
        return cls(dense_reference(loaded, drawn, greedy=False), tuple(sample.task for sample in drawn))

    def measured(self, loaded: LoadedModel, plan: Plan) -> tuple[np.ndarray, float]:
        """Divergence of each prompt, and the density over all."""
        found = compare(loaded, {"plan": PlanMode(plan, "prefill")}, self.reference)["plan"]
        return np.maximum(found.kl, _LEAST), found.spent.tiles / max(found.spent.causal_tiles, 1.0)


def _compared(
    loaded: LoadedModel,
    profile: Profile,
    entry: LengthProfile,
    samples: _Samples,
    path: Path,
    families: Sequence[Family],
    share: float,
) -> dict[str, Any]:
    prefill = PrefillPlan.model_validate(read_tree(path.read_text(encoding="utf-8"), str(path)).data["prefill"])
    theirs, density = samples.measured(loaded, _plan(loaded, prefill))
    target = goal = share * density
    for _ in range(_ATTEMPTS):
        ours, own_density = samples.measured(loaded, _plan(loaded, _compiled(profile, entry, target, families)))
        if abs(own_density / goal - 1.0) < _CLOSE:
            break
        target = min(1.0, target * goal / own_density)
    logs = np.log(ours) - np.log(theirs)
    interval = bootstrap((logs,), np.mean, rng=np.random.default_rng(0)).confidence_interval
    tasks = np.array(samples.tasks)
    return {
        "density": density,
        "own_density": own_density,
        "theirs": float(np.mean(theirs)),
        "ours": float(np.mean(ours)),
        "ratio": float(np.exp(logs.mean())),
        "interval": [float(np.exp(interval.low)), float(np.exp(interval.high))],
        "prompts": len(logs),
        "tasks": {name: float(np.exp(logs[tasks == name].mean())) for name in dict.fromkeys(samples.tasks)},
    }


def _compiled(
    profile: Profile, entry: LengthProfile, target: float, families: Sequence[Family] = FAMILIES
) -> PrefillPlan:
    tables = ScoreTables.of(entry)
    choice = at_target(tables, families, target)
    if choice is None:
        sys.exit(f"{target:.3f} at {entry.length} tokens is below what mandatory tiles take: compare at another length")
    groups = tuple(
        HeadGroup(layer=scores.layer, heads=(head,), pattern=tables.pattern(choice, row, head))
        for row, scores in enumerate(entry.layers)
        for head in np.flatnonzero(choice[row] >= 0).tolist()
    )
    dense = PrefillBucket(up_to=None, dense=True)  # all of it, beside a plan that computes everything there
    buckets = (PrefillBucket(up_to=entry.length, heads=groups), dense) if groups else (dense,)
    return PrefillPlan(tile=profile.tile, lengths=buckets)


def _plan(loaded: LoadedModel, prefill: PrefillPlan) -> Plan:
    return Plan(status="unverified", model=loaded.info, prefill=prefill)


def _print(row: dict[str, Any]) -> None:
    low, high = row["interval"]
    print(
        f"{format_length(row['length'])} beside {row['plan']} at {row['density']:.3f} (ours {row['own_density']:.3f}): "
        f"divergence {row['ours']:.2e} instead of {row['theirs']:.2e} nats; geometric means {row['ratio']:.2f} "
        f"[{low:.2f}, {high:.2f}] over {row['prompts']} prompts; "
        + ", ".join(f"{name} {ratio:.2f}" for name, ratio in row["tasks"].items()),
        flush=True,
    )


if __name__ == "__main__":
    main()
