"""`sparsekv verify`: does a plan keep what its gate asks for?"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, Subject, Subjects, settings_of
from sparsekv.cli.output import emit, emit_json, quality_table, tell
from sparsekv.cli.plan_files import check_writable
from sparsekv.planner.flags import MOST, Flag, Lengths
from sparsekv.planner.options import DEFAULT_TASKS, HELD_OUT, VERIFY_TIME, Drawn, Gated, Hardware, PlanOptions
from sparsekv.plans.errors import GateError, SparseKVError, UsageError

if TYPE_CHECKING:
    from sparsekv.planner.verify import Verification
    from sparsekv.plans.model import ModelInfo
    from sparsekv.plans.schema import Plan


class VerifyFlags(Subjects, Gated, Drawn, Hardware, Output):
    """What `verify` is asked to do."""

    lengths: Annotated[
        Lengths, Flag("Such as 4k,16k; the plan's own by default.", ("--lengths", "--length"), "LIST")
    ] = ()
    verify_samples: Annotated[
        int | None, Field(ge=1, le=MOST), Flag(HELD_OUT, ("--samples", "--verify-samples"), "N")
    ] = None
    verify_time: Annotated[float | None, Field(gt=0.0, le=1e6), Flag(VERIFY_TIME, metavar="SECONDS")] = None
    write: Annotated[bool, Flag("If the gate is met, put this quality and status in place of the plan's own.")] = False

    def options(self, plan: Plan) -> PlanOptions:
        """What to verify of a plan: the lengths it was made for, unless others are asked for."""
        own = sorted({bucket.up_to for bucket in plan.buckets if bucket.up_to is not None and not bucket.dense})
        if not own and plan.cost:  # one bucket for all lengths
            own = sorted(entry.length for entry in plan.cost.lengths)
        return PlanOptions(
            lengths=self.lengths or tuple(own),
            tasks=self.tasks or DEFAULT_TASKS,
            verify_samples=self.verify_samples,
            gate=self.gate,
            verify_time=self.verify_time,
            verify_seed=self.seed if self.is_given("seed") else None,
            batch=self.batch,
            prefill_chunk=self.prefill_chunk,
            backend=settings_of(self).backend,
        )


def verify(flags: VerifyFlags) -> None:
    """Run a plan on held-out prompts against dense: prefill, decode, both.

    Exit 1 when a mean misses its gate. Exit 0 when all meet theirs, also where samples or their 95% bounds are too
    little to call the plan verified.
    """
    from sparsekv.plans.files import parse_plan, read_text, rewrite_plan

    subject = flags.subject
    found, file, before = subject.need_plan(), None, ""
    if flags.write:
        file = _own_file(subject)
        before = read_text(file)
        found = parse_plan(before, str(file))
    asked = flags.options(found)
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.settled import settle
    from sparsekv.planner.verify import verify as measure
    from sparsekv.plans.schema import check_model, to_data

    def check(info: ModelInfo, hardware: str) -> None:
        check_model(found, info, flags.allow_mismatch)
        settle(asked, info.context_length, hardware)

    loaded = subject.load(flags, check)
    differs = check_model(found, loaded.info, flags.allow_mismatch)
    if flags.write:
        _check_same_model(found, loaded.info, differs)
    settled = settle(asked, loaded.info.context_length, loaded.model.device.type)
    evidence = found.quality.evidence if found.quality else None
    attempt = evidence.attempt if evidence else 1  # the samples are those of that attempt
    verdict = measure(loaded, found, settled, BarProgress(), allow_mismatch=flags.allow_mismatch, attempt=attempt)
    facts: dict[str, Any] = {"passed": verdict.passed, "verified": verdict.passed and verdict.conclusive}
    facts |= {"reasons": list(verdict.reasons), "quality": to_data(verdict.quality)}
    facts |= {"model": loaded.info.id, "plan_model": found.model.id, "differs": differs}
    if not flags.as_json:
        emit(quality_table(verdict.quality))
    if not verdict.passed:
        raise GateError("gate missed: " + "; ".join(verdict.reasons)).with_facts(**facts)
    (tell if flags.as_json else emit)(_met(verdict, found, subject))
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
    if flags.as_json:
        emit_json(facts)


def _met(result: Verification, plan: Plan, subject: Subject) -> str:
    from sparsekv.plans.show import verdict

    first, *others = result.reasons or ("",)
    file = str(subject.path or plan.model.id)
    return "\n".join((*verdict(result.recorded(plan), file, first), *others))


def _own_file(subject: Subject) -> Path:
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


app = commands.app(commands.command(verify))
