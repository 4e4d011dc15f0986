"""`sparsekv verify`: does a plan keep what its gate asks for?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sparsekv.cli import arguments
from sparsekv.cli.output import emit, emit_json, quality_table, tell
from sparsekv.cli.plan import check_writable
from sparsekv.plans.errors import GateError, SparseKVError, UsageError

if TYPE_CHECKING:
    from sparsekv.planner.verify import Verification
    from sparsekv.plans.model import ModelInfo
    from sparsekv.plans.schema import Plan


def verify(
    target: arguments.Target = None,
    plan: arguments.PlanFile = None,
    model: arguments.Model = None,
    lengths: Annotated[
        str | None,
        typer.Option("--lengths", "--length", metavar="LIST", help="Such as 4k,16k; the plan's own by default."),
    ] = None,
    tasks: arguments.Tasks = None,
    samples: Annotated[
        int | None,
        typer.Option("--samples", "--verify-samples", min=1, max=arguments.MOST, metavar="N", help=arguments.HELD_OUT),
    ] = None,
    max_accuracy_drop: arguments.MaxAccuracyDrop = None,
    max_kl: arguments.MaxKl = None,
    max_decode_kl: arguments.MaxDecodeKl = None,
    min_agreement: arguments.MinAgreement = None,
    min_exact: arguments.MinExact = None,
    write: Annotated[
        bool,
        typer.Option("--write", help="If the gate is met, put this quality and status in place of the plan's own."),
    ] = False,
    seed: arguments.Seed = 0,
    batch: arguments.Batch = None,
    chunk: arguments.Chunk = None,
    device: arguments.Device = None,
    dtype: arguments.Dtype = None,
    backend: arguments.Backend = None,
    allow_mismatch: arguments.AllowMismatch = False,
    as_json: arguments.Json = False,
) -> None:
    """Run a plan on held-out prompts against dense: prefill, decode, both.

    Exit 1 when a mean misses its gate. Exit 0 when all meet theirs, also where samples or their 95% bounds are too
    little to call the plan verified.
    """
    from sparsekv.plans.files import parse_plan, read_text, rewrite_plan

    subject = arguments.Subject.named(target, plan, model)
    found, file, before = subject.need_plan(), None, ""
    if write:
        file = _own_file(subject)
        before = read_text(file)
        found = parse_plan(before, str(file))
    from sparsekv.planner.options import TASKS, PlanOptions

    own = sorted({bucket.up_to for bucket in found.buckets if bucket.up_to is not None and not bucket.dense})
    if not own and found.cost:  # one bucket for all lengths
        own = sorted(entry.length for entry in found.cost.lengths)
    asked = PlanOptions(
        lengths=tuple(own) if lengths is None else arguments.lengths_from(lengths, "--lengths"),
        tasks=TASKS if tasks is None else arguments.tasks_from(tasks, "--tasks"),
        verify_samples=samples,
        gate=arguments.gate_of(
            max_accuracy_drop=max_accuracy_drop,
            max_kl=max_kl,
            max_decode_kl=max_decode_kl,
            min_agreement=min_agreement,
            min_exact=min_exact,
        ),
        seed=seed,
        batch=batch,
        prefill_chunk=chunk,
        backend=arguments.settings(device, dtype, backend).backend,
    )
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.verify import verify as measure
    from sparsekv.plans.schema import check_model, to_data

    def check(info: ModelInfo, hardware: str) -> None:
        check_model(found, info, allow_mismatch)
        asked.settled(info.context_length, hardware)

    loaded = subject.load(device, dtype, check)
    differs = check_model(found, loaded.info, allow_mismatch)
    if write:
        _check_same_model(found, loaded.info, differs)
    settled = asked.settled(loaded.info.context_length, loaded.model.device.type)
    verdict = measure(loaded, found, settled, BarProgress(), allow_mismatch=allow_mismatch)
    facts: dict[str, Any] = {"passed": verdict.passed, "verified": verdict.passed and verdict.conclusive}
    facts |= {"reasons": list(verdict.reasons), "quality": to_data(verdict.quality)}
    facts |= {"model": loaded.info.id, "plan_model": found.model.id, "differs": differs}
    if not as_json:
        emit(quality_table(verdict.quality))
    if not verdict.passed:
        raise GateError("gate missed: " + "; ".join(verdict.reasons)).with_facts(**facts)
    (tell if as_json else emit)(_met(verdict, found, subject))
    if differs:
        tell(f"measured on {loaded.info.id}; this says nothing about {found.model.id}, the model of the plan")
    if file is not None:
        recorded = verdict.recorded(found)
        try:
            rewrite_plan(recorded, file, before)
        except SparseKVError as error:
            error.with_facts(**facts).add_note("what was measured is printed, and in no file")
            raise
        tell(f"{file}: written as {recorded.status}")
    if as_json:
        emit_json(facts)


def _met(result: Verification, plan: Plan, subject: arguments.Subject) -> str:
    from sparsekv.plans.show import verdict

    first, *others = result.reasons or ("",)
    file = str(subject.path or plan.model.id)
    return "\n".join((*verdict(result.recorded(plan), file, first), *others))


def _own_file(subject: arguments.Subject) -> Path:
    """The plan's file, to be written."""
    if subject.path is None:
        raise UsageError(
            "expected a plan file of yours beside --write, found the plan of a hub repository; copy it and name the "
            "copy with --plan FILE"
        )
    check_writable(subject.path)
    return subject.path


def _check_same_model(plan: Plan, model: ModelInfo, differs: list[str]) -> None:
    """A plan's quality is of its own model and weights, whatever it was allowed to be run on."""
    from sparsekv.plans.model import OTHER_WEIGHTS

    known, found = plan.model.fingerprint, model.fingerprint
    if differs or known.weights is None or known.weights != found.weights:
        part = OTHER_WEIGHTS if known.architecture == found.architecture else "other architecture"
        if part == OTHER_WEIGHTS and known.weights_difference(found) == "older kind":
            part = "a newer weights fingerprint, which says nothing about the older one of the plan"
        raise UsageError(
            f"expected the model that the plan was made for beside --write, found another one ({model.id}, with "
            f"{part}); leave --write out, or plan this model"
        )
