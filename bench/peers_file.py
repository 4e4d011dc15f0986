"""Rows of `bench peers`: one for each method, setting and length."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from sparsekv.bench.suite import SuiteCell
from sparsekv.planner.records import RunFile, RunRecord, RunSettings
from sparsekv.plans.types import (
    Digest,
    Length,
    Natural,
    NonNegative,
    Positive,
    Share,
    Text,
)

At = Literal["dense", "plan", "published", "equal", "original"]
Key = tuple[str, At, int]


class PeerRow(RunRecord):
    """One method at one length; what was not measured is None, and `note` says why.

    Attributes:
        at: its setting: as published, at the density of the plan ("equal"), its authors' own code, the plan, or dense.
        density, kl, recall: in the model: the share of tiles computed, the mean divergence of next-token logits from
            dense in nats, and RULER's mean in percent; `dense_recall` is dense's on the same samples.
        timed_density, error: of what was timed, a layer of planted structure: the share of tiles, and the output's
            distance from dense attention in float32, relative to its size.
    """

    method: Text
    at: At
    length: Length
    setting: str = ""
    density: Share | None = None
    kl: NonNegative | None = None
    kl_interval: tuple[NonNegative, NonNegative] | None = None
    agreement: NonNegative | None = None
    recall: NonNegative | None = None
    dense_recall: NonNegative | None = None
    timed_setting: str = ""
    timed_density: Share | None = None
    index_ms: NonNegative | None = None
    attention_ms: NonNegative | None = None
    whole_ms: NonNegative | None = None
    error: NonNegative | None = None
    note: str = ""

    @property
    def key(self) -> Key:
        return self.method, self.at, self.length

    @property
    def is_measured(self) -> bool:
        """Returns whether it has a number; one without is tried again by the next run."""
        return any(value is not None for value in (self.whole_ms, self.index_ms, self.kl))


class PeersRun(RunSettings):
    """One run of `bench peers`; its file also has RULER's scores, sample by sample."""

    WHAT: ClassVar[str] = "rows of `bench peers`"
    RECORDS: ClassVar[Any] = PeerRow | SuiteCell
    TOLD: ClassVar[frozenset[str]] = frozenset({"versions"})
    kind: Literal["sparsekv.peers"] = "sparsekv.peers"
    schema_version: Literal[2] = 2
    shape: Text
    heads: Positive
    kv_heads: Positive
    head_dim: Positive
    dtype: Text
    device: Text
    tile: Text
    planted_density: Share
    plan: Digest | None = None
    model: Digest | None = None
    weights: Digest | None = None
    tasks: tuple[Text, ...] = ()
    samples: Natural = 0
    ruler_samples: Natural = 0
    rounds: Positive
    seed: Natural
    versions: dict[Text, Text]


PeersFile = RunFile[PeersRun]


def measured(file: PeersFile) -> dict[Key, PeerRow]:
    """Returns the rows that need not be measured again."""
    return {key: row for key, row in file.all(PeerRow).items() if row.is_measured}
