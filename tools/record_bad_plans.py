"""Records what a good plan of the reference model and three that were made bad do on held-out samples.

    plan_model("tiny-retriever", lengths="2k", tile="64", target_density=0.3, crossover=False, verify_samples=0)
    python tools/record_bad_plans.py plan.yaml tests/data/bad_plans.json     # five minutes of one core

tests/planner/test_bad_plans.py resamples the outcomes: none of the bad plans may be verified.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Sequence
from pathlib import Path

from sparsekv.planner.common_options import DEFAULT_TASKS
from sparsekv.planner.evaluation import EvalSamples, PlanMode, evaluate
from sparsekv.planner.outcomes_file import ModeOutcomes
from sparsekv.planner.records import versions
from sparsekv.plans.files import load_plan
from sparsekv.plans.patterns import AShape, tokens
from sparsekv.plans.phases import HeadGroup, Segment
from sparsekv.plans.schema import Plan
from sparsekv.runtime.hf.load import load_model

LENGTH, SAMPLES, SEED = 2048, 12, 0
DIGITS = 6  # of nats


def cut_prefill(plan: Plan, layers: Iterable[int]) -> Plan:
    """Returns the plan with the first tile and the last two in some layers: a third of its density, 0.3."""
    assert plan.prefill
    first, *others = plan.prefill.lengths
    cut = AShape(sink=tokens(64), window=tokens(64))
    heads = [one for one in first.heads if one.layer not in set(layers)]
    heads += [HeadGroup(layer=layer, heads=tuple(range(4)), pattern=cut) for layer in layers]
    sparser = first.model_copy(update={"heads": tuple(sorted(heads, key=lambda one: (one.layer, one.heads)))})
    return plan.model_copy(update={"prefill": plan.prefill.model_copy(update={"lengths": (sparser, *others)})})


def with_segments(plan: Plan, segments: Sequence[Segment]) -> Plan:
    """Returns the plan with other decode segments."""
    assert plan.decode
    (bucket,) = plan.decode.lengths
    other = bucket.model_copy(update={"segments": tuple(segments)})
    return plan.model_copy(update={"decode": plan.decode.model_copy(update={"lengths": (other,)})})


def cut_decode(plan: Plan) -> Plan:
    """Returns the plan with a third of the chosen and recent tokens in the layers of its last segment."""
    *others, last = plan.decode.lengths[0].segments
    budget = last.budget.model_copy(update={"fraction": last.budget.fraction / 3, "at_most": last.budget.at_most // 3})
    return with_segments(plan, [*others, last.model_copy(update={"budget": budget, "recent": last.recent // 3})])


def wrong_filters(plan: Plan) -> Plan:
    """Returns the plan with filter layers that choose other tokens than the layers behind them need."""
    first = plan.decode.lengths[0].segments[0]
    chosen = {0: range(1, 5), 5: range(6, 8), 9: range(10, 12)}
    return with_segments(
        plan, [first.model_copy(update={"filter": one, "layers": tuple(layers)}) for one, layers in chosen.items()]
    )


def rounded(outcomes: ModeOutcomes) -> dict[str, object]:
    """Returns outcomes as data, with fewer digits."""
    return json.loads(json.dumps(outcomes.model_dump(mode="json")), parse_float=lambda text: round(float(text), DIGITS))


def main() -> None:
    """Runs the plans and writes the file."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("plan", type=Path, help="of the reference model, made by the command above")
    parser.add_argument("out", type=Path)
    asked = parser.parse_args()
    plan, loaded = load_plan(asked.plan), load_model("tiny-retriever", device="cpu", dtype="float32")
    modes = {
        "good": PlanMode(plan, "decode"),
        "prefill cut to a third in layers 7 to 11": PlanMode(cut_prefill(plan, range(7, 12)), "prefill"),
        "decode cut to a third in layers 7 to 11": PlanMode(cut_decode(plan), "decode"),
        "wrong filter layers": PlanMode(wrong_filters(plan), "decode"),
    }
    found = evaluate(loaded, modes, EvalSamples(DEFAULT_TASKS, (LENGTH,), SAMPLES, seed=SEED))
    plans = {name: rounded(ModeOutcomes.of(mode.phase, found[name][0])) for name, mode in modes.items()}
    lines = ",\n".join(f"{json.dumps(name)}: {json.dumps(one)}" for name, one in plans.items())
    asked.out.write_text(f'{{"versions": {json.dumps(versions())}, "plans": {{\n{lines}\n}}}}\n')


if __name__ == "__main__":
    main()
