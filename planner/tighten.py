"""The next attempt at a plan that missed its gate: which options make it lose less, and what that gave up."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Set

from sparsekv.planner.evaluation import PhaseName
from sparsekv.planner.filter_layers import takes_trials
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.planner.settled import Settled
from sparsekv.plans.patterns import Budget
from sparsekv.plans.types import format_length

_DENSER = 1.3  # at each attempt
_LOSS_STEP = 0.5
_LEAST_LOSS = 0.005


def after_a_missed_gate(options: Settled, missed: Set[PhaseName]) -> str:
    """A sentence that names options which can be used together with those that were.

    Args:
        options: of the last plan.
        missed: the phases that missed the gate; where only both together missed it, either may be given more.
    """
    wanted = {phase for phase in options.phases if phase in missed} or set(options.phases)
    looser = (
        "loosen the gate that was missed (--max-kl, --max-decode-kl, --min-agreement, --min-exact, --max-accuracy-drop)"
    )
    first, *rest = (*_more(options, wanted), looser)
    return f"{first[0].upper()}{first[1:]}, {', '.join(rest)}, or verify on more samples (--verify-samples)"


def _more(options: Settled, phases: Set[str]) -> Iterator[str]:
    if "prefill" in phases:
        if options.preset is not None:
            yield f"search without the {options.preset} preset, which has one density a length"
        elif options.target_speedup is not None:
            yield "ask for less than this --target-speedup"
        else:
            yield "raise --target-density"
    if "decode" in phases:
        yield "choose other --filter-layers" if options.filter_layers else "raise --decode-budget"


def tightened(options: Settled, profile: Profile, missed: Mapping[PhaseName, Collection[int]]) -> Settled | None:
    """Options of which a plan loses less in the phases that missed the gate; None when there are none.

    Args:
        options: settled, of the plan that missed.
        missed: the phases that missed, with the lengths that did worst. Where only both together missed, both are
            tightened.
    """
    alone = set(missed) - {"both"} or {"prefill", "decode"}
    lengths = {length for phase, some in missed.items() if phase != "decode" for length in some}
    stricter = options
    if "prefill" in alone:
        stricter = _denser(stricter, profile, lengths)
    if "decode" in alone:
        stricter = _more_careful(stricter, profile)
    return None if stricter == options else stricter


def _denser(options: Settled, profile: Profile, lengths: Collection[int]) -> Settled:
    """A larger budget at the lengths that missed, which the allocation spends on the heads that it helps most."""
    if not options.target_density or options.target_speedup is not None:  # denser would miss the speedup
        return options
    entries = [entry for entry in profile.lengths if entry.layers]
    targets = list(options.target_density)
    for number, entry in enumerate(entries):
        if entry.length in lengths:
            denser = round(targets[number] * _DENSER, 4)
            targets[number] = denser if denser < 1.0 else targets[number]  # dense everywhere is no plan
    return options.but(target_density=tuple(targets))


def _more_careful(options: Settled, profile: Profile) -> Settled:
    """What was tried and diverged at most half as much. Where nothing was: half the loss (fewer layers attend to chosen
    tokens); at the least loss, the next larger budget."""
    if takes_trials(profile, options):
        tried = [trial.kl_bound for entry in profile.lengths for trial in entry.trials]
        inside = [bound for bound in tried if bound <= options.decode_bound]
        return options.but(decode_kl=max(inside) / 2) if inside else options
    if not options.filter_layers and options.loss_bound > _LEAST_LOSS:
        return options.but(decode_loss=options.loss_bound * _LOSS_STEP)
    longest = profile.lengths[-1]
    budgets: tuple[Budget, ...] = longest.reuse.budgets if longest.reuse else ()
    spent = options.decode_budget.resolve(longest.length)
    larger = [budget for budget in budgets if budget.resolve(longest.length) > spent]
    least = min(larger, key=lambda budget: budget.resolve(longest.length), default=options.decode_budget)
    return options.but(decode_budget=least)


def tightened_remarks(asked: Settled, used: Settled, profile: Profile) -> tuple[str, ...]:
    """What a plan that met its gate at a later attempt gave up of what was asked for.

    Args:
        asked: settled, before the first attempt.
        used: those of the plan.
        profile: what both were compiled from.
    """
    entries = [entry for entry in profile.lengths if entry.layers]
    targets = zip(entries, asked.target_density, used.target_density, strict=False)
    lines = [
        f"prefill at {format_length(entry.length)} is planned for a density of {after:g}: with the {before:g} that was "
        "asked for, the plan missed its gate"
        for entry, before, after in targets
        if before != after
    ]
    if asked.decode_bound != used.decode_bound:
        lines.append(
            f"decode is planned for a divergence of {used.decode_bound:g} on calibration prompts: with "
            f"{asked.decode_bound:g}, the plan missed its gate"
        )
    if (asked.loss_bound, asked.decode_budget) != (used.loss_bound, used.decode_budget):
        lines.append(
            f"decode is planned for a loss of {used.loss_bound:g} and a budget of {used.decode_budget}: with "
            f"{asked.loss_bound:g} and {asked.decode_budget}, the plan missed its gate"
        )
    return tuple(lines)
