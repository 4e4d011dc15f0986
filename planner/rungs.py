"""The next plan after one that missed its test: denser at the lengths that missed, or dense there.

Both phases are tested together, so that both are made denser. Three plans are tried; a length that missed in the last
of them becomes dense, as does one that nothing makes denser.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

from sparsekv.planner.common_options import Phase
from sparsekv.planner.filter_layers import choose_filter_layers, takes_trials
from sparsekv.planner.options import Settled
from sparsekv.planner.profile.profile_data import Profile
from sparsekv.plans.patterns import Budget
from sparsekv.plans.types import format_length

_DENSER = 1.3
_LOSS_STEP = 0.5
_LEAST_LOSS = 0.005


def denser(options: Settled, profile: Profile, lengths: Collection[int]) -> Settled:
    """Options of the next denser plan at these lengths; where nothing is denser, they are dense. The same where they
    are dense already: what such a plan loses is rounding.
    """
    found = options
    for phase in options.phases:
        found = _stricter(found, profile, phase, lengths)
    return dense_at(options, profile, lengths) if found == options else found


def dense_at(options: Settled, profile: Profile, lengths: Collection[int]) -> Settled:
    """Options of a plan that is dense at these lengths."""
    dense = {
        phase: (*options.dense_at(phase), *(n for n in _sparse_lengths(options, profile, phase) if n in lengths))
        for phase in options.phases
    }
    dense = {phase: some for phase, some in dense.items() if some}
    return options if dense == options.dense else options.but(dense=dense)


def _sparse_lengths(options: Settled, profile: Profile, phase: Phase) -> list[int]:
    """The profiled lengths at which a phase need not be dense."""
    profiled = (entry.length for entry in profile.lengths if (entry.layers if phase == "prefill" else entry.reuse))
    return [length for length in profiled if length not in options.dense_at(phase)]


def _stricter(options: Settled, profile: Profile, phase: Phase, lengths: Collection[int]) -> Settled:
    """The same options where there are no stricter ones, or none that leave the other lengths sparse."""
    sparse = _sparse_lengths(options, profile, phase)
    if not any(length in lengths for length in sparse):
        return options
    if phase == "prefill":
        return _denser_prefill(options, profile, [length for length in sparse if length in lengths])
    stricter = _more_careful(options, profile)
    plans = [choose_filter_layers(profile, one) for one in (options, stricter)]
    before, after = ({length for length in sparse if not plan.bucket(length).dense} for plan in plans)
    return stricter if before.difference(lengths) <= after else options


def _denser_prefill(options: Settled, profile: Profile, lengths: Collection[int]) -> Settled:
    """A larger budget at the lengths that missed, which the allocation spends on the heads that it helps most."""
    if not options.target_density:
        return options
    targets = list(options.target_density)
    for number, entry in enumerate(entry for entry in profile.lengths if entry.layers):
        if entry.length in lengths:
            more = round(targets[number] * _DENSER, 4)
            targets[number] = more if more < 1.0 else targets[number]  # dense everywhere is no plan
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


def denser_remarks(asked: Settled, used: Settled, profile: Profile) -> Iterator[str]:
    """A line for each part of a plan that is denser than what was asked for.

    Args:
        asked: settled, before the first test.
        used: those of the plan.
    """
    entries = [entry for entry in profile.lengths if entry.layers]
    for entry, before, after in zip(entries, asked.target_density, used.target_density, strict=False):
        if before != after and entry.length not in used.dense_at("prefill"):
            at = format_length(entry.length)
            yield f"prefill at {at} is planned for a density of {after:g}: with {before:g} the plan missed its test"
    if not _sparse_lengths(used, profile, "decode"):
        return
    if asked.decode_bound != used.decode_bound:
        yield (
            f"decode is planned for a divergence of {used.decode_bound:g} on calibration prompts: with "
            f"{asked.decode_bound:g} the plan missed its test"
        )
    if (asked.loss_bound, asked.decode_budget) != (used.loss_bound, used.decode_budget):
        yield (
            f"decode is planned for a loss of {used.loss_bound:g} and a budget of {used.decode_budget}: with "
            f"{asked.loss_bound:g} and {asked.decode_budget} the plan missed its test"
        )


def dense_remarks(options: Settled, lost: Mapping[int, Sequence[str]]) -> Iterator[str]:
    """A line for each length that is dense, with what each plan lost there."""
    for length in sorted({n for some in options.dense.values() for n in some}):
        told = ", then ".join(lost.get(length, ()))
        yield f"{format_length(length)} is dense: every plan that was tried lost too much there ({told})"
