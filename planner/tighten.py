"""The next attempt at a plan that missed its gate: which options make it lose less, and what that gave up.

A ladder with an end: stricter options for the phases that missed; where there are none, dense at the lengths that
missed; then at all lengths. Dense is what the gates hold plans against, so that its end meets them.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence, Set

from sparsekv.planner.common_options import PHASES, Phase
from sparsekv.planner.evaluation import PhaseName
from sparsekv.planner.filter_layers import choose_filter_layers, takes_trials
from sparsekv.planner.options import Settled
from sparsekv.planner.prices import Prices
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.plans.patterns import Budget
from sparsekv.plans.schema import Measurement, Plan, Quality
from sparsekv.plans.types import format_length

_DENSER = 1.3  # at each attempt
_LOSS_STEP = 0.5
_LEAST_LOSS = 0.005


def after_a_missed_gate(options: Settled, dense: Set[Phase]) -> tuple[str, ...]:
    """At most one line: what of the options that were asked for kept a phase from being made stricter before it went
    dense.

    Args:
        options: settled, before the first attempt.
        dense: the phases that went dense.
    """
    others = list(_others(options, dense))
    return (f"more of it may stay sparse with {', '.join(others)}",) if others else ()


def _others(options: Settled, phases: Set[Phase]) -> Iterator[str]:
    if "prefill" in phases and options.preset is not None:
        yield f"the search in place of the {options.preset} preset, which has one density a length"
    if "decode" in phases and options.filter_layers:
        yield "other filter_layers"
    elif "decode" in phases and not options.any_budget:
        yield "a larger decode_budget"


def tightened(
    options: Settled,
    profile: Profile,
    cost: Prices,
    missed: Mapping[PhaseName, Collection[int]],
    quality: Quality,
    *,
    is_last: bool = False,
) -> Settled:
    """Options of which a plan loses less in the phases that missed the gate: stricter ones, or dense. The same where
    those phases are dense at every length: what they miss is rounding.

    Args:
        options: settled, of the plan that missed.
        profile, cost: what it was compiled from.
        missed: the phases that missed, with the lengths that did worst. Where only both together missed, both are
            made stricter; where neither can be, that one goes dense which moves more by itself.
        quality: what was measured of that plan.
        is_last: nothing stricter is to be tried.
    """
    found, both = options, missed.get("both", ())
    alone = {phase: missed[phase] for phase in options.phases if phase in missed}
    for phase in alone or options.phases:
        stricter = found if is_last else _stricter(found, profile, cost, phase, {*alone.get(phase, ()), *both})
        if stricter == found and phase in alone:
            stricter = _dense(found, profile, phase, alone[phase])
        found = stricter
    if found == options and both:
        sparse = [phase for phase in options.phases if _sparse_lengths(options, profile, phase)]
        return _dense(options, profile, _moving(sparse, quality, both), both) if sparse else options
    return found


def _moving(phases: Sequence[Phase], quality: Quality, lengths: Collection[int]) -> Phase:
    """The phase that alone diverges more at these lengths."""

    def moved(phase: Phase) -> float:
        measured: Measurement | None = getattr(quality, phase)
        parts = measured.by_length if measured else ()
        return sum(part.agreement.kl for part in parts if part.length in lengths)

    return max(phases, key=moved)


def _dense(options: Settled, profile: Profile, phase: Phase, lengths: Collection[int]) -> Settled:
    """A phase dense at these lengths; at all, where it is so at these already."""
    sparse = _sparse_lengths(options, profile, phase)
    more = [length for length in sparse if length in lengths] or sparse
    return options.but(dense={**options.dense, phase: (*options.dense_at(phase), *more)}) if more else options


def _sparse_lengths(options: Settled, profile: Profile, phase: Phase) -> list[int]:
    """The profiled lengths at which a phase need not be dense."""
    return [length for length in _profiled_lengths(profile, phase) if length not in options.dense_at(phase)]


def _profiled_lengths(profile: Profile, phase: Phase) -> list[int]:
    return [entry.length for entry in profile.lengths if (entry.layers if phase == "prefill" else entry.reuse)]


def _stricter(options: Settled, profile: Profile, cost: Prices, phase: Phase, lengths: Collection[int]) -> Settled:
    """The same options where there are no stricter ones, or none that leave the other lengths sparse."""
    sparse = _sparse_lengths(options, profile, phase)
    if phase == "prefill" or not sparse:
        return _denser(options, profile, [length for length in sparse if length in lengths])
    stricter = _more_careful(options, profile)
    plans = [choose_filter_layers(profile, cost, one) for one in (options, stricter)]
    before, after = ({length for length in sparse if not plan.bucket(length).dense} for plan in plans)
    return stricter if before.difference(lengths) <= after else options


def _denser(options: Settled, profile: Profile, lengths: Collection[int]) -> Settled:
    """A larger budget at the lengths that missed, which the allocation spends on the heads that it helps most."""
    if not options.target_density:
        return options
    entries = [entry for entry in profile.lengths if entry.layers]
    targets = list(options.target_density)
    for number, entry in enumerate(entries):
        if entry.length in lengths:
            denser = round(targets[number] * _DENSER, 4)
            targets[number] = denser if denser < 1.0 else targets[number]  # dense everywhere is no plan
    return options.but(target_density=tuple(targets))


def _more_careful(options: Settled, profile: Profile) -> Settled:
    """Returns what was tried and diverged at most half as much. Where nothing was: half the loss (fewer layers attend
    to chosen tokens); at the least loss, the next larger budget."""
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
    """Returns what a later attempt gave up of what was asked for, where it is sparse.

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
        if before != after and entry.length not in used.dense_at("prefill")
    ]
    if not _sparse_lengths(used, profile, "decode"):
        return tuple(lines)
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


def went_dense(first: Plan, last: Plan, profile: Profile) -> dict[Phase, tuple[int, ...]]:
    """The profiled lengths at which a phase is sparse in one plan and dense in a later one."""
    found: dict[Phase, tuple[int, ...]] = {}
    for phase in PHASES:
        before, after = getattr(first, phase), getattr(last, phase)
        profiled = _profiled_lengths(profile, phase) if before and after else ()
        lengths = tuple(n for n in profiled if after.bucket(n).dense and not before.bucket(n).dense)
        found |= {phase: lengths} if lengths else {}
    return found


def reasons_by_phase(missed: Collection[PhaseName], reasons: Sequence[str]) -> dict[Phase, str]:
    """Returns why `tightened` changes each phase: a line of what it missed by itself, or, where none did, of both
    together.

    Args:
        missed: the phases that missed.
        reasons: what of the gates was missed, each with its phase in front.
    """
    alone: dict[Phase, PhaseName] = {phase: phase for phase in PHASES if phase in missed}
    blamed = alone or {phase: "both" for phase in PHASES}
    return {phase: next((one for one in reasons if one.startswith(by)), reasons[0]) for phase, by in blamed.items()}


def dense_remarks(options: Settled, reasons: Mapping[Phase, str]) -> tuple[str, ...]:
    """A line for each phase that is dense to meet its gate.

    Args:
        options: of the plan; `dense` says where.
        reasons: why each phase was changed last.
    """
    return tuple(
        f"{phase} at {', '.join(map(format_length, lengths))} is dense: every sparser plan missed its gate "
        f"({reasons.get(phase, 'with the other phase')})"
        for phase, lengths in options.dense.items()
    )
