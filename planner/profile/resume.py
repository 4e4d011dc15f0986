"""Records of a profiling run, on disk so that an interrupted run goes on; and their means over prompts."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import numpy.typing as npt

from sparsekv.planner.profile.calibration import CalibrationPrompt, over_prompts
from sparsekv.planner.profile.profile_data import (
    Candidate,
    LayerScores,
    LengthProfile,
    PartOfAll,
    Reuse,
    ScoreParts,
    Table,
    TokenChoice,
)
from sparsekv.planner.records import RunFile, RunRecord, RunSettings
from sparsekv.plans.files import content_digest
from sparsekv.plans.patterns import Pattern
from sparsekv.plans.types import Digest, Length, Natural, rounded

Key = tuple[int, int, int]
_LEAST_DAMAGE = 1e-12  # of a prompt on which nothing does any


class LayerRecord(ScoreParts, RunRecord):
    """One layer over one calibration prompt."""

    length: Length
    sample: Natural
    patterns: tuple[tuple[Pattern, ...], ...] = ()
    importance: PartOfAll = 0.0
    kept: Table = ()  # [budget][filter layer]

    @property
    def key(self) -> Key:
        """Returns the identity of the record: length, prompt, layer."""
        return self.length, self.sample, self.layer


class ProfileRun(RunSettings):
    """A profiling run, by the digest of everything that its records depend on."""

    WHAT: ClassVar[str] = "an unfinished profile"
    RECORDS: ClassVar[Any] = LayerRecord
    kind: Literal["sparsekv.partial"] = "sparsekv.partial"
    schema_version: Literal[1] = 1
    run: Digest


def records_at(path: Path | None, run: Mapping[str, Any]) -> RunFile[ProfileRun]:
    """Returns the records of an earlier run of the same thing, or none yet.

    Args:
        path: of the partial file; None keeps records in memory only.
        run: everything that records depend on, as JSON data.

    Raises:
        UsageError: the file is of a run with other options.
    """
    return RunFile.of(ProfileRun(run=content_digest(run)), path)


def length_means(
    length: int,
    prompts: Sequence[CalibrationPrompt],
    candidates: Sequence[Candidate],
    choice: TokenChoice | None,
    records: Sequence[Sequence[LayerRecord]],
) -> LengthProfile:
    """The profile of one length: means over its calibration prompts.

    Args:
        candidates: what was scored; empty without the prefill phase.
        choice: of the decode statistics; None without the decode phase.
        records: [layer][prompt].
    """
    numbers: dict[Pattern, int] = {}
    searched = [samples for samples in records if samples[0].patterns]
    weights = _prompt_weights(searched) if searched else ()
    tasks = [prompt.task for prompt in prompts]
    layers = tuple(_layer_means(samples, weights, tasks, numbers) for samples in searched)
    return LengthProfile(
        length=length,
        prompt_tokens=tuple(len(prompt.ids) for prompt in prompts),
        prompt_weights=weights,
        candidates=tuple(candidates) if layers else (),
        patterns=tuple(numbers),
        layers=layers,
        reuse=_reuse_means(choice, records) if choice else None,
    )


def _prompt_weights(records: Sequence[Sequence[LayerRecord]]) -> tuple[float, ...]:
    """Returns what the damage on each prompt counts, geometric mean 1: less where all of it is larger, by the square
    root.

    Damage differs by orders of magnitude between prompts, with how sure the model is of its answer: without weights the
    least sure prompt alone would decide.
    """
    medians = [[np.median(sample.damage, 0).sum() for sample in samples] for samples in records]
    logs = 0.5 * np.log(np.maximum(np.sum(medians, 0), _LEAST_DAMAGE))
    return tuple(rounded(float(weight)) for weight in np.exp(logs.mean() - logs))


def _layer_means(
    samples: Sequence[LayerRecord], weights: Sequence[float], tasks: Sequence[str], numbers: dict[Pattern, int]
) -> LayerScores:
    patterns = tuple(tuple(numbers.setdefault(one, len(numbers)) for one in row) for row in samples[0].patterns)
    damage_PSH = np.array([sample.damage for sample in samples]) * np.array(weights)[:, None, None]
    first = samples[0]
    return LayerScores(
        layer=first.layer,
        candidates=first.candidates,
        patterns=patterns,
        damage=as_table(over_prompts(damage_PSH, tasks)),
        worst=as_table(damage_PSH.max(0)),
        tiles=as_table(np.mean([sample.tiles for sample in samples], 0)),
        columns=as_table(np.mean([sample.columns for sample in samples], 0)),
    )


def _reuse_means(choice: TokenChoice, records: Sequence[Sequence[LayerRecord]]) -> Reuse:
    kept_JBI = [np.mean([sample.kept for sample in samples], 0) for samples in records]
    return Reuse(
        **dict(choice),
        importance=tuple(float(np.mean([sample.importance for sample in samples])) for samples in records),
        kept=tuple(as_table(kept_BI[b] for kept_BI in kept_JBI) for b in range(len(choice.budgets))),
    )


def as_table(rows: Iterable[npt.NDArray[np.float64]]) -> Table:
    """Rows of numbers as files hold them."""
    return tuple(tuple(map(float, row)) for row in rows)
