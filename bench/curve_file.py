"""Curve files: what each method costs and keeps at a range of densities. A JSON list with an object a point."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from pydantic import ConfigDict, TypeAdapter, ValidationError

from sparsekv.plans.errors import PlanError, UsageError
from sparsekv.plans.files import write_bytes
from sparsekv.plans.types import Length, NonNegative, Part, Positive, Share, Text
from sparsekv.plans.yaml_io import printable

MAX_BYTES = 64 << 20


class CurvePoint(Part):
    """One method at one density and length, in one phase; what was not measured is None.

    `density` is the share of tiles (prefill) or of cached tokens read (decode); `kl` the mean divergence of next-token
    logits from dense, in nats; `agreement` the share of equal top-1 tokens; `accuracy` the share of right answers, over
    the tasks that dense solves, and `dense_accuracy` dense's own.
    Other keys of a file are left to the readers that they are for.
    """

    model_config = ConfigDict(frozen=True, extra="ignore")

    method: Text
    length: Length
    phase: Literal["prefill", "decode"]
    density: Share
    kl: NonNegative | None = None
    agreement: NonNegative | None = None
    accuracy: NonNegative | None = None
    dense_accuracy: NonNegative | None = None


class CurveRow(CurvePoint):
    """A point as `eval --curve` writes it.

    Attributes:
        setting: what the method was given, such as "tau 0.9".
        samples: of all tasks together.
        kl_interval, agreement_interval: 95% intervals.
        exact: share of samples of which every token of dense's greedy text is picked.
    """

    setting: Text
    samples: Positive
    kl_interval: tuple[NonNegative, NonNegative] | None = None
    agreement_interval: tuple[NonNegative, NonNegative] | None = None
    exact: NonNegative | None = None


def write_curve(rows: Sequence[CurveRow], path: Path) -> None:
    """Writes a curve file, atomically.

    Raises:
        UsageError: it cannot be written there.
    """
    lines = (json.dumps(row.model_dump(mode="json")) for row in rows)
    write_bytes(path, ("[\n" + ",\n".join(lines) + "\n]\n").encode())


_POINTS = TypeAdapter(tuple[CurvePoint, ...])


def read_curve(path: Path) -> tuple[CurvePoint, ...]:
    """The points of a curve file, in its order.

    Raises:
        UsageError: the file cannot be read.
        PlanError: it is no list of points.
    """
    try:
        with path.open("rb") as file:
            content = file.read(MAX_BYTES + 1)
    except OSError as error:
        raise UsageError(f"cannot read the curve {path}: {error.strerror or error}") from error
    if len(content) > MAX_BYTES:
        raise PlanError(f"expected a curve of at most {MAX_BYTES >> 20} MiB, found more in {path}; make it again")
    try:
        return _POINTS.validate_python(json.loads(content))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        where, what = printable(".".join(map(str, first["loc"]))) or "the top", printable(first["msg"])
        raise PlanError(
            f"expected a list of curve points in {path}, found at {where:.200}: {what:.300}; make it again"
        ) from error
    except (ValueError, RecursionError) as error:
        raise PlanError(f"expected a curve in {path}, found no whole JSON: {error}; make it again") from error
