"""Which pattern each head follows: MInference 1.0, section 3.2, algorithm 1, for every head of the model.

Among candidates brought to the target cost, each head takes the one of least output error. The error is the mean of
two: over all rows, and over the question and the answer (TAIL_WEIGHT), since a head that retrieves does so in a
hundredth of the rows, which an error over all rows does not see.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from sparsekv.planner.cost_data import DeviceCost
from sparsekv.planner.crossover import dense_below
from sparsekv.planner.options import PlanOptions
from sparsekv.planner.predict import causal_tiles, is_faster_at, prefill_estimate
from sparsekv.planner.profile_data import LengthProfile, Profile
from sparsekv.planner.tables import ABSENT, DENSE, Choice, Floats, ScoreTables
from sparsekv.plans.errors import GateError, UsageError
from sparsekv.plans.patterns import TileShape
from sparsekv.plans.prefill import HeadGroup, PrefillBucket, PrefillPlan

TAIL_WEIGHT = 0.5
# Densities in a profile are rounded; one that is the target but for rounding is the target.
_ROUNDING = 1e-4
# Candidates are fitted on one prompt; on the mean of all they may cost this much more than the target.
TOLERANCE = 1.1


def allocate(profile: Profile, cost: DeviceCost, options: PlanOptions) -> PrefillPlan:
    """The prefill phase of a plan: one bucket a profiled length, and an open-ended one like the last.

    The density over all profiled heads of each bucket is at most its target. Heads, and whole lengths, that dense is
    predicted to compute faster go dense, unless `options.crossover` is off.

    Args:
        profile: what was measured.
        cost: of the device that the plan is for.
        options: settled for the profile: `target_density` has one entry a profiled length, or none where the profile
            has one density a length (the preset), or `target_speedup` is set.

    Raises:
        UsageError: a target lies below all that was profiled, or the profile has no prefill part.
        GateError: no profiled density reaches the target speedup at the longest length.
    """
    entries = [entry for entry in profile.lengths if entry.layers]
    if not entries:
        raise UsageError("expected a profile with prefill candidates, found none; profile with the prefill phase")
    targets = options.target_density or tuple(ladder(entry)[-1] for entry in entries)
    work = [_Length(profile, entry, cost, options) for entry in entries]
    if options.target_speedup is not None:
        choices = [length.at_speedup(options.target_speedup) for length in work]
    else:
        choices = [length.at_density(target) for length, target in zip(work, targets, strict=True)]
    buckets = [length.bucket(choice) for length, choice in zip(work, choices, strict=True)]
    first = work[0].dense_bucket_below(choices[0]) if options.crossover and not buckets[0].dense else ()
    last = PrefillBucket(up_to=None, extrapolated=True, same_as=buckets[-1].up_to)
    return PrefillPlan(tile=profile.tile, lengths=(*first, *buckets, last))


def ladder(entry: LengthProfile) -> tuple[float, ...]:
    """The densities that were profiled at a length, ascending."""
    return tuple(sorted({candidate.density for candidate in entry.candidates}))


class _Length:
    """The allocation of one length."""

    def __init__(self, profile: Profile, entry: LengthProfile, cost: DeviceCost, options: PlanOptions) -> None:
        self._entry, self._cost, self._crossover = entry, cost, options.crossover
        self._families = set(options.families)
        self._own_family = np.array([candidate.family in self._families for candidate in entry.candidates])
        self._longest = entry is profile.lengths[-1]
        self._tile: TileShape = profile.tile
        self._tables = ScoreTables.of(entry)
        self._error_LCH = (1.0 - TAIL_WEIGHT) * self._tables.error_LCH + TAIL_WEIGHT * self._tables.tail_error_LCH

    def at_density(self, target: float) -> Choice:
        """Algorithm 1 at a target density."""
        usable_LCH = self._usable(target)
        error_LCH = np.where(usable_LCH, self._error_LCH, np.inf)
        best_LH = np.where(usable_LCH.any(1), error_LCH.argmin(1), DENSE)
        return self._within(np.where(self._tables.present_LH, best_LH, ABSENT), target)

    def at_speedup(self, target: float) -> Choice:
        """The least sparse choice that is predicted to be `target` times as fast as dense."""
        for density in reversed(ladder(self._entry)):
            choice = self.at_density(density)
            estimate = prefill_estimate(self._cost, self._tables, choice, self._tile)
            speedup = estimate.dense_us / max(estimate.sparse_us, 1e-9)
            if speedup >= target:
                return choice
        if self._longest:
            raise GateError(
                f"expected prefill attention {target:g} times as fast as dense at {self._entry.length} tokens, found "
                f"{speedup:.2f} at the lowest density profiled; profile lower densities, or ask for less"
            )
        return choice

    def bucket(self, choice: Choice) -> PrefillBucket:
        """The choice as a bucket; dense where dense is predicted to be faster."""
        groups = tuple(
            HeadGroup(layer=scores.layer, heads=(head,), pattern=self._tables.pattern(choice, row, head))
            for row, scores in enumerate(self._entry.layers)
            for head in np.flatnonzero(choice[row] >= 0).tolist()
        )
        if not groups or (self._crossover and not self._is_faster(choice)):
            return PrefillBucket(up_to=self._entry.length, dense=True)
        return PrefillBucket(up_to=self._entry.length, heads=groups)

    def dense_bucket_below(self, choice: Choice) -> tuple[PrefillBucket, ...]:
        """A dense bucket for lengths that are too short for these patterns to pay."""
        below = dense_below(
            lambda length: is_faster_at(self._cost, self._tables, choice, self._tile, length), self._entry.length
        )
        return (PrefillBucket(up_to=below, dense=True),) if below else ()

    def _usable(self, target: float) -> npt.NDArray[np.bool_]:
        """[L, C, H]: of each ray the highest density within the target; without those that dense outruns."""
        allowed: dict[str, int] = {}
        for place, candidate in enumerate(self._entry.candidates):
            if candidate.family in self._families and candidate.density <= target * (1.0 + _ROUNDING):
                best = allowed.get(candidate.ray)
                if best is None or self._entry.candidates[best].density < candidate.density:
                    allowed[candidate.ray] = place
        if not allowed:
            raise UsageError(
                f"expected a target density of at least {ladder(self._entry)[0]:g} at {self._entry.length} tokens, "
                f"the least that was profiled, found {target:g}; raise it, or profile again with it"
            )
        usable_LCH = np.zeros(self._error_LCH.shape, bool)
        usable_LCH[:, list(allowed.values())] = True
        # A ray whose smallest pattern costs more than the target is not at the target cost.
        usable_LCH &= self._tables.density_LCH <= target * TOLERANCE
        if (self._tables.present_LH & ~usable_LCH.any(1)).any():
            raise self._too_low(target)
        return usable_LCH & ~self._outrun() if self._crossover else usable_LCH

    def _too_low(self, target: float) -> UsageError:
        least = float(np.nanmin(self._tables.density_LCH, 1).max())
        return UsageError(
            f"expected a target density that leaves room for the tiles every pattern computes (the first, the "
            f"diagonal, the one before), found {target:g} at {self._entry.length} tokens, where they take up to "
            f"{least:.3g}; raise it, or plan longer contexts or smaller tiles"
        )

    def _outrun(self) -> npt.NDArray[np.bool_]:
        """[L, C, H]: candidates that cost more than a dense head of the same launch, index building included."""
        length = self._entry.length
        causal = causal_tiles(length, self._tile)
        _, tile_us, column_us = self._cost.prefill_sparse.prices
        index_C = np.array([self._cost.index_head_us(candidate.family, length) for candidate in self._entry.candidates])
        tiles_LCH = self._tables.tiles_LCH * causal
        sparse_LCH = tiles_LCH * tile_us + self._tables.columns_LCH * causal * column_us + index_C[None, :, None]
        return np.asarray(sparse_LCH >= causal * tile_us)

    def _within(self, choice: Choice, target: float) -> Choice:
        """Moves heads to sparser candidates until the mean density, over all prompts, is within the target.

        Candidates were fitted on the first calibration prompt; on the others they cost a little more or less. The
        moves that add least error for the tiles they save come first.
        """
        tables = self._tables
        limit = target * int((choice != ABSENT).sum())
        density_LH = tables.take(tables.density_LCH, choice, 1.0)
        over = float(density_LH.sum()) - limit
        moved = choice.copy()
        for _, saved, row, head, candidate in self._moves(choice, density_LH, target) if over > 0.0 else []:
            moved[row, head] = candidate
            over -= saved
            if over <= 0.0:
                break
        if over > limit * _ROUNDING and not (moved == DENSE).any():
            raise self._too_low(target)
        return moved

    def _moves(self, choice: Choice, density_LH: Floats, target: float) -> list[tuple[float, float, int, int, int]]:
        """One move a head: to its least-error candidate within the target. (error a tile, tiles, layer, head, to)."""
        moves = []
        for row, head in np.argwhere((choice >= 0) & (density_LH > target)).tolist():
            within_C = self._own_family & (self._tables.density_LCH[row, :, head] <= target)
            if within_C.any():
                error_C = np.where(within_C, self._error_LCH[row, :, head], np.inf)
                candidate = int(error_C.argmin())
                saved = float(density_LH[row, head] - self._tables.density_LCH[row, candidate, head])
                added = float(error_C[candidate] - self._error_LCH[row, choice[row, head], head])
                moves.append((max(added, 0.0) / saved, saved, row, head, candidate))
        return sorted(moves)

    def _is_faster(self, choice: Choice) -> bool:
        estimate = prefill_estimate(self._cost, self._tables, choice, self._tile)
        return estimate.sparse_us < estimate.dense_us
