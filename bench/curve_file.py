"""Points of curves: what each method costs and keeps at a range of densities."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from sparsekv.bench.suite import ModelRun
from sparsekv.planner.records import RunRecord
from sparsekv.plans.types import Digest, Length, Natural, NonNegative, Share, Text

Interval = tuple[NonNegative, NonNegative]


class CurvePoint(RunRecord):
    """One method at one density and length, in one phase; what was not measured is None.

    Attributes:
        setting: the value of what the method is set by, such as "tau 0.9".
        density: share of tiles (prefill) or of cached tokens read (decode).
        samples: of all tasks together.
        kl: mean divergence of next-token logits from dense, in nats.
        agreement: share of equal top-1 tokens.
        exact: share of samples of which every token of dense's greedy text is picked.
        accuracy, dense_accuracy: share of right answers, over the tasks that dense solves.
    """

    method: Text
    setting: str = ""
    length: Length
    phase: Literal["prefill", "decode"]
    density: Share
    samples: Natural = 0
    kl: NonNegative | None = None
    kl_interval: Interval | None = None
    agreement: NonNegative | None = None
    agreement_interval: Interval | None = None
    exact: NonNegative | None = None
    accuracy: NonNegative | None = None
    dense_accuracy: NonNegative | None = None

    @property
    def key(self) -> tuple[int, str, str, str]:
        return self.length, self.phase, self.method, self.setting


class CurveRun(ModelRun):
    """One run of curves.py, with the digests of what its methods work from."""

    WHAT: ClassVar[str] = "points of curves"
    RECORDS: ClassVar[Any] = CurvePoint
    kind: Literal["sparsekv.curve"] = "sparsekv.curve"
    schema_version: Literal[1] = 1
    tasks: tuple[Text, ...]
    plan: Digest | None = None
    profile: Digest | None = None
    preset: Digest | None = None
