"""Files of `eval --suite`: what each method scored on every sample, so that a run goes on where an earlier one ended.

A score is a sample's, from 0 to 1: `recall` is RULER's, the share of the expected strings that occur in the generated
text; `exact` is whether that text begins with the answer.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal, Self

import numpy as np
from pydantic import ConfigDict, Field, ValidationError, model_validator

from sparsekv.planner.data_files import first_fault
from sparsekv.planner.evaluation.results import Interval, score_interval
from sparsekv.plans.errors import PlanError, UsageError
from sparsekv.plans.files import read_text, write_bytes
from sparsekv.plans.types import Digest, FieldError, Length, Natural, Part, Portion, Positive, Text, WeightsDigest

MAX_BYTES = 64 << 20
Metric = Literal["recall", "exact"]
Key = tuple[str, str, int]  # method, task, length


class SuiteModel(Part):
    """Says which model was run. A name of it says nothing: folders are renamed."""

    id: Text
    architecture: Digest
    weights: WeightsDigest | None = None
    dtype: Text


class SuiteSettings(Part):
    """Says which samples were drawn, and how they were run."""

    seed: Natural
    samples: Positive
    phase: Text
    backend: Text
    prefill_chunk: Length | None = None


class SuiteMethod(Part):
    """A method by name, and the digest of its plan; without one, dense."""

    name: Text
    plan: Digest | None = None


class SuiteCell(Part):
    """One method on the samples of one task and length, in their order."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    method: Text
    task: Text
    length: Length
    recall: tuple[Portion, ...]
    exact: tuple[Portion, ...]
    prefill_density: Portion
    decode_share: Portion | None = None  # of the tokens; None where no text went beyond its first token

    @property
    def key(self) -> Key:
        """Returns what it is of."""
        return self.method, self.task, self.length


@dataclass(frozen=True, slots=True)
class Paired:
    """Mean scores of dense and of a method on the same samples, and the 95% interval of their difference."""

    dense: float
    own: float
    interval: Interval

    @property
    def difference(self) -> float:
        """The method's score less that of dense."""
        return self.own - self.dense


class SuiteResult(Part):
    """What has been measured so far.

    Attributes:
        devices: on which this was run, in the order of the runs.
        versions: of what the first run was made with.
    """

    kind: Literal["sparsekv.suite"] = "sparsekv.suite"
    schema_version: Literal[1] = 1
    suite: Literal["ruler"] = "ruler"
    model: SuiteModel
    settings: SuiteSettings
    methods: tuple[SuiteMethod, ...]
    devices: tuple[Text, ...]
    versions: dict[Text, Text]
    cells: tuple[SuiteCell, ...] = Field(default=())

    @model_validator(mode="after")
    def _cells_have_all_samples(self) -> Self:
        samples = self.settings.samples
        for cell in self.cells:
            if {len(cell.recall), len(cell.exact)} != {samples}:
                raise FieldError(f"expected {samples} scores of each kind in {'/'.join(map(str, cell.key))}", "cells")
        return self

    @property
    def by_key(self) -> dict[Key, SuiteCell]:
        """The cells by what they are of."""
        return {cell.key: cell for cell in self.cells}

    def with_cells(self, cells: Sequence[SuiteCell]) -> Self:
        """This and more."""
        return self.model_copy(update={"cells": (*self.cells, *cells)})

    def scores(self, method: str, metric: Metric, tasks: Collection[str], lengths: Collection[int]) -> list[float]:
        """The scores of all samples of some tasks and lengths, in the same order for every method."""
        cells = self.by_key
        chosen = (cells[method, task, length] for length in lengths for task in tasks)
        return list(chain.from_iterable(getattr(cell, metric) for cell in chosen))

    def paired(self, method: str, metric: Metric, tasks: Collection[str], lengths: Collection[int]) -> Paired:
        """A method beside dense, over some tasks and lengths."""
        dense, own = (self.scores(name, metric, tasks, lengths) for name in ("dense", method))
        return Paired(float(np.mean(dense)), float(np.mean(own)), score_interval(dense, own))


def continued_from(found: SuiteResult, wanted: SuiteResult, path: Path) -> SuiteResult:
    """Returns what a file holds as the beginning of a run, with the run's methods and device added.

    Args:
        wanted: the run, without cells.

    Raises:
        UsageError: what is in the file was measured otherwise; names each difference.
    """
    differing = list(_differing(found, wanted))
    if differing:
        raise UsageError(
            f"expected {path} to hold results of this run, found others there: {'; '.join(differing)}. Give the "
            "options of that run, or another file with -o"
        )
    known = {method.name for method in found.methods}
    methods = (*found.methods, *(method for method in wanted.methods if method.name not in known))
    devices = tuple(dict.fromkeys((*found.devices, *wanted.devices)))
    return found.model_copy(update={"methods": methods, "devices": devices})


def _differing(found: SuiteResult, wanted: SuiteResult) -> Iterator[str]:
    for there, here in ((found.settings, wanted.settings), (found.model, wanted.model)):
        for name in type(here).model_fields:
            old, new = getattr(there, name), getattr(here, name)
            if name != "id" and old != new:
                yield f"{name.replace('_', ' ')} {_told(old)} there, {_told(new)} here"
    plans = {method.name: method.plan for method in found.methods}
    for method in wanted.methods:
        if plans.get(method.name, method.plan) != method.plan:
            yield f"plan of {method.name} {_told(plans[method.name])} there, {_told(method.plan)} here"


def _told(value: object) -> str:
    return "none" if value is None else f"{value!s:.26}"


def write_suite(result: SuiteResult, path: Path) -> None:
    """Writes the file, atomically, a line for each cell.

    Raises:
        UsageError: it cannot be written there.
    """
    data = result.model_dump(mode="json")
    cells = ",\n".join(json.dumps(cell) for cell in data.pop("cells", []))
    head = json.dumps(data, indent=1).removesuffix("\n}")
    write_bytes(path, f'{head},\n "cells": [\n{cells}\n ]\n}}\n'.encode())


def read_suite(path: Path) -> SuiteResult:
    """Reads a file of `write_suite`.

    Raises:
        UsageError: the file cannot be read.
        PlanError: it is no result of a suite.
    """
    text = read_text(path, MAX_BYTES)
    try:
        return SuiteResult.model_validate(json.loads(text))
    except ValidationError as error:
        raise PlanError(
            f"expected results of --suite in {path}, found at {first_fault(error)}; name what it wrote, or a new file"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(
            f"expected results of --suite in {path}, found no whole JSON: {error}; name what it wrote, or a new file"
        ) from error
