"""Predicts what exact output (docs/exact.md) gains: the plan drafts tokens, a dense pass checks them
all."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile

from sparsekv.plans.schema import Plan, WholeStep
from sparsekv.plans.types import format_length

DRAFTS = (0, 2, 4, 6, 10)  # tokens of a draft: each is a captured step of its own; 0 is a step of dense decoding
_LEAST = 1.02  # predictions and timings differ by more than what is less


@dataclass(frozen=True, slots=True)
class ExactGain:
    """Holds the gain of the drafts that pay most at one length: tokens a second over those of dense decoding."""

    length: int
    agreement: float  # share of tokens at which the plan's likeliest is dense's
    drafted: int
    ratio: float


def tokens_a_cycle(agreement: float, drafted: int) -> float:
    """Returns how many tokens a draft and its check give on average, where each drafted one counts with this
    probability if those before it do (Leviathan et al., 2023, section 3.1)."""
    return drafted + 1 if agreement >= 1 else (1 - agreement ** (drafted + 1)) / (1 - agreement)


def gain_of(step: WholeStep, agreement: float, drafted: int) -> float:
    """Tokens a second with drafts of one length, over dense decoding."""
    cycle_us = step.dense_us + drafted * (step.sparse_us + step.token_us)
    return tokens_a_cycle(agreement, drafted) * step.dense_us / max(cycle_us, 1e-9)


def exact_gains(plan: Plan) -> Iterator[ExactGain]:
    """The gain at every length at which steps are predicted and the agreement was measured."""
    for entry in plan.cost.lengths if plan.cost and plan.quality else ():
        measured = plan.quality.at(entry.length) if plan.quality else None
        if entry.step and measured and measured.agreed is not None:
            rate, step = measured.agreed, entry.step
            ratio, drafted = max((gain_of(step, rate, drafted), drafted) for drafted in DRAFTS)
            yield ExactGain(entry.length, rate, drafted, ratio)


def exact_line(plan: Plan) -> str | None:
    """From which length on it pays, and how much there; None where that is not known."""
    gains = list(exact_gains(plan))
    if not gains:
        return None
    paying = list(takewhile(lambda gain: gain.ratio > _LEAST, reversed(gains)))
    if not paying:
        return "exact output does not pay at the planned lengths, as predicted"
    first = paying[-1]
    told = f"{first.drafted} drafts, {first.agreement:.1%} agree"
    return f"exact output: {first.ratio:.2f}x from {format_length(first.length)} on, predicted ({told})"
