"""Files of `bench peers`: a row for each method, setting and length; a run goes on where an earlier one ended."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal, Self

from pydantic import Field, ValidationError

from sparsekv.planner.data_files import first_fault
from sparsekv.planner.evaluation.suite_file import SuiteResult
from sparsekv.plans.errors import PlanError, UsageError
from sparsekv.plans.files import read_text, write_bytes
from sparsekv.plans.types import (
    Digest,
    Length,
    Natural,
    NonNegative,
    Part,
    Positive,
    Share,
    Text,
    WeightsDigest,
)

MAX_BYTES = 64 << 20
At = Literal["dense", "plan", "published", "equal", "original"]
Key = tuple[str, At, int]


class PeerRow(Part):
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
        """Returns what it is of."""
        return self.method, self.at, self.length

    @property
    def is_measured(self) -> bool:
        """Returns whether it has a number; one without is tried again by the next run."""
        return any(value is not None for value in (self.whole_ms, self.index_ms, self.kl))


class PeersSettings(Part):
    """Says how rows of one file were measured, and of what: all of them alike."""

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
    weights: WeightsDigest | None = None
    tasks: tuple[Text, ...] = ()
    samples: Natural = 0
    ruler_samples: Natural = 0
    rounds: Positive
    seed: Natural


class PeersFile(Part):
    """Holds what has been measured so far; `suite` holds RULER's scores sample by sample."""

    kind: Literal["sparsekv.peers"] = "sparsekv.peers"
    schema_version: Literal[1] = 1
    settings: PeersSettings
    versions: dict[Text, Text]
    rows: tuple[PeerRow, ...] = Field(default=())
    suite: SuiteResult | None = None

    @property
    def measured(self) -> dict[Key, PeerRow]:
        """The rows that need not be measured again."""
        return {row.key: row for row in self.rows if row.is_measured}

    def with_row(self, row: PeerRow) -> Self:
        """This and a row, in place of one of the same key."""
        return self.model_copy(update={"rows": (*(one for one in self.rows if one.key != row.key), row)})

    def continued(self, path: Path) -> PeersFile:
        """This run with the rows that a file holds.

        Raises:
            UsageError: they were measured otherwise, or the file cannot be read.
            PlanError: it is no file of `bench peers`.
        """
        if not path.exists() or not path.stat().st_size:
            return self
        found = read_peers(path)
        there, here = found.settings.model_dump(), self.settings.model_dump()
        if differing := [
            f"{name} {there[name]} there, {here[name]} here" for name in here if there[name] != here[name]
        ]:
            raise UsageError(
                f"expected {path} to hold rows of this run, found others there: {'; '.join(differing):.300}. Give the "
                "options of that run, or another file with -o"
            )
        return found


def write_peers(result: PeersFile, path: Path) -> None:
    """Writes the file, atomically.

    Raises:
        UsageError: it cannot be written there.
    """
    write_bytes(path, (json.dumps(result.model_dump(mode="json"), indent=1) + "\n").encode())


def read_peers(path: Path) -> PeersFile:
    """Reads a file of `write_peers`.

    Raises:
        UsageError: the file cannot be read.
        PlanError: it holds something else.
    """
    text = read_text(path, MAX_BYTES)
    try:
        return PeersFile.model_validate_json(text)
    except ValidationError as error:
        raise PlanError(
            f"expected rows of `bench peers` in {path}, found at {first_fault(error)}; remove it, or name another file"
        ) from error
