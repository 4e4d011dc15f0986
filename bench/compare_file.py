"""The file of `sparsekv compare`: the outcome of every sample, what each method was held to, and tables of both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import numpy as np

from sparsekv.bench.intervals import Interval, bootstrap_interval, score_interval
from sparsekv.bench.suite import ModelRun
from sparsekv.planner.evaluation.predictions import DENSE
from sparsekv.planner.records import RunFile, RunRecord
from sparsekv.plans.phases import PrefillPlan
from sparsekv.plans.types import (
    Digest,
    Length,
    Natural,
    NonNegative,
    Portion,
    Positive,
    Share,
    Text,
    columns,
    format_length,
)

_RESAMPLES = 2000  # of paired divergences
_ROUNDING = 3.0  # times it: nearer to dense is not told apart from it
Name = tuple[str, str]  # of a method, and what it is held to
DENSE_NAME: Name = (DENSE, "1")
SPENT = {"prefill": "tiles", "decode": "tokens read", "eviction": "bytes"}
SHOWN = {
    "minference": "MInference, searched",
    "line_ratio": "1000:6096 in every head",
    "xattention": "XAttention",
    "flexprefill": "FlexPrefill",
    "flashprefill": "FlashPrefill",
    "skip_softmax": "skip-softmax",
    "stem": "Stem without values",
}
EARLIER = SHOWN | {"minference": "1000:6096 in every head", "flexprefill": "FlexPrefill's block rule"}


class Sampled(RunRecord):
    """One method on one sample.

    Attributes:
        at: what it is held to.
        kl: divergence from dense on dense's own text, a mean over its first tokens.
        share: of tiles, of tokens read or of bytes, of the batch; None where answers ended before a step.
        prefill_seconds, step_seconds: of its prompt and of a step of its batch; None in plain torch.
    """

    method: Text
    at: Text
    task: Text
    length: Length
    number: Natural
    score: Portion
    kl: NonNegative
    share: Portion | None = None
    prefill_seconds: NonNegative | None = None
    step_seconds: NonNegative | None = None

    @property
    def key(self) -> tuple[str, str, int, str, int]:
        return self.method, self.at, self.length, self.task, self.number


class Held(RunRecord):
    """The setting of a method at a length.

    Attributes:
        target: the share, or seconds, that it was held to.
        made_by: digest of its plan, or of its code where that is no part of sparsekv.
    """

    method: Text
    at: Text
    length: Length
    target: NonNegative
    budget: Share | None = None
    setting: str = ""
    made_by: Digest | None = None

    @property
    def key(self) -> tuple[str, str, int]:
        return self.method, self.at, self.length


class Searched(RunRecord):
    """The patterns of MInference's search at a length; every target scales the same ones."""

    length: Length
    prefill: PrefillPlan

    @property
    def key(self) -> int:
        return self.length


class CompareRun(ModelRun):
    """Runs into one file: more methods, shares, tasks, lengths and samples may be added."""

    WHAT: ClassVar[str] = "results of `sparsekv compare`"
    RECORDS: ClassVar[Any] = Sampled | Held | Searched
    TOLD: ClassVar[frozenset[str]] = ModelRun.TOLD | {"samples"}
    kind: Literal["sparsekv.compare"] = "sparsekv.compare"
    schema_version: Literal[1, 2] = 2  # of the first some rules were others, see EARLIER, and dense has no divergence
    phase: Literal["prefill", "decode", "eviction"]
    suite: Text
    reference: Text
    samples: Positive
    device: Text
    backend: Text
    profile: Digest | None = None


class CompareFile(RunFile[CompareRun]):
    """The results so far."""

    def missing(self, *names: Name, task: str, length: int, numbers: Sequence[int]) -> list[Name]:
        known = self.all(Sampled)
        return [name for name in names if any((*name, length, task, number) not in known for number in numbers)]


@dataclass(frozen=True, slots=True)
class Row:
    """One method at one length beside dense and the reference, over the samples that all three have.

    Attributes:
        over_dense, over: mean of its score, or the reference's, minus dense's, or its own, with the 95% interval of
            paired differences; in percent. The second is None of the reference itself.
        kl: of dense, what rounding alone comes to: dense as this runtime computes it.
        kl_interval: None of a single sample.
        ratio: divergence of the reference over its own on the samples of both, with a paired interval.
        prefill_seconds, step_seconds: medians.
    """

    method: str
    at: str
    length: int
    setting: str
    samples: int
    score: float
    over_dense: tuple[float, Interval] | None
    over: tuple[float, Interval] | None
    kl: float
    kl_interval: Interval | None
    ratio: tuple[float, Interval | None] | None
    share: float
    prefill_seconds: float | None
    step_seconds: float | None


def rows(file: CompareFile) -> Iterator[Row]:
    """By length and what is held to, dense first and then the reference."""
    names: dict[tuple[int, str], dict[str, None]] = {}
    for one in file.all(Held).values():
        names.setdefault((one.length, one.at), {})[one.method] = None
    for (length, at), methods in sorted(names.items()):
        ordered = sorted(methods, key=lambda name: name != file.settings.reference)
        yield from (row for name in (DENSE, *ordered) if (row := _row(file, name, at, length)))


def _row(file: CompareFile, method: str, at: str, length: int) -> Row | None:
    reference = file.settings.reference
    own, ours = _of(file, method, at, length), _of(file, reference, at, length)
    dense = _of(file, DENSE, DENSE_NAME[1], length)
    if method == DENSE:
        own = dense
    if not own:
        return None
    held = file.all(Held).get((method, at, length))
    is_compared = method not in (DENSE, reference) and ours.keys() & own.keys()
    kls = [one.kl for one in own.values()]
    return Row(
        method=method,
        at=at,
        length=length,
        setting=held.setting if held else "",
        samples=len(own),
        score=100.0 * float(np.mean([one.score for one in own.values()])),
        over_dense=None if method == DENSE else _difference(dense, own),
        over=_difference(own, ours) if is_compared else None,
        kl=float(np.mean(kls)),
        kl_interval=bootstrap_interval(kls),
        ratio=_ratio(own, ours) if is_compared else None,
        share=float(np.mean([one.share for one in own.values() if one.share is not None] or [math.nan])),
        prefill_seconds=_median([one.prefill_seconds for one in own.values()]),
        step_seconds=_median([one.step_seconds for one in own.values()]),
    )


Samples = dict[tuple[str, int], Sampled]


def _of(file: CompareFile, method: str, at: str, length: int) -> Samples:
    """The samples of a method; where a run was stopped, as many of each task as all tasks have, which weigh alike."""
    every = (one for one in file.all(Sampled).values() if (one.method, one.at, one.length) == (method, at, length))
    found = {(one.task, one.number): one for one in every}
    least = min(Counter(task for task, _ in found).values(), default=0)
    return {key: one for key, one in found.items() if key[1] < least}


def _difference(one: Samples, other: Samples) -> tuple[float, Interval]:
    """The mean of other minus one over the samples of both, in percent."""
    both = [key for key in one if key in other]
    scores = [one[key].score for key in both], [other[key].score for key in both]
    low, high = score_interval(*scores)
    return 100.0 * float(np.mean(scores[1]) - np.mean(scores[0])), (100.0 * low, 100.0 * high)


def _ratio(one: Samples, other: Samples) -> tuple[float, Interval | None] | None:
    """The mean divergence of other over that of one; resampled together."""
    both = [key for key in one if key in other]
    kl_NW = np.array([[other[key].kl, one[key].kl] for key in both])
    if not kl_NW[:, 1].any():
        return None
    mean = kl_NW.mean(0)
    drawn = np.random.default_rng(0).integers(len(both), size=(_RESAMPLES, len(both)))
    above_X, below_X = kl_NW[drawn].mean(1).T
    known = below_X > 0.0
    bounds = np.quantile(above_X[known] / below_X[known], (0.025, 0.975)) if len(both) > 1 else None
    return float(mean[0] / mean[1]), None if bounds is None else (float(bounds[0]), float(bounds[1]))


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return float(np.median(known)) if known else None


# --- tables -----------------------------------------------------------------------------------------------------------


def table_of(file: CompareFile, every: Sequence[Row]) -> list[tuple[str, ...]]:
    """A header and a line a row."""
    reference, spent = file.settings.reference, SPENT[file.settings.phase]
    header = (
        *("length", "held to", "method", "setting", spent, "score", "minus dense", f"{reference} minus it"),
        *("divergence", f"{reference}'s over it", "prompt s", "step ms"),
    )
    return [header, *(_cells(row, shown(file, row.method)) for row in every)]


def _share(row: Row) -> str:
    return "-" if math.isnan(row.share) else f"{row.share:.3f}"  # answers that all ended before a step


def _cells(row: Row, name: str) -> tuple[str, ...]:
    kl = f"{row.kl:.4f}" + ("" if row.kl_interval is None else " [{:.4f}, {:.4f}]".format(*row.kl_interval))
    kl = (f"rounding {row.kl:.2g}" if row.kl else "-") if row.method == DENSE else kl
    return (
        *(format_length(row.length), row.at, name, row.setting or "-", _share(row), f"{row.score:.1f}"),
        *(_points(row.over_dense), _points(row.over), kl, _times(row.ratio)),
        "-" if row.prefill_seconds is None else f"{row.prefill_seconds:.3f}",
        "-" if row.step_seconds is None else f"{1000.0 * row.step_seconds:.1f}",
    )


def shown(file: CompareFile, method: str) -> str:
    """The name that people read."""
    return (SHOWN if file.settings.schema_version > 1 else EARLIER).get(method, method)


def _times(ratio: tuple[float, Interval | None] | None) -> str:
    if ratio is None:
        return "-"
    return f"{ratio[0]:.3g}" + (" [{:.3g}, {:.3g}]".format(*ratio[1]) if ratio[1] else "")


def _points(difference: tuple[float, Interval] | None) -> str:
    return "-" if difference is None else "{:+.1f} [{:+.1f}, {:+.1f}]".format(difference[0], *difference[1])


def text(file: CompareFile) -> str:
    """The table and the sentences below it."""
    every = list(rows(file))
    table = columns(table_of(file, every), right=(4, 5, 10, 11))
    facts = f"{file.settings.model}, {file.settings.dtype}, {file.settings.device}, {file.settings.suite}"
    return "\n\n".join((table, facts, *sentences(file, every)))


def sentences(file: CompareFile, every: Sequence[Row]) -> Iterator[str]:
    """The reference beside the nearest of the others, for each length and each share or time."""
    reference, spent = file.settings.reference, SPENT[file.settings.phase]
    for length, at in dict.fromkeys((row.length, row.at) for row in every):
        same = [row for row in every if (row.length, row.at) == (length, at)]
        ours = next((row for row in same if row.method == reference), None)
        others = [row for row in same if row.over is not None]
        if ours is None or not others:
            continue
        best = min(others, key=lambda row: row.kl)
        assert best.over is not None
        difference, (low, high) = best.over
        more = "more" if low > 0.0 else "fewer" if high < 0.0 else None
        told = f"{abs(difference):.1f} points {more}" if more else "no difference of scores is shown"
        dense = next((row for row in same if row.method == DENSE), None)
        near = dense is not None and dense.kl > 0.0 and ours.kl < _ROUNDING * dense.kl
        name = shown(file, best.method)
        ratio = f"{_times(best.ratio)} of that of {name}" if best.ratio else f"{name} has none"
        if dense and dense.kl:
            ratio += f" ({'at rounding, which' if near else 'rounding alone'} comes to {dense.kl:.2g})"
        yield (
            f"At {format_length(length)}, {reference} at {_share(ours)} of the {spent} diverges by {ours.kl:.4f} "
            f"nats, {ratio}, the nearest of {len(others)} others, at {_share(best)}: {told} "
            f"[{low:+.1f}, {high:+.1f}] on {min(ours.samples, best.samples)} samples."
        )
