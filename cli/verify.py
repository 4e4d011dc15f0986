"""`sparsekv verify`: does a plan keep what its gate asks for?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sparsekv.cli.options import (
    Backend,
    Batch,
    Chunk,
    Device,
    Dtype,
    Json,
    Model,
    Samples,
    Seed,
    Tasks,
)
from sparsekv.cli.output import emit, emit_json, tell
from sparsekv.cli.scores import quality_table
from sparsekv.cli.values import lengths_from, names_from
from sparsekv.plans.errors import GateError, UsageError

if TYPE_CHECKING:
    from sparsekv.plans.decode import DecodeBucket
    from sparsekv.plans.model import ModelInfo
    from sparsekv.plans.prefill import PrefillBucket
    from sparsekv.plans.schema import Plan


def verify(
    target: Annotated[
        str | None, typer.Argument(metavar="MODEL", help="A model; a folder's sparsekv.yaml is its plan.")
    ] = None,
    plan: Annotated[Path | None, typer.Option("--plan", metavar="FILE", help="The plan.")] = None,
    model: Model = None,
    lengths: Annotated[
        str | None, typer.Option("--lengths", metavar="LENGTHS", help="Such as 4k,16k; the plan's own by default.")
    ] = None,
    tasks: Tasks = None,
    samples: Samples = None,
    max_accuracy_drop: Annotated[
        float, typer.Option("--max-accuracy-drop", min=0.0, metavar="POINTS", help="Most a task may lose.")
    ] = 1.0,
    max_kl: Annotated[
        float | None, typer.Option("--max-kl", min=0.0, metavar="NATS", help="Most mean divergence.")
    ] = None,
    write: Annotated[bool, typer.Option("--write", help="If the gate is met, write it into the plan.")] = False,
    seed: Seed = 0,
    batch: Batch = None,
    chunk: Chunk = None,
    device: Device = None,
    dtype: Dtype = None,
    backend: Backend = None,
    as_json: Json = False,
) -> None:
    """Run a plan on held-out prompts against dense: prefill, decode, both. Exit 1 when it misses the gate."""
    from sparsekv.cli.subject import backend_named, load, need_plan, subject_of
    from sparsekv.plans.schema import to_data
    from sparsekv.plans.writer import write_plan

    subject = subject_of(target, plan, model)
    found = need_plan(subject)
    from sparsekv.planner.options import TASKS, Gate, PlanOptions
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.verify import verify as measure

    asked = PlanOptions(
        lengths=lengths_from(lengths, "--lengths") if lengths else _sparse_lengths(found),
        tasks=names_from(tasks) or TASKS,
        verify_samples=samples,
        gate=Gate(max_accuracy_drop, max_kl),
        seed=seed,
        batch=batch,
        prefill_chunk=chunk,
        backend=backend_named(backend),
    )
    loaded = load(subject, device, dtype)
    if write:
        _check_same_weights(found, loaded.info)
    options = asked.settled(loaded.info.context_length, loaded.model.device.type)
    verdict = measure(loaded, found, options, BarProgress())
    if as_json:
        emit_json({"passed": verdict.passed, "reasons": list(verdict.reasons), "quality": to_data(verdict.quality)})
    else:
        emit(quality_table(verdict.quality))
    if not verdict.passed:
        raise GateError("the plan misses its gate: " + "; ".join(verdict.reasons))
    for line in verdict.reasons:
        tell(line)
    if write and subject.path is not None:
        status = "verified" if verdict.conclusive else "unverified"
        write_plan(found.model_copy(update={"status": status, "quality": verdict.quality}), subject.path)
        tell(f"{subject.path}: written as {status}")


def _sparse_lengths(plan: Plan) -> tuple[int, ...]:
    """The lengths at which a plan says something of its own; empty where it names none."""
    buckets: list[PrefillBucket | DecodeBucket] = []
    buckets += plan.prefill.lengths if plan.prefill else ()
    buckets += plan.decode.lengths if plan.decode else ()
    return tuple(sorted({bucket.up_to for bucket in buckets if bucket.up_to is not None and not bucket.dense}))


def _check_same_weights(plan: Plan, model: ModelInfo) -> None:
    if plan.model.fingerprint != model.fingerprint:
        raise UsageError(
            f"expected the model that the plan was made for beside --write, found another ({model.id}); "
            "leave --write out, or plan this model"
        )
