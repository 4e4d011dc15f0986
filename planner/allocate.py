"""Which pattern each head follows: MInference 1.0, section 3.2, algorithm 1, for every head of the model.

Among candidates brought to the target cost, each head takes the one of least output error. The error is the mean of
two: over all rows, and over the question and the answer (TAIL_WEIGHT), since a head that retrieves does so in a
hundredth of the rows, which an error over all rows does not see.

A target density bounds the mean over the heads that are sparse. Heads that the crossover makes dense stand outside:
they are dense because that is faster, so that sparser neighbours would lose accuracy and win nothing that was asked
for. The plan is then denser than its target, which `crossover_remarks` tells; without a crossover no head is dense and
the target bounds the whole.
"""

from __future__ import annotations

from collections.abc import Collection
from itertools import pairwise

import numpy as np

from sparsekv.planner.cost.crossover import Mask, Savings, longest_losing, pays
from sparsekv.planner.cost.device_cost import DeviceCost
from sparsekv.planner.cost.predict import ABSENT, DENSE, Choice, Floats, ScoreTables, layer_times, prefill_estimate
from sparsekv.planner.options import ROUNDING, Family, PlanOptions, mandatory_density, too_low
from sparsekv.planner.profile.profile_data import LengthProfile, Profile
from sparsekv.plans.errors import GateError, UsageError
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.phases import HeadGroup, PrefillBucket, PrefillPlan

TAIL_WEIGHT = 0.5
# Candidates are fitted on one prompt; on the mean of all they may cost this much more than the target.
TOLERANCE = 1.1


def allocate(profile: Profile, cost: DeviceCost, options: PlanOptions) -> PrefillPlan:
    """The prefill phase of a plan: one bucket a profiled length, and an open-ended one like the last (dense where that
    would not pay all the way up to the model's context).

    The density over the sparse heads of each bucket is at most its target. Heads, layers, and lengths between the
    profiled ones that dense is predicted to compute faster go dense, unless `options.crossover` is off.

    Args:
        options: settled for the profile: `target_density` has one entry a profiled length, or none where the profile
            has one density a length (the preset), or `target_speedup` is set.

    Raises:
        UsageError: a target lies below all that was profiled.
        GateError: no profiled density reaches the target speedup at the longest length.
    """
    entries = [entry for entry in profile.lengths if entry.layers]
    targets = options.target_density or tuple(entry.densities[-1] for entry in entries)
    work = [_Length(profile, entry, cost, options) for entry in entries]
    if options.target_speedup is not None:
        choices = [length.at_speedup(options.target_speedup) for length in work]
    else:
        choices = [length.at_density(target) for length, target in zip(work, targets, strict=True)]
    buckets: list[PrefillBucket] = []
    for length, choice in zip(work, choices, strict=True):
        above = buckets[-1].up_to if buckets else None
        buckets += length.buckets(choice, above or 0)
    last = PrefillBucket(up_to=None, extrapolated=True, same_as=buckets[-1].up_to)
    if not (buckets[-1].dense or work[-1].pays_up_to(profile.model.context_length, choices[-1])):
        last = PrefillBucket(up_to=None, dense=True)
    # A dense bucket that a longer dense one follows is part of it.
    lengths = [bucket for bucket, after in pairwise([*buckets, last]) if not (bucket.dense and after.dense)]
    return PrefillPlan(tile=profile.tile, lengths=(*lengths, last))


def check_profiled(profile: Profile, options: PlanOptions) -> None:
    """Finds out, without a device cost, whether anything was profiled within the target densities.

    Args:
        options: settled for the profile.

    Raises:
        UsageError: a target lies below all that was profiled.
    """
    entries = [entry for entry in profile.lengths if entry.layers]
    for entry, target in zip(entries, options.target_density, strict=False):
        _rays_within(entry, options.families, target)


def _rays_within(entry: LengthProfile, families: Collection[Family], target: float) -> dict[str, int]:
    """Of each ray the candidate of highest density within the target."""
    numbered = enumerate(entry.candidates)
    within = [
        (candidate.density, number, candidate.ray)
        for number, candidate in numbered
        if candidate.family in families and candidate.density <= target * (1.0 + ROUNDING)
    ]
    if not within:
        raise UsageError(
            f"expected a target density of at least {entry.densities[0]:g} at {entry.length} tokens, "
            f"the least that was profiled, found {target:g}; raise it, or profile again with it"
        )
    return {ray: number for _, number, ray in sorted(within)}


class _Length:
    """The allocation of one length."""

    def __init__(self, profile: Profile, entry: LengthProfile, cost: DeviceCost, options: PlanOptions) -> None:
        self._profile, self._entry, self._cost = profile, entry, cost
        self._longest = entry is profile.lengths[-1]
        self._tile: TileShape = profile.tile
        self._tables = ScoreTables.of(entry)
        self._savings = Savings(cost, self._tables, profile.tile) if options.crossover else None
        self._error_LCH = (1.0 - TAIL_WEIGHT) * self._tables.error_LCH + TAIL_WEIGHT * self._tables.tail_error_LCH
        self._families = options.families
        self._own_C = np.array([candidate.family in options.families for candidate in entry.candidates])

    def at_density(self, target: float) -> Choice:
        """Algorithm 1 at a target density, and what of it the crossover leaves sparse."""
        usable_LCH = self._usable(target)
        allowed_LCH = np.broadcast_to(self._own_C[:, None], usable_LCH.shape)
        if self._savings is None:
            return self._within(self._best(usable_LCH), allowed_LCH, target)
        allowed_LCH = allowed_LCH & self._savings.paying_candidates()
        choice = self._without_losing_families(usable_LCH, allowed_LCH, self._savings)
        while True:  # each turn but the last makes a layer dense
            sparse = self._savings.without_losing_layers(choice)
            choice = self._within(sparse, allowed_LCH, target)
            if np.array_equal(choice, sparse):
                return choice

    def at_speedup(self, target: float) -> Choice:
        """The least sparse choice that is predicted to be `target` times as fast as dense."""
        choice, speedup = np.where(self._tables.present_LH, DENSE, ABSENT), 1.0
        for density in reversed(self._entry.densities):
            try:
                choice = self.at_density(density)
            except UsageError:  # no room for mandatory tiles here, nor at lower densities
                break
            estimate = prefill_estimate(self._cost, self._tables, choice, self._profile)
            speedup = estimate.dense_us / max(estimate.sparse_us, 1e-9)
            if speedup >= target:
                return choice
        if self._longest:
            raise GateError(
                f"expected prefill attention {target:g} times as fast as dense at {self._entry.length} tokens, found "
                f"{speedup:.2f} at the lowest density profiled; profile lower densities, or ask for less"
            )
        return choice

    def buckets(self, choice: Choice, above: int) -> list[PrefillBucket]:
        """The choice as a bucket, behind a dense one for the lengths from `above` on at which it would not pay."""
        length = self._entry.length
        groups = tuple(
            HeadGroup(layer=scores.layer, heads=(head,), pattern=self._tables.pattern(choice, row, head))
            for row, scores in enumerate(self._entry.layers)
            for head in np.flatnonzero(choice[row] >= 0).tolist()
        )
        if not groups:
            return [PrefillBucket(up_to=length, dense=True)]
        below = None if self._savings is None else longest_losing(lambda n: self._pays_at(choice, n), length, above)
        dense = [PrefillBucket(up_to=below, dense=True)] if below else []
        return [*dense, PrefillBucket(up_to=length, heads=groups)]

    def pays_up_to(self, longest: int, choice: Choice) -> bool:
        """Whether the choice pays at longer lengths too, or is to hold whether it pays or not."""
        length = self._entry.length
        if self._savings is None or longest <= length:
            return True
        return longest_losing(lambda n: self._pays_at(choice, n), longest + 1, length) is None

    def _pays_at(self, choice: Choice, length: int) -> bool:
        times = layer_times(self._cost, self._tables, choice, self._tile, length)
        return pays(float(times.sparse_us.sum()), float(times.dense_us.sum()))

    def _usable(self, target: float) -> Mask:
        """[L, C, H]: of each ray the highest density within the target."""
        allowed = _rays_within(self._entry, self._families, target)
        usable_LCH = np.zeros(self._error_LCH.shape, bool)
        usable_LCH[:, list(allowed.values())] = True
        # A ray whose smallest pattern costs more than the target is not at the target cost.
        usable_LCH &= self._tables.density_LCH <= target * TOLERANCE
        without_LH = self._tables.present_LH & ~usable_LCH.any(1)
        if without_LH.any():
            own_LCH = self._tables.density_LCH[:, self._own_C]
            raise self._unreached(target, float(own_LCH.min(1)[without_LH].max()))
        return usable_LCH

    def _best(self, usable_LCH: Mask) -> Choice:
        """The candidate of least error for each head; dense where none is usable."""
        error_LCH = np.where(usable_LCH, self._error_LCH, np.inf)
        best_LH = np.where(usable_LCH.any(1), error_LCH.argmin(1), DENSE)
        return np.where(self._tables.present_LH, best_LH, ABSENT)

    def _without_losing_families(self, usable_LCH: Mask, allowed_LCH: Mask, savings: Savings) -> Choice:
        """Each layer without the families whose index costs it more than they save; narrows `allowed_LCH` to that."""
        choice = self._best(usable_LCH & allowed_LCH)
        for row in range(len(choice)):
            while (losing := savings.losing_family(choice[row], row)) is not None:
                allowed_LCH[row, [candidate.family == losing for candidate in self._entry.candidates]] = False
                choice[row] = self._best(usable_LCH & allowed_LCH)[row]
        return choice

    def _within(self, choice: Choice, allowed_LCH: Mask, target: float) -> Choice:
        """Moves heads to sparser candidates until the mean density of sparse heads is within the target.

        Candidates were fitted on the first calibration prompt; on the others they cost a little more or less. The
        moves that add least error for the tiles they save come first.
        """
        tables = self._tables
        limit = target * int((choice >= 0).sum())
        density_LH = np.where(choice >= 0, tables.take(tables.density_LCH, choice, 0.0), 0.0)
        over = float(density_LH.sum()) - limit
        moved = choice.copy()
        for _, saved, row, head, candidate in self._moves(choice, density_LH, allowed_LCH, target) if over > 0 else []:
            moved[row, head] = candidate
            over -= saved
            if over <= 0.0:
                break
        if over > limit * ROUNDING:
            raise self._unreached(target, target + over / int((choice >= 0).sum()))
        return moved

    def _moves(
        self, choice: Choice, density_LH: Floats, allowed_LCH: Mask, target: float
    ) -> list[tuple[float, float, int, int, int]]:
        """One move a head: to its least-error candidate within the target. (error a tile, tiles, layer, head, to)."""
        moves = []
        for row, head in np.argwhere((choice >= 0) & (density_LH > target)).tolist():
            within_C = allowed_LCH[row, :, head] & (self._tables.density_LCH[row, :, head] <= target)
            if within_C.any():
                error_C = np.where(within_C, self._error_LCH[row, :, head], np.inf)
                candidate = int(error_C.argmin())
                saved = float(density_LH[row, head] - self._tables.density_LCH[row, candidate, head])
                added = float(error_C[candidate] - self._error_LCH[row, choice[row, head], head])
                moves.append((max(added, 0.0) / saved, saved, row, head, candidate))
        return sorted(moves)

    def _unreached(self, target: float, found: float) -> UsageError:
        families = {
            candidate.family for position, candidate in enumerate(self._entry.candidates) if self._own_C[position]
        }
        least = min(mandatory_density(self._entry.length, self._tile, family) for family in families)
        if least > target:
            return too_low(target, self._entry.length, found)
        return UsageError(
            f"expected candidates of {', '.join(sorted(families))} that come to a density of {target:g} over all "
            f"calibration prompts at {self._entry.length} tokens, found {found:.4g} with the sparsest: on some prompts "
            f"they cost more than on the one they were fitted on. Ask for {min(1.0, found * 1.005):.3g} with the same "
            "profile, or profile a lower one"
        )
