"""Means over calibration prompts: from the records of a profiling run to the profile of a length."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sparsekv.planner.profile_data import Candidate, LayerScores, LengthProfile, Reuse, SelectorChoice, Table
from sparsekv.planner.search.partial import LayerRecord
from sparsekv.plans.patterns import Budget, Pattern

_TABLES = ("error", "tail_error", "mass", "tiles", "columns")


def collected(
    length: int,
    prompt_tokens: Sequence[int],
    candidates: Sequence[Candidate],
    budgets: Sequence[Budget],
    selectors: Sequence[SelectorChoice],
    records: Sequence[Sequence[LayerRecord]],
) -> LengthProfile:
    """The profile of one length.

    Args:
        length: the length.
        prompt_tokens: tokens of each calibration prompt.
        candidates: what was scored; empty without the prefill phase.
        budgets: of the decode statistics; empty without the decode phase.
        selectors: of the decode statistics.
        records: [layer][prompt].
    """
    places: dict[Pattern, int] = {}
    layers = tuple(_layer(samples, places) for samples in records if samples[0].patterns)
    return LengthProfile(
        length=length,
        prompt_tokens=tuple(prompt_tokens),
        candidates=tuple(candidates) if layers else (),
        patterns=tuple(places),
        layers=layers,
        reuse=_reuse(budgets, selectors, records) if budgets else None,
    )


def _layer(samples: Sequence[LayerRecord], places: dict[Pattern, int]) -> LayerScores:
    patterns = tuple(tuple(places.setdefault(pattern, len(places)) for pattern in row) for row in samples[0].patterns)
    means = {name: _mean([getattr(sample, name) for sample in samples]) for name in _TABLES}
    return LayerScores(layer=samples[0].layer, patterns=patterns, **means)


def _mean(tables: Sequence[Table]) -> Table:
    return tuple(tuple(float(value) for value in row) for row in np.mean(np.array(tables), 0))


def _reuse(
    budgets: Sequence[Budget], selectors: Sequence[SelectorChoice], records: Sequence[Sequence[LayerRecord]]
) -> Reuse:
    kept_JSBI = [np.mean([np.array(sample.kept) for sample in samples], 0) for samples in records]
    return Reuse(
        budgets=tuple(budgets),
        selectors=tuple(selectors),
        importance=tuple(float(np.mean([sample.importance for sample in samples])) for samples in records),
        kept=tuple(
            tuple(tuple(tuple(kept_SBI[s, b].tolist()) for kept_SBI in kept_JSBI) for b in range(len(budgets)))
            for s in range(len(selectors))
        ),
    )
