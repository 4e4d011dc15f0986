"""What to try when no plan met its gate, in terms of the options that were used."""

from __future__ import annotations

from collections.abc import Iterator, Set

from sparsekv.planner.evaluation.evaluate import PhaseName
from sparsekv.planner.options import PlanOptions


def after_a_missed_gate(options: PlanOptions, missed: Set[PhaseName]) -> str:
    """A sentence that names options which can be used together with those that were.

    Args:
        options: of the last plan.
        missed: the phases that missed the gate; where only both together missed it, either may be given more.
    """
    wanted = {phase for phase in options.phases if phase in missed} or set(options.phases)
    first, *rest = (*_more(options, wanted), *_looser(options))
    return f"{first[0].upper()}{first[1:]}, {', '.join(rest)}, or verify on more samples (--verify-samples)"


def _more(options: PlanOptions, phases: Set[str]) -> Iterator[str]:
    if "prefill" in phases:
        if options.preset is not None:
            yield f"search without the {options.preset} preset, which has one density a length"
        elif options.target_speedup is not None:
            yield "ask for less than this --target-speedup"
        else:
            yield "raise --target-density"
    if "decode" in phases:
        yield "choose other --filter-layers" if options.filter_rule == "fixed" else "raise --decode-budget"


def _looser(options: PlanOptions) -> Iterator[str]:
    yield "loosen --max-accuracy-drop" if options.gate.max_kl is None else "loosen --max-accuracy-drop or --max-kl"
