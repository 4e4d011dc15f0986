"""`sparsekv verify`: the test of a plan on held-out prompts, beside dense."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from sparsekv.cli import commands
from sparsekv.cli.arguments import Output, Subject, Subjects, settings_of
from sparsekv.cli.output import emit, emit_json, emit_verdict, print_parts, tell
from sparsekv.cli.plan_files import answered_prompts, check_replaceable, check_writable, outcomes_beside, own_prompts
from sparsekv.planner.flags import LENGTHS, Flag, Lengths, Unread
from sparsekv.planner.options import (
    GivenPrompt,
    Hardware,
    PlanOptions,
    Settled,
    TaskSamples,
    digest_of_prompts,
    lengths_to_verify,
    set_aside,
    settle,
)
from sparsekv.plans.brief import denser_command, verdict
from sparsekv.plans.errors import GateError, SparseKVError, UsageError
from sparsekv.plans.files import parse_plan, read_text, rewrite_plan
from sparsekv.plans.model import OTHER_WEIGHTS, ModelInfo, same_architecture
from sparsekv.plans.schema import NOTHING_SPARSE, Plan, check_model, to_data
from sparsekv.plans.types import columns, format_length

if TYPE_CHECKING:
    from sparsekv.planner.verify import Verification
    from sparsekv.runtime.hf.load import LoadedModel


class VerifyFlags(Subjects, TaskSamples, Hardware, Output):
    group: ClassVar = "Verification"
    unread: ClassVar[tuple[Unread, ...]] = (
        Unread(("tasks", "seed"), "no samples are drawn", ("prompts_file",)),
        Unread(("write", "verify", "prompts_file", "full"), "a diagnosis verifies nothing", ("phases",)),
    )
    lengths: Annotated[
        Lengths,
        Flag("Such as 4k,16k; by default the plan's own, or where it names none some that fit the device.", *LENGTHS),
    ] = ()
    verify: Annotated[
        Literal["small", "full"],
        Flag("Prompts: small excludes a loss of 5 points over all and of 40 in a task, full of 3 and 25."),
    ] = "small"
    prompts_file: Annotated[
        Path | None,
        Flag(
            'Own prompts: JSON lines of {"prompt", "answer"}; of those it was made from, the part set aside.',
            ("--prompts",),
            "FILE",
        ),
    ] = None
    write: Annotated[bool, Flag("Put the result in the plan; the same command goes on after an interruption.")] = False
    phases: Annotated[
        bool, Flag("A diagnosis: prefill alone, decode alone, and both on a few prompts of each task.")
    ] = False
    full: Annotated[bool, Flag("Print tables by task and length too.")] = False

    def options(self, plan: Plan) -> PlanOptions:
        return PlanOptions(
            **lengths_to_verify(plan, self.lengths, plan.model.context_length),
            verify=self.verify,
            verify_tasks=self.tasks,
            verify_seed=self.seed if self.is_given("seed") else None,
            batch=self.batch,
            prefill_chunk=self.prefill_chunk,
            kv_dtype=plan.kv_dtype,
            backend=settings_of(self).backend,
        )


def verify(flags: VerifyFlags) -> None:
    """Test a plan on held-out prompts against dense, both phases together.

    Exit 1 when it loses more than the test allows. Exit 0 otherwise, also where the model answers too few of the tasks:
    the sentence says which.
    """
    subject = flags.subject
    plan = subject.need_plan()
    flags.register_methods()
    if not flags.write:
        _verify(flags, subject, plan)
        return
    from sparsekv.planner.records import only_run

    file = _own_file(subject)
    outcomes = outcomes_beside(file)
    with only_run(outcomes):
        before = read_text(file)
        try:
            _verify(flags, subject, parse_plan(before, str(file)), file, before)
        except KeyboardInterrupt as stop:
            if outcomes.exists():
                stop.add_note(f"what was measured until then is in {outcomes}; the same command goes on from there")
            raise


def _verify(flags: VerifyFlags, subject: Subject, plan: Plan, file: Path | None = None, before: str = "") -> None:
    """Runs a plan, and writes to its file, which held `before`, where one is named."""
    if plan.is_dense:
        if flags.as_json:
            emit_json({"passed": True, "verified": False, "reasons": [NOTHING_SPARSE], "quality": None})
        else:
            _say(plan, subject, flags)
        return
    options = flags.options(plan)
    subject = subject.checked(flags, options.lengths)
    calibrated, aside = _set_aside(plan, flags.prompts_file)
    prompts = answered_prompts(flags.prompts_file) if flags.prompts_file and not aside else ()
    from sparsekv.planner.evaluation.given import HeldOut
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.verify import VerifyRun
    from sparsekv.planner.verify import verify as measure

    def check(info: ModelInfo, hardware: str) -> None:
        check_model(plan, info)
        settle(options, info.context_length, hardware)

    loaded = subject.load(flags, check)
    plan = _of_these_weights(plan, loaded.info)
    differs = check_model(plan, loaded.info)
    if flags.write:
        _check_same_weights(plan, loaded.info)
    settled = settle(options, loaded.info.context_length, loaded.model.device.type)
    if flags.phases:
        _diagnose(flags, plan, loaded, settled)
        return
    result = measure(
        loaded,
        plan,
        settled,
        VerifyRun.after(plan, flags.verify, outcomes_beside(file) if file else None),
        BarProgress(),
        prompts=prompts,
        held_out=HeldOut.of(loaded.tokenizer, calibrated, aside, settled) if aside else None,
    )
    facts: dict[str, Any] = {"passed": result.passed, "verified": result.verified}
    facts |= {"reasons": list(result.reasons), "quality": to_data(result.quality)}
    facts |= {"model": loaded.info.id, "plan_model": plan.model.id, "differs": differs}
    recorded = result.recorded(plan)
    _say(recorded, subject, flags)
    if differs:
        tell(f"measured on {loaded.info.id}; this says nothing about {plan.model.id}, the model of the plan")
    if file is not None:
        _write(result, plan, file, before, facts)
    if not result.passed:
        denser = f"`{denser_command(recorded, _place(recorded, subject), subject.model)}`"
        raise GateError(f"test missed: {'; '.join(result.reasons)}; go on with {denser}").with_facts(**facts)
    if flags.as_json:
        emit_json(facts)


def _diagnose(flags: VerifyFlags, plan: Plan, loaded: LoadedModel, settled: Settled) -> None:
    """Prints each phase alone and both together, on a few prompts of each task; it verifies nothing."""
    from sparsekv.planner.progress import BarProgress
    from sparsekv.planner.verify import diagnose

    scores = diagnose(loaded, plan, settled, BarProgress())
    if flags.as_json:
        emit_json([asdict(score) for score in scores])
        return
    rows = [
        (
            *(one.phase, one.task, format_length(one.length), f"{one.dense} -> {one.plan} of {one.prompts}"),
            *(f"{one.kl:.3g}", f"{one.density:.3f}", f"{one.read:.3f}"),
        )
        for one in sorted(scores, key=lambda score: ("prefill", "decode", "both").index(score.phase))
    ]
    header = ("phase", "task", "length", "right, dense -> plan", "divergence, nats", "tiles", "tokens")
    emit(columns([header, *rows], right=(2, 4, 5, 6)))


def _of_these_weights(plan: Plan, model: ModelInfo) -> Plan:
    """An imported plan was made from a config alone: what is measured is measured on the weights that are loaded."""
    planned, loaded = plan.model.fingerprint, model.fingerprint
    same = same_architecture(planned.architecture, loaded.architecture)
    if plan.status != "imported" or planned.weights is not None or not same:
        return plan
    return plan.model_copy(update={"model": plan.model.model_copy(update={"fingerprint": loaded})})


def _set_aside(plan: Plan, file: Path | None) -> tuple[tuple[GivenPrompt, ...], tuple[GivenPrompt, ...]]:
    """The prompts of a file that the plan was calibrated on, and those that were set aside; none of other prompts."""
    if file is None or plan.provenance.prompts is None:
        return (), ()
    calibrated, aside = set_aside(own_prompts(file))
    return (calibrated, aside) if digest_of_prompts(aside) == plan.provenance.prompts else ((), ())


def _write(result: Verification, plan: Plan, file: Path, before: str, facts: dict[str, Any]) -> None:
    """Puts the result in the plan's file; of a run that decides nothing, behind a plan that is verified, its number."""
    recorded = result.recorded(plan)
    if plan.status == "verified" and plan.quality and result.passed and not result.verified:
        recorded = plan.model_copy(update={"quality": plan.quality.model_copy(update={"run": result.quality.run})})
    try:
        rewrite_plan(recorded, file, before)
    except SparseKVError as error:
        error.with_facts(**facts).add_note(f"what was measured is printed, and in {outcomes_beside(file)}")
        raise
    outcomes_beside(file).unlink(missing_ok=True)
    tell(f"{file}: written as {recorded.status_text}")


def _say(plan: Plan, subject: Subject, flags: VerifyFlags) -> None:
    lines = verdict(plan, _place(plan, subject), model=subject.model)
    if flags.as_json:
        tell("\n".join(lines))
        return
    emit_verdict(lines, plan.status)
    if flags.full and plan.quality:
        from sparsekv.plans.show import quality_tables

        print_parts(quality_tables(plan.quality))


def _place(plan: Plan, subject: Subject) -> str:
    return str(subject.path or plan.model.id)


def _own_file(subject: Subject) -> Path:
    if subject.path is None:
        raise UsageError(
            "expected a plan file of yours beside --write, found the plan of a hub repository; copy it and name the "
            "copy with --plan FILE"
        )
    check_writable(subject.path)
    check_replaceable(outcomes_beside(subject.path), "an unfinished test", "outcomes")
    return subject.path


def _check_same_weights(plan: Plan, model: ModelInfo) -> None:
    """A plan's quality is of the weights that it was made for."""
    planned = plan.model.fingerprint.weights
    if planned is None or planned != model.fingerprint.weights:
        raise UsageError(
            f"expected the model that the plan was made for beside --write, found another one ({model.id}, with "
            f"{OTHER_WEIGHTS}); leave --write out, or plan this model"
        )


app = commands.app(
    verify, "sparsekv verify ./my-model --write", "sparsekv verify --plan plan.yaml --verify full --full"
)
