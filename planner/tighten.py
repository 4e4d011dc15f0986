"""Options for a profile at hand, and stricter ones when a plan missed its gate."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import replace

from sparsekv.planner.allocate import ladder
from sparsekv.planner.conflicts import check_profile
from sparsekv.planner.evaluation.evaluate import PhaseName
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.profile_data import LengthProfile, Profile
from sparsekv.plans.errors import UsageError
from sparsekv.plans.patterns import Budget
from sparsekv.plans.types import format_length

_LOSS_STEP = 0.5
_LEAST_LOSS = 0.005


def for_profile(options: PlanOptions, profile: Profile) -> tuple[PlanOptions, Profile]:
    """The options as far as a profile that was made earlier leaves them open, and the lengths of it that are asked for.

    Raises:
        UsageError: something was asked for that was not profiled, or that contradicts what was.
    """
    check_profile(options, profile)
    known = tuple(entry.length for entry in profile.lengths)
    missing = sorted(set(options.lengths) - set(known))
    if missing:
        raise UsageError(
            f"expected lengths that the profile has ({', '.join(map(format_length, known))}), "
            f"found {', '.join(map(format_length, missing))}; leave them out, or profile again"
        )
    lengths = options.lengths or known
    kept = tuple(entry for entry in profile.lengths if entry.length in lengths)
    return (
        replace(options, lengths=lengths, tile=profile.tile, preset=profile.preset, levels=()),
        profile.model_copy(update={"lengths": kept}),
    )


def tightened(
    options: PlanOptions, profile: Profile, missed: Mapping[PhaseName, Collection[int]]
) -> PlanOptions | None:
    """Options of which a plan loses less in the phases that missed the gate; None when there are none.

    Args:
        options: settled, of the plan that missed.
        profile: what it was compiled from.
        missed: the phases that missed, with the lengths that did worst. Where only both together missed, both are
            tightened.
    """
    alone = set(missed) - {"both"} or {"prefill", "decode"}
    lengths = {length for some in missed.values() for length in some}
    stricter = options
    if "prefill" in alone:
        stricter = _denser(stricter, profile, lengths)
    if "decode" in alone:
        stricter = _more_careful(stricter, profile)
    return None if stricter == options else stricter


def _denser(options: PlanOptions, profile: Profile, lengths: Collection[int]) -> PlanOptions:
    """The next density of the ladder at the lengths that missed."""
    if not options.target_density or options.target_speedup is not None:  # denser would miss the speedup
        return options
    entries = [entry for entry in profile.lengths if entry.layers]
    return replace(
        options,
        target_density=tuple(
            _next_density(entry, target) if entry.length in lengths else target
            for entry, target in zip(entries, options.target_density, strict=True)
        ),
    )


def _next_density(entry: LengthProfile, target: float) -> float:
    return next((density for density in ladder(entry) if density > target * 1.001), target)


def _more_careful(options: PlanOptions, profile: Profile) -> PlanOptions:
    """Half the loss (fewer layers attend to chosen tokens); at the least loss, the next larger budget."""
    if options.filter_rule == "dp" and options.decode_loss > _LEAST_LOSS:
        return replace(options, decode_loss=options.decode_loss * _LOSS_STEP)
    longest = profile.lengths[-1]
    budgets: tuple[Budget, ...] = longest.reuse.budgets if longest.reuse else ()
    spent = options.decode_budget.resolve(longest.length)
    larger = sorted((b.resolve(longest.length), place) for place, b in enumerate(budgets))
    return next(
        (replace(options, decode_budget=budgets[place]) for size, place in larger if size > spent),
        options,
    )
